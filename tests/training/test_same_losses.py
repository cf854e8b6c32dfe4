"""For any number of ranks, a step uses the same samples and has the same loss."""

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from ddp_hpc.data.sample_order import EpochOrder

from .runs import LINEAR, losses, records

# 100 samples: three global batches of 32 and one of 4, which 3 ranks cannot divide evenly.
SHORT = ["--src-shape", "1,32", "--tgt-shape", "4,32"]
SIZES = ["--num-samples", "100", "--epochs", "2", *SHORT, "--dropout", "0", "--lr-scaling", "none"]


def _losses(forks, folder, *options, ranks=1, name="m.jsonl"):
    forks.run(*SIZES, *options, "--metrics", name, cwd=folder, ranks=ranks)
    return losses(folder / name)


def _plain_loop(path, dtype, epochs, batch_size, lr, order_seed):
    """A plain training loop, which shares only the order of samples with ours."""
    with h5py.File(path) as file:
        src, tgt = (torch.from_numpy(file[name][...]) for name in ("src", "tgt"))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more threads, MKL chooses their number, which affects the last bit
    torch.manual_seed(0)
    model = nn.Transformer(d_model=src.shape[-1], batch_first=True, dropout=0.0).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    loss_of = nn.CrossEntropyLoss()
    found = []
    for epoch in range(epochs):
        order = torch.from_numpy(EpochOrder(len(src), order_seed, epoch, True).take(0, len(src)))
        for batch in order.split(batch_size):
            optimizer.zero_grad()
            loss = loss_of(model(src[batch], tgt[batch]), tgt[batch])
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    torch.set_num_threads(num_threads)
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory, forks):
    """The losses of one rank at batch 32 in float64, and those of the plain loop on the same file."""
    folder = tmp_path_factory.mktemp("one_rank")
    ours = _losses(forks, folder, "--dtype", "float64", "--batch-size", "32", "--threads", "1")
    (path,) = (folder / "data").glob("*.h5")
    return ours, _plain_loop(path, torch.float64, 2, 32, 0.001, 0)


def test_one_rank_equals_a_plain_loop_to_the_last_bit(reference):
    ours, plain = reference
    assert ours == plain


def test_two_ranks_at_batch_16_equal_one_rank_at_batch_32(reference, tmp_path, forks):
    two = _losses(forks, tmp_path, "--dtype", "float64", "--batch-size", "16", ranks=2)
    assert two == pytest.approx(reference[0], abs=1e-9)


def test_three_ranks_divide_a_smaller_last_batch(tmp_path, forks):
    # Global batches of 24 and one of 4 on 3 ranks; the plain loop never pads.
    three = _losses(forks, tmp_path, "--dtype", "float64", "--batch-size", "8", ranks=3)
    (path,) = (tmp_path / "data").glob("*.h5")
    assert three == pytest.approx(_plain_loop(path, torch.float64, 2, 24, 0.001, 0), abs=1e-9)


@pytest.mark.parametrize(
    ("ranks", "batch_size"),
    [
        (1, "32"),
        pytest.param(2, "8", marks=pytest.mark.check),
        (3, "8"),
        pytest.param(3, "32", marks=pytest.mark.check),
    ],
)
def test_a_global_batch_is_the_same_on_any_number_of_ranks(reference, ranks, batch_size, tmp_path, forks):
    options = ("--dtype", "float64", "--batch-size", batch_size, "--global-batch", "32", "--threads", "1")
    assert _losses(forks, tmp_path, *options, ranks=ranks) == pytest.approx(reference[0], abs=1e-9)


@pytest.mark.check
def test_a_global_batch_that_needs_accumulation_is_refused_with_a_static_graph(tmp_path, forks):
    options = ("--static-graph", "--batch-size", "8", "--global-batch", "32")
    _losses(forks, tmp_path, *options, ranks=4)
    job = forks.start(*SIZES, *options, cwd=tmp_path, ranks=3)
    assert job.wait() == [2, 2, 2]
    (line,) = job.errors()
    assert "--global-batch 32 needs gradient accumulation with --batch-size 8 on 3 ranks, but" in line


def test_a_rank_without_samples_in_the_last_batch_takes_part(tmp_path, forks):
    # 97 samples in global batches of 32: the last batch is one sample for two ranks.
    options = ("--num-samples", "97", "--dtype", "float64", "--epochs", "1")
    two = _losses(forks, tmp_path, *options, "--batch-size", "16", ranks=2)
    (path,) = (tmp_path / "data").glob("*.h5")
    assert two == pytest.approx(_plain_loop(path, torch.float64, 1, 32, 0.001, 0), abs=1e-9)


def test_each_sample_is_used_once_per_epoch(tmp_path, forks):
    options = ["--num-samples", "100", "--epochs", "2", "--batch-size", "16", *LINEAR]
    forks.run(*options, "--metrics", "m.jsonl", cwd=tmp_path, ranks=2)
    samples = [(r["epoch"], r["samples"]) for r in records(tmp_path / "m.jsonl")]
    assert sum(n for epoch, n in samples if epoch == 1) == 100
    assert sum(n for epoch, n in samples if epoch == 2) == 100


def test_without_shuffle_samples_are_in_file_order(tmp_path, forks):
    options = ("--dtype", "float64", "--batch-size", "100", "--epochs", "1", "--no-shuffle")
    (whole,) = _losses(forks, tmp_path, *options)
    (path,) = (tmp_path / "data").glob("*.h5")
    with h5py.File(path) as file:
        tgt = torch.from_numpy(file["tgt"][...])
        src = torch.from_numpy(file["src"][...])
    torch.manual_seed(0)
    model = nn.Transformer(d_model=32, batch_first=True, dropout=0.0).to(torch.float64)
    assert whole == pytest.approx(nn.functional.cross_entropy(model(src, tgt), tgt).item(), abs=1e-12)
    assert np.array_equal(EpochOrder(100, 0, 0, False).take(0, 100), np.arange(100))
