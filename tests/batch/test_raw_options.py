"""--directive, directives in --setup, and --launcher-arg: options as schedulers and launchers write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.lint.parse_script import parse_script
from ddp_hpc.lint.run_checks import lint_script
from ddp_hpc.render.render_script import render
from ddp_hpc.request.job import Job
from ddp_hpc.sites.site import load_site
from tests.batch.conftest import Sandbox, run_cli
from tests.batch.test_requeue import SAY
from tests.batch.test_scripts_run import script


def refused(profile: str, **options: object) -> str:
    with pytest.raises(RequestError) as caught:
        render(Job(walltime_s=600, **options), load_site(profile))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("profile", "directive", "line"),
    [
        ("generic_slurm", "--switches=1", "#SBATCH --switches=1"),
        ("generic_slurm", "#SBATCH --switches=1 ", "#SBATCH --switches=1"),
        ("generic_slurm", '--comment="two words"', '#SBATCH --comment="two words"'),
        ("generic_pbs", "-W sandbox=PRIVATE", "#PBS -W sandbox=PRIVATE"),
    ],
)
def test_a_raw_directive_is_written_once_and_accepted_by_lint(
    profile: str, directive: str, line: str
) -> None:
    text = render(Job(walltime_s=600, directive=(directive,)), load_site(profile))
    assert text.splitlines().count(line) == 1
    assert [one for one in lint_script(text, load_site(profile)) if one.severity == "error"] == []


def test_lint_checks_the_chunks_of_a_raw_select() -> None:
    job = Job(
        num_nodes=3,
        ranks_per_node=4,
        launcher="mpiexec",
        queue="gpuvolta",
        account="x",
        directive=("-l select=1:ncpus=8+2:ncpus=1",),
    )
    site = load_site("gadi")
    found = {one.check: one.what for one in lint_script(render(job, site), site)}
    assert "the chunk '2:ncpus=1' has 1 CPU" in found["PBS021"]


def test_a_raw_directive_replaces_the_option_of_the_profile() -> None:
    lines = render(Job(walltime_s=600, directive=("--mem=8G",)), load_site("delta")).splitlines()
    assert "#SBATCH --mem=8G" in lines
    assert "#SBATCH --mem=0" not in lines


@pytest.mark.parametrize(
    ("profile", "directive", "said"),
    [
        ("generic_slurm", "--nodes=3", "ddp-hpc writes '--nodes=1' itself"),
        ("generic_slurm", "-N 3", "ddp-hpc writes '--nodes=1' itself"),
        ("generic_slurm", "#PBS -l mem=1gb", "the directives of Slurm begin with #SBATCH"),
        ("generic_pbs", "-l select=3", "ddp-hpc writes '-l select=1:ncpus=1:mpiprocs=1' itself"),
        ("generic_pbs", "-j eo", "ddp-hpc writes '-j oe' itself"),
        ("frontera_rtx", "--mem=8G", "does not accept it"),
        ("local", "--mem=8G", "without a scheduler"),
    ],
)
def test_a_raw_directive_that_the_script_cannot_have_is_refused(
    profile: str, directive: str, said: str
) -> None:
    assert said in refused(profile, directive=(directive,))


def test_a_raw_directive_and_an_option_for_the_same_are_refused() -> None:
    assert "ddp-hpc writes '--mem=4G' itself" in refused("generic_slurm", mem="4G", directive=("--mem=8G",))


def test_a_template_without_options_cannot_have_raw_directives(tmp_path: Path) -> None:
    template = tmp_path / "own.sh.j2"
    template.write_text("#!/bin/bash\n#SBATCH --nodes={{ job.num_nodes }}\n{{ launch_line }}\n")
    said = refused("generic_slurm", directive=("--switches=1",), template=str(template))
    assert "the template does not write `directives.options`" in said


@pytest.mark.parametrize(
    "directive",
    ["", "mem=1", "--a\n#SBATCH --b", "--a\rb", "--a\0", "--a 'b", "--a # b", "#SBATCH", "--\x7f", "-" * 2000,
     "--a\udcff", "# --a"],
)  # fmt: skip
def test_a_raw_directive_that_is_not_one_line_is_refused(directive: str) -> None:
    said = refused("generic_slurm", directive=(directive,))
    assert "--directive" in said
    assert len(said) < 400


@pytest.mark.parametrize(
    ("line", "use"),
    [
        ("#SBATCH --mem=8G", "Use --directive --mem=8G."),
        ("#PBS -l mem=8gb", "Use --directive '-l mem=8gb'."),
    ],
)
def test_a_directive_in_setup_is_refused_with_the_option_for_it(line: str, use: str) -> None:
    assert refused("generic_slurm", setup=(line,)).endswith(use)


def test_a_comment_in_setup_is_not_a_directive() -> None:
    assert "\n# the modules\n" in render(Job(setup=("# the modules",)), load_site("generic_slurm"))


@pytest.mark.parametrize("profile", ["generic_slurm", "generic_pbs"])
def test_launcher_arguments_are_the_last_options_of_the_launcher(profile: str) -> None:
    given = ("--x 'a b'", "--y=$(id)")
    text = render(Job(walltime_s=600, launcher_arg=given), load_site(profile))
    wrap = " ".join([*load_site(profile).launch.wrap, "python -m ddp_hpc.train"])
    assert f" --x 'a b' '--y=$(id)' \\\n  {wrap}" in text


def test_launcher_arguments_reach_the_launcher_of_torchruns_agents() -> None:
    text = render(Job(launcher="torchrun", launcher_arg=("--label",)), load_site("generic_slurm"))
    (launch,) = parse_script(text).launches()
    assert launch.own_words[-1] == "--label"


def test_the_running_job_passes_launcher_arguments_to_mpiexec(sandbox: Sandbox) -> None:
    sandbox.launcher("mpiexec", then=f"{SAY}say done 9")
    nodes = sandbox.folder / "nodes"
    nodes.write_text("a\n")
    environ = {"PBS_JOBID": "7", "PBS_O_WORKDIR": str(sandbox.work), "PBS_NODEFILE": str(nodes)}
    done = sandbox.run(script("generic_pbs", launcher_arg=("--tag 'a $b'",)), **environ)
    assert done.returncode == 0, done.stderr
    words = sandbox.words()
    assert words[words.index("--tag") : words.index("--tag") + 3] == ["--tag", "a $b", "python"]


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("python", "not an option of a launcher"),
        ("", "not an option of a launcher"),
        ("--x : -n 1", "not an option of a launcher"),
        ("--x\n-y", "not an option of a launcher"),
        ("--x 'y", "unclosed quote"),
        ("-n 4", "sets -n, which ddp-hpc writes itself"),
        ("-N4", "sets -N4"),
        ("--ntasks-per-node=3", "sets --ntasks-per-node"),
        ("--label --nodes=3", "sets --nodes"),
    ],
)
def test_an_argument_that_the_launcher_must_not_get_is_refused(argument: str, said: str) -> None:
    assert said in refused("generic_slurm", launcher_arg=(argument,))


def test_torchrun_without_a_launcher_gets_no_launcher_arguments() -> None:
    said = refused("local", launcher="torchrun", launcher_arg=("--x",))
    assert "without another launcher" in said


def test_a_job_file_and_options_are_joined_and_repeated_in_the_header(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(
        'profile = "generic_slurm"\ndirective = ["--switches=1"]\nlauncher_arg = ["--label"]\n'
    )
    options = ["--directive", "--nice=5", "--launcher-arg", "-v"]
    done = run_cli("render", "--job", str(tmp_path / "job.toml"), *options)
    assert done.returncode == 0, done.stderr
    assert b"--directive --switches=1 --directive --nice=5" in done.stdout
    assert b"--launcher-arg --label --launcher-arg -v" in done.stdout
    assert b"#SBATCH --switches=1\n#SBATCH --nice=5\n" in done.stdout
