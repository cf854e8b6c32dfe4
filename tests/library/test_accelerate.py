"""The library beside Accelerate: the same loop has the same losses, weights and gathered values."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import skip_without
from tests.training.forked import Forks

skip_without("accelerate")
pytestmark = pytest.mark.check  # test_whole_loop.py has the main behavior
PROGRAM = Path(__file__).with_name("beside_accelerate.py")


Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def run(framework_forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("ranks")
    return functools.cache(functools.partial(_result, framework_forks, directory))


def _result(forks: Forks, directory: Path, *words: str, ranks: int = 2) -> list[Any]:
    ended = forks.script(PROGRAM, *words, cwd=directory, ranks=ranks)
    assert ended.exit_code == 0, ended.stderr
    [found] = re.findall(r"^result (.*)$", ended.stdout, re.MULTILINE)
    result: list[Any] = ast.literal_eval(found)
    return result


def test_without_accumulation_losses_and_weights_are_equal_bit_for_bit(run: Run) -> None:
    ours, theirs = (run(kind, "1", "4", "48") for kind in ("library", "accelerate"))
    assert len(ours[0]) == 12
    assert ours == theirs


def test_with_accumulation_the_weights_are_equal_up_to_rounding(run: Run) -> None:
    ours, theirs = (run(kind, "3", "4", "48") for kind in ("library", "accelerate"))
    assert ours[2] == pytest.approx(theirs[2], abs=1e-12)
    # The parts of a step contain its samples in another order.
    assert sorted(ours[1]) == sorted(theirs[1])
    assert len(ours[0]) == len(theirs[0]) == 12


def test_the_values_of_an_uneven_last_step_are_gathered_once(run: Run) -> None:
    ours, theirs = (run(kind, "1", "4", "19") for kind in ("library", "accelerate"))
    assert ours[1] == theirs[1] == [*range(19), *range(19)]


def test_an_uneven_last_step_has_the_gradients_of_one_process(run: Run) -> None:
    """Accelerate repeats samples there, so that its weights depend on the number of ranks."""
    ours, alone = (run("library", "1", size, "19", ranks=ranks) for size, ranks in (("4", 2), ("8", 1)))
    assert ours[2] == pytest.approx(alone[2], abs=1e-12)
    theirs = run("accelerate", "1", "4", "19")
    assert theirs[2] != pytest.approx(alone[2], abs=1e-4)
