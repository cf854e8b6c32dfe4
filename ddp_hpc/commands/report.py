"""The command `ddp-hpc report`: where the time of traced steps, or of the jobs of a run, was spent."""

from __future__ import annotations

import gc
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ddp_hpc.base.atomic_files import write_atomically
from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.base.pip_extras import require
from ddp_hpc.base.units import counted

_PATH = click.Path(path_type=Path)


@click.command("report")
@click.argument("directory", metavar="TRACE_DIR|RUN_DIR", type=_PATH)
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
    "--perfetto",
    "merged_file",
    type=_PATH,
    metavar="FILE.json.gz",
    help="Merge the traces of all ranks, with corrected clocks, into one file for https://ui.perfetto.dev.",
)
@click.option(
    "--processes",
    type=click.IntRange(1),
    metavar="N",
    help="Number of processes that read traces in parallel.  [default: number of cores]",
)
def command(
    directory: Path,
    others: tuple[Path, ...],
    page_file: Path | None,
    json_file: Path | None,
    merged_file: Path | None,
    processes: int | None,
) -> None:
    """Report where a training run spent its time, based on the traces of its ranks or on its run directory.

    TRACE_DIR contains Chrome traces (.json or .json.gz) that training wrote with --trace-dir, or those of any
    other program that uses torch.profiler. It can also be a single trace file. The report shows the times of
    data loading, forward, backward, optimizer, snapshots, hidden and exposed communication, and idling; the
    rank that the others wait for; what slow steps have more of; collectives with their bus bandwidth;
    operators; and memory. For GPUs, it also shows why they are idle, how kernels are launched, and the
    critical path of a step. Unreadable files are skipped with a message.

    RUN_DIR is the run directory of a job script. The report shows the node-hours of all jobs of the run and
    what they were used for: useful steps, starts, steps that were repeated after a failure, and others. With
    -o, a page shows the loss, the speed, and what the nodes did, over the whole life of the run.

    \b
    Examples:
      mpiexec -n 4 python -m ddp_hpc.train --trace-dir traces
      ddp-hpc report traces
      ddp-hpc report traces -o report.html
      ddp-hpc report runs/ddp -o run.html
      ddp-hpc report traces --compare traces_before -o changed.html
    """  # noqa: D301 - click does not rewrap the paragraph after a real \b
    from ddp_hpc.trace import report_files as files

    files.check_outputs(page_file, json_file, merged_file)
    if _is_run_without_traces(directory):
        if others or merged_file:
            raise RequestError(
                f"{directory} is a run directory, and --compare and --perfetto need traces; leave them out, "
                "or give the --trace-dir of a training"
            )
        _report_run(directory, page_file, json_file)
        return
    require("ddp-hpc report", "report", "numpy", "msgspec", *(("plotly",) if page_file else ()))
    from ddp_hpc.trace import compare, html_page
    from ddp_hpc.trace import text_report as text
    from ddp_hpc.trace.summarize_run import read_captures

    gc.enable()  # main() disables garbage collection
    captures = read_captures((directory, *others), processes)
    sentences = [compare.compare(captures[0], other) for other in captures[1:]]
    if page_file is None:
        click.echo(text.text(captures, sentences), nl=False)
    else:
        write_atomically(page_file, html_page.page(captures, sentences).encode(), "report")
        click.echo(f"{page_file}: the report on {counted(len(captures[0].ranks), 'rank')}", err=True)
    if merged_file is not None:
        from ddp_hpc.trace.merge_traces import write_merged

        write_merged(merged_file, captures[0].ranks)
        click.echo(f"{merged_file}: the merged traces", err=True)
    if json_file is not None:
        _write_numbers(json_file, files.numbers_of(captures, sentences))


def _is_run_without_traces(directory: Path) -> bool:
    from ddp_hpc.base.timeline import TIMELINE
    from ddp_hpc.queue.run_directories import runs_in

    is_run = (directory / TIMELINE).is_file() or directory in runs_in(directory)
    return is_run and not any(directory.glob("rank*-of-*.json*"))


def _report_run(run_dir: Path, page_file: Path | None, json_file: Path | None) -> None:
    """Reports on a run. The scheduler is asked whether its last job still runs."""
    from ddp_hpc.queue.cost_text import cost_lines
    from ddp_hpc.queue.job_report import last_jobs
    from ddp_hpc.queue.run_cost import run_cost
    from ddp_hpc.queue.run_curve import run_curve

    cost = None
    with suppress(DdpHpcError, StopIteration):  # the scheduler does not answer, or is that of another machine
        cost = next(last_jobs(run_dir)).cost
    cost = cost or run_cost(run_dir, is_running=False)
    if cost is None:
        raise RequestError(
            f"{run_dir} has no file `timeline`: its jobs have not started, or ran with an earlier version of "
            "ddp-hpc; run a job again, or give the --trace-dir of a training"
        )
    curve = run_curve(run_dir)
    if page_file is None:
        click.echo("\n".join(cost_lines(cost, curve)))
    else:
        require("ddp-hpc report -o", "report", "plotly")
        from ddp_hpc.base.run_state import read_state
        from ddp_hpc.queue.run_page import page

        write_atomically(page_file, page(run_dir, read_state(run_dir), cost, curve).encode(), "report")
        click.echo(f"{page_file}: the report on {counted(len(cost.attempts), 'attempt')}", err=True)
    if json_file is not None:
        _write_numbers(json_file, {"cost": asdict(cost), "progress": [asdict(point) for point in curve]})


def _write_numbers(path: Path, numbers: dict[str, Any]) -> None:
    from ddp_hpc.trace.report_files import write_numbers

    write_numbers(path, numbers)
    click.echo(f"{path}: the numbers of the report", err=True)
