"""The findings of `ddp-hpc lint`, and scripts without findings."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.lint.parse_script import parse_script
from ddp_hpc.lint.run_checks import CHECKS, ask_sbatch, lint_request, lint_script
from ddp_hpc.request.job import Job
from ddp_hpc.request.queue_choice import largest_num_nodes
from ddp_hpc.schedulers.registry import SCHEDULERS
from ddp_hpc.sites.site import load_site
from tests.batch.conftest import ROOT, run_cli

PBS = "#!/bin/bash -l\n#PBS -l walltime=01:00:00\n"
SLURM = "#!/bin/bash\n#SBATCH --time=01:00:00\n"
TWO_NODES = f"{SLURM}#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-node=4\n"
CHUNKS = f"{PBS}#PBS -l select=2:ncpus=64:mpiprocs=4:ngpus=4\ncd $PBS_O_WORKDIR\nexport TMPDIR=/tmp\n"

# More bad scripts, in addition to the examples in docs/reference/lint/.
BAD = [
    ("JOB001", 1, " \n\n"),
    ("JOB001", 2, "#!/bin/bash\nx\0y\n"),
    ("JOB002", 1, "#!/bin/bash\r\n#PBS -l walltime=01:00:00\r\n"),
    ("JOB002", 3, SLURM + "srun python train.py\r\n"),
    ("JOB003", 3, SLURM + "echo $((1 + 2\n"),
    ("JOB003", 5, SLURM + "for i in 1 2; do\n  echo $i\n"),
    ("JOB003", 4, SLURM + "cat <<EOF\nnever closed\n"),
    ("JOB005", 3, PBS + "#PBS-l select=2\n"),
    ("JOB005", 3, PBS + "#PBS: -l select=2\n"),
    ("JOB009", 3, SLURM + "export AWS_SECRET_ACCESS_KEY='abcd1234efgh'\n"),
    ("JOB009", 3, SLURM + "HF_TOKEN=hf_0123456789 srun python train.py\n"),
    ("RANK001", 6, CHUNKS + "mpiexec -n 8 --ppn 4 python -m torch.distributed.run --nnodes=2 train.py\n"),
    ("RANK014", 6, TWO_NODES + "srun -n 2 --ntasks-per-node=1 torchrun --nnodes=2 train.py\n"),
    ("RANK003", 7, CHUNKS + "export MASTER_ADDR=$(hostname)\nmpiexec -n 16 --ppn 8 python train.py\n"),
    ("RANK004", 6, CHUNKS + "mpirun -np 4 python train.py\n"),
    ("RANK004", 6, TWO_NODES + "mpirun -np 4 python train.py\n"),
    ("RANK005", 6, CHUNKS + "export OMP_NUM_THREADS=64\nmpiexec -n 8 --ppn 4 ./a.out\n"),
    ("RANK006", 4, PBS + "trap 'kill $pid' TERM\nmpiexec -n 4 python train.py\n"),
    ("RANK006", 4, SLURM + "trap stop SIGUSR1\nsrun python train.py | tee log\n"),
    ("RANK007", 3, SLURM + "trap stop SIGCONT\n"),
    ("RANK008", 3, SLURM + "torchrun --nproc-per-node=2 --master_port 29500 train.py\n"),
    ("RANK009", 6, TWO_NODES + "export MASTER_ADDR=127.0.0.1\n"),
    ("PBS003", 4, PBS + "#PBS -l select=2\n#PBS -E\n"),
    ("PBS006", 3, PBS + f"#PBS -N {'n' * 231}\n"),
    ("PBS010", 3, PBS + "#PBS -l place=scatter:exclusive\n"),
    ("PBS011", 3, PBS + "#PBS -e host:no/such/folder/log\n"),
    ("PBS012", 6, CHUNKS + "NUM_NODES=`cat $PBS_NODEFILE | wc -l`\n"),
    ("PBS013", 3, PBS + "qsub -W depend=afterok:$PBS_JOBID next.pbs\n"),
    ("SLURM008", 3, SLURM + "#SBATCH --signal=SIGUSR1@60\ntrap stop USR1\n"),
    ("SLURM010", 3, SLURM + "scontrol requeue $SLURM_JOB_ID\n"),
    ("SLURM013", 5, SLURM + "#SBATCH -N 2\n#SBATCH --ntasks-per-node 4\n#SBATCH -n 4\n"),
]

REQUESTS = [
    ("SITE002", "polaris", Job(num_nodes=2)),
    ("SITE005", "polaris", Job(queue="gpu", account="P")),
    ("SITE006", "polaris", Job(num_nodes=3, queue="debug", account="P")),
    ("SITE006", "polaris", Job(num_nodes=2, queue="prod", account="P")),
    ("SITE007", "polaris", Job(num_nodes=10, queue="prod", walltime_s=24 * 3600, account="P")),
    ("SITE007", "polaris", Job(queue="debug", walltime_s=2 * 3600, account="P")),
    ("SITE005", "leonardo", Job(account="P", qos="boost_dbg")),
    ("SITE007", "leonardo", Job(account="P", qos="boost_qos_dbg", walltime_s=3600)),
    ("SITE012", "sophia", Job(account="P", queue="by-node", walltime_s=60)),
    ("SITE013", "kestrel", Job(account="P", queue="debug-gpu")),
    ("RANK008", "polaris", Job(account="P", setup=("export MASTER_PORT=2345",))),
    ("JOB009", "generic_slurm", Job(setup=("export WANDB_API_KEY=0123456789",))),
    ("SITE009", "polaris", Job(account="P", setup=("export MASTER_ADDR=$(hostname -f)",))),
]


def ids(text: str) -> set[str]:
    return {finding.check for finding in lint_script(text)}


@pytest.mark.parametrize(("check", "line", "text"), BAD)
def test_a_mistake_in_a_script_has_a_finding_with_its_line(
    check: str, line: int, text: str, tmp_path: Path
) -> None:
    found = [finding for finding in lint_script(text, directory=tmp_path) if finding.check == check]
    assert [finding.line for finding in found][:1] == [line]
    assert found[0].severity == CHECKS[check].severity
    assert "\n" not in found[0].what + found[0].remedy


@pytest.mark.parametrize(("check", "profile", "job"), REQUESTS)
def test_a_mistake_in_a_request_has_a_finding(check: str, profile: str, job: Job) -> None:
    assert check in {finding.check for finding in lint_request(job, load_site(profile))}


def test_a_request_that_cannot_be_rendered_is_refused() -> None:
    with pytest.raises(RequestError, match="5 ranks per node"):
        lint_request(Job(ranks_per_node=5), load_site("polaris"))


GOOD = {
    # argonne-lcf/user-guides: the minimal job of Aurora, with the additions of this tool.
    "pbs": """#!/bin/bash -l
