"""Nodes as sets of Linux namespaces: each has its own network, host name, mounts, IPC and process IDs."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from tests.waiting import PATIENCE

from .configuration import HEAD, Layout

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_HERE = Path(__file__).resolve().parent
_T = TypeVar("_T")


class ClusterError(RuntimeError):
    """The test cluster does not work as expected."""


def wait_for(what: str, look: Callable[[], _T], timeout: float = 20.0, step: float = 0.05) -> _T:
    """Calls look() repeatedly and returns its first true value.

    Raises:
        ClusterError: no value was true within `timeout` seconds.
    """
    end = time.monotonic() + PATIENCE * timeout
    while True:
        if result := look():
            return result
        if time.monotonic() > end:
            raise ClusterError(f"no {what} after {PATIENCE * timeout:g} s")
        time.sleep(step)


def start_keeper(layout: Layout, parent: int) -> subprocess.Popen[bytes]:
    """Starts the head node in a process that ends the whole cluster when `parent` ends.

    The process has its own session, so that Ctrl-C in pytest's terminal does not reach it.
    """
    argv = ["setpriv", "--pdeathsig", "TERM", "bash", str(_HERE / "keeper.sh")]
    argv += [str(layout.root), layout.settings.node_prefix, str(parent)]
    with (layout.log / "keeper.log").open("ab") as log:
        keeper = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env={"PATH": SYSTEM_PATH, "LANG": "C.UTF-8"},
        )

    def is_ready() -> bool:
        if keeper.poll() is not None:
            raise ClusterError("the head node did not start")
        return (layout.run / f"ready-{HEAD}").exists()

    try:
        wait_for("head node", is_ready)
    except BaseException:
        keeper.terminate()
        keeper.wait(30)
        raise
    return keeper


def start_node(layout: Layout, name: str) -> None:
    """Starts a compute node: its namespaces below those of the head node, its network cables, and slurmd."""
    ready = layout.run / f"ready-{name}"
    ready.unlink(missing_ok=True)
    argv = ["unshare", "--net", "--uts", "--ipc", "--mount", "--propagation", "private"]
    argv += ["--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
    argv += ["bash", str(_HERE / "node_init.sh"), str(layout.root), name]
    log = layout.log / f"node-{name}.log"
    call(
        layout,
        HEAD,
        "setsid",
        "--fork",
        "sh",
        "-c",
        'log=$1; shift; exec "$@" >>"$log" 2>&1',
        "_",
        log,
        *argv,
    )
    wait_for(f"node {name}", ready.exists)
    connect(layout, name)
    slurmd(layout, name, "start")


def init_pid(layout: Layout, name: str) -> int:
    """Returns the process ID of a node's first process in this PID namespace.

    Raises:
        ClusterError: the node is not running.
    """
    wanted = [str(_HERE / "node_init.sh"), str(layout.root), name]
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            argv = (entry / "cmdline").read_text(errors="replace").rstrip("\0").split("\0")
            if argv[:1] == ["bash"] and argv[1:] == wanted and _pid_in_its_namespace(entry) == "1":
                return int(entry.name)
        except OSError:  # the process has ended in the meantime
            continue
    raise ClusterError(f"node {name} is not up")


def _pid_in_its_namespace(entry: Path) -> str:
    lines = (entry / "status").read_text(errors="replace").splitlines()
    return next((line.split()[-1] for line in lines if line.startswith("NSpid:")), "")


def enter(layout: Layout, name: str, cwd: Path | str = "/") -> list[str]:
    """Returns the command prefix that runs a command on a node.

    nsenter waits for the command and returns its exit code. If nsenter is killed, the command is killed too.
    """
    target = init_pid(layout, name)
    return [
        *("nsenter", f"--target={target}", "--net", "--uts", "--ipc", "--mount", "--pid", f"--wdns={cwd}"),
        *("setpriv", "--pdeathsig", "KILL", "--"),
    ]


def call(layout: Layout, name: str, *argv: object, check: bool = True) -> str:
    """Runs a short command on a node and returns its stdout.

    Raises:
        ClusterError: the command failed and `check` is set.
    """
    words: Sequence[str] = [str(word) for word in argv]
    env = {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", "SLURM_CONF": str(layout.conf)}
    done = subprocess.run(
        [*enter(layout, name), *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
    )
    if check and done.returncode:
        raise ClusterError(f"{name}: {' '.join(words)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def connect(layout: Layout, name: str) -> None:
    """Connects the node to each network's switch, which is an interface of the head node."""
    for i, network in enumerate(layout.settings.networks):
        device, address = network.interface, f"{layout.settings.address(name, i)}/24"
        if name == HEAD:
            call(layout, HEAD, "ip", "link", "add", device, "type", "bridge")
        else:
            peer = ("peer", "name", device, "netns", pid_seen_from_head(layout, name))
            call(layout, HEAD, "ip", "link", "add", _cable(device, name), "type", "veth", *peer)
            call(layout, HEAD, "ip", "link", "set", _cable(device, name), "master", device, "up")
        call(layout, name, "ip", "addr", "add", address, "dev", device)
        call(layout, name, "ip", "link", "set", device, "up")


def pid_seen_from_head(layout: Layout, name: str) -> str:
    status = Path(f"/proc/{init_pid(layout, name)}/status").read_text().splitlines()
    return next(line.split()[-2] for line in status if line.startswith("NSpid:"))


def _cable(device: str, name: str) -> str:
    return f"{device}-{name}"[:15]  # the longest name of an interface in Linux


def set_link(layout: Layout, name: str, state: str) -> None:
    """Disconnects (`down`) or connects (`up`) a node's network cables at the switch."""
    for network in layout.settings.networks:
        call(layout, HEAD, "ip", "link", "set", _cable(network.interface, name), state)


def power_off(layout: Layout, name: str) -> None:
    """Simulates a power loss: other nodes receive no FIN and no RST, because the links are cut first."""
    set_link(layout, name, "down")
    pid = init_pid(layout, name)
    call(layout, HEAD, "kill", "-KILL", pid_seen_from_head(layout, name))
    wait_for(f"end of {name}", lambda: not Path(f"/proc/{pid}/cmdline").exists())
    # Open connections would keep the network namespace of a dead node, and with it
    # the cable, for minutes, and the node could not be started again.
    for network in layout.settings.networks:
        call(layout, HEAD, "ip", "link", "delete", _cable(network.interface, name), check=False)


def slurmd(layout: Layout, name: str, action: str) -> None:
    """Starts (`start`), stops with SIGTERM (`stop`) or kills (`kill`) the slurmd of a node."""
    if action == "start":
        call(layout, name, "slurmd", "-f", layout.conf)
        return
    pid = (layout.run / f"slurmd-{name}.pid").read_text().strip()
    call(layout, name, "kill", {"stop": "-TERM", "kill": "-KILL"}[action], pid)
