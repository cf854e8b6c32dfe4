"""What --idle-timeout does with runs that hang, and with runs that only print nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.base.attempt_end import read_end
from ddp_hpc.base.run_outcomes import Cause
from ddp_hpc.discovery.world import short_hostname
from tests.conftest import Launch

from .jobs import Job
from .programs import BEGIN

pytestmark = pytest.mark.check

END_S = 150.0
SAVED = Path(__file__).parents[1] / "slurm" / "plain_training.py"
# Processes wait for each other without CPU time when the group is destroyed.
LAST = "dist.barrier()\nsys.stdout.flush()\nos._exit(0)\n"
COMPUTE = """
def compute(duration_s):
    end_s = time.monotonic() + duration_s
    while time.monotonic() < end_s:
        sum(range(1000))
"""


@pytest.fixture
def job(launch: Launch, tmp_path: Path) -> Job:
    return Job(launch, tmp_path)


def said(job: Job, program: str, exit_code: int = 0, **options: object) -> str:
    """Runs the program until its end, and returns the log of the job."""
    ended = job.launch.end(job.start(program, **options), END_S)  # type: ignore[arg-type]  # as in `start`
    assert ended.exit_code == exit_code, ended.stdout + ended.stderr
    return ended.stdout


# Hangs


@pytest.mark.parametrize("how", ["loop", "skip"])
def test_a_training_that_hangs_once_is_complete_after_a_restart(job: Job, how: str) -> None:
    # It prints nothing, so that only its checkpoints show that it does not hang.
    log = said(job, SAVED.read_text(), program_arguments=("20", "5", how, "13"), idle_s=12, num_ranks=2)
    assert "ddp-hpc: restart 1 of 3 in this job, from step 10" in log
    assert (job.run_dir / "state").read_text().startswith("done ")
    assert log.count("ddp-hpc: terminating mpiexec: hang: ") == 1


def test_ranks_that_ignore_sigterm_are_killed_and_started_again(job: Job) -> None:
    program = f"""{BEGIN}
import signal
signal.signal(signal.SIGTERM, lambda *_: None)
if not Path("began").exists():
    dist.barrier()
    Path("began").touch()
    Path(os.environ["DDP_HPC_PROGRESS_FILE"]).write_text("1")
    if rank == 1:
        while True:
            pass
{LAST}"""
    log = said(job, program)
    assert "ddp-hpc: restart 1 of 3 in this job, from step 1" in log
    assert "killing mpiexec" not in log


def test_ranks_that_all_poll_at_the_same_line_hang_too(job: Job) -> None:
    program = f"""{BEGIN}
while True: pass  # as in a wait for a GPU
{LAST}"""
    said(job, program, exit_code=1)
    end = read_end(job.run_dir, "1 7")
    assert end is not None
    line = 1 + [text.startswith("while True") for text in program.splitlines()].index(True)
    assert f"all 3 ranks compute in train.py:{line} (<module>); stacks" in end.reason
    assert end.rank is None


def test_a_stopped_rank_is_named(job: Job) -> None:
    program = f"""{BEGIN}
import signal
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
{LAST}"""
    said(job, program, exit_code=1)
    end = read_end(job.run_dir, "1 7")
    assert end is not None
    assert (
        "rank 1 on" in end.reason.partition(" cannot continue because its process is stopped in train.py:")[0]
    )
    assert end.rank == 1


def test_a_long_evaluation_on_rank_0_looks_like_a_hang_and_the_reason_says_so(job: Job) -> None:
    program = f"""{BEGIN}{COMPUTE}
if rank == 0:
    compute(60)
{LAST}"""
    said(job, program, exit_code=1)
    end = read_end(job.run_dir, "1 7")
    assert end is not None
    assert " s: rank 0 on" in end.reason
    assert end.reason.endswith("; if the program was only slow, raise --idle-timeout")
    assert (end.rank, end.cause) == (0, Cause.HANG)


def test_the_stacks_of_all_threads_and_of_all_ranks_are_kept(job: Job) -> None:
    program = f"""{BEGIN}
