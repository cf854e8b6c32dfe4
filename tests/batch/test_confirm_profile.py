"""`ddp-hpc profiles confirm`: the script, and the comparison of a profile with the answers of its machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ddp_hpc.base.errors import RequestError
from ddp_hpc.cli import cli
from ddp_hpc.confirm.answers import MAX_BYTES, read_answers
from ddp_hpc.confirm.checklist import RANK_COMMAND, checklist
from ddp_hpc.confirm.compare import Fact, compare
from ddp_hpc.sites.site import load_site, profile_files
from tests.batch.conftest import Sandbox

SLURM = """
title = "mine"
scheduler = "slurm"
owner = "me"
checked = "2026-11-21"
default_queue = "gpu"
{more}
[slurm]
version = "23.11"
{slurm}
[node]
cores = 64
threads = 128
devices = 4
{queues}
[launch]
default = "srun"
"""
PBS = """
title = "mine"
scheduler = "pbs"
owner = "me"
checked = "2026-11-21"
default_queue = "work"
software = ["module load torch"]
[pbs]
version = "2022.1.1"
[node]
cores = 32
threads = 64
devices = 2
[launch]
default = "mpiexec"
dialect = "pals"
cpu_bind = ["16-31", "0-15"]
[fabric]
interface = "hsn0"
{queues}
"""
PARTITION = (
    "PartitionName={name} AllowGroups=ALL AllowQos=ALL Default=NO QoS={qos} MaxNodes={nodes} MaxTime={time} "
    "MinNodes=0 State={state} TotalNodes=9 JobDefaults=(null) TRES=cpu=640,mem=9000G,node=9,gres/gpu=36\n"
)
NODE = (
    "NodeName=g01 CPUAlloc=0 CPUEfctv=128 CPUTot=128 Gres=gpu:a100:4(S:0-1) OS=Linux 5.14 #1 SMP "
    "RealMemory=512000 ThreadsPerCore=2 Partitions=gpu\n"
)


def slurm_queue(text: str, qos: str = "") -> str:
    name = f'name = "gpu"\nqos = "{qos}"' if qos else 'name = "gpu"'
    return f"[[queues]]\n{name}\n{text}"


def partition(
    name: str = "gpu",
    qos: str = "N/A",
    nodes: str = "UNLIMITED",
    time: str = "2-00:00:00",
    state: str = "UP",
) -> str:
    return PARTITION.format(name=name, qos=qos, nodes=nodes, time=time, state=state)


def answers_of(scheduler: str, end: str = "", **sections: str) -> str:
    parts = "".join(f"== {key}\n{text}\n" for key, text in sections.items())
    return f"== ddp-hpc answers 1 mine {scheduler}\n{parts}== end\n{end}"


def compared(folder: Path, profile: str, text: str) -> dict[str, Fact]:
    path = folder / "mine.toml"
    path.write_text(profile)
    site = load_site(str(path))
    return {fact.key: fact for fact in compare(site, read_answers(text, site))[1]}


def verdict(facts: dict[str, Fact], key: str) -> tuple[str, str, str]:
    return facts[key].profile, facts[key].machine, facts[key].verdict


def slurm(folder: Path, queues: str = "", slurm: str = "", **sections: str) -> dict[str, Fact]:
    return compared(
        folder, SLURM.format(queues=queues, slurm=slurm, more=""), answers_of("slurm", **sections)
    )


def pbs(
    folder: Path, queues: object = None, profile: str = "", end: str = "", **sections: str
) -> dict[str, Fact]:
    if queues is not None:
        sections["queues"] = json.dumps({"pbs_version": "x", "Queue": queues})
    return compared(folder, PBS.format(queues=profile), answers_of("pbs", end, **sections))


@pytest.mark.parametrize(
    ("profile", "shown", "expected"),
    [
        ('max_walltime = "48:00:00"', partition(), ("48:00:00", "48:00:00", "confirmed")),
        ('max_walltime = "24:00:00"', partition(), ("24:00:00", "48:00:00", "differs")),
        ("", partition(), ("-", "48:00:00", "new")),
        ('max_walltime = "24:00:00"', partition(time="UNLIMITED"), ("24:00:00", "-", "no answer")),
    ],
)
def test_the_walltime_of_a_partition(
    tmp_path: Path, profile: str, shown: str, expected: tuple[str, str, str]
) -> None:
    facts = slurm(tmp_path, slurm_queue(profile), partitions=shown)
    assert verdict(facts, "queues.gpu.max_walltime") == expected


@pytest.mark.parametrize(
    ("of_partition", "qos", "walltime", "nodes"),
    [
        ("N/A", "short|01:00:00|node=2,gres/gpu=8||", "01:00:00", "2"),
        # The limits of the partition hold too.
        ("N/A", "short|3-00:00:00|node=64||", "48:00:00", "16"),
        ("N/A", "short|3-00:00:00|node=64||PartitionMaxNodes,PartitionTimeLimit", "72:00:00", "64"),
        # The QOS of the partition comes before that of the job.
        ("part", "short|01:00:00|node=2||", "12:00:00", "4"),
        ("part", "short|01:00:00|node=2||DenyOnLimit,OverPartQOS", "01:00:00", "2"),
    ],
)
def test_the_limits_of_a_qos_and_of_its_partition(
    tmp_path: Path, of_partition: str, qos: str, walltime: str, nodes: str
) -> None:
    facts = slurm(
        tmp_path,
        slurm_queue("", qos="short"),
        partitions=partition(qos=of_partition, nodes="16"),
        qos=f"part|12:00:00|node=4||\n{qos}",
    )
    assert facts["queues.gpu.short.max_walltime"].machine == walltime
    assert facts["queues.gpu.short.max_nodes"].machine == nodes


def test_where_queues_are_qos_their_own_limits_are_compared(tmp_path: Path) -> None:
    queues = '[[queues]]\nname = "debug"\nmax_nodes = 8\n[[queues]]\nname = "gone"'
    qos = "debug|00:30:00|node=8||\nadmin||||"
    facts = slurm(tmp_path, queues, 'queue_option = "qos"', partitions=partition(), qos=qos)
    assert verdict(facts, "queues.debug.max_nodes") == ("8", "8", "confirmed")
    assert verdict(facts, "queues.debug.max_walltime") == ("-", "00:30:00", "new")
    assert verdict(facts, "queues.gone") == ("listed", "not listed", "differs")


def test_the_widest_limits_of_several_entries_are_compared(tmp_path: Path) -> None:
    small = 'max_nodes = 4\nmax_walltime = "48:00:00"\n'
    large = slurm_queue('min_nodes = 5\nmax_nodes = 9\nmax_walltime = "24:00:00"')
    facts = slurm(tmp_path, slurm_queue(small) + large, partitions=partition(nodes="9"))
    assert {facts[f"queues.gpu.{name}"].verdict for name in ("max_nodes", "max_walltime")} == {"confirmed"}
    assert "queues.gpu.min_nodes" not in facts


def test_queues_that_are_closed_missing_or_new(tmp_path: Path) -> None:
    shown = partition(state="DOWN") + partition("fresh", nodes="3") + partition("shut", state="INACTIVE")
    shown += partition("cpu").replace(",gres/gpu=36", "")
    facts = slurm(tmp_path, slurm_queue("") + '\n[[queues]]\nname = "gone"', partitions=shown)
    assert verdict(facts, "queues.gpu") == ("open", "closed", "differs")
    assert verdict(facts, "queues.gone") == ("listed", "not listed", "differs")
    assert facts["queues.fresh"].change == (
        *("[[queues]]", 'name = "fresh"', "max_nodes = 3", 'max_walltime = "48:00:00"'),
    )
    assert not {"queues.cpu", "queues.shut"} & set(facts)


def test_the_nodes_of_the_default_partition(tmp_path: Path) -> None:
    kinds = "cpu*|c[01-99]|256|100|(null)\ngpu|g[01-20]|128|512000|gpu:a100:4(S:0-1)"
    facts = slurm(tmp_path, nodes=kinds, node=NODE + NODE.replace("g01", "c01"), version="slurm 23.11.4")
    assert verdict(facts, "node.cores") == ("64", "64", "confirmed")
    assert verdict(facts, "node.threads") == ("128", "128", "confirmed")
    assert verdict(facts, "node.devices") == ("4", "4", "confirmed")
    assert verdict(facts, "slurm.version") == ("23.11", "23.11.4", "confirmed")


def test_the_share_of_a_gpu_is_compared_where_jobs_request_single_gpus(tmp_path: Path) -> None:
    profile = SLURM.format(queues="", slurm="", more="").replace(
        "cores = 64\nthreads = 128\ndevices = 4", "cores_per_device = 20\nmemory_mib_per_device = 120000"
    )
    text = answers_of("slurm", nodes="gpu|g[01-20]|128|512000|gpu:4", node=NODE, partitions=partition())
    facts = compared(tmp_path, profile, text)
    assert verdict(facts, "node.cores_per_device") == ("20", "16", "differs")
    assert verdict(facts, "node.memory_mib_per_device") == ("120000", "128000", "confirmed")


QUEUE = {"queue_type": "Execution", "enabled": "True", "started": "True"}


def test_the_limits_of_pbs_queues(tmp_path: Path) -> None:
    work = QUEUE | {
        "resources_max": {"nodect": 4, "walltime": "02:00:00"},
        "resources_min": {"nodect": 2, "walltime": "00:05:00"},
    }
    profile = '[[queues]]\nname = "work"\nmax_nodes = 4\nmax_walltime = "01:00:00"\nmin_walltime = "00:05:00"'
    facts = pbs(tmp_path, {"work": work}, profile)
    assert verdict(facts, "queues.work.max_nodes") == ("4", "4", "confirmed")
    assert verdict(facts, "queues.work.min_nodes") == ("-", "2", "new")
    assert verdict(facts, "queues.work.max_walltime") == ("01:00:00", "02:00:00", "differs")
    assert verdict(facts, "queues.work.min_walltime") == ("00:05:00", "00:05:00", "confirmed")
    assert facts["queues.work.max_walltime"].change == (
        '# [[queues]] name = "work"',
        'max_walltime = "02:00:00"',
    )


def test_a_routing_queue_has_its_own_limits_or_those_of_its_destinations(tmp_path: Path) -> None:
    queues = {
        "work": {"queue_type": "Route", "route_destinations": "small,large", "enabled": "True"}
        | {"resources_max": {"ngpus": 16}},
        "small": QUEUE | {"from_route_only": "True", "resources_max": {"walltime": "03:00:00"}},
        "large": QUEUE | {"from_route_only": "True", "resources_max": {"walltime": "24:00:00"}},
    }
    facts = pbs(tmp_path, queues, '[[queues]]\nname = "work"\nmax_nodes = 8\nmax_walltime = "24:00:00"')
    assert verdict(facts, "queues.work.max_walltime") == ("24:00:00", "24:00:00", "confirmed")
    # 16 GPUs on nodes of two
    assert verdict(facts, "queues.work.max_nodes") == ("8", "8", "confirmed")
    assert not {"queues.small", "queues.large"} & set(facts)


@pytest.mark.parametrize(
    "attributes",
    [
        {"from_route_only": "True"},
        {"acl_user_enable": "True"},
        {"resources_max": {"ngpus": 0}},
        {"enabled": "False"},
    ],
)
def test_pbs_queues_that_users_cannot_choose_are_not_new(
    tmp_path: Path, attributes: dict[str, object]
) -> None:
    facts = pbs(tmp_path, {"open": QUEUE, "other": QUEUE | attributes, "R123": QUEUE})
    assert "queues.open" in facts
    assert not {"queues.other", "queues.R123"} & set(facts)


def test_the_cpus_of_pbs_may_be_threads(tmp_path: Path) -> None:
    node = {"resources_available": {"ncpus": 64, "ngpus": 1, "mem": "512gb"}}
    nodes = json.dumps({"nodes": {"x1": node, "login": {"resources_available": {"ncpus": 4}}}})
    facts = pbs(tmp_path, nodes=nodes, version="pbs_version = 2022.1.1.20220926110806")
    assert verdict(facts, "node.threads") == ("64", "64", "confirmed")
    assert verdict(facts, "node.cores") == ("32", "-", "no answer")
    # Each half of the GPU is a device.
    assert verdict(facts, "node.devices") == ("2", "2", "confirmed")
    assert verdict(facts, "pbs.version") == ("2022.1.1", "2022.1.1", "confirmed")


@pytest.mark.parametrize(
    ("output", "python", "expected"),
    [
        ("", "Python 3.11.7\ntorch 2.8.0", ("Python 3.11.7, torch 2.8.0", "confirmed")),
        ("x: ERROR:105: Unable to locate a modulefile for 'torch'", "Python 3.9", ("", "differs")),
        (
            "-- exit code 1 of module load torch",
            "Python 3.9",
            ("-- exit code 1 of module load torch", "differs"),
        ),
        ("", "bash: python: command not found", ("no Python", "differs")),
    ],
)
def test_the_software_loads_or_not(
    tmp_path: Path, output: str, python: str, expected: tuple[str, str]
) -> None:
    facts = pbs(tmp_path, software=output, python=python)
    machine, result = expected
    assert (facts["software"].machine, facts["software"].verdict) == (machine or output, result)


@pytest.mark.parametrize(
    ("version", "kind", "result"),
    [
        ("mpiexec version 1.2.12 revision 8f4d built on June 11 2024", "pals", "confirmed"),
        ("HYDRA build details:\n    Version: 4.1", "hydra", "differs"),
        ("mpiexec (OpenRTE) 4.1.5", "openmpi", "differs"),
    ],
)
def test_the_kind_of_mpiexec(tmp_path: Path, version: str, kind: str, result: str) -> None:
    facts = pbs(tmp_path, launchers=f"launcher mpiexec /opt/bin/mpiexec\n{version}")
    assert verdict(facts, "launch.dialect") == ("pals", kind, result)


def test_a_launcher_that_the_login_node_lacks_is_no_answer(tmp_path: Path) -> None:
    facts = pbs(tmp_path, launchers="launcher mpiexec \ntimeout: failed to run command 'mpiexec'")
    assert {facts[key].verdict for key in ("launch.default", "launch.dialect")} == {"no answer"}


def rank(
    number: int, *, cpus: str, devices: int | None = 2, interface: str = "hsn0", **variables: str
) -> str:
    """The line that `ddp-hpc env --json --devices` prints on a rank."""
    report = {
        "launcher": "pals",
        "hostname": f"secret{number // 2}",
        "values": {"rank": number, "local_rank": number % 2},
        "cpus": cpus,
        "interfaces": [interface],
        "devices": {"number": devices, **variables},
    }
    return f"{json.dumps(report)}\n"


def test_what_the_ranks_see_is_confirmed(tmp_path: Path) -> None:
    # The second rank also has the other threads of its cores, and a torch without support for GPUs.
    first, second = (
        rank(0, cpus="16-31"),
        rank(1, cpus="0-15,32-47", devices=None, CUDA_VISIBLE_DEVICES="0,1"),
    )
    facts = pbs(tmp_path, end=f"log line\n{first}[1] {second}")
    for key in ("launch (device of LOCAL_RANK)", "launch.cpu_bind", "fabric.interface"):
        assert facts[key].verdict == "confirmed", facts[key]


def test_what_the_ranks_do_not_see_differs(tmp_path: Path) -> None:
    lines = rank(2, cpus="16-31") + rank(3, cpus="0-31", devices=1, interface="eth0")
    facts = pbs(tmp_path, end=lines)
    where = "rank 3 (local rank 1 of node 1)"
    assert verdict(facts, "launch (device of LOCAL_RANK)") == ("visible", f"{where} sees 1 device", "differs")
    assert verdict(facts, "launch.cpu_bind") == ("16-31:0-15", f"{where} has CPUs 0-31", "differs")
    assert verdict(facts, "fabric.interface") == ("hsn0", f"{where} has eth0", "differs")


def test_an_interface_of_a_fast_network_is_new_if_the_profile_has_none(tmp_path: Path) -> None:
    text = answers_of("slurm", rank(0, cpus="0", interface="ib0"))
    facts = compared(tmp_path, SLURM.format(queues="", slurm="", more=""), text)
    assert verdict(facts, "fabric.interface") == ("-", "ib0", "new")


def confirm(folder: Path, content: bytes, *options: str, profile: str = SLURM) -> Result:
    (folder / "mine.toml").write_text(profile.format(queues=slurm_queue(""), slurm="", more=""))
    (folder / "answers.txt").write_bytes(content)
    argv = ["profiles", "confirm", str(folder / "mine.toml"), str(folder / "answers.txt"), *options]
    return CliRunner().invoke(cli, argv)


def test_the_exit_code_and_the_lines_to_change(tmp_path: Path) -> None:
    same = confirm(tmp_path, answers_of("slurm", version="slurm 23.11.4").encode())
    assert (same.exit_code, same.stderr) == (0, "")
    other = confirm(tmp_path, answers_of("slurm", version="slurm 24.05.1").encode())
    assert other.exit_code == 1
    assert 'Change in the profile:\n  [slurm]\n  version = "24.05.1"\n' in other.stdout


def test_the_result_contains_no_names_of_users_or_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USER", "jdoe42")
    text = answers_of(
        "slurm",
        rank(0, cpus="0"),
        nodes="gpu|g01|128|512000|gpu:4",
        node=NODE.replace("g01", "secret0"),
        software="-- exit code 1 of source /home/other/venv/bin/activate for jdoe42",
    )
    for options in ([], ["--json"]):
        done = confirm(tmp_path, text.encode(), *options)
        assert done.exit_code == 1
        assert not [word for word in ("jdoe42", "other", "secret") if word in done.stdout]


CONTROL = answers_of("slurm", version="slurm 24.05.1", partitions=partition("a\x1b[2J\x07"))
TRUNCATED = answers_of("slurm", partitions=partition())[:200]
# Valid JSON, but not what a rank prints.
RANKS = (
    '{"launcher": ' + "[" * 100_000,
    rank(0, cpus="0-99999999999"),
    rank(-1, cpus="0"),
    '{"launcher": 1}',
)


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (b"", 2, "this is not the output of a script that ddp-hpc profiles confirm prints"),
        (bytes(range(256)) * 99, 2, "this is not the output"),
        (b"== ddp-hpc answers 1 mine pbs\n", 2, "answers for another profile (mine pbs), not for mine slurm"),
        (b"== ddp-hpc answers 1 \x1b[2J slurm\n", 2, "answers for another profile (?[2J slurm)"),
        (answers_of("slurm").encode() + b"x" * MAX_BYTES, 2, "more than 32 MiB, which is too large"),
        (TRUNCATED.encode(), 0, "the answers end before the script did"),
        (CONTROL.encode(), 1, ""),
        (answers_of("slurm", "\n".join(RANKS)).encode(), 0, ""),
        (answers_of("slurm", qos="||||\n|" * 9, nodes="|" * 99, node="NodeName=").encode(), 0, ""),
    ],
)  # fmt: skip
def test_hostile_answers(tmp_path: Path, content: bytes, code: int, message: str) -> None:
    done = confirm(tmp_path, content)
    error = done.exception if isinstance(done.exception, RequestError) else None
    said = str(error) if error else done.stderr
    assert (error.exit_code if error else done.exit_code) == code
    assert message in said
    assert len(said.splitlines()) <= 1
    assert "\x1b" not in done.stdout + said


@pytest.mark.parametrize(
    "queues", ["[]", "{", '{"Queue": 1}', '{"Queue": {"a": 1, "work": {"resources_max": 1}}}']
)
def test_answers_of_pbs_that_are_not_tables(tmp_path: Path, queues: str) -> None:
    facts = compared(
        tmp_path,
        PBS.format(queues='[[queues]]\nname = "work"'),
        answers_of("pbs", queues=queues, nodes=queues),
    )
    assert facts["node.threads"].verdict == "no answer"


def test_the_script_continues_after_commands_that_fail(sandbox: Sandbox) -> None:
    site = load_site("generic_slurm")
    for name in ("sbatch", "scontrol", "sacctmgr", "sinfo", "srun"):
        sandbox.program(name, "#!/bin/bash\necho no answer >&2\nexit 3\n")
    done = sandbox.run(checklist(site, "generic_slurm"))
    text = done.stdout.decode()
    assert (done.returncode, text.count("no answer\n-- exit code 3\n")) == (0, 5)
    answers = read_answers(text, site)
    assert answers.is_complete
    found, facts = compare(site, answers)
    assert (found.version, found.queues, found.nodes) == ("", {}, ())
    assert next(fact for fact in facts if fact.key == "software").machine.startswith("Python 3")
    assert b"ddp-hpc submit --profile generic_slurm --nodes 2" in done.stderr


def test_a_command_that_hangs_is_ended(sandbox: Sandbox) -> None:
    sandbox.program("sbatch", "#!/bin/bash\nsleep 100\n")
    text = checklist(load_site("generic_slurm"), "generic_slurm").replace("timeout 60", "timeout 0.2")
    done = sandbox.run(text)
    assert b"== version\n-- exit code 124\n" in done.stdout


@pytest.mark.parametrize("name", list(profile_files()))
def test_the_script_of_every_profile_is_valid_and_short(name: str) -> None:
    site = load_site(name)
    if site.scheduler not in ("slurm", "pbs"):
        with pytest.raises(RequestError, match="only profiles with slurm or pbs"):
            checklist(site, name)
        return
    text = checklist(site, name)
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    assert len(text.splitlines()) <= 65
    assert " ".join(RANK_COMMAND) in text