#PBS -A PROJECT
#PBS -l select=2
#PBS -l place=scatter
#PBS -l walltime=00:30:00
#PBS -l filesystems=home:flare
#PBS -q debug
#PBS -k doe
##PBS -m abe
# PBS starts in the home directory.
cd "$PBS_O_WORKDIR"
export TMPDIR=/tmp OMP_NUM_THREADS=8
NNODES=$(wc -l < "$PBS_NODEFILE"); NT=$((NNODES*12))
mpiexec -n "$NT" -ppn 12 --envall python train.py
""",
    # Similar to submit_pm_dp.sh of NERSC/sc24-dl-tutorial.
    "slurm": """#!/bin/bash
#SBATCH -C gpu
#SBATCH --account=m0000_g
#SBATCH -q regular
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --gpu-bind=none
#SBATCH --time=01:00:00
#SBATCH --image=nersc/pytorch:24.08.01
#SBATCH --output=%x-%j.out   # a comment, which sbatch ignores
export FI_MR_CACHE_MONITOR=userfaultfd NCCL_DEBUG=INFO
srun -u -K --cpus-per-task=32 bash -c '
  export RANK=$SLURM_PROCID
  python train.py
'
""",
    # CSCfi/csc-user-guide: torchrun once per node.
    "torchrun": """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:a100:4
