"""Support for LSF: directives of job scripts, the launcher jsrun, and allocations of running jobs.

Sources: IBM Spectrum LSF 10.1, Command Reference (bsub, bjobs, bkill) and Configuration Reference
(environment variables, lsb.params, lsf.conf), ibm.com/docs/en/spectrum-lsf/10.1.0; the Summit user guide of
OLCF for jsrun and nodes that are allocated whole (`bsub -nnodes`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ddp_hpc.errors import RequestError
from ddp_hpc.request.job import Job
from ddp_hpc.request.rank_layout import Layout
from ddp_hpc.schedulers.allocation import Allocation
from ddp_hpc.schedulers.base import (
    Directives,
    Overrides,
    Scheduler,
    ScriptOptions,
    refuse_unused,
    resource_numbers,
    whole_number,
)
from ddp_hpc.schedulers.lsf import checks
from ddp_hpc.schedulers.lsf.parse_directives import split_words
from ddp_hpc.schedulers.lsf.submit_options import array_of, submit_options
from ddp_hpc.schedulers.lsf.times import left_s, minutes_of, walltime_s
from ddp_hpc.sites.site import Site, queue_entries

if TYPE_CHECKING:
    from ddp_hpc.schedulers.running_job import RunningJob

# One slot is usually one core (bsub -n); all GPUs of a host are requested per host (bsub -gpu).
_SLOTS = ("-n {all_cpus}", "-R span[ptile={cpus}]")
_GPUS = "-gpu num={devices}"
# With the job step manager (jsrun), whole nodes are allocated (bsub -nnodes).
_WHOLE_NODES = ("-nnodes {nodes}",)


class Lsf(Scheduler):
    """The LSF scheduler.

    JOB_TERMINATE_INTERVAL, the time between SIGINT, SIGTERM and SIGKILL, is 10 s (lsb.params.5).
    A parallel job gets only SIGKILL unless LSB_USE_SEQUENTIAL_SIGNAL is set in lsf.conf. At the run limit LSF
    sends SIGUSR2 first, and ends the job up to ten minutes later (bsub -W).
    """

    name = "lsf"
    title = "LSF"
    template = "lsf.sh.j2"
    submit_program = "bsub"
    launchers = ("mpiexec", "jsrun")
    can_requeue = True
    kill_delay_s = 10
    interactive_command = "bsub -Is bash"
    array_index_variables = ("LSB_JOBINDEX",)
    prefix = "#BSUB"
    log_flags = ("-o", "-e", "-oo", "-eo")
    name_flags = frozenset(("-J", "-u"))
    walltime_flag = "-W"
    queue_flag = "-q"
    walltime_directive = "#BSUB -W HH:MM"
    walltime_pattern = re.compile(r"(?:\d{1,6}:)?\d{1,9}(?:/[\w.-]+)?")
    walltime_form = "HH:MM or minutes, such as 01:30"
    is_ambiguous_walltime = False
    reads_loose_directives = True
    # LSF expands variables in the value of -o, and many users write logs below $HOME.
    free_text_flags = frozenset(
        ("-env", "-E", "-Ep", "-Jd", "-R", "-w", "-o", "-oo", "-e", "-eo", "-i", "-cwd")
    )
    repeatable_flags = frozenset(("-R", "-f", "-data"))
    named_in_value = frozenset(("-R",))
    account_flags = ("-P", "-G")
    checks = checks.CHECKS
    job_id_variable = "LSB_JOBID"
    commands = ("bsub", "bjobs", "bkill")
    query_command = "bjobs"
    job_id_pattern = re.compile(r"\[")
    stand_in = "ddp_hpc.schedulers.lsf.stand_in.rehearsal_adapter"

    def directives(self, job: Job, site: Site, layout: Layout) -> Directives:
        refuse_unused(site, [("--filesystems", job.filesystems)])
        default = _WHOLE_NODES if layout.launcher == "jsrun" else _SLOTS + (_GPUS,) * bool(layout.devices)
        of_queue = next((queue.resources for queue in queue_entries(site, layout.queue)), ())
        numbers = resource_numbers(job, site, layout)
        values = super().directives(job, site, layout)
        return {
            **values,
            "array": array_of(job),
            "resources": [
                text.format_map(numbers) for text in of_queue or site.scheduler_options.resources or default
            ],
            "walltime": minutes_of(layout.walltime_s or 0),
            "options": site.scheduler_options.options,
        }

    def submit_options(self, job: Job, site: Site, layout: Layout) -> list[str]:
        return submit_options(job)

    def submit_argv(
        self, script: str, options: Sequence[str], after: str = "", variables: str = ""
    ) -> list[str]:
        # Without LSB_BSUB_PARSE_SCRIPT in lsf.conf, bsub reads #BSUB lines only from its standard input.
        return ["/bin/sh", "-c", 'script=$1; shift; exec bsub "$@" <"$script"', "bsub", script, *options]

    def overrides(self, asked: Overrides, script: ScriptOptions, site: Site | None) -> list[list[str]]:
        if asked.num_nodes or asked.qos:
            raise RequestError("--nodes and --qos cannot override directives of LSF; change the script")
        walltime = ["-W", minutes_of(asked.walltime_s)] if asked.walltime_s else []
        queue = ["-q", asked.queue] if asked.queue else []
        name = ["-J", asked.name] if asked.name else []
        return [words for words in (walltime, queue, name) if words]

    def submit_line(self, options: str = "") -> str:
        return f"bsub {options}".rstrip() + " <"

    def launch_words(self, site: Site, layout: Layout) -> Sequence[str]:
        """Returns a jsrun command with one resource set per node, so that each rank sees all GPUs of its
        node, as NCCL requires.
        """
        if layout.launcher != "jsrun":
            return ()
        cores = layout.threads_per_rank
        return [
            *("jsrun", "--nrs", "{num_nodes}", "--rs_per_host", "1"),
            *("--tasks_per_rs", str(layout.ranks_per_node)),
            *("--cpu_per_rs", "ALL_CPUS", "--gpu_per_rs", "ALL_GPUS" if layout.devices else "0"),
            *("--bind", f"packed:{cores}" if cores else "none"),
            *site.launch.options,
        ]

    def exclude_host(self, host: str) -> str:
        return f"bsub -R \"select[hname!='{host}']\""

    def split_options(self, words: Sequence[str]) -> Iterator[tuple[str, str]]:
        return split_words(words)

    def num_nodes(self, script: ScriptOptions) -> int | None:
        if (nodes := script.value("-nnodes")) is not None:
            return whole_number(nodes)
        if _requirements(script, r"(\d+\*\{)"):
            return None  # a compound requirement, such as 2*{span[ptile=1]}, has slots of its own
        slots = whole_number((script.value("-n") or "1").split(",")[0])
        spans = [match[1] for match in _requirements(script, r"span\[ *(hosts *= *1|ptile *= *\d{1,6})")]
        if slots is None or not spans:
            return 1 if slots == 1 else None
        per_host = spans[-1].rpartition("=")[2].strip()
        return 1 if spans[-1].startswith("hosts") else -(-slots // max(1, int(per_host)))

    def gpus_per_node(self, script: ScriptOptions) -> int | None:
        found = re.search(r"(?:^|:)num=(\d{1,4})(/task)?(?:/host)?(?=:|$)", script.value("-gpu") or "")
        if found:
            return None if found[2] else int(found[1])
        older = [int(match[1]) for match in _requirements(script, r"\bngpus\w*=(\d{1,4})")]
        return older[-1] if older else None

    def walltime_s(self, text: str) -> int | None:
        return walltime_s(text) if self.walltime_pattern.fullmatch(text) else None

    def find_allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """Returns the hosts in LSB_MCPU_HOSTS, which lists each host and its slots: `hostA 4 hostB 4`."""
        if "LSB_JOBID" not in environ:
            return None
        words = environ.get("LSB_MCPU_HOSTS", "").split()
        slots = [whole_number(word) for word in words[1::2]]
        # If whole nodes are allocated, the first host is the launch node, which does not run ranks.
        slots = slots[1:] if "CSM_ALLOCATION_ID" in environ else slots
        if len(words) % 2 or not slots or None in slots:
            raise RequestError(
                f"LSB_JOBID is set, but LSB_MCPU_HOSTS is {environ.get('LSB_MCPU_HOSTS', '')[:40]!r}; it "
                "must list hosts and their slots. Run ddp-hpc launch in the shell of bsub -Is bash, or "
                "unset LSB_JOBID."
            )
        return Allocation(
            scheduler=self.name,
            job_id=environ["LSB_JOBID"],
            num_nodes=len(slots),
            cpus_per_node=min(count for count in slots if count is not None),
        )

    def read_end_s(self, job_id: str, ask: Callable[..., str]) -> tuple[float, str] | None:
        fields = "runtimelimit run_time time_left delimiter=';'"
        remaining_s = left_s(ask("bjobs", "-noheader", "-o", fields, job_id))
        return None if remaining_s is None else (time.time() + remaining_s, "bjobs")

    def array_options(self, index: str) -> list[str]:
        return ["-J", f"task[{index}]"]

    def array_index(self, environ: Mapping[str, str]) -> str:
        # LSF sets the index to 0 in a job that does not belong to an array.
        return super().array_index(environ).removeprefix("0")

    def job_id(self, environ: Mapping[str, str]) -> str:
        # In a job array, LSB_JOBID is the ID of the whole array, so the index must be added.
        index = self.array_index(environ)
        return (
            f"{environ['LSB_JOBID']}[{index}]"
            if index and "LSB_JOBID" in environ
            else super().job_id(environ)
        )

    def running_job(self, environ: Mapping[str, str]) -> RunningJob:
        from ddp_hpc.schedulers.lsf.running_job import LsfJob

        return LsfJob(self.job_id(environ), environ)


SCHEDULER = Lsf()


def _requirements(script: ScriptOptions, pattern: str) -> list[re.Match[str]]:
    """Returns the matches of a pattern in all resource requirements; bsub joins several -R with &&."""
    values = [d.value for d in script.read() if d.flag == "-R"]
    return [match for value in values for match in re.finditer(pattern, value)]