threading.Thread(target=threading.Event().wait, name="helper", daemon=True).start()
if rank == 0:
    time.sleep(1000)
{LAST}"""
    said(job, program, exit_code=1)
    for rank in range(3):
        assert "Thread" in job.stacks(rank)
        assert "threading.py" in job.stacks(rank)


# No hangs


def test_ranks_that_compute_and_print_nothing_continue_and_the_log_says_so_once(job: Job) -> None:
    program = f"""{BEGIN}{COMPUTE}
for step in range(60):
    compute(0.3)
    dist.all_reduce(torch.ones(1))
{LAST}"""
    _, has_begun, rest = said(job, program, num_ranks=2).rpartition(" begins\n")
    assert has_begun
    assert rest.count("s, but all ranks are using CPU time, so the run continues") == 1


@pytest.mark.parametrize("activity", ["output", "checkpoint"])
def test_the_activity_of_one_rank_is_enough(job: Job, activity: str) -> None:
    act = {
        "output": "os.write(1, b'.')",
        "checkpoint": "Path(os.environ['DDP_HPC_PROGRESS_FILE']).write_text(str(step))",
    }[activity]
    program = f"""{BEGIN}
if rank == 1:
    for step in range(12):
        time.sleep(2)
        {act}
{LAST}"""
    assert "no output" not in said(job, program).rpartition(" begins\n")[2]


def test_without_ddp_hpc_exec_the_log_says_that_hangs_are_not_noticed(job: Job) -> None:
    log = said(job, "import time; time.sleep(45)", launcher=("mpiexec", "-n", "2", "python"), idle_s=3)
    assert "and no rank reports its position, so hangs cannot be detected; use ddp-hpc exec" in log


# Frameworks


FRAMEWORKS = {
    "lightning": """
import lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        while self.global_rank == 1 and index == 2:
            time.sleep(0.1)  # elsewhere
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
trainer = lightning.Trainer(
    accelerator="cpu", devices=world_size, num_nodes=1, strategy="ddp", max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False,
)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=4))  # waits
""",
    "trainer": """
import transformers
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.step = torch.nn.Linear(4, 1), 0
    def forward(self, x):
        self.step += 1
        while rank == 1 and self.step == 3:
            time.sleep(0.1)  # elsewhere
        return {"loss": self.layer(x).sum()}
arguments = transformers.TrainingArguments(
    output_dir="out", use_cpu=True, max_steps=9, per_device_train_batch_size=4, report_to=[],
    save_strategy="no", logging_strategy="no", disable_tqdm=True, ddp_backend="gloo",
)
data = [{"x": torch.ones(4)} for _ in range(64)]
transformers.Trainer(Model(), arguments, train_dataset=data).train()  # waits
""",
    "accelerate": """
import accelerate
accelerator = accelerate.Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
for step in range(9):
    while rank == 1 and step == 2:
        time.sleep(0.1)  # elsewhere
    accelerator.backward(model(torch.ones(2, 4)).sum())  # waits
""",
}


@pytest.mark.soak
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_lines_of_programs_with_a_framework_are_named(job: Job, framework: str) -> None:
    pytest.importorskip({"trainer": "transformers"}.get(framework, framework))
    program = BEGIN + FRAMEWORKS[framework]
    lines = program.splitlines()
    elsewhere, waits = (
        next(number for number, line in enumerate(lines, 1) if line.endswith(mark))
        for mark in ("# elsewhere", "# waits")
    )
    said(job, program, exit_code=1, idle_s=20, num_ranks=2)
    end = read_end(job.run_dir, "1 7")
    assert end is not None
    assert f" on {short_hostname()} is in train.py:{elsewhere} (" in end.reason
    assert f" waits in train.py:{waits} (" in end.reason
    assert end.rank == 1
