"""Training under mpiexec with gloo, but with the TCPStore clients that GPU backends use."""

from pathlib import Path

from tests.training.runs import LINEAR, error_lines, losses, succeeded, train

SIZES = [*LINEAR, "--num-samples", "64", "--batch-size", "4", "--epochs", "1", "--device", "cpu"]
WITH_TORCH_CLIENTS = [str(Path(__file__).parents[1] / "training" / "with_torch_clients.py")]


def test_the_losses_are_those_with_the_ranks_own_store(tmp_path: Path) -> None:
    options = [*SIZES, "--metrics", "metrics.jsonl"]
    found = []
    for program in (None, WITH_TORCH_CLIENTS):
        done = succeeded(train(*options, cwd=tmp_path, ranks=3, program=program))
        assert error_lines(done) == []
        found.append(losses(tmp_path / "metrics.jsonl"))
    assert found[0] == found[1] != []
