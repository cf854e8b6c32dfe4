"""The settings of the test cluster, and the files that its daemons read."""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_lowercase

HEAD = "head"
DOMAIN = "cluster.test"
CLUSTER, DATABASE = "testcluster", "slurm_acct_db"
CGROUPS = Path("/sys/fs/cgroup")
CGROUP_CONTROLLERS = ("freezer", "memory")


@dataclass(frozen=True)
class Network:
    """A network interface of every node, and the first three numbers of its IPv4 addresses."""

    interface: str
    subnet: str


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a cluster. Nodes can have more CPUs, memory and GPUs than the machine."""

    num_nodes: int = 2
    # Unique, because Slurm's cgroups are named after nodes and shared.
    node_prefix: str = field(default_factory=lambda: "n" + "".join(random.choices(ascii_lowercase, k=4)))
    cpus_per_node: int = 8
    memory_mib_per_node: int = 16000
    gpus_per_node: int = 4
    features: str = "gpu"
    networks: tuple[Network, ...] = (Network("eth0", "10.44.0"),)
    # Like Debian's installer: on each node, the node's own name resolves to 127.0.1.1.
    loopback_names: bool = False
    kill_wait_s: int = 5
    slurmd_timeout_s: int = 30
    requeue_wait_s: int = 10
    # With cgroups v1, which limit the memory of jobs. A step of a requeued job sometimes failed to create its
    # cgroup, since the previous attempt was just removing the cgroup of the same name. Without cgroups, Slurm
    # finds the processes of jobs in /proc.
    cgroups: bool = False
    # With slurmdbd and MariaDB. The controller then forgets jobs soon after their end.
    accounting: bool = False

    @property
    def node_names(self) -> list[str]:
        return [f"{self.node_prefix}{i}" for i in range(1, self.num_nodes + 1)]

    def address(self, name: str, network: int = 0) -> str:
        last = 1 if name == HEAD else 11 + self.node_names.index(name)
        return f"{self.networks[network].subnet}.{last}"


@dataclass(frozen=True)
class Layout:
    """The paths of a cluster's files.

    The root is short, because a socket's path has at most 108 characters.
    """

    root: Path
    settings: Settings

    @property
    def conf(self) -> Path:
        return self.root / "etc" / "slurm.conf"

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def mails(self) -> Path:
        """The mails of jobs, each one line with the arguments of the mail program."""
        return self.root / "mails"

    @property
    def munge_socket(self) -> Path:
        return self.run / "munge.socket"

    @property
    def database_socket(self) -> Path:
        return self.run / "mariadb.socket"

    def node(self, name: str) -> Path:
        return self.root / "nodes" / name


def write_configuration(layout: Layout) -> None:
    """Writes all files of a new cluster below its root."""
    root, settings = layout.root, layout.settings
    for folder in (layout.log, layout.run, layout.home, root / "etc", root / "state", root / "munge"):
        folder.mkdir(parents=True)
    # munged refuses a key that others can read.
    key = root / "etc" / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))

    hosts = [HEAD, *settings.node_names]
    table = "".join(f"{settings.address(name)}\t{name}.{DOMAIN} {name}\n" for name in hosts)
    for name, first_pid in zip(hosts, _first_pids(len(hosts)), strict=True):
        own = f"127.0.1.1\t{name}.{DOMAIN} {name}\n" if settings.loopback_names and name != HEAD else ""
        node = layout.node(name)
        (node / "spool").mkdir(parents=True)
        (node / "tmp").mkdir()
        (node / "tmp").chmod(0o1777)
        (node / "hosts").write_text(f"127.0.0.1\tlocalhost\n{own}{table}")
        (node / "hostname").write_text(f"{name}\n")
        (node / "resolv.conf").write_text("")
        (node / "first_pid").write_text(f"{first_pid}\n")

    layout.conf.write_text(_slurm_conf(layout))
    if settings.accounting:
        slurmdbd = root / "etc" / "slurmdbd.conf"  # slurmdbd refuses a file that others can read
        slurmdbd.touch(mode=0o600)
        slurmdbd.write_text(_slurmdbd_conf(layout))
    mail = root / "etc" / "mail"
    mail.write_text(f'#!/bin/sh\necho "$*" >>{layout.mails}\n')
    mail.chmod(0o755)
    (root / "etc" / "plugstack.conf").write_text("")
    (root / "etc" / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes\n")
    if settings.gpus_per_node:
        # Slurm accepts any device file as a GPU. The number at the end of its name
        # becomes the index in CUDA_VISIBLE_DEVICES.
        devices = root / "dev"
        devices.mkdir()
        for i in range(settings.gpus_per_node):
            (devices / f"gpu{i}").symlink_to("/dev/null")
        span = f"{devices}/gpu[0-{settings.gpus_per_node - 1}]"
        (root / "etc" / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={span}\n")


def _first_pids(num_hosts: int) -> Iterable[int]:
    """Returns first process IDs that are far apart for each host.

    The hosts share /tmp, where Open MPI names directories only by process ID, so two nodes with the same IDs
    would use the same directory.
    """
    start = random.randrange(1000, 8000)
    return range(start, start + num_hosts * 2000, 2000)


def has_cgroup_v1() -> bool:
    """Returns whether Slurm can track processes by cgroups v1; its plugin for v2 needs systemd."""
    return all(os.access(CGROUPS / name / "tasks", os.W_OK) for name in CGROUP_CONTROLLERS)


def _slurmdbd_conf(layout: Layout) -> str:
    return f"""\
