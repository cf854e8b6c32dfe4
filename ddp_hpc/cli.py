"""`ddp-hpc`: what runs on the login node. Each command imports its module inside its body."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import click

from ddp_hpc import __version__
from ddp_hpc.errors import EXIT_FAILED, EXIT_INTERRUPTED, DdpHpcError, RequestError

_EPILOG = """\b
Shell completion, for bash (zsh and fish likewise):
  eval "$(_DDP_HPC_COMPLETE=bash_source ddp-hpc)"
"""


@click.group(
    epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="ddp-hpc")
def cli() -> None:
    """PyTorch jobs on PBS and Slurm machines: render the script, find the ranks, train."""


@cli.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--profile", metavar="NAME", help="The site: see `ddp-hpc profiles list`. Else it is found out."
)
@click.option(
    "--job", "job_file", metavar="FILE.toml", type=click.Path(path_type=Path), help="Options from a file."
)
@click.option("--nodes", type=int, metavar="N", help="Nodes.  [1]")
@click.option("--ranks-per-node", type=int, metavar="R", help="Ranks on each node.  [its GPUs, else 1]")
@click.option(
    "--gpus-per-node", type=int, metavar="G", help="GPUs of a node, where the profile does not know."
)
@click.option(
    "--cpus-per-node", type=int, metavar="C", help="CPUs of a node, where the profile does not know."
)
@click.option("--walltime", metavar="HH:MM:SS", help="How long the job may run; also 90m, 2h, 1h30m.")
@click.option("--queue", metavar="Q", help="Queue, partition or QOS, whichever the site has.")
@click.option("--account", metavar="A", help="Project that pays.  [DDP_HPC_ACCOUNT]")
@click.option("--name", metavar="NAME", help="Name of the job; at most 15 characters on PBS.  [ddp]")
@click.option(
    "--launcher", metavar="mpiexec|srun|torchrun", help="What starts the ranks.  [as the profile says]"
)
@click.option(
    "--mpi", metavar="none|pmi2|pmix|cray_shasta", help="How srun starts MPI ranks.  [the site's default]"
)
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="A variable for the ranks; may be repeated.")
@click.option(
    "--setup", multiple=True, metavar="LINE", help="A line of bash for modules and the like; may be repeated."
)
@click.option(
    "--run-dir", metavar="DIR", help="Folder of the run, from the folder of submission.  [runs/NAME]"
)
@click.option(
    "--max-attempts", type=int, metavar="N", help="Starts in all of a run that goes on by itself.  [20]"
)
@click.option(
    "--min-nodes", type=int, metavar="M", help="Go on with M nodes where others are lost; with torchrun."
)
@click.option("--step", is_flag=True, help="Write torchrun_script.sh instead, which runs once on each node.")
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="Write FILE instead of stdout."
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def render(
    profile: str | None, job_file: Path | None, step: bool, output: Path | None, **options: Any
) -> None:
    """Write a job script for PBS, Slurm or this machine.

    COMMAND is what each rank runs, after --; without it: python -m ddp_hpc.train.

    \b
    Examples:
      ddp-hpc render --nodes 2 --walltime 01:00:00 -o job.sh
      ddp-hpc render --profile polaris --nodes 2 --queue debug --account MYPROJECT -o job.pbs
      ddp-hpc render --profile perlmutter --launcher torchrun --nodes 4 -- python train.py --lr 0.1
      ddp-hpc render --profile local --ranks-per-node 2 | bash
      ddp-hpc render --job job.toml --setup 'module load cuda' --env NCCL_DEBUG=INFO
      ddp-hpc render --walltime 02:00:00 --max-attempts 5 -- python -m ddp_hpc.train --epochs 100
      ddp-hpc render --launcher torchrun --nodes 4 --min-nodes 3 -o job.sh
      ddp-hpc render --step -o torchrun_script.sh
    """  # noqa: D301 - a true \b tells click to leave the lines alone
    from ddp_hpc.batch import render as scripts

    if step:
        given = [name for name, value in {"profile": profile, "job": job_file, **options}.items() if value]
        if given:
            raise RequestError(
                f"--step and --{given[0].replace('_', '-')} were given; the step script is the same for "
                "every job; give --step alone, or with -o"
            )
        text = scripts.render_step()
    else:
        text = _render_job(profile, job_file, options)
    if output is None or str(output) == "-":
        sys.stdout.buffer.write(scripts.script_bytes(text))
    else:
        scripts.write_script(text, output)


def _render_job(profile: str | None, job_file: Path | None, options: dict[str, Any]) -> str:
    from ddp_hpc.batch.detect import choose_profile
    from ddp_hpc.batch.job import JobFile, make_job, read_job_file, with_account
    from ddp_hpc.batch.layout import advice
    from ddp_hpc.batch.render import render
    from ddp_hpc.batch.site import load_site

    env = [_variable(text) for text in options.pop("env")]
    command = options.pop("command")
    asked = JobFile(**options, env=dict(env), command=command or None)
    file = read_job_file(job_file) if job_file else JobFile()
    name, why = choose_profile(profile or "", file.profile, os.environ)
    _say(f"profile {name}: {why}")
    site = load_site(name)
    job = make_job(asked, file)
    # On one's own machine nobody bills; the variable is for the other profiles then.
    if site.scheduler != "local":
        job = with_account(job, os.environ.get("DDP_HPC_ACCOUNT", ""))
    _check_bash(job.setup)
    text = render(job, site)
    for line in advice(job, site):
        _say(f"warning: {line}")
    return text


def _check_bash(setup: tuple[str, ...]) -> None:
    """The user's own lines are bash, and a quote that is not closed would show only after the queue."""
    if not setup:
        return
    import shutil
    import subprocess

    bash = shutil.which("bash")
    if bash is None:
        return
    checked = subprocess.run(
        [bash, "-n"], input="\n".join(setup), capture_output=True, text=True, check=False
    )
    if checked.returncode:
        complaint = checked.stderr.strip().splitlines()[0].partition(": ")[2]
        raise RequestError(f"--setup: bash does not understand {'; '.join(setup)!r} ({complaint})")


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise RequestError(
            f"--env {text!r} was given; NAME=VALUE is needed; for an empty value write {text}="
        )
    return name, value


