"""A real Slurm cluster on one Linux host: munged, slurmctld and a slurmd per node.

Nothing outside its namespaces is configured: the host keeps its name, its
addresses, its routes and its /etc, and needs no systemd. Two clusters may run
beside each other, as each has its own root folder and its own node names.

    with Cluster() as cluster:
        done = cluster.run(["srun", "--nodes=2", "hostname"])
        job_id = cluster.sbatch("#!/bin/sh\\nsrun hostname\\n", "--nodes=2")
        end = cluster.wait(job_id)
        print(end.state, end.exit_code, cluster.job_output(job_id))
"""

from __future__ import annotations

import os
import random
import shutil
import string
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

from . import nodes
from .configuration import HEAD, Layout, Settings, write_configuration
from .head_node import HeadNode, JobEnd
from .nodes import ClusterError, wait_for
from .requirements import what_is_missing

__all__ = ["HEAD", "Cluster", "ClusterError", "JobEnd", "Settings", "random_prefix", "what_is_missing"]


def random_prefix() -> str:
    """A start for node names that no other cluster has: Slurm names its cgroups by node, for all to see."""
    return "n" + "".join(random.choices(string.ascii_lowercase, k=4))


class Cluster(HeadNode):
    """A cluster that is up inside a `with` block, and never outlives the process that made it."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings(node_prefix=random_prefix())
        self._keeper: subprocess.Popen[bytes] | None = None

    @property
    def root(self) -> Path:
        """The folder of everything that the cluster writes; it goes with the cluster."""
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
        """Start all daemons and wait until every node is idle.

        Raises:
            ClusterError: with the last lines of every daemon's log.
        """
        if reason := what_is_missing():
            raise ClusterError(reason)
        if self._layout is not None:
            raise ClusterError("the cluster is up already")
        # Not $TMPDIR: the sockets below allow a path of 108 characters.
        layout = Layout(Path(tempfile.mkdtemp(prefix="ddp-slurm-", dir="/tmp")), self.settings)
        self._layout = layout
        try:
            layout.root.chmod(0o755)  # munged wants its socket to be within everyone's reach
            write_configuration(layout)
            self._keeper = nodes.start_keeper(layout, os.getpid())
            nodes.connect(layout, HEAD)
            self._start_munged()
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
        # One munged serves all nodes: a socket in a file system is reached from
        # any network namespace.
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
        """End every process of the cluster and remove its files. A second call does nothing."""
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
        """The last lines of every daemon's log, for a failure's report."""
        parts = []
        for path in sorted(self.layout.log.glob("*")):
            if lines := path.read_text(errors="replace").splitlines()[-num_lines:]:
                parts += [f"---- {path.name}", *lines]
        return "\n".join(parts)

    def node_states(self) -> dict[str, str]:
        """Slurm's word for each node, such as `idle` or `down*`."""
        text = nodes.call(self.layout, HEAD, "sinfo", "-h", "-N", "-p", "debug", "-o", "%N %T", check=False)
        return dict(line.split() for line in text.splitlines() if line.strip())

    def wait_idle(self, timeout: float = 30.0) -> None:
        """Wait until every node is up and free."""
        wanted = dict.fromkeys(self.node_names, "idle")
        wait_for("idle nodes", lambda: self.node_states() == wanted, timeout, 0.1)

    def power_off(self, name: str) -> None:
        """Power loss of a node: its peers are told nothing."""
        nodes.power_off(self.layout, name)

    def power_on(self, name: str) -> None:
        """Switch a node on again after a power loss."""
        nodes.start_node(self.layout, name)

    def set_link(self, name: str, state: str) -> None:
        """Pull (`down`) or plug (`up`) a node's network cable."""
        nodes.set_link(self.layout, name, state)

    def slurmd(self, name: str, action: str) -> None:
        """`start`, `stop` or `kill` a node's slurmd alone; its tasks go on."""
        nodes.slurmd(self.layout, name, action)
