"""`python benchmarks/lint_precision.py DIR`: findings of `ddp-hpc lint` on any directory of job scripts.

Every file with a #SBATCH or #PBS line is checked, without a profile. If sbatch is installed, each
Slurm script is also given to `sbatch --test-only`, with a configuration whose controller does not run: sbatch
parses all options before it contacts the controller. For each check, the tables show the number of findings,
the number of scripts with a finding, how many of these scripts sbatch refuses, and their classes. The last
lines show how many of all refused scripts have an error of lint.

`--draw N` prints N random findings for a person to judge, selected with --seed, --severity and --class.

`python benchmarks/lint_precision.py --recall tests/lint/mistakes.txt` measures recall on scripts with one
known mistake each: how many are found by a check that the file names for it, how many of these by a note, and
how many corrected scripts have an error or a warning.

`python benchmarks/lint_precision.py --programs tests/lint/programs.txt DIR` compares the checks of programs
with verdicts on programs of the repositories DIR/OWNER/NAME: how many findings are right, how many mistakes
are found, and on how many programs all checks agree with the verdict.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ddp_hpc.lint.parse_script import read_script
from ddp_hpc.lint.run_checks import CHECKS, LintFinding, lint_script
from ddp_hpc.sites.site import load_site

CLASSES = ("ml", "mpi", "other")
DIRECTIVE = re.compile(rb"^#(?:SBATCH|PBS)\b", re.MULTILINE)
MACHINE_LEARNING = re.compile(
    r"torch|tensorflow|keras|\bjax\b|deepspeed|accelerate launch|huggingface|transformers|horovod|NCCL|WANDB|"
    r"wandb|lightning|sklearn|(?:train|finetune|pretrain|run_glue|run_mlm|main_ddp)\w*\.py|--epochs|--batch[-_]size",
    re.IGNORECASE,
)
MPI = re.compile(r"\b(?:mpirun|mpiexec|aprun|ibrun|mpiexec\.hydra|orterun|mpprun)\b|^\s*srun\b", re.MULTILINE)
# Generic resources in public scripts. sbatch refuses names that are not configured, but their syntax is
# valid.
GRES = re.compile(r"--gres[ =]?['\"]?(?:gres[:/])?([A-Za-z][\w-]*)|,([A-Za-z][\w-]*):")
BUILT_IN_GRES = (
    *("gpu", "mps", "shard", "nic", "craynetwork", "tmpdisk"),
    *("lscratch", "nvme", "mic", "dcu", "ssd", "vmem"),
)
CONFIGURATION = """ClusterName=none
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=1
MessageTimeout=1
SelectType=select/cons_tres
GresTypes={gres}
NodeName=n1 CPUs=1
PartitionName=p Nodes=n1 Default=YES
"""
ACCEPTED = "Unable to contact slurm controller"
# Options of plugins with public documentation: Shifter, Pyxis, uenv, EAR, and those of some sites. sbatch
# rejects them here, because the plugins are not installed.
PLUGIN = re.compile(
    r"unrecognized option '--(?:image|module|volume|container-\w+|uenv[\w-]*|view|ear[\w-]*|fpgalink|repo|"
    r"perf|gpu-accounting|nv-meta|ccm|quotatype|gpu_cmode|gpu-mps|no-step-tmpdir)\b"
)
# Answers that depend on this machine, not on the script.
UNDECIDED = re.compile(
    r"Problem talking to database|--[ug]id|Unable to open file|Invalid --nodefile|No such file or directory|"
    r"slurm_read_hostfile|can't open"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--recall", type=Path, help="measure recall on the mistakes in this file")
    parser.add_argument("--submitted", action="store_true", help="check them as `ddp-hpc submit` does")
    parser.add_argument("--programs", type=Path, help="compare lint with the verdicts in this file")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    parser.add_argument("--json", type=Path, help="write all findings and answers to this file")
    parser.add_argument("--draw", type=int, default=0, help="print this many random findings")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--severity", default="error")
    parser.add_argument("--class", dest="script_class", choices=CLASSES)
    args = parser.parse_args()
    if args.recall:
        print_recall(args.recall)
    if args.programs:
        print_programs(args.programs, args.directory)
    if args.directory is None or args.programs:
        return
    paths = sorted(path for path in args.directory.rglob("*") if is_job_script(path))
    with tempfile.TemporaryDirectory() as work:
        configuration = Path(work, "slurm.conf")
        names = sorted(set(BUILT_IN_GRES) | set(gres_names(paths)))
        configuration.write_text(CONFIGURATION.format(gres=",".join(names)))
        begun_s = time.monotonic()
        with ProcessPoolExecutor(args.jobs, initializer=enter, initargs=(work,)) as pool:
            examine_one = partial(examine, is_submitted=args.submitted)
            rows = list(pool.map(examine_one, paths, chunksize=50))
        took_s = time.monotonic() - begun_s
    print_tables(rows, took_s)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=0))
    if args.draw:
        draw(rows, args.draw, args.seed, args.severity, args.script_class)


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A script with one mistake, the corrected script, and the checks whose remedy corrects it."""

    name: str
    source: str
    checks: tuple[str, ...]
    profile: str
    version: str
    wrong: str
    corrected: str

    def findings(self, text: str) -> list[LintFinding]:
        """Returns the errors and warnings of lint for one of the two scripts."""
        return [one for one in self._all_findings(text) if one.severity != "note"]

    def found_by(self) -> list[LintFinding]:
        """Returns the findings that name the mistake and its remedy: those of the checks which the corrected
        script does not have.
        """
        others = {(one.check, one.what) for one in self._all_findings(self.corrected)}
        found = [one for one in self._all_findings(self.wrong) if one.check in self.checks]
        return [one for one in found if (one.check, one.what) not in others]

    def _all_findings(self, text: str) -> list[LintFinding]:
        site = load_site(self.profile) if self.profile else None
        return lint_script(text, site, installed_version=self.version)


