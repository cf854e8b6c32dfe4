"""The findings of `ddp-hpc lint`, and scripts without findings."""

from __future__ import annotations

import difflib
import time
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.lint.parse_script import MAX_PARSED_CHARS, parse_script
from ddp_hpc.lint.run_checks import CHECKS, lint_script
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
    ("JOB005", 3, PBS + "#PBS: -l select=2\n"),
    ("JOB009", 3, SLURM + "export AWS_SECRET_ACCESS_KEY='abcd1234efgh'\n"),
    ("JOB009", 3, SLURM + "HF_TOKEN=hf_0123456789 srun python train.py\n"),
    ("RANK001", 6, CHUNKS + "mpiexec -n 8 --ppn 4 python -m torch.distributed.run --nnodes=2 train.py\n"),
    ("RANK014", 6, TWO_NODES + "srun -n 2 --ntasks-per-node=1 torchrun --nnodes=2 train.py\n"),
    (
        "RANK003",
        7,
        CHUNKS + "export OMP_NUM_THREADS=8\nmpiexec -n 2 --ppn 1 torchrun --nproc-per-node=8 x.py\n",
    ),
    ("RANK004", 6, CHUNKS + "mpirun -np 64 python train.py\n"),
    ("RANK004", 6, TWO_NODES + "mpirun -np 64 python train.py\n"),
    ("RANK005", 6, CHUNKS + "export OMP_NUM_THREADS=64\nmpiexec -n 8 --ppn 4 ./a.out\n"),
    ("RANK006", 4, PBS + "trap 'kill $pid' USR1\nmpiexec -n 4 python train.py\n"),
    ("RANK006", 5, SLURM + "#SBATCH --signal=B:USR1\ntrap stop SIGUSR1\nsrun python a.py | tee log\n"),
    ("RANK009", 6, TWO_NODES + "srun torchrun --nnodes=2 --rdzv-endpoint=localhost:0 train.py\n"),
    ("PBS003", 4, PBS + "#PBS -l select=2\n#PBS -E\n"),
    ("PBS011", 3, PBS + "#PBS -e host:no/such/folder/log\n#PBS -k doe\n"),
    ("PBS012", 6, CHUNKS + "NUM_NODES=`cat $PBS_NODEFILE | wc -l`\n"),
    ("SLURM008", 3, SLURM + "#SBATCH --signal=SIGUSR1@60\ntrap stop USR1\n"),
    ("SLURM010", 3, SLURM + "scontrol requeue $SLURM_JOB_ID\nsrun torchrun a.py\n"),
    ("SLURM013", 5, SLURM + "#SBATCH -N 2\n#SBATCH --ntasks-per-node 4\n#SBATCH -n 4\n"),
]


@pytest.mark.parametrize(("check", "line", "text"), BAD)
def test_a_mistake_in_a_script_has_a_finding_with_its_line(
    check: str, line: int, text: str, tmp_path: Path
) -> None:
    found = [finding for finding in lint_script(text, directory=tmp_path) if finding.check == check]
    assert [finding.line for finding in found][:1] == [line]
    assert found[0].severity == CHECKS[check].severity
    assert "\n" not in found[0].what + found[0].remedy


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


HOSTILE = {
    "binary": "".join(map(chr, range(256))) * 4000,
    "nul": "\0" * 1_000_000,
    "ten megabytes": SLURM + "echo hello world\n" * 600_000,
    "open substitutions": SLURM + "$($(" * 200_000,
    "here-documents": SLURM + "<<A <<B\n" * 100_000,
    "directives": "#!/bin/bash\n" + "#SBATCH --nodes=2 # x\n#PBS -l select=1:a=b\n" * 20_000,
    "long directive": "#!/bin/bash\n#SBATCH --" + "x" * 1_000_000 + "\n#PBS -l " + "a=b," * 100_000 + "\n",
    "launchers": SLURM + "#SBATCH -n 4\n" + "srun python train.py\n" * 8000,
    "a long pipeline": SLURM + "trap x TERM\n" + "srun x | " * 12_000 + "cat &\n",
    "here-documents of their own": SLURM + "".join(f"cat <<E{i}\nx\nE{i}\n" for i in range(4000)),
    "log directories": SLURM + "#SBATCH -o a/b\n" * 2400 + "mkdir -p a\n" * 2400,
    "surrogates": SLURM + "#SBATCH --output=\udc80\udcff$x\nexport API_KEY=\udc80aaaaaaaaa\n",
    "equals": SLURM + "export " + "A=" * 300_000,
    "nodes": "#!/bin/bash\n#PBS -l select=" + "9" * 100_000 + ":ngpus=-1\n#PBS -l walltime=" + "0:" * 50_000,
}


