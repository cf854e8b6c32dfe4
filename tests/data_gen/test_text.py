"""Conversion of text files to samples of bytes."""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from data_gen.text import write_text
from ddp_hpc.base.errors import DataError, RequestError
from ddp_hpc.data.open_file import open_samples

# All words are different, so that overlaps between samples are detected.
BOOK = b"".join(b"%05d\n" % number for number in range(2000))


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_bytes(BOOK)
    return path


def windows(path: Path, split: str = "") -> list[bytes]:
    """Returns the bytes of each sample: src and the last byte of tgt."""
    with h5py.File(path) as file:
        src, tgt = file[f"{split}src"][:], file[f"{split}tgt"][:]
    assert (src.dtype, tgt.dtype) == (np.uint8, np.uint8)
    np.testing.assert_array_equal(src[:, 1:], tgt[:, :-1])
    return [bytes(one) + bytes(other[-1:]) for one, other in zip(src, tgt, strict=True)]


def refused(*inputs: Path, kind: type[Exception] = DataError, **options: object) -> str:
    output = inputs[0].parent / "out" / "out.h5"
    with pytest.raises(kind) as caught:
        write_text(inputs, output, **options)
    assert not output.exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_tgt_is_src_shifted_by_one_and_the_windows_cover_the_text(book, tmp_path):
    path = write_text([book], tmp_path / "out.h5", length=16, test_share=0).path
    found = windows(path)
    assert b"".join(found) == (BOOK + b"\0")[: 17 * len(found)]
    assert len(BOOK) - 17 * len(found) < 17
    samples = open_samples(path)
    assert (samples.num_classes, samples.reader, samples.test) == (256, "hdf5 memory map", None)


def test_the_splits_share_no_bytes(book, tmp_path):
    path = write_text([book], tmp_path / "out.h5", length=11, test_share=0.1).path
    train, test = windows(path), windows(path, "test/")
    assert len(test) == (len(train) + len(test)) // 10
    # A window has two lines and begins with a line, so it contains only complete lines.
    assert sorted(train + test) == [BOOK[i : i + 12] for i in range(0, len(BOOK), 12)]
    assert not {line for window in train for line in window.split()} & {
        line for window in test for line in window.split()
    }


def test_the_test_split_consists_of_ten_sections_at_equal_distances(book, tmp_path):
    numbers = [int(window[:5]) // 2 for window in windows(
        write_text([book], tmp_path / "out.h5", length=11, test_share=0.1).path, "test/"
    )]  # fmt: skip
    begins = [number for number in numbers if number - 1 not in numbers]
    assert len(begins) == 10
    assert np.diff(begins).tolist() == [100] * 9


def test_files_are_read_once_in_the_order_of_their_paths(tmp_path):
    names = ("b.py", "a.py", "empty.py")
    for name in names:
        (tmp_path / name).write_text("" if name == "empty.py" else name)
    (tmp_path / "again.py").symlink_to("b.py")
    inputs = [tmp_path / name for name in (*names, "again.py")]
    path = write_text(inputs, tmp_path / "out.h5", length=1, test_share=0).path
    assert b"".join(windows(path)) == b"a.py\0b.py\0"


def test_a_file_of_the_same_text_is_reused_and_another_is_rejected(book, tmp_path):
    path = tmp_path / "out.h5"
    assert not write_text([book], path).reused
    book = book.rename(tmp_path / "renamed.txt")
    assert write_text([book], path).reused
    with pytest.raises(RequestError, match="length is 128 instead of 64"):
        write_text([book], path, length=64)
    with pytest.raises(RequestError, match=r"test_share is 0\.05 instead of 0\.1"):
        write_text([book], path, test_share=0.1)
    book.write_bytes(BOOK.upper() + b"!")
    with pytest.raises(RequestError, match="exists with different contents"):
        write_text([book], path)
    assert not write_text([book], path, force=True).reused


def test_missing_or_empty_text_is_rejected(book, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    assert "has only 0 bytes" in refused(empty)
    os.mkfifo(tmp_path / "pipe")
    assert "pipe is not a regular file" in refused(tmp_path / "pipe")
    assert "no such file" in refused(book, tmp_path / "nowhere.txt")
    assert "is a directory" in refused(tmp_path)
    assert "--length 20000 needs 20001" in refused(book, length=20000)
    assert "selects none of them" in refused(book, length=5000)


@pytest.mark.parametrize(
    "options",
    [{"length": 0}, {"test_share": -0.1}, {"test_share": 0.6}, {"test_share": np.nan}],
)
def test_numbers_out_of_range_are_rejected(book, options):
    assert " must be " in refused(book, kind=RequestError, **options)


def test_unreadable_files_are_reported(open_folder, as_nobody):
    (open_folder / "own.txt").write_text("mine" * 100)
    (open_folder / "own.txt").chmod(0)
    with as_nobody():
        assert "own.txt: Permission denied" in refused(open_folder / "own.txt")


def test_the_command_prints_the_path(tmp_path, book, run_generator):
    done = run_generator("text", "book.txt", "-o", "text.h5", "--length", "32")
    assert (done.returncode, done.stdout) == (0, "text.h5\n")
    second = run_generator("text", book.name, "-o", "text.h5", "--length", "32")
    assert second.returncode == 0
    assert "reusing the existing file" in second.stderr
    wrong = run_generator("text", ".")
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)