def read_mistakes(path: Path) -> list[Mistake]:
    """Returns the mistakes in a file; its first lines describe its format."""
    mistakes = []
    for entry in re.split("^== ", path.read_text(), flags=re.MULTILINE)[1:]:
        name, *lines = entry.rstrip("\n").split("\n")
        fields = dict(line.split(": ", 1) for line in lines if re.match("[a-z]+: ", line))
        script = [line for line in lines if line[:1] in ("-", "+", " ")]
        mistakes.append(
            Mistake(
                name=name,
                source=fields["source"],
                checks=tuple(fields.get("checks", "").split()),
                profile=fields.get("profile", ""),
                version=fields.get("version", ""),
                wrong=_script(script, "- "),
                corrected=_script(script, "+ "),
            )
        )
    return mistakes


def _script(lines: list[str], kept: str) -> str:
    text = "".join(line[1:] + "\n" for line in lines if line[0] in kept)
    return text.replace("\\r\n", "\r\n").replace("\\s\n", " \n")


def print_recall(path: Path) -> None:
    mistakes = read_mistakes(path)
    severities = {mistake: {one.severity for one in mistake.found_by()} for mistake in mistakes}
    missed = [mistake for mistake in mistakes if not severities[mistake]]
    for mistake in missed:
        others = ", ".join(one.check for one in mistake.findings(mistake.wrong))
        print(f"missed: {mistake.name}" + (f" (other findings: {others})" if others else ""))
    wrong = 0
    for mistake in mistakes:
        found = mistake.findings(mistake.corrected)
        wrong += bool(found)
        for one in found:
            print(f"corrected, but reported: {mistake.name}: {one.check}, line {one.line}: {one.what}")
    total = len(mistakes)
    by_note = list(severities.values()).count({"note"})
    share = 100 * (total - len(missed)) / max(1, total)
    print(f"found: {total - len(missed)} of {total} ({share:.0f} %), {by_note} of them only by a note")
    print(f"corrected scripts with an error or a warning: {wrong} of {total}")


# The checks of programs, and the verdicts that they should report.
OF_PROGRAMS = {
    "RANK024": "same",
    "RANK025": "all",
    "RANK026": "order",
    "RANK027": "shared",
    "JOB032": "no",
}
KINDS = {
    (True, True): "right findings",
    (False, True): "wrong findings",
    (True, False): "missed",
    (False, False): "rightly none",
}
LAUNCHES = {
    "torchrun": "torchrun --nproc-per-node=4",
    "srun": "srun --ntasks=4 python",
    "mpirun": "mpirun -np 4 python",
    "accelerate": "accelerate launch",
    "deepspeed": "deepspeed",
    "python": "python",
}


