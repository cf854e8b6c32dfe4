"""The lines of the script for Polaris, each with the page that documents it.

The pages are those of argonne-lcf/user-guides at 7d04a3f91d5e, read on 2026-08-19, unless another is named.
"""

from __future__ import annotations

import re

import pytest

from ddp_hpc.base.units import parse_walltime_s
from ddp_hpc.render.rejection_warnings import advice
from ddp_hpc.request.job import Job
from ddp_hpc.sites.site import load_site
from tests.batch.conftest import run_cli

RUNNING_JOBS = "docs/polaris/running-jobs/index.md"
USING_GPUS = "docs/polaris/running-jobs/using-gpus.md"
PYTORCH = "docs/polaris/data-science/frameworks/pytorch.md"
NCCL = "docs/polaris/applications-and-libraries/libraries/nccl.md"
GETTING_STARTED = "docs/polaris/getting-started.md"
KNOWN_ISSUES = "docs/polaris/known-issues.md"
NCCL_TESTS = "argonne-lcf/alcf-nccl-tests@385be33604cc: pytests/torch_nccl/results"

NO_PROXY = (
    "'admin,polaris-adminvm-01,localhost,*.cm.polaris.alcf.anl.gov,"
    "polaris-*,*.polaris.alcf.anl.gov,*.alcf.anl.gov'"
)


def without_meanings(script: str) -> list[str]:
    """The lines of a script without the comments at the end of its exports."""
    return [re.sub(r"^( *export .*?)  # .*", r"\1", line) for line in script.splitlines()]


@pytest.fixture(scope="module")
def script() -> list[str]:
    done = run_cli("render", "--profile", "polaris", "--nodes", "2", "--account", "datascience")
    assert done.returncode == 0, done.stderr
    return without_meanings(done.stdout.decode())


def beyond_one_node(script: list[str]) -> list[str]:
    """The exports of jobs on several nodes, without their comments."""
    start = script.index("if ((num_nodes > 1)); then")
    block = script[start + 1 : script.index("fi", start)]
    return [line.strip() for line in block if not line.strip().startswith("#")]


def test_the_directives_are_these_and_no_others(script: list[str]) -> None:
    assert [line for line in script if line.startswith("#PBS")] == [
        "#PBS -N ddp",
        "#PBS -l select=2:system=polaris",  # RUNNING_JOBS
        "#PBS -l place=scatter",  # RUNNING_JOBS
        "#PBS -l walltime=00:30:00",  # required: RUNNING_JOBS; debug allows 5 minutes to 1 hour
        "#PBS -l filesystems=home:eagle",  # required: RUNNING_JOBS
        "#PBS -q debug",  # 1 to 2 nodes: RUNNING_JOBS
        "#PBS -A datascience",  # required: RUNNING_JOBS
        "#PBS -k doe",  # the site always sets this: RUNNING_JOBS
        "#PBS -W umask=022",  # PBS sets 077, with which nobody else can read the files of the job
        "#PBS -j oe",
    ]


@pytest.mark.parametrize(
    ("line", "source"),
    [
        ("#!/bin/bash -l", RUNNING_JOBS),
        ("module use /soft/modulefiles", PYTORCH),
        ("module load conda/2025-09-25", PYTORCH),
        ("conda activate base", PYTORCH),
        ("num_ranks=$((num_nodes * 4))", USING_GPUS),  # four GPUs, one rank per GPU
        ("export OMP_NUM_THREADS=8", USING_GPUS),  # 32 cores; the default is 64, as in NCCL_TESTS
        ("export http_proxy=http://proxy.alcf.anl.gov:3128", GETTING_STARTED),
        ("export https_proxy=http://proxy.alcf.anl.gov:3128", GETTING_STARTED),
        (f"export no_proxy={NO_PROXY}", GETTING_STARTED),
        # The names in PBS_NODEFILE have this suffix, the output of `hostname` does not.
        ("export DDP_HPC_FABRIC_SUFFIX=.hsn.cm.polaris.alcf.anl.gov", NCCL_TESTS),
    ],
)
def test_each_fact_is_on_exactly_one_line(script: list[str], line: str, source: str) -> None:
    assert script.count(line) == 1, source


def test_nccl_uses_slingshot_on_several_nodes_with_the_settings_of_the_guide(script: list[str]) -> None:
    """NCCL_PROTO and FI_CXI_RDZV_* are from measurements with the plugin below, newer than the guide."""
    exports = [line for line in beyond_one_node(script) if "LD_LIBRARY_PATH" not in line]
    assert exports == [  # NCCL
        "export NCCL_NET='AWS Libfabric'",
        "export NCCL_PROTO=Simple",
        "export NCCL_NET_GDR_LEVEL=PHB",
        "export NCCL_CROSS_NIC=1",
        "export FI_CXI_DISABLE_HOST_REGISTER=1",
        "export FI_MR_CACHE_MONITOR=userfaultfd",
        "export FI_CXI_DEFAULT_CQ_SIZE=131072",
        "export FI_CXI_RDZV_PROTO=alt_read",
        "export FI_CXI_RDZV_EAGER_SIZE=0",
        "export FI_CXI_RDZV_GET_MIN=0",
        "export FI_CXI_RDZV_THRESHOLD=0",
    ]


