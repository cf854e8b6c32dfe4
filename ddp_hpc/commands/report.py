"""`ddp-hpc report`."""

from __future__ import annotations

import gc
from importlib.util import find_spec
from pathlib import Path

import click

from ddp_hpc.errors import RequestError
from ddp_hpc.partial_files import write_whole

_PATH = click.Path(path_type=Path)


@click.command("report")
@click.argument("trace_dir", type=_PATH)
@click.option(
    "--compare",
    "others",
    type=_PATH,
    multiple=True,
    metavar="DIR",
    help="Traces of another run, to be set beside it; may be repeated.",
)
@click.option(
    "-o",
    "--output",
    "page_file",
    type=_PATH,
    metavar="FILE.html",
    help="One page that needs no network, with a time line over ranks.",
)
@click.option("--json", "json_file", type=_PATH, metavar="FILE", help="All numbers.")
@click.option(
    "--merged",
    "merged_file",
    type=_PATH,
    metavar="FILE.json.gz",
    help="All ranks' traces on one clock, for ui.perfetto.dev.",
)
@click.option("--processes", type=click.IntRange(1), metavar="N", help="That read at once.  [the cores]")
def command(
    trace_dir: Path,
    others: tuple[Path, ...],
    page_file: Path | None,
    json_file: Path | None,
    merged_file: Path | None,
    processes: int | None,
) -> None:
    """Where the time went: TRACE_DIR holds torch.profiler's Chrome traces, one or more for each rank.

    Ours (--trace-dir of the training) or anybody's, .json or .json.gz; a single file will do. Told are: data,
    forward, backward, optimizer, snapshot, communication hidden and exposed, idle; the rank that the others
    wait for; the slowest data load; collectives with bus bandwidth; operators; memory. What cannot be read is
    left out, and said.

    \b
    Examples:
      mpiexec -n 4 python -m ddp_hpc.train --trace-dir traces
      ddp-hpc report traces
      ddp-hpc report traces -o report.html
      ddp-hpc report traces --compare traces_before -o changed.html
      ddp-hpc report traces --merged all_ranks.json.gz
    """  # noqa: D301 - a true \b tells click to leave the lines alone
    for package in ("numpy", "msgspec", *(("plotly",) if page_file else ())):
        if find_spec(package) is None:
            raise RequestError(
                f"report needs {package}, which is not installed; pip install 'ddp-hpc[report]'"
            )
    from ddp_hpc.trace import compare, documents, merge, page, text

    gc.enable()  # main() disables it
    folders = (trace_dir, *others)
    documents.check_outputs(folders, page_file, json_file, merged_file)
    captures = documents.read_all(folders, processes)
    sentences = [compare.compare(captures[0], other) for other in captures[1:]]
    click.echo(text.text(captures, sentences), nl=False)
    if page_file is not None:
        write_whole(page_file, page.page(captures, sentences).encode(), "report")
    if json_file is not None:
        documents.write_json(captures, sentences, json_file)
    if merged_file is not None:
        num_events = merge.write_merged(captures[0].ranks, merged_file)
        num_ranks = len(captures[0].ranks)
        click.echo(f"{merged_file}: {num_events} events of {num_ranks} rank{'s' * (num_ranks > 1)}", err=True)