@dataclass(frozen=True, kw_only=True)
class JudgedProgram:
    """A program of a public repository, and what is right and wrong with it."""

    repository: str
    path: str
    launcher: str
    verdicts: tuple[str, ...]

    def findings(self, directory: Path) -> dict[str, str]:
        """Returns what the checks of programs find in a script that starts it, by their ids."""
        script = (
            "#!/bin/bash\n#SBATCH --time=24:00:00\n#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-node=4\n"
        )
        text = script + f"{LAUNCHES[self.launcher]} {self.path}\n"
        found = lint_script(text, directory=directory / self.repository, select=tuple(OF_PROGRAMS))
        return {one.check: one.what for one in found}

    def expected(self) -> set[str]:
        """Returns the checks that should have a finding."""
        return {check for check, wrong in OF_PROGRAMS.items() if wrong in self.verdicts}


def read_programs(path: Path) -> list[JudgedProgram]:
    """Returns the programs in a file; its first lines describe its format."""
    programs = []
    for line in path.read_text().splitlines():
        if fields := line.partition("#")[0].split():
            repository, _, program, launcher, *verdicts = fields
            programs.append(
                JudgedProgram(
                    repository=repository, path=program, launcher=launcher, verdicts=tuple(verdicts)
                )
            )
    return programs


def print_programs(path: Path, directory: Path) -> None:
    programs = [one for one in read_programs(path) if (directory / one.repository / one.path).is_file()]
    counts: Counter[tuple[str, str]] = Counter()
    num_right = 0
    for one in programs:
        found, expected = one.findings(directory), one.expected()
        num_right += found.keys() == expected
        for check in OF_PROGRAMS:
            kind = KINDS[check in expected, check in found]
            counts[check, kind] += 1
            if kind in ("missed", "wrong findings"):
                print(f"{check}: {kind}: {one.repository} {one.path} {found.get(check, '')}")
    for check in OF_PROGRAMS:
        print(f"{check}: " + ", ".join(f"{kind} {counts[check, kind]}" for kind in KINDS.values()))
    print(f"programs on which all checks agree with the verdict: {num_right} of {len(programs)}")


def is_job_script(path: Path) -> bool:
    return path.is_file() and bool(DIRECTIVE.search(path.read_bytes()))


