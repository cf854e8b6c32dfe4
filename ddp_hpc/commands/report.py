"""The command `ddp-hpc report`, which reports where the time of traced steps was spent."""

from __future__ import annotations

import gc
from pathlib import Path

import click

from ddp_hpc.base.atomic_files import write_atomically
from ddp_hpc.base.pip_extras import require
from ddp_hpc.base.units import counted

_PATH = click.Path(path_type=Path)


@click.command("report")
@click.argument("trace_dir", type=_PATH)
@click.option(
    "--compare",
    "others",
    type=_PATH,
    multiple=True,
    metavar="DIR",
    help="Directory with the traces of another run, for a comparison; may be repeated.",
)
@click.option(
    "-o",
    "--output",
    "page_file",
    type=_PATH,
    metavar="FILE.html",
    help="Write the report as an HTML page with charts and a timeline of the ranks, instead of printing it.",
)
@click.option(
    "--json", "json_file", type=_PATH, metavar="FILE", help="Write all numbers to this file as JSON."
)
@click.option(
    "--processes",
    type=click.IntRange(1),
    metavar="N",
    help="Number of processes that read traces in parallel.  [default: number of cores]",
)
def command(
    trace_dir: Path,
    others: tuple[Path, ...],
    page_file: Path | None,
    json_file: Path | None,
    processes: int | None,
) -> None:
    """Report where a training run spent its time, based on the traces of its ranks.

    TRACE_DIR contains Chrome traces (.json or .json.gz) that training wrote with --trace-dir, or those of any
    other program that uses torch.profiler. It can also be a single trace file. The report shows the times of
    data loading, forward, backward, optimizer, snapshots, hidden and exposed communication, and idling; the
    rank that the others wait for; the slowest data load; collectives with their bus bandwidth; operators; and
    memory. For GPUs, it also shows why they are idle, how kernels are launched, and the critical path of a
    step. Unreadable files are skipped with a message.

    \b
    Examples:
      mpiexec -n 4 python -m ddp_hpc.train --trace-dir traces
      ddp-hpc report traces
      ddp-hpc report traces -o report.html
      ddp-hpc report traces --compare traces_before -o changed.html
    """  # noqa: D301 - click does not rewrap the paragraph after a real \b
    require("ddp-hpc report", "report", "numpy", "msgspec", *(("plotly",) if page_file else ()))
    from ddp_hpc.trace import compare, html_page
    from ddp_hpc.trace import input_and_output as documents
    from ddp_hpc.trace import text_report as text

    gc.enable()  # main() disables garbage collection
    directories = (trace_dir, *others)
    documents.check_outputs(page_file, json_file)
    captures = documents.read_all(directories, processes)
    sentences = [compare.compare(captures[0], other) for other in captures[1:]]
    if page_file is None:
        click.echo(text.text(captures, sentences), nl=False)
    else:
        write_atomically(page_file, html_page.page(captures, sentences).encode(), "report")
        click.echo(f"{page_file}: the report on {counted(len(captures[0].ranks), 'rank')}", err=True)
    if json_file is not None:
        documents.write_json(captures, sentences, json_file)
        click.echo(f"{json_file}: the numbers of the report", err=True)
