"""A rank of these tests: connects to the other ranks and prints the endpoint. It ends like a training."""

import json
import os
import sys
import time

from ddp_hpc.base.errors import DdpHpcError, ReportedElsewhereError
from ddp_hpc.discovery.rank_communication import abort_mpi
from ddp_hpc.discovery.watchdog import time_limit
from ddp_hpc.discovery.world import discover
from ddp_hpc.rendezvous.connect_ranks import rendezvous
from ddp_hpc.rendezvous.store_process import StoreProcess

environ = dict(os.environ)
limit_s = float(environ.get("CONNECT_LIMIT_S", "20"))
# Includes the time by which one rank starts later than another, which is long on a busy machine.
watchdog_s = float(environ.get("CONNECT_WATCHDOG_S", "50"))
launched_as = environ.get("PMI_RANK", environ.get("OMPI_COMM_WORLD_RANK", ""))


def connect() -> dict[str, object]:
    with time_limit(watchdog_s, "") as watchdog:
        watchdog.stage("in MPI_Init for the other ranks")
        if launched_as == environ.get("CONNECT_SLEEPS"):
            time.sleep(600)
        world = discover(environ)
        endpoint = rendezvous(world, environ, limit_s, watchdog)
    assert endpoint is not None
    time.sleep(float(environ.get("CONNECT_HOLDS_S", "0")))
    # Every rank has a connection over which both sides have proved that they have the key.
    endpoint.store.set(f"hello/{world.rank}", b"", 5)
    endpoint.store.get([f"hello/{rank}" for rank in range(world.world_size)], limit_s)
    return {
        "rank": world.rank,
        "launcher": world.launcher,
        "host": endpoint.host,
        "port": endpoint.port,
        "why": endpoint.why,
        "interface": endpoint.interface,
        "serves": isinstance(endpoint.process, StoreProcess),
    }


try:
    printed = connect()
except DdpHpcError as error:
    if not isinstance(error, ReportedElsewhereError):
        sys.stderr.write(f"error: {error}\n")
        sys.stderr.flush()
    if not error.on_all_ranks:
        abort_mpi(error.exit_code, patience_s=0)
    sys.exit(error.exit_code)
sys.stdout.write(json.dumps(printed) + "\n")
