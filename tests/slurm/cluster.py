"""A real Slurm cluster on one Linux host: munged, slurmctld and a slurmd per node.

Nothing outside of its namespaces is changed: not the host's name, addresses,
routes or /etc, and systemd is not needed. Two clusters can run at the same time,
because each has its own root directory and its own node names.

    with Cluster() as cluster:
        done = cluster.run(["srun", "--nodes=2", "hostname"])
        job_id = cluster.sbatch("#!/bin/sh\\nsrun hostname\\n", "--nodes=2")
        end = cluster.wait(job_id)
        print(end.state, end.exit_code, cluster.job_output(job_id))
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

from . import nodes
from .accounting import start_accounting
from .configuration import HEAD, Layout, Settings, write_configuration
from .head_node import HeadNode, JobEnd
from .nodes import ClusterError, wait_for
from .requirements import what_is_missing, what_is_missing_for_accounting

__all__ = ["HEAD", "Cluster", "ClusterError", "JobEnd", "Settings", "what_is_missing"]


class Cluster(HeadNode):
    """A cluster that runs inside a `with` block, and ends with the process that created it."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self._keeper: subprocess.Popen[bytes] | None = None

    @property
    def root(self) -> Path:
        """The directory of all files of the cluster, which is removed with the cluster."""
        return self.layout.root

    @property
    def node_names(self) -> list[str]:
        return self.settings.node_names

    @property
    def addresses(self) -> dict[str, str]:
        """The address of each compute node on the first network."""
        return {name: self.settings.address(name) for name in self.node_names}

    def __enter__(self) -> Cluster:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def up(self) -> None:
        """Starts all daemons and waits until every node is idle.

        Raises:
            ClusterError: a daemon or node did not start; with the last lines of all logs.
        """
        if reason := what_is_missing_for_accounting() if self.settings.accounting else what_is_missing():
            raise ClusterError(reason)
        if self._layout is not None:
            raise ClusterError("the cluster is up already")
        # $TMPDIR is not used, because the path of a socket is limited to 108 characters.
        layout = Layout(Path(tempfile.mkdtemp(prefix="ddp-slurm-", dir="/tmp")), self.settings)
        self._layout = layout
        try:
            layout.root.chmod(0o755)  # munged requires that every user can access its socket
            write_configuration(layout)
            self._keeper = nodes.start_keeper(layout, os.getpid())
            nodes.connect(layout, HEAD)
            self._start_munged()
            if self.settings.accounting:
                start_accounting(layout)
            nodes.call(layout, HEAD, "slurmctld", "-f", layout.conf, "-c")
            for name in self.node_names:
                nodes.start_node(layout, name)
            self.wait_idle()
        except BaseException as error:
            tails = self.log_tails()
            self.down()
            if isinstance(error, Exception):
                raise ClusterError(f"the test cluster did not start: {error}\n{tails}") from error
            raise

    def _start_munged(self) -> None:
        # One munged serves all nodes, because processes in any network namespace
        # can connect to a socket in the file system.
        layout = self.layout
        nodes.call(
            layout,
            HEAD,
            "munged",
            f"--key-file={layout.root}/etc/munge.key",
            f"--socket={layout.munge_socket}",
            f"--pid-file={layout.run}/munged.pid",
            f"--log-file={layout.log}/munged.log",
            f"--seed-file={layout.root}/munge/seed",
        )

    def down(self) -> None:
        """Ends every process of the cluster and removes its files. Further calls do nothing."""
        layout, keeper = self._layout, self._keeper
        self._layout = self._keeper = None
        if keeper is not None:
            keeper.terminate()
            try:
                keeper.wait(30)
            except subprocess.TimeoutExpired:
                keeper.kill()
                keeper.wait()
        if layout is not None:
            shutil.rmtree(layout.root, ignore_errors=True)

    def log_tails(self, num_lines: int = 15) -> str:
        """Returns the last lines of every daemon's log, for error messages."""
        parts = []
        for path in sorted(self.layout.log.glob("*")):
            if lines := path.read_text(errors="replace").splitlines()[-num_lines:]:
                parts += [f"---- {path.name}", *lines]
        return "\n".join(parts)

    def node_states(self) -> dict[str, str]:
        """Returns Slurm's state of each node, such as `idle` or `down*`."""
        text = nodes.call(self.layout, HEAD, "sinfo", "-h", "-N", "-p", "debug", "-o", "%N %T", check=False)
        return dict(line.split() for line in text.splitlines() if line.strip())

    def wait_idle(self, timeout: float = 30.0) -> None:
        """Waits until every node is up and idle."""
        wanted = dict.fromkeys(self.node_names, "idle")
        wait_for("idle nodes", lambda: self.node_states() == wanted, timeout, 0.1)

    def power_off(self, name: str) -> None:
        """Simulates a power loss of a node: other nodes are not notified."""
        nodes.power_off(self.layout, name)

    def power_on(self, name: str) -> None:
        """Starts a node again that was powered off."""
        nodes.start_node(self.layout, name)

    def set_link(self, name: str, state: str) -> None:
        """Disconnects (`down`) or connects (`up`) a node's network cable."""
        nodes.set_link(self.layout, name, state)

    def slurmd(self, name: str, action: str) -> None:
        """Starts, stops or kills (`kill`) only the slurmd of a node; its tasks keep running."""
        nodes.slurmd(self.layout, name, action)
