"""Profiles of users: separate files, extensions of shipped profiles, and messages about mistakes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddp_hpc.base.errors import RequestError
from ddp_hpc.cli import cli
from ddp_hpc.render.render_script import render
from ddp_hpc.render.validate_site_profile import faults_of
from ddp_hpc.request.job import Job
from ddp_hpc.sites.profile_tables import (
    Account,
    Detect,
    Env,
    Fabric,
    Fallback,
    Launch,
    Node,
    Pbs,
    Proxy,
    Queue,
    Slurm,
    Source,
)
from ddp_hpc.sites.site import Site, load_site
from tests.batch.conftest import ROOT, run_cli

MINE = """\
title = "mine"
scheduler = "pbs"
owner = "me"
checked = "2026-11-21"
[launch]
default = "mpiexec"
[[sources]]
where = "our own handbook"
read = "2026-11-20"
of = ["launch"]
"""

Own = Callable[..., Path]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Own:
    """Writes a profile into the directory of the job, or with `in_home` into the user's profile directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def write(text: str, name: str = "mine", *, in_home: bool = False) -> Path:
        folder = tmp_path / "config/ddp-hpc/profiles" if in_home else tmp_path
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.toml"
        path.write_text(text)
        return path if in_home else Path(f"./{name}.toml")

    return write


def refused(path: Path | str) -> str:
    with pytest.raises(RequestError) as caught:
        load_site(str(path))
    return str(caught.value)


def exports(script: str) -> set[str]:
    lines = (line.strip().partition("  # ")[0] for line in script.splitlines())
    return {line.removeprefix("export ") for line in lines if line.startswith("export ")}