def gres_names(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        for line in path.read_text("utf-8", "replace").splitlines():
            if line.startswith("#SBATCH") and "--gres" in line:
                for first, second in GRES.findall(line):
                    yield first or second


def enter(work: str) -> None:
    # Relative log directories must not be found by chance.
    os.chdir(work)
    for name in [name for name in os.environ if name.startswith(("SBATCH_", "SLURM_"))]:
        del os.environ[name]
    os.environ |= {"SLURM_CONF": f"{work}/slurm.conf", "LC_ALL": "C"}


def examine(path: Path, is_submitted: bool = False) -> dict[str, Any]:
    text = read_script(path, path.name)
    begun_s = time.perf_counter()
    findings = lint_script(text, path=path, is_submitted=is_submitted)
    found = [(one.check, one.severity, one.line, one.what) for one in findings]
    took_s = time.perf_counter() - begun_s
    answer = ask_sbatch(path) if re.search(r"^#SBATCH\b", text, re.MULTILINE) else ""
    return {
        "path": str(path),
        "class": class_of(text),
        "findings": found,
        "lint_s": took_s,
        "answer": answer,
        "verdict": verdict_of(answer),
    }


def class_of(text: str) -> str:
    if MACHINE_LEARNING.search(text):
        return "ml"
    return "mpi" if MPI.search(text) else "other"


def ask_sbatch(path: Path) -> str:
    """Returns the messages of sbatch; empty if it is not installed or does not answer."""
    if not (sbatch := shutil.which("sbatch")):
        return ""
    try:
        done = subprocess.run(
            [sbatch, "--test-only", str(path)], stdin=subprocess.DEVNULL, capture_output=True, timeout=30
        )
    except subprocess.TimeoutExpired:
        return ""
    return done.stderr.decode("utf-8", "replace").strip() or "(no message)"


def verdict_of(answer: str) -> str:
    if not answer or UNDECIDED.search(answer) or answer == "(no message)":
        return "unknown"
    if ACCEPTED in answer:
        return "accepted"
    return "plugin" if PLUGIN.search(answer) else "refused"


def print_tables(rows: list[dict[str, Any]], took_s: float) -> None:
    asked = [row for row in rows if row["verdict"] in ("accepted", "refused")]
    plugins = [row for row in rows if row["verdict"] == "plugin"]
    refused = [row for row in asked if row["verdict"] == "refused"]
    of_class = Counter(row["class"] for row in rows)
    times = sorted(row["lint_s"] for row in rows)
    print(
        f"{len(rows)} scripts ({', '.join(f'{of_class[name]} {name}' for name in CLASSES)}), {took_s:.0f} s"
    )
    if times:
        median, most = times[len(times) // 2], times[int(len(times) * 0.99)]
        print(f"lint: median {median * 1e3:.1f} ms, 99th percentile {most * 1e3:.1f} ms")
        print(f"lint: {len(times) / sum(times):.0f} scripts per second in one process")
    print(
        f"sbatch: {len(asked) - len(refused)} accepted, {len(refused)} refused, and {len(plugins)} refused "
        "for an option of a plugin that is not installed here"
    )
    head = ("findings", "scripts", "asked", "refused", *CLASSES)
    print(f"\n{'check':<10}{'severity':<9}" + "".join(f"{name:>9}" for name in head))
    for one in CHECKS.values():
        print_row(one.id, one.severity, [r for r in rows if any(f[0] == one.id for f in r["findings"])])
    has_error = [row for row in refused if any(f[1] == "error" for f in row["findings"])]
    share = 100 * len(has_error) / max(1, len(refused))
    # `ddp-hpc submit` refuses templates, too.
    others = [row for row in refused if row not in has_error]
    templates = sum(any(f[0] == "JOB027" for f in row["findings"]) for row in others)
    print(f"\nrefused by sbatch, with an error of lint: {len(has_error)} of {len(refused)} ({share:.1f} %)")
    print(f"refused by sbatch, and a template: {templates}")
    accepted = [row for row in asked if row["verdict"] == "accepted"]
    clean = [row for row in accepted if not any(f[1] == "error" for f in row["findings"])]
    print(f"accepted by sbatch, without an error of lint: {len(clean)} of {len(accepted)}")
    syntax = Counter(
        f[0]
        for row in accepted
        for f in row["findings"]
        if f[1] == "error" and f[0].startswith(("SLURM", "JOB"))
    )
    print(f"errors of JOB and SLURM checks on accepted scripts: {dict(syntax.most_common())}")
    for row in refused:
        if row not in has_error:
            print(f"no error: {row['path']}: {row['answer'].splitlines()[0][:150]}")


def print_row(check: str, severity: str, rows: list[dict[str, Any]]) -> None:
    findings = sum(f[0] == check for row in rows for f in row["findings"])
    verdicts = Counter(row["verdict"] for row in rows)
    of_class = Counter(row["class"] for row in rows)
    numbers = (findings, len(rows), verdicts["accepted"] + verdicts["refused"], verdicts["refused"])
    cells = "".join(f"{number:>9}" for number in (*numbers, *(of_class[name] for name in CLASSES)))
    if rows:
        print(f"{check:<10}{severity:<9}{cells}")


def draw(rows: list[dict[str, Any]], number: int, seed: int, severity: str, script_class: str | None) -> None:
    chosen = [row for row in rows if script_class in (None, row["class"])]
    found = [(row["path"], *f) for row in chosen for f in row["findings"] if f[1] == severity]
    print(f"\n{number} of {len(found)} findings of severity {severity}, seed {seed}:")
    for path, check, _, line, what in sorted(random.Random(seed).sample(found, min(number, len(found)))):
        print(f"{path}:{line}: {check}: {what}")


if __name__ == "__main__":
    sys.exit(main())
