"""Compares every strategy with each of its options with one process that trains on the same samples.

`python -m tests.training.strategy_rows` runs all of them and writes the table of
docs/explanation/parallel-strategies.md. With an argument, such as `fsdp`, it runs only the rows whose options
contain it, and prints them.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .forked import Forks
from .runs import losses

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "parallel-strategies.md"
BEGIN, END = "<!-- the table: python -m tests.training.strategy_rows -->", "<!-- the end of the table -->"
# 150 samples in steps of 16: ten steps per epoch, the last one of 6. A Transformer of 1.7 M parameters.
TRAINING = [
    "--epochs", "2", "--src-shape", "4,32", "--tgt-shape", "6,32", "--dropout", "0",
    "--lr-scaling", "none", "--log-every", "100",
]  # fmt: skip
NUM_STEPS, GLOBAL_BATCH = 20, 16
# For a loss of about 5. Half-precision types have 8 or 11 bits of precision.
EXACT, HALF = 1e-9, 5e-2


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    options: str
    data_size: tuple[int, int]
    """Number of shards of the samples on 2 and on 4 ranks; 0: not run on that number of ranks."""
    tolerance: float = EXACT
    like: str = ""
    """Options that the single process needs too, because they affect the result of the training."""
    foreach: bool = False
    """Whether the optimizer updates many tensors at once (foreach), as on a GPU without --fused."""

    def on(self, ranks: int) -> int:
        return self.data_size[ranks == 4]

    def __str__(self) -> str:
        options = f"`{self.options}`" if self.options else "none: DDP"
        return f"{options}, foreach" if self.foreach else options


DATA, MODEL = (2, 4), (1, 1)
DECAY = "--optimizer adamw --weight-decay 0.1"
SGD = "--optimizer sgd --weight-decay 0.1"
ROWS = [
    Row("", DATA),
    Row("--static-graph", DATA),
    Row("--find-unused-parameters", DATA),
    Row("--bucket-mib 1", DATA),
    Row("--accumulate 2", DATA),
    Row("--clip-norm 0.5", DATA, like="--clip-norm 0.5"),
    Row("--check-gradients", DATA),
    Row("--activation-checkpointing", DATA),
    Row("--devices-per-rank 2", DATA),
    Row("--compress-gradients fp16", DATA, HALF),
    Row("--amp bf16", DATA, HALF),
    Row("--amp fp16", DATA, HALF),
    Row("--compile", DATA),
    Row("--strategy zero", DATA),
    Row("--strategy zero --accumulate 2 --clip-norm 0.5", DATA, like="--clip-norm 0.5"),
    Row(f"--strategy zero {DECAY}", DATA, like=DECAY),
    Row("--strategy zero --amp bf16", DATA, HALF),
    Row("--strategy fsdp", DATA),
    Row("--strategy fsdp --accumulate 2 --clip-norm 0.5", DATA, like="--clip-norm 0.5"),
    Row(f"--strategy fsdp {DECAY}", DATA, like=DECAY),
    Row("--strategy fsdp --activation-checkpointing", DATA),
    Row("--strategy fsdp --amp bf16", DATA, HALF),
    Row("--strategy fsdp --compile", DATA),
    Row("--strategy tp", MODEL),
    Row("--strategy tp --accumulate 2 --clip-norm 0.5", MODEL, like="--clip-norm 0.5"),
    Row("--strategy tp --activation-checkpointing", MODEL),
    Row("--strategy tp --amp bf16", MODEL, HALF),
    Row("--strategy pp", MODEL),
    Row("--strategy pp --pipeline-schedule 1f1b", MODEL),
    Row("--strategy pp --pipeline-chunks 1", MODEL),
    Row("--strategy pp --accumulate 2 --clip-norm 0.5", MODEL, like="--clip-norm 0.5"),
    Row("--strategy pp --activation-checkpointing", MODEL),
    Row("--strategy pp --amp bf16", MODEL, HALF),
    Row("--mesh dp=2,tp=2", (0, 2)),
    Row("--mesh pp=2,dp=2", (0, 2)),
    Row("--mesh dp=2,fsdp=2", (0, 4)),
    Row("--mesh fsdp=2,tp=2", (0, 2)),
    Row("--mesh pp=2,tp=2", (0, 1)),
]  # fmt: skip
# On a GPU, the optimizer is fused or foreach, and torch's kernels reject some lists of parameters.
ROWS += [
    kind
    for row in ROWS
    if re.fullmatch(r"(--(strategy|mesh) \S+)?", row.options)
    for kind in (replace(row, options=f"{row.options} --fused".strip()), replace(row, foreach=True))
]
ROWS += [
    Row(f"--strategy tp {DECAY} --fused", MODEL, like=DECAY),
    Row(f"--strategy tp {SGD}", MODEL, like=SGD, foreach=True),
    Row(f"--strategy fsdp {SGD}", DATA, like=SGD, foreach=True),
]


@dataclass(frozen=True)
class Measured:
    """The result of a row, or of the single process."""

    losses: list[float]
    state_bytes: int


def measure(
    forks: Forks,
    home: Path,
    row: Row,
    ranks: int,
    *more: str,
    num_samples: int = 150,
    program: str = "",
    timeout_s: float = 60.0,
) -> Measured:
    """Trains, with `more` options; `home` is an empty directory."""
    accumulate = 2 if "--accumulate" in row.options else 1
    batch_size = GLOBAL_BATCH // (row.on(ranks) if ranks > 1 else 1) // accumulate
    options = row.options if ranks > 1 else row.like
    # Half precision needs float32.
    dtype = ["--dtype", "float64"] if row.tolerance == EXACT else []
    words = [*TRAINING, *more, "--num-samples", num_samples, *dtype]
    words += ["--batch-size", batch_size if ranks > 1 else GLOBAL_BATCH, *options.split()]
    outputs = ["--data-dir", home.parent / "data", "--metrics", "m.jsonl", "--summary", "s.json"]
    program = program or ("tests.training.foreach" if row.foreach and ranks > 1 else "ddp_hpc.train")
    job = forks.start(*map(str, [*words, *outputs]), cwd=home, ranks=ranks, program=program)
    assert job.wait(timeout_s) == [0] * ranks, job.words()
    state_bytes: int = json.loads((home / "s.json").read_text())["memory"]["state_bytes"]
    return Measured(losses(home / "m.jsonl"), state_bytes)


def distance(row: Measured, single: Measured) -> float:
    """The largest difference over the steps."""
    return max(abs(a - b) for a, b in zip(row.losses, single.losses, strict=True))


def table(forks: Forks, home: Path, rows: Sequence[Row] = ROWS) -> str:
    """The rows in Markdown; each must be within its tolerance of the single process."""
    lines = [
        "| options | ranks | distance | allowed | MiB per rank | of one process |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    singles: dict[tuple[str, bool], Measured] = {}
    for number, row in enumerate(rows):
        key = (row.like, row.tolerance == EXACT)
        for ranks in (1, 2, 4):
            if (key in singles) if ranks == 1 else not row.on(ranks):
                continue
            (folder := home / f"{number}-{ranks}").mkdir()
            found = measure(forks, folder, row, ranks, timeout_s=400)
            if ranks == 1:
                singles[key] = found
                continue
            single = singles[key]
            assert len(found.losses) == NUM_STEPS
            far = distance(found, single)
            assert far <= row.tolerance, f"{row} on {ranks} ranks: {far}"
            lines.append(
                f"| {row} | {ranks} | {far:.0e} | "
                f"{row.tolerance:.0e} | {found.state_bytes / 2**20:.1f} | "
                f"{found.state_bytes / single.state_bytes:.2f} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        forks = Forks()
        try:
            chosen = [row for row in ROWS if sys.argv[-1] in row.options] if sys.argv[1:] else ROWS
            lines = table(forks, Path(folder), chosen)
        finally:
            forks.close()
    if sys.argv[1:]:
        print(lines)
        return
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{lines}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