#SBATCH -t 1-12:00
srun torchrun --nnodes=$SLURM_JOB_NUM_NODES --nproc_per_node=4 --rdzv_id=$SLURM_JOB_ID \\
  --rdzv_backend=c10d --rdzv_endpoint=$(hostname):$((10000 + SLURM_JOB_ID % 20000)) train.py
""",
    "here-document": SLURM + "cat <<'EOF' >x.sh\n#PBS -q no\nMASTER_PORT=1\ntrap x CONT\nEOF\necho done\n",
    "no newline at the end": SLURM + "hostname",
}


@pytest.mark.parametrize("name", GOOD)
def test_a_correct_script_has_no_finding(name: str) -> None:
    found = lint_script(GOOD[name])
    assert found == []


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").iterdir()), ids=lambda path: path.name)
def test_the_jobs_in_the_repository_have_no_finding(path: Path) -> None:
    assert lint_script(path.read_text()) == []


@pytest.mark.parametrize("path", sorted((ROOT / "profiles").glob("*.toml")), ids=lambda path: path.stem)
def test_rendered_scripts_have_no_finding(path: Path) -> None:
    site = load_site(path.stem)
    queue = next((entry for entry in site.queues if entry.name == site.default_queue), None)
    num_nodes = 1 if site.scheduler == "local" else max(2, queue.min_nodes if queue else 1)
    num_nodes = min(num_nodes, (queue.max_nodes if queue else 0) or largest_num_nodes(site) or num_nodes)
    account = "" if site.scheduler == "local" else f"{site.account.prefix}proj{site.account.suffix}"
    walltime_s = 600 if site.scheduler != "local" else None
    for launcher in ("", *SCHEDULERS[site.scheduler].writer.launchers):
        job = Job(num_nodes=num_nodes, account=account, walltime_s=walltime_s, launcher=launcher)
        try:
            found = lint_request(job, site)
        except RequestError:
            if launcher:
                continue  # not every site supports every launcher
            raise
        assert found == [], launcher


HOSTILE = {
    "binary": "".join(map(chr, range(256))) * 4000,
    "nul": "\0" * 1_000_000,
    "ten megabytes": SLURM + "echo hello world\n" * 600_000,
    "open substitutions": SLURM + "$($(" * 200_000,
    "here-documents": SLURM + "<<A <<B\n" * 100_000,
    "directives": "#!/bin/bash\n" + "#SBATCH --nodes=2 # x\n#PBS -l select=1:a=b\n" * 20_000,
    "long directive": "#!/bin/bash\n#SBATCH --" + "x" * 1_000_000 + "\n#PBS -l " + "a=b," * 100_000 + "\n",
    "surrogates": SLURM + "#SBATCH --output=\udc80\udcff$x\nexport API_KEY=\udc80aaaaaaaaa\n",
    "equals": SLURM + "export " + "A=" * 300_000,
    "nodes": "#!/bin/bash\n#PBS -l select=" + "9" * 100_000 + ":ngpus=-1\n#PBS -l walltime=" + "0:" * 50_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_scripts_cause_no_traceback_and_no_delay(name: str) -> None:
    begun = time.process_time()
    found = lint_script(HOSTILE[name], load_site("polaris"))
    assert time.process_time() - begun < 5
    for finding in found:
        (finding.what + finding.remedy).encode()
        assert len(finding.what) < 1000


def test_the_parser_returns_words_lines_and_launched_programs() -> None:
    text = SLURM + "if true; then\n  A=1 srun -n 4 --ppn=2 \\\n    python train.py -n 9 >log 2>&1 &\nfi\n"
    srun = next(command for command in parse_script(text).commands if command.name == "srun")
    assert srun.line == 4
    assert srun.ends == "&"
    assert srun.option("-n") == "4"
    assert srun.option("--ppn") == "2"
    assert srun.launched == ("python", "train.py", "-n", "9")


def test_the_command_prints_one_line_per_finding_and_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(SLURM + "module load x\n#SBATCH --nodes=2\n")
    done = run_cli("lint", "job.sh", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith(b"job.sh:4: error JOB004: this directive comes after the first command")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), b"nothing to check"),
        (("no-such.sh",), b"does not exist"),
        (("/dev/zero",), b"is not a regular file"),
        (("job.sh", "--nodes", "2"), b"--nodes"),
        (("--profile", "polaris", "--test-only"), b"requires a script"),
        (("--profile", "polaris", "--ranks-per-node", "5", "--", "python", "x.py"), b"5 ranks per node"),
    ],
)
def test_an_invalid_request_exits_with_2(args: tuple[str, ...], said: bytes, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(SLURM)
    done = run_cli("lint", *args, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == b""


def test_list_contains_every_check() -> None:
    lines = run_cli("lint", "--list").stdout.decode().splitlines()
    assert [line.split()[0] for line in lines] == list(CHECKS)
    assert len(lines) >= 30


def fake_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    program = tmp_path / "sbatch"
    program.write_text(f"#!/bin/bash\n{text}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.defpath}")


def test_a_script_that_sbatch_refuses_has_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_sbatch(
        tmp_path,
        monkeypatch,
        '[[ $1 == --test-only ]] && echo "sbatch: error: invalid partition: x" >&2; exit 1',
    )
    (found,) = ask_sbatch(tmp_path / "job.sh")
    assert found.check == "SLURM900"
    assert "invalid partition: x" in found.what


def test_a_script_that_sbatch_accepts_has_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_sbatch(tmp_path, monkeypatch, 'echo "sbatch: Job 5 to start at noon" >&2')
    assert ask_sbatch(tmp_path / "job.sh") == []


def test_an_sbatch_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_hpc.lint.run_checks._TEST_ONLY_LIMIT_S", 0.2)
    fake_sbatch(tmp_path, monkeypatch, "exec sleep 20")
    (found,) = ask_sbatch(tmp_path / "job.sh")
    assert "did not finish" in found.what


@pytest.mark.parametrize(
    ("time", "too_long"),
    [("24000", True), ("16-16", True), ("1-12:30", True), ("600", False), ("0-11", False), ("90:00", False)],
)
def test_a_walltime_is_parsed_as_by_slurm(time: str, too_long: bool) -> None:
    """alps_clariden's limit is 12 hours; a bare number is minutes."""
    script = f"#!/bin/bash\n#SBATCH --partition=normal\n#SBATCH --account=g1\n#SBATCH --time={time}\n"
    found = [one.check for one in lint_script(script, load_site("alps_clariden"))]
    assert ("SITE007" in found) == too_long


