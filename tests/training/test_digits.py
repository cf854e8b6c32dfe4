"""Real images: the README's command reaches at least 97 % on the test split with 2 ranks."""

import json
import re

import pytest

from .runs import run, succeeded, train


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The file created by `python -m data_gen digits`."""
    import sys

    folder = tmp_path_factory.mktemp("digits")
    succeeded(run([sys.executable, "-m", "data_gen", "digits", "--output", "digits.h5"], folder))
    return folder / "digits.h5"


def _options(digits):
    return ["--model", "classifier", "--data", str(digits), "--epochs", "15", "--summary", "s.json"]


def _check(summary, said):
    test = json.loads(summary.read_text())["test"]
    assert test["accuracy"] >= 0.97
    assert f"accuracy {100 * test['accuracy']:.2f} %" in said


@pytest.mark.check
def test_two_ranks_reach_97_percent_on_the_test_split(digits, tmp_path, forks):
    job = forks.run(*_options(digits), cwd=tmp_path, ranks=2)
    _check(tmp_path / "s.json", job.words())


@pytest.mark.soak
def test_accuracy_counts_each_test_image_once_for_any_number_of_ranks(digits, tmp_path):
    """359 is not divisible by 2 or 3, so padding would count some images twice."""
    options = ["--model", "classifier", "--data", str(digits), "--max-steps", "1", "--lr-scaling", "none"]
    found = set()
    # After one step with a global batch of 30, 1, 2 and 3 ranks evaluate the same weights.
    for ranks in (1, 2, 3):
        batch = ["--batch-size", str(30 // ranks), "--dropout", "0", "--summary", f"{ranks}.json"]
        done = succeeded(train(*options, *batch, cwd=tmp_path, ranks=ranks))
        found.add(re.search(r"\((\d+) of (\d+)\)", done.stdout).groups())
        test = json.loads((tmp_path / f"{ranks}.json").read_text())["test"]
        assert test["samples"] == 359
    assert len(found) == 1, found