@pytest.mark.check
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_scripts_cause_no_traceback_and_no_delay(name: str) -> None:
    begun = time.process_time()
    found = lint_script(HOSTILE[name], load_site("polaris"))
    assert time.process_time() - begun < 20, "quadratic time would be minutes"
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
    (tmp_path / "job.sh").write_text(SLURM + "#SBATCH --walltime=1\n")
    done = run_cli("lint", "job.sh", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith(b"job.sh:3: error SLURM002: '--walltime' is not an sbatch option")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), b"nothing to check"),
        (("no-such.sh",), b"does not exist"),
        (("/dev/zero",), b"is not a regular file"),
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


@pytest.mark.parametrize(
    ("time", "too_long"),
    [("24000", True), ("16-16", True), ("1-12:30", True), ("600", False), ("0-11", False), ("90:00", False)],
)
def test_a_walltime_is_parsed_as_by_slurm(time: str, too_long: bool) -> None:
    """alps_clariden's limit is 12 hours; a bare number is minutes."""
    script = f"#!/bin/bash\n#SBATCH --partition=normal\n#SBATCH --account=g1\n#SBATCH --time={time}\n"
    found = [one.check for one in lint_script(script, load_site("alps_clariden"))]
    assert ("SITE007" in found) == too_long


def test_a_syntax_error_is_found_under_every_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C.utf8")
    monkeypatch.setenv("LANGUAGE", "de")
    assert [found.check for found in lint_script(SLURM + "if true; then\n")] == ["JOB003"]


@pytest.mark.parametrize(
    "script",
    [
        SLURM + "#SBATCH --nodes=1\n" * 3000,
        SLURM + "".join(f"#SBATCH --qx{number}q=1\n" for number in range(3000)),
        PBS + "#PBS -l select=1" + "".join(f":qx{number}q=1" for number in range(3000)) + "\n",
    ],
    ids=["one option", "unknown options", "unknown resources"],
)
def test_only_a_limited_number_of_misspelled_words_is_compared(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookups = 0

    class Counting(difflib.SequenceMatcher[str]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            nonlocal lookups
            lookups += 1
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(difflib, "SequenceMatcher", Counting)
    lint_script(script)
    assert lookups <= 200


def test_a_script_beyond_the_size_limit_is_truncated_at_a_line() -> None:
    body = "echo 0123456789012345678901234567890123456789\n"
    script = parse_script(SLURM + body * (MAX_PARSED_CHARS // len(body) + 10))
    assert {command.text for command in script.commands} == {body.strip()}


@pytest.mark.parametrize(
    ("command", "program", "is_reported"),
    [
        ("python train.py", "import torch\n", True),
        ("python train.py", "from multiprocessing import Pool\n", True),
        ("python train.py", "import numpy\n", False),
        ("python3 -V", "import torch\n", False),
        ("python other.py", "import torch\n", False),
        ("export TMPDIR=/tmp\npython train.py", "import torch\n", False),
    ],
)
def test_a_long_tmpdir_matters_to_programs_with_workers(
    command: str, program: str, is_reported: bool, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(program)
    found = lint_script(f"{PBS}cd $PBS_O_WORKDIR\n{command}\n", directory=tmp_path)
    assert ("PBS014" in {one.check for one in found}) == is_reported