def test_a_walltime_without_colons_is_seconds_on_pbs() -> None:
    script = f"{PBS}#PBS -q debug\n#PBS -A p\n#PBS -l select=1,filesystems=home\n"
    found = lint_script(script.replace("01:00:00", "108000"), load_site("polaris"))
    assert [one.check for one in found] == ["JOB012", "SITE007"]


def test_a_partition_with_gpu_in_its_name_is_not_a_request_for_gpus() -> None:
    script = "#!/bin/bash\n#SBATCH --partition=gpu_a100\n#SBATCH --time=01:00:00\n"
    assert "SITE004" in [one.check for one in lint_script(script, load_site("snellius_a100"))]


def test_a_syntax_error_is_found_under_every_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C.utf8")
    monkeypatch.setenv("LANGUAGE", "de")
    assert [found.check for found in lint_script(SLURM + "if true; then\n")] == ["JOB003"]


def test_an_inaccessible_log_directory_hides_no_other_finding(tmp_path: Path) -> None:
    script = f"{PBS}#PBS -q debug\n#PBS -q prod\n#PBS -o /{'x' * 300}/log\n"
    assert [found.check for found in lint_script(script)] == ["JOB007"]


def test_an_assignment_after_a_keyword_is_detected() -> None:
    script = parse_script(PBS + "if true; then export TMPDIR=/tmp; fi\n")
    assert script.assignments == ((3, "TMPDIR", "/tmp"),)