@cli.group()
def profiles() -> None:
    """The sites that scripts can be rendered for."""


@profiles.command("list")
def list_profiles() -> None:
    """Every profile: name, scheduler, the date its facts were checked, title."""
    from ddp_hpc.batch.site import load_site, profile_files

    sites = [load_site(name) for name in profile_files()]
    width = max(len(site.name) for site in sites)
    for site in sites:
        click.echo(f"{site.name:<{width}}  {site.scheduler:<5}  {site.checked}  {site.title}")


@profiles.command("show")
@click.argument("name")
def show_profile(name: str) -> None:
    """The profile's file as it is, to read or to start your own (~/.config/ddp-hpc/profiles/NAME.toml)."""
    from ddp_hpc.batch.site import profile_file

    sys.stdout.buffer.write(profile_file(name).read_bytes())


@cli.command()
@click.option(
    "--discovery", default="auto", metavar="NAME", show_default=True, help="The launcher to believe."
)
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def env(discovery: str, as_json: bool) -> None:
    """The world this process finds itself in, and where each value came from.

    \b
    Start it as the ranks are started:
      mpiexec -n 4 ddp-hpc env
      srun --nodes=2 ddp-hpc env --json
    """  # noqa: D301 - as above
    from ddp_hpc.world.report import run

    run(discovery=discovery, as_json=as_json)


_PATH = click.Path(path_type=Path)
_FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)


def _many(*default: Any) -> dict[str, Any]:
    """An option that may be repeated."""
    return {"multiple": True, "default": default, "show_default": True}


@cli.group()
def bench() -> None:
    """Benchmarks of this machine: a table on stdout, and JSON or a picture where asked for."""


