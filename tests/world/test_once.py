"""Errors before the ranks have met: one line a node, whoever has them."""

import sys

SAY = "import os; from ddp_hpc.world.once import say_once_a_node; say_once_a_node(TEXT, os.environ)"


def _say(launch, texts):
    """One process a rank, as Hydra starts them, each with its own text."""
    for rank, text in enumerate(texts):
        env = {"PMI_RANK": str(rank), "PMI_SIZE": str(len(texts)), "MPI_LOCALRANKID": str(rank)}
        env |= {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "x", "TEXT": text}
        code = SAY.replace("TEXT", "os.environ['TEXT']")
        yield launch.start([sys.executable, "-c", code], env=env)


def _errors(launch, texts):
    running = list(_say(launch, texts))
    return [launch.end(process).stderr for process in running]


def test_the_same_error_on_all_ranks_is_said_by_rank_0_alone(launch):
    texts = [f"error: rank {rank} of 3 is alone" for rank in range(3)]
    assert _errors(launch, texts) == ["error: rank 0 of 3 is alone\n", "", ""]


def test_different_errors_are_all_said(launch):
    said = _errors(launch, ["error: no port", "error: no libmpi"])
    assert said == ["error: no port\n", "error: no libmpi\n"]


def test_an_error_that_only_another_rank_has_is_not_lost(launch):
    (process,) = list(_say(launch, ["", "error: mine"]))[1:]
    assert launch.end(process).stderr == "error: mine\n"