def test_the_plugin_precedes_the_libraries_of_the_modules(script: list[str]) -> None:
    # nccl.md prepends the plugin and then hwloc, so hwloc comes first. The plugin is that of ALCF's module
    # conda/2025-09-25-aws-nccl-1.6.0, because newer ones do not start since the upgrade of 2026-08.
    (line,) = [line for line in beyond_one_node(script) if "LD_LIBRARY_PATH" in line]
    folders, _, rest = line.removeprefix("export LD_LIBRARY_PATH=").partition('"')
    assert folders == "/soft/libraries/hwloc/lib:/soft/libraries/aws-ofi-nccl/v1.6.0-libfabric-1.22.0/lib"
    assert rest == '${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"'


def test_the_settings_of_nccl_are_not_set_on_one_node() -> None:
    alone = run_cli("render", "--profile", "polaris", "--nodes", "1").stdout.decode().splitlines()
    blocks = beyond_one_node(alone)
    outside = [line for line in alone if line.lstrip().startswith("export ") and line.strip() not in blocks]
    assert not [line for line in outside if "NCCL_" in line or "FI_" in line]


def test_local_rank_i_is_bound_to_the_cores_next_to_gpu_i(script: list[str]) -> None:
    (line,) = [line for line in script if line.startswith("  mpiexec -n")]
    # RUNNING_JOBS: PALS's mpiexec, -n and --ppn.
    assert line.startswith('  mpiexec -n "$num_ranks" --ppn 4 ')
    # USING_GPUS, its table of affinities: the first cores of GPU 0 to 3, without their second threads.
    nearest_cores = ["24-31", "16-23", "8-15", "0-7"]
    assert re.findall(r"--cpu-bind list:(\S+)", line) == [":".join(nearest_cores)]


def test_all_ranks_see_all_gpus(script: list[str]) -> None:
    # USING_GPUS uses a wrapper that reverses the order of the GPUs instead; both together would cancel out.
    assert not [line for line in script if "CUDA_VISIBLE_DEVICES" in line or "set_affinity" in line]


@pytest.mark.parametrize(
    ("fallback", "left_out", "source"),
    [
        ("no-gdr", {"NCCL_NET_GDR_LEVEL"}, "argonne-lcf/alcf-nccl-tests@385be33604cc: pytests/README.md"),
        ("no-nccl", {"NCCL_NET_GDR_LEVEL", "NCCL_CROSS_NIC", "NCCL_NET"}, NCCL),
    ],
)
def test_the_fallbacks_remove_the_documented_variables(
    script: list[str], fallback: str, left_out: set[str], source: str
) -> None:
    done = run_cli("render", "--profile", "polaris", "--nodes", "2", "--fallback", fallback)
    names = [
        re.findall(r"export (\w+)=", line) for line in beyond_one_node(done.stdout.decode().splitlines())
    ]
    before = [re.findall(r"export (\w+)=", line) for line in beyond_one_node(script)]
    assert names == [name for name in before if name[0] not in left_out], source


@pytest.mark.parametrize(
    ("queue", "nodes", "walltime", "fits"),
    [  # all of RUNNING_JOBS; between two ranges of prod a job can be deleted without a message: KNOWN_ISSUES
        ("debug", 2, "01:00:00", True),
        ("debug", 3, "01:00:00", False),
        ("debug", 1, "00:05:00", True),
        ("debug", 1, "00:04:59", False),
        ("debug-scaling", 10, "01:00:00", True),
        ("debug-scaling", 11, "01:00:00", False),
        ("prod", 9, "03:00:00", False),
        ("prod", 24, "03:00:00", True),
        ("prod", 24, "03:00:01", False),
        ("prod", 25, "06:00:00", True),
        ("prod", 99, "06:00:00", True),
        ("prod", 99, "06:00:01", False),
        ("prod", 100, "24:00:00", True),
        ("prod", 496, "24:00:00", True),
        ("prod", 497, "24:00:00", False),
        ("preemptable", 10, "72:00:00", True),
        ("capacity", 4, "168:00:00", True),
        ("capacity", 5, "168:00:00", False),
    ],
)
def test_a_job_outside_its_queue_is_warned_about(queue: str, nodes: int, walltime: str, fits: bool) -> None:
    job = Job(num_nodes=nodes, queue=queue, walltime_s=parse_walltime_s(walltime), account="datascience")
    site = load_site("polaris")
    assert [(site.checked in line) for line in advice(job, site)] == ([] if fits else [True])
