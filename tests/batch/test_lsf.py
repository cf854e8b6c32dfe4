"""Scripts for LSF: directives, launch, remaining time, successor, and what lint reads in other scripts.

No LSF was available. The answers of its commands are those of IBM's manual and of public logs.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddp_hpc.errors import RequestError
from ddp_hpc.lint.check_registry import Subject
from ddp_hpc.lint.parse_script import parse_script
from ddp_hpc.lint.run_checks import lint_script
from ddp_hpc.render.render_script import render
from ddp_hpc.request.job import Job
from ddp_hpc.schedulers.allocation import Allocation
from ddp_hpc.schedulers.registry import SCHEDULERS
from ddp_hpc.sites.site import load_site
from tests.batch.conftest import Sandbox
from tests.batch.test_requeue import SAY, folder
from tests.batch.test_scripts_run import script

LSF = SCHEDULERS["lsf"]
# A bjobs that reports a run limit of two minutes, and a bsub that records its options, variables and script.
BJOBS = '#!/bin/bash\n[[ $* == "-noheader -o runtimelimit 7" ]] && echo 2.0\n'
BSUB = """#!/bin/bash
printf '%s\\n' "$@" >"$RECORD.bsub"
env >"$RECORD.bsub.env"
cat >"$RECORD.bsub.script"
echo "Job <8> is submitted to queue <gpu>."
"""


def directives(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("#BSUB")]


def environ(sandbox: Sandbox, *hosts: str, **extra: str) -> dict[str, str]:
    """The environment of LSF job 7 whose host file has these lines."""
    hostfile = sandbox.folder / "hostfile"
    hostfile.write_text("".join(f"{host}\n" for host in hosts))
    given = {"LSB_JOBID": "7", "LS_SUBCWD": str(sandbox.work), "LSB_DJOB_HOSTFILE": str(hostfile)}
    return {**given, "LSB_QUEUE": "gpu", "LSB_PROJECT_NAME": "abc", **extra}


def log(sandbox: Sandbox) -> str:
    return (sandbox.work / "ddp-7.out").read_text()


class TestTheScript:
    def test_slots_are_cores_and_gpus_are_requested_per_host(self) -> None:
        job = Job(num_nodes=2, gpus_per_node=4, cpus_per_node=32, queue="gpu", account="abc", walltime_s=5400)
        assert directives(render(job, load_site("generic_lsf"))) == [
            "#BSUB -J ddp",
            "#BSUB -n 64",
            "#BSUB -R span[ptile=32]",
            "#BSUB -gpu num=4",
            "#BSUB -W 01:30",
            "#BSUB -q gpu",
            "#BSUB -P abc",
            "#BSUB -o ddp-%J.out",
        ]

    def test_jsrun_gets_whole_nodes_and_one_resource_set_per_node(self) -> None:
        job = Job(num_nodes=2, gpus_per_node=6, cpus_per_node=42, launcher="jsrun")
        text = render(job, load_site("generic_lsf"))
        assert directives(text)[1] == "#BSUB -nnodes 2"
        assert not any("span" in line or "-gpu" in line for line in directives(text))
        assert (
            'jsrun --nrs "$num_nodes" --rs_per_host 1 --tasks_per_rs 6 --cpu_per_rs ALL_CPUS '
            "--gpu_per_rs ALL_GPUS --bind packed:7 \\\n" in text
        )

    def test_a_walltime_is_rounded_up_to_minutes(self) -> None:
        assert "#BSUB -W 00:02" in directives(render(Job(walltime_s=61), load_site("generic_lsf")))

    def test_a_profile_replaces_the_requests_and_adds_options(self, tmp_path: Path) -> None:
        own = tmp_path / "own.toml"
        own.write_text(
            'extends = "generic_lsf"\n[scheduler_options]\n'
            'resources = ["-nnodes {nodes}"]\noptions = ["-alloc_flags \\"smt4 nvme\\""]\n'
        )
        found = directives(render(Job(num_nodes=3), load_site(str(own))))
        assert found[1] == "#BSUB -nnodes 3"
        assert found[-2] == '#BSUB -alloc_flags "smt4 nvme"'

    @pytest.mark.parametrize("option", ["-P $(whoami)", "-P a;b", "P", "-P {node}"])
    def test_options_that_no_directive_can_hold_are_refused(self, tmp_path: Path, option: str) -> None:
        own = tmp_path / "own.toml"
        own.write_text(f'extends = "generic_lsf"\n[scheduler_options]\nresources = ["{option}"]\n')
        with pytest.raises(RequestError):
            load_site(str(own))

    @pytest.mark.parametrize("asked", [{"launcher": "torchrun"}, {"launcher": "srun"}, {"filesystems": "x"}])
    def test_what_lsf_does_not_have_is_refused(self, asked: dict[str, str]) -> None:
        with pytest.raises(RequestError):
            render(Job(**asked), load_site("generic_lsf"))  # type: ignore[arg-type]

    def test_a_missing_account_is_named_with_the_redirection_of_bsub(self, tmp_path: Path) -> None:
        own = tmp_path / "own.toml"
        own.write_text('extends = "generic_lsf"\naccount = { required = true }\n')
        assert "submit it with: bsub -P PROJECT < SCRIPT\n" in render(Job(), load_site(str(own)))


class TestTheRunningScript:
    def test_a_host_is_counted_once_however_many_slots_it_has(self, sandbox: Sandbox) -> None:
        sandbox.program("bjobs", BJOBS)
        sandbox.launcher("mpiexec", then=f"{SAY}say done 9")
        done = sandbox.run(script("generic_lsf", num_nodes=2, ranks_per_node=2), **environ(sandbox, *"aabb"))
        assert done.returncode == 0, done.stderr
        assert sandbox.words()[:4] == ["-n", "4", "-ppn", "2"]
        assert f"ddp-hpc: job 7: {sandbox.bin}/mpiexec -n 4 " in log(sandbox)

    def test_the_launch_node_of_jsrun_is_not_counted_and_ranks_meet_on_the_first_node(
        self, sandbox: Sandbox
    ) -> None:
        sandbox.program("bjobs", BJOBS)
        sandbox.launcher("jsrun", then=f"{SAY}say done 9")
        text = script("generic_lsf", num_nodes=2, ranks_per_node=2, launcher="jsrun")
        done = sandbox.run(text, **environ(sandbox, "batch1", *"aabb"))
        assert done.returncode == 0, done.stderr
        assert sandbox.words()[:2] == ["--nrs", "2"]
        assert sandbox.seen()["MASTER_ADDR"] == "a"
        assert sandbox.seen()["DDP_HPC_LAUNCH"]

    def test_the_deadline_comes_from_the_run_limit_that_lsf_reports(self, sandbox: Sandbox) -> None:
        sandbox.program("bjobs", BJOBS)
        sandbox.launcher("mpiexec", then='echo "left: $((DDP_HPC_DEADLINE - $(date +%s)))"')
        sandbox.run(script("generic_lsf"), **environ(sandbox, "a"))
        match = re.search(r"^left: (\d+)$", log(sandbox), re.MULTILINE)
        assert match
        assert 110 <= int(match[1]) <= 120

    def test_without_an_answer_of_bjobs_the_directive_counts(self, sandbox: Sandbox) -> None:
        sandbox.launcher("mpiexec", then='echo "left: $((DDP_HPC_DEADLINE - $(date +%s)))"')
        sandbox.run(script("generic_lsf"), **environ(sandbox, "a"))
        assert "LSF does not report the walltime of job 7; the 1800 s of the directives are used" in log(
            sandbox
        )
        assert re.search(r"^left: (1800|179\d)$", log(sandbox), re.MULTILINE)

    def test_a_run_that_is_not_done_submits_a_successor_after_itself(self, sandbox: Sandbox) -> None:
        sandbox.program("bjobs", BJOBS)
        sandbox.program("bsub", BSUB)
        sandbox.launcher("mpiexec", then=f"{SAY}say requeue 3 no time left")
        done = sandbox.run(script("generic_lsf", account="abc"), **environ(sandbox, "a"))
        assert done.returncode == 75
        words = Path(f"{sandbox.record}.bsub").read_text().splitlines()
        assert words == ["-w", "ended(7)", "-W", "2", "-q", "gpu", "-P", "abc"]
        assert Path(f"{sandbox.record}.bsub.script").read_text() == script("generic_lsf", account="abc")
        names = Path(f"{sandbox.record}.bsub.env").read_text()
        assert "DDP_HPC_ATTEMPT=2\n" in names
        assert "LSB_JOBID" not in names
        assert log(sandbox).endswith(
            "\n8\nddp-hpc: stopped at step 3: no time left; attempt 2 resumes the run\n"
        )

    def test_a_refused_successor_names_the_command_for_doing_it_by_hand(self, sandbox: Sandbox) -> None:
        sandbox.program("bjobs", BJOBS)
        sandbox.program("bsub", "#!/bin/bash\necho 'gpu: No such queue. Job not submitted.' >&2\nexit 255\n")
        sandbox.launcher("mpiexec", then=f"{SAY}say requeue 3 no time left")
        assert sandbox.run(script("generic_lsf"), **environ(sandbox, "a")).returncode == 75
        assert "gpu: No such queue. Job not submitted." in log(sandbox)
        assert f"cd {sandbox.work} && bsub < {folder(sandbox)}/job.sh" in log(sandbox)

    def test_it_survives_the_signal_that_lsf_sends_at_the_run_limit(self, sandbox: Sandbox) -> None:
        sandbox.program("bjobs", BJOBS)
        sandbox.launcher("mpiexec", then=f"kill -USR2 $PPID\nsleep 0.2\n{SAY}say done 9")
        assert sandbox.run(script("generic_lsf"), **environ(sandbox, "a")).returncode == 0

    def test_outside_of_lsf_it_tells_how_to_submit_it(self, sandbox: Sandbox) -> None:
        done = sandbox.run(script("generic_lsf"))
        assert done.returncode != 0
        assert b"submit this script with bsub < SCRIPT" in done.stderr


class TestTheAllocation:
    def test_hosts_and_slots_are_those_of_lsb_mcpu_hosts(self) -> None:
        found = LSF.find_allocation({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 4 b 2"})
        assert found == Allocation(scheduler="lsf", job_id="7", num_nodes=2, cpus_per_node=2)

    def test_the_launch_node_of_whole_nodes_is_left_out(self) -> None:
        given = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "batch1 1 a 42 b 42", "CSM_ALLOCATION_ID": "9"}
        found = LSF.find_allocation(given)
        assert found
        assert (found.num_nodes, found.cpus_per_node) == (2, 42)

    @pytest.mark.parametrize("hosts", ["", "a", "a 4 b", "a x"])
    def test_a_list_that_cannot_be_read_is_refused(self, hosts: str) -> None:
        with pytest.raises(RequestError, match="LSB_MCPU_HOSTS"):
            LSF.find_allocation({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": hosts})

    def test_outside_of_a_job_there_is_none(self) -> None:
        assert LSF.find_allocation({"LSB_MCPU_HOSTS": "a 4"}) is None


HEAD = "#!/bin/bash\n#BSUB -W 02:00\n"


def subject(*lines: str) -> Subject:
    return Subject(script=parse_script("#!/bin/bash\n" + "\n".join(lines) + "\n"))


class TestLint:
    @pytest.mark.parametrize(
        ("lines", "nodes"),
        [
            (["#BSUB -nnodes 4"], 4),
            (["#BSUB -n 64", '#BSUB -R "span[ptile=16]"'], 4),
            (["#BSUB -n 65", '#BSUB -R"rusage[mem=4] span[ptile=16]"'], 5),
            (["#BSUB -n16", "#BSUB -R span[hosts=1]"], 1),
            (["#BSUB -n 4,8", '#BSUB -R "span[ptile=4]"', '#BSUB -R "select[type==any]"'], 1),
            (["#BSUB -n 1"], 1),
            (["#BSUB -n 8"], None),
            (['#BSUB -gpu "num=2" -R "span[ptile=4]" -n 8  # two nodes'], 2),
        ],
    )
    def test_the_number_of_nodes_is_read_from_slots_and_span(
        self, lines: list[str], nodes: int | None
    ) -> None:
        assert subject(*lines).num_nodes == nodes

    @pytest.mark.parametrize(
        ("line", "gpus"),
        [
            ('#BSUB -gpu "num=4:mode=shared"', 4),
            ("#BSUB -gpu num=2/host", 2),
            ('#BSUB -gpu "num=1/task"', None),
            ('#BSUB -gpu "mode=shared:num=3"', 3),
            ('#BSUB -R "rusage[ngpus_excl_p=2]"', 2),
            ("#BSUB -gpu -", None),
        ],
    )
    def test_gpus_are_counted_per_host(self, line: str, gpus: int | None) -> None:
        assert subject(line).gpus_per_node == gpus

    @pytest.mark.parametrize(
        ("text", "seconds"),
        [("90", 5400), ("1:30", 5400), ("0:05", 300), ("72:00", 259200), ("60/hostA", 3600)],
    )
    def test_a_run_limit_is_minutes_or_hours_and_minutes(self, text: str, seconds: int) -> None:
        assert subject(f"#BSUB -W {text}").walltime_s == seconds
        assert lint_script(f"#!/bin/bash\n#BSUB -W {text}\ndate\n") == []

    @pytest.mark.parametrize("text", ["24:00:00", "2h", "1.5"])
    def test_a_run_limit_that_bsub_rejects_is_an_error(self, text: str) -> None:
        [found] = lint_script(f"#!/bin/bash\n#BSUB -W {text}\ndate\n")
        assert (found.check, found.severity) == ("JOB011", "error")
        assert "HH:MM" in found.remedy

    @pytest.mark.parametrize(
        "lines",
        [
            ["#BSUB -o $HOME/logs/%J.out"],  # usual at sites whose users do so every day
            ["#BSUB -nnodes 2   # number of nodes", "#BSUB -G bank", "#BSUB -alloc_flags smt4"],
            ['#BSUB -R "rusage[mem=8GB]"', '#BSUB -R "select[gpu32gb]"', '#BSUB -J "sweep[1-210]%4"'],
            ["#BSUB -B", "#BSUB -N", "#BSUB -x", "#BSUB -u me@example.org"],
            ["# bsub -n 4 -Is bash shows a prompt", "##BSUB -n 4", "### BSUB -n 4"],
            ["export X=1", "#BSUB -q late"],  # bsub reads directives on every line
            ["#MSUB -l nodes=1", "#QSUB -q x"],
        ],
    )
    def test_what_works_has_no_finding(self, lines: list[str]) -> None:
        assert lint_script(HEAD + "\n".join(lines) + "\ndate\n") == []

    @pytest.mark.parametrize(
        ("line", "check"),
        [
            ("#BSUB --nodes=2", "LSF001"),
            ("#BSUB -jobname x", "LSF001"),
            ("#BSUB -nodes 2", "LSF001"),
            ("#bsub -n 4", "LSF002"),
            ("#BUSB -n 4", "JOB005"),
            ("#SBATCH --nodes=2", "JOB006"),
            ("#BSUB -W 03:00", "JOB007"),
            ("#BSUB -w done(12)", "LSF004"),
            ("#BSUB -w firstjob", "LSF004"),
            ("#BSUB -q $QUEUE", "JOB008"),
        ],
    )
    def test_a_mistake_is_found(self, line: str, check: str) -> None:
        assert check in {found.check for found in lint_script(f"{HEAD}{line}\ndate\n")}

    def test_an_unknown_option_has_a_suggestion(self) -> None:
        [found] = lint_script(f"{HEAD}#BSUB -gpus num=1\ndate\n")
        assert found.what == "'-gpus' is not a bsub option (did you mean \"gpu\"?)"

    def test_a_script_without_a_run_limit_is_told_how_to_request_one(self) -> None:
        [found] = lint_script("#!/bin/bash\n#BSUB -n 1\ndate\n")
        assert (found.check, found.remedy.split(",")[0]) == ("JOB010", "add #BSUB -W HH:MM")
