"""average_replica: the parameters and the optimizer state of all ranks become their average."""

import json

PROGRAM = """
import json, os
import torch
import torch.distributed as dist
from ddp_hpc.training.optimization.gradients import average_replica

os.environ["MASTER_ADDR"] = "127.0.0.1"
dist.init_process_group("gloo")
rank = dist.get_rank()
trained = torch.nn.Parameter(torch.tensor([1.0 + rank]))
frozen = torch.nn.Parameter(torch.tensor([5.0 + rank]), requires_grad=False)
optimizer = torch.optim.Adam([trained, frozen], lr=0.0)
trained.grad = torch.tensor([10.0 * rank])
optimizer.step()
average_replica([trained, frozen], optimizer)
state = {name: value.item() for name, value in optimizer.state[trained].items()}
with open(f"replica{rank}", "w") as file:
    json.dump([trained.item(), frozen.item(), state["step"], state["exp_avg"]], file)
dist.destroy_process_group()
"""


def test_trained_parameters_and_moments_are_averaged_and_step_counts_stay(forks, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = forks.script("program.py", cwd=tmp_path, ranks=2)
    assert ended.exit_code == 0, ended.stderr
    replicas = [json.loads((tmp_path / f"replica{rank}").read_text()) for rank in (0, 1)]
    # Adam's exp_avg is 0.1 times the first gradient: 0 on rank 0, and 1 on rank 1.
    assert replicas == [[1.5, 5.0, 1.0, 0.5], [1.5, 6.0, 1.0, 0.5]]
