"""The cores of each rank, compared with the documentation of the sites."""

from __future__ import annotations

import re

from ddp_hpc.sites.site import load_site


def masks(name: str) -> list[set[int]]:
    """The cores of local rank 0, 1, ... from the masks for srun."""
    (option,) = [word for word in load_site(name).slurm.srun_options if "mask_cpu" in word]
    found = [int(mask, 16) for mask in re.findall(r"0x[0-9a-f]+", option)]
    return [{core for core in range(mask.bit_length()) if mask >> core & 1} for mask in found]


def test_on_delta_rank_i_has_the_cores_next_to_gpu_i() -> None:
    # ncsa/Delta_doc@826840da34c8: docs/source/user_guide/architecture.rst, its table of affinities.
    beside = {0: range(48, 64), 1: range(32, 48), 2: range(16, 32), 3: range(16)}
    assert masks("delta") == [set(beside[gpu]) for gpu in range(4)]


def test_on_lumi_each_rank_has_the_seven_usable_cores_of_its_chiplet() -> None:
    # LUMI-AI-Guide: 05-multi-gpu-and-node/run_ddp_srun_4.sh; one core each is map_cpu:49,57,17,25,1,9,33,41.
    first_cores = [49, 57, 17, 25, 1, 9, 33, 41]
    assert masks("lumi_g") == [set(range(core, core + 7)) for core in first_cores]


def test_on_polaris_rank_i_has_the_cores_next_to_gpu_i() -> None:
    # argonne-lcf/user-guides@7d04a3f91d5e: docs/polaris/running-jobs/using-gpus.md, its table of affinities.
    assert load_site("polaris").launch.cpu_bind == ("24-31", "16-23", "8-15", "0-7")


def test_on_aurora_no_rank_has_cores_of_both_sockets_or_of_the_operating_system() -> None:
    # argonne-lcf/user-guides@7d04a3f91d5e: docs/aurora/running-jobs-aurora.md: the system has cores 0, 52.
    site = load_site("aurora")
    ranges = [[int(core) for core in cores.split("-")] for cores in site.launch.cpu_bind]
    assert len(ranges) == site.node.devices == 12
    for rank, (first, last) in enumerate(ranges):
        assert (1 <= first < last <= 51) if rank < 6 else (53 <= first < last <= 103)


def test_on_perlmutter_the_order_of_the_gpus_is_reversed_to_match_the_cores() -> None:
    # NERSC/sc25-dl-tutorial: submit_pm_dp.sh. The variable is set after srun, which replaces it.
    site = load_site("perlmutter")
    assert site.launch.wrap == ("env", "CUDA_VISIBLE_DEVICES=3,2,1,0")
    assert "--gpu-bind=none" in site.slurm.srun_options


def test_on_frontier_each_die_is_paired_with_the_seven_nearest_cores() -> None:
    # olcf/olcf-user-docs@2745903: systems/frontier_user_guide.rst, NUMA domains and dies, as on LUMI.
    assert masks("frontier") == masks("lumi_g")
