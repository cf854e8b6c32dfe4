"""The variables of torchrun for programs that another launcher started."""

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.torchrun.environment import make_torchrun_environment


@pytest.mark.parametrize("value", ["soon", "0", "inf"])
def test_an_invalid_time_limit_is_refused(value: str) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    with pytest.raises(RequestError, match=f"DDP_HPC_INIT_TIMEOUT_S='{value}' is not a positive number of"):
        make_torchrun_environment(environ | {"DDP_HPC_INIT_TIMEOUT_S": value})