AuthType=auth/munge
AuthInfo=socket={layout.munge_socket}
DbdHost={HEAD}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StorageLoc={DATABASE}
StorageUser=slurm
StoragePass=slurm
LogFile={layout.log}/slurmdbd.log
PidFile={layout.run}/slurmdbd.pid
"""


def _accounting_options(layout: Layout) -> str:
    """Returns the options for accounting, and how long the controller knows jobs that have ended."""
    if not layout.settings.accounting:
        return "AccountingStorageType=accounting_storage/none\nMinJobAge=3600"
    # AuthInfo is not used for connections to slurmdbd.
    return (
        f"AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost={HEAD}\n"
        f"AccountingStoragePass={layout.munge_socket}\nMinJobAge=2"
    )


def _slurm_conf(layout: Layout) -> str:
    root, settings = layout.root, layout.settings
    gres = f" Gres=gpu:{settings.gpus_per_node}" if settings.gpus_per_node else ""
    nodes = "\n".join(
        f"NodeName={name} NodeAddr={settings.address(name)} CPUs={settings.cpus_per_node} "
        f"RealMemory={settings.memory_mib_per_node} Feature={settings.features}{gres}"
        for name in settings.node_names
    )
    tracking = (
        "ProctrackType=proctrack/cgroup\nTaskPlugin=task/cgroup"
        if settings.cgroups
        else "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none"
    )
    # TmpFS: the PMIx plugins of two nodes would use the same files in /tmp.
    # cred_expire is also the time before a requeued job can start again (default:
    # 120 s). config_overrides allows nodes with more resources than the machine.
    return f"""\
ClusterName={CLUSTER}
SlurmctldHost={HEAD}({settings.address(HEAD)})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={layout.munge_socket},cred_expire={settings.requeue_wait_s}
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/nodes/%n/spool
TmpFS={root}/nodes/%n/tmp
SlurmctldPidFile={layout.run}/slurmctld.pid
SlurmdPidFile={layout.run}/slurmd-%n.pid
SlurmctldLogFile={layout.log}/slurmctld.log
SlurmdLogFile={layout.log}/slurmd-%n.log
PlugStackConfig={root}/etc/plugstack.conf
MailProg={root}/etc/mail
{tracking}
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait={settings.kill_wait_s}
SlurmctldTimeout=30
SlurmdTimeout={settings.slurmd_timeout_s}
TCPTimeout=2
TreeWidth=16
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=200000,sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU={settings.memory_mib_per_node // settings.cpus_per_node}
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{"GresTypes=gpu" if settings.gpus_per_node else ""}
JobAcctGatherType=jobacct_gather/none
{_accounting_options(layout)}
{nodes}
PartitionName=debug Nodes=ALL Default=YES DefaultTime=00:10:00 MaxTime=01:00:00 PriorityTier=10
PartitionName=long Nodes=ALL MaxTime=UNLIMITED PriorityTier=10
PartitionName=spare Nodes=ALL MaxTime=UNLIMITED PriorityTier=1 PreemptMode=REQUEUE GraceTime=5
PartitionName=urgent Nodes=ALL MaxTime=01:00:00 PriorityTier=100
"""