def test_a_file_is_a_profile(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(MINE)
    done = run_cli("render", "--profile", "./mine.toml", "--walltime", "1h", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    script = done.stdout.decode()
    assert "#PBS -l walltime=01:00:00" in script
    assert "export DDP_HPC_PROFILE=mine" in script
    # The command line that renders the script again must find the file.
    assert "ddp-hpc render --profile ./mine.toml --walltime 01:00:00" in script


@pytest.mark.parametrize("name", ["./missing.toml", ".", "./folder.toml"])
def test_a_file_that_cannot_be_read_is_refused(own: Own, name: str) -> None:
    Path("folder.toml").mkdir()
    said = refused(name)
    assert name.removeprefix("./").removesuffix(".toml") in said
    assert "\n" not in said


@pytest.mark.parametrize("name", ["-x", "x$(id)"])
def test_a_file_name_that_cannot_be_in_a_variable_is_refused(own: Own, name: str) -> None:
    own(MINE, name)
    assert "Rename the file" in refused(f"./{name}.toml")


@pytest.mark.parametrize(
    ("extends", "text", "said"),
    [
        ("polaris", '[pbs]\nresources = ["select={nodes"]\n', "has an unmatched brace"),
        ("polaris", '[pbs]\nfilesystems = "home eagle"\n', "filesystems is 'home eagle'"),
        ("leonardo", '[slurm]\ngpu_type = "a100\\n#SBATCH --hold"\n', "which is not allowed in a directive"),
        ("polaris", '[env.always]\n"A B" = "x"\n', "invalid variable name 'A B'"),
        ("polaris", '[env.always]\nUID = "3"\n', "UID is a bash variable"),
        ("polaris", 'shell = "/bin/bash\\ntouch pwned"\n', "a path such as /bin/bash"),
        ("polaris", "[node]\ndevices = -4\n", "devices must not be negative (got -4)"),
        (
            "generic_pbs",
            "[node]\ncores = 64\nthreads = 32\n",
            "threads (32) must not be less than cores (64)",
        ),
        (
            "polaris",
            '[[queues]]\nname = "q"\nmin_walltime = "02:00:00"\nmax_walltime = "01:00:00"\n',
            "is greater than max_walltime",
        ),
    ],
)
def test_a_value_that_would_break_the_script_is_refused(own: Own, extends: str, text: str, said: str) -> None:
    own(f'extends = "{extends}"\n{text}')
    assert said in refused("./mine.toml")


class TestExtends:
    def test_holds_only_what_differs(self, own: Own) -> None:
        own('extends = "polaris"\nowner = "me"\n[env.multi_node]\nNCCL_CROSS_NIC = "2"\nMINE = "1"\n')
        site, below = load_site("./mine.toml"), load_site("polaris")
        assert (site.name, site.owner, site.title) == ("mine", "me", below.title)
        # A table is merged key by key ...
        assert site.env.multi_node == {**below.env.multi_node, "NCCL_CROSS_NIC": "2", "MINE": "1"}
        assert site.proxy is not None
        assert below.proxy is not None
        assert site.proxy.url == below.proxy.url

    def test_a_list_takes_the_place_of_the_other_one(self, own: Own) -> None:
        own('extends = "polaris"\nsoftware = ["module load mine"]\n[[queues]]\nname = "reservation"\n')
        site = load_site("./mine.toml")
        assert site.software == ("module load mine",)
        assert [queue.name for queue in site.queues] == ["reservation"]

    def test_may_go_over_several_files(self, own: Own) -> None:
        own('extends = "polaris"\nowner = "group"\ntitle = "ours"\n', "group", in_home=True)
        own('extends = "group"\nowner = "me"\n')
        site = load_site("./mine.toml")
        assert (site.owner, site.title, site.node.devices) == ("me", "ours", 4)

    def test_only_what_is_new_needs_a_source(self, own: Own) -> None:
        path = own('extends = "polaris"\nowner = "me"\n')
        assert faults_of(path) == []

    def test_in_a_ring_is_refused(self, own: Own) -> None:
        own('extends = "b"\n' + MINE, "a", in_home=True)
        own('extends = "c"\n' + MINE, "b", in_home=True)
        own('extends = "a"\n' + MINE, "c", in_home=True)
        assert "extends itself (a -> b -> c -> a); remove one of these `extends` keys" in refused("a")

    def test_a_file_that_hides_the_shipped_one_cannot_extend_it(self, own: Own) -> None:
        own('extends = "polaris"\nowner = "me"\n', "polaris", in_home=True)
        assert "(polaris -> polaris)" in refused("polaris")

    @pytest.mark.parametrize("value", ["3", '["polaris"]'])
    def test_of_something_that_is_no_name_is_refused(self, own: Own, value: str) -> None:
        assert '"extends" must be the name of a profile' in refused(own(f"extends = {value}\n{MINE}"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("account.option = '-B'", "option must be one of '-A', '-P', '-W group_list=', '' (got '-B')"),
        ("confidence = 'sure'", 'confidence must be "high", "medium" or "low" (got \'sure\')'),
        ("pbs.resources = ['select={node}']", 'unknown placeholder {node} (did you mean "nodes"?)'),
        ('pbs.options = ["-k doe\\n#PBS -q x"]', "is not allowed in a directive"),
        ('env.unset = ["A; rm -rf /"]', "invalid variable name"),
        ('notes = ["one\\ntwo"]', "contains a line break"),
        ("slurm.gpu_option = 'gpus'", "gpu_option must be one of 'gpus-per-node', 'gres', '' (got 'gpus')"),
        ('launch = { default = "mpiexec", cpu_bind = ["0-7"] }', "1 sets of cores for 0 devices"),
    ],
)
def test_an_invalid_value_is_refused_with_the_valid_ones(own: Own, line: str, said: str) -> None:
    text = MINE.replace('[launch]\ndefault = "mpiexec"\n', "") if line.startswith("launch") else MINE
    assert said in refused(own(f"{line}\n{text}"))


class TestCheck:
    def test_is_silent_where_nothing_is_wrong(self, own: Own) -> None:
        own('default_walltime = "00:30:00"\n' + MINE)
        result = CliRunner().invoke(cli, ["profiles", "check", "./mine.toml"], standalone_mode=False)
        assert result.exception is None
        assert result.output == ""

    def test_wants_a_source_for_what_ages(self, own: Own) -> None:
        path = own('default_walltime = "1h"\nenv.always = { A = "1" }\nsoftware = ["x"]\n' + MINE)
        assert [line.partition(". ")[0] for line in faults_of(path)] == [
            'mine.toml: "env" has no source',
            'mine.toml: "software" has no source',
        ]

    def test_knows_the_keys_that_a_source_is_of(self, own: Own) -> None:
        path = own('default_walltime = "1h"\n' + MINE.replace('of = ["launch"]', 'of = ["lunch", "launch"]'))
        (fault,) = faults_of(path)
        assert "a source names 'lunch', which is not a key of profiles (did you mean \"launch\"?)" in fault

    def test_says_all_faults_of_all_files_at_once(self, own: Own, tmp_path: Path) -> None:
        own(
            'default_walltime = "1h"\ndefault_queue = "debgu"\n'
            + MINE
            + '[[queues]]\nname = "debug"\nmin_nodes = 4\nmax_nodes = 2\n',
            "one",
        )
        own("defualt_queue = 'x'\n" + MINE, "two")
        done = run_cli("profiles", "check", "./one.toml", "./two.toml", cwd=tmp_path)
        assert done.returncode == 2
        assert done.stdout == b""
        lines = done.stderr.decode().splitlines()
        assert [line.startswith("error: ") for line in lines] == [True] * 4
        for line, said in zip(
            lines,
            (
                'one.toml: "queues" has no source',
                "one.toml: queue debug has max_nodes 2 below min_nodes 4",
                "one.toml: default_queue 'debgu' is not one of its queues (did you mean \"debug\"?)",
                'two.toml: unknown key "defualt_queue"',
            ),
            strict=True,
        ):
            assert said in line

    def test_a_queue_without_a_name_is_only_for_sites_whose_jobs_name_no_queue(self, own: Own) -> None:
        text = MINE.replace('of = ["launch"]', 'of = ["launch", "queues"]') + "[[queues]]\nmax_nodes = 4\n"
        assert faults_of(own('default_walltime = "1h"\n' + text)) == []
        (fault,) = faults_of(own('default_walltime = "1h"\ndefault_queue = "debug"\n' + text, "other"))
        assert "an entry of [[queues]] has no name" in fault

    def test_tries_its_scripts(self, own: Own) -> None:
        text = MINE.replace('default = "mpiexec"', 'default = "srun"')
        faults = faults_of(own('default_walltime = "1h"\n' + text))
        assert [line.partition(":")[0] for line in faults] == ["mine.toml", "mine.toml"]
        assert "cannot render a script for one node: launcher srun does not work under PBS" in faults[0]


class TestFallback:
    def test_a_known_one_leaves_out_and_adds(self, own: Own) -> None:
        own(
            'extends = "polaris"\n[[fallbacks]]\nname = "tcp"\nwhy = "w"\n'
            'without = ["NCCL_NET"]\nenv = { NCCL_CROSS_NIC = "0", MINE = "1" }\n'
        )
        site = load_site("./mine.toml")
        plain, tcp = (exports(render(Job(num_nodes=2, fallback=name), site)) for name in ("", "tcp"))
        assert {"NCCL_NET='AWS Libfabric'", "NCCL_CROSS_NIC=1"} <= plain
        assert tcp - plain == {"NCCL_CROSS_NIC=0", "MINE=1"}
        assert plain - tcp == {"NCCL_NET='AWS Libfabric'", "NCCL_CROSS_NIC=1"}

    def test_an_unknown_one_is_refused_with_those_there_are(self) -> None:
        with pytest.raises(RequestError, match=r'did you mean "no-gdr".*profile polaris has no-gdr, no-nccl'):
            render(Job(fallback="no-gdrr"), load_site("polaris"))


def test_a_users_profile_file_is_shown_unchanged(own: Own, tmp_path: Path) -> None:
    own(MINE + "# a comment\n")
    done = run_cli("profiles", "show", "./mine.toml", cwd=tmp_path)
    assert done.stdout.decode() == MINE + "# a comment\n"


class TestThePage:
    PAGE = (ROOT / "docs" / "how-to" / "write-a-profile.md").read_text()

    def test_it_names_every_key(self) -> None:
        named = set(re.findall(r"`\[*([a-z_]+)\]*", self.PAGE))
        tables = {"account": Account, "detect": Detect, "node": Node, "queues": Queue, "pbs": Pbs}
        tables |= {"slurm": Slurm, "launch": Launch, "env": Env}
        tables |= {
            "fallbacks": Fallback,
            "fabric": Fabric,
            "proxy": Proxy,
            "sources": Source,
        }
        keys = {field.name for kind in (Site, *tables.values()) for field in fields(kind)}
        # The reader of a file sets these.
        assert keys - named == {"file"}

    def test_its_example_is_a_profile_without_fault(self, own: Own) -> None:
        (text,) = re.findall(r"```toml\n(extends.*?)```", self.PAGE, re.DOTALL)
        assert faults_of(own(text)) == []