@bench.command()
@click.option("--num-samples", type=int, metavar="N", help="Samples of the synthetic data.  [2048]")
@click.option("--src-shape", metavar="N,N,...", help="Shape of one sample of src.  [1,512]")
@click.option("--tgt-shape", metavar="N,N,...", help="Shape of one sample of tgt.  [20,512]")
@click.option("--dtype", metavar="NAME", help="[float32]")
@click.option("--formats", metavar="F,F,...", help="Of hdf5,hdf5_chunked,hdf5_gzip,pt,safetensors.  [all]")
@click.option("--access", "accesses", type=click.Choice(["shuffled", "sequential"]), **_many("shuffled"))
@click.option("--batch-size", "batch_sizes", type=click.IntRange(1), metavar="N", **_many(32))
@click.option("--ahead", type=click.IntRange(0, 64), help="Batches a thread reads ahead.", **_many(0, 2))
@click.option("--workers", type=click.IntRange(0, 64), help="Processes that read.", **_many(0))
@click.option("--rounds", type=click.IntRange(1), default=8, show_default=True, help="Turns of each row.")
@click.option("--seconds", type=click.FloatRange(0, 3600), default=0.25, show_default=True, help="Of a turn.")
@click.option("--cold", is_flag=True, help="Try to drop the files from the page cache before each turn.")
@click.option("--dir", "folder", type=_FOLDER, help="Where to make the files.  [a temporary folder]")
@click.option("--data", type=_PATH, metavar="FILE", help="Read this file instead.")
@click.option("--src-key", default="src", show_default=True, metavar="KEY", help="Name of src in FILE.")
@click.option("--tgt-key", default="tgt", show_default=True, metavar="KEY", help="Name of tgt in FILE.")
@click.option("--json", "json_file", type=_PATH, metavar="FILE")
@click.option("--picture", type=_PATH, metavar="FILE.png|FILE.svg")
def io(json_file: Path | None, picture: Path | None, **options: Any) -> None:
    """How long a batch takes to read, in each format, beside other ways to read it.

    Repeat --access, --batch-size, --ahead and --workers to compare. The files are removed at the end.

    \b
    memcpy          the bytes of a batch, lying together, copied within memory: the floor
    memory          a TensorDataset in memory behind a DataLoader
    memory_indexed  the same tensors, indexed a batch at a time
    memory_gather   samples copied one by one out of memory: no file can do better
    naive_hdf5      one h5py read a sample, behind a DataLoader
    h5py_batch      one h5py read a batch, of ascending numbers
    hdf5, pt, ...   the trainer's own loader; with ahead=N or workers=N nothing computes meanwhile,
                    so this is what it costs and not what training waits

    \b
    Examples:
      ddp-hpc bench io --json io.json --picture io.png
      ddp-hpc bench io --dir /lustre/me --cold --workers 0 --workers 4
      ddp-hpc bench io --data train.h5 --access shuffled --access sequential
      # samples of 10 MB
      ddp-hpc bench io --num-samples 64 --batch-size 8 --src-shape 1,1280000 --tgt-shape 1,1280000
      # samples of 256 bytes
      ddp-hpc bench io --src-shape 32 --tgt-shape 32 --batch-size 32 --batch-size 1024
    """  # noqa: D301 - as above
    try:
        from ddp_hpc.bench import io as bench_io
    except ModuleNotFoundError as error:
        raise RequestError(
            f"bench io needs {error.name}, which is not installed; pip install 'ddp-hpc[train]'"
        ) from error
    gc.enable()  # main() disables it, and training does not
    bench_io.command(json_file, picture, **options)


def _say(line: str) -> None:
    click.echo(line, err=True)


def main() -> None:
    """The console script: errors become one line on stderr and their exit code."""
    # A command of a tenth of a second leaves no garbage worth a search (3 % of its time).
    gc.disable()
    if sys.stdout is None:
        _say("error: stdout is closed; leave it open, or write to a file")
        sys.exit(EXIT_FAILED)
    try:
        code = cli.main(prog_name="ddp-hpc", standalone_mode=False)
        sys.stdout.flush()
    except DdpHpcError as err:
        _say(f"error: {err}")
        code = err.exit_code
    except click.ClickException as err:
        err.show()
        code = err.exit_code
    except (click.Abort, KeyboardInterrupt):
        _say("interrupted")
        code = EXIT_INTERRUPTED
    except OSError as err:
        # Python must not try to flush into it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(err, BrokenPipeError):  # the reader, such as `head`, has gone
            _say(f"error: cannot write the output ({err.strerror}); write it to a file with room")
        code = EXIT_FAILED
    sys.exit(code)
