"""Invalid requests: exit code 2 and one line with what was seen, what was needed and what to do."""

import h5py
import numpy as np
import pytest

from .runs import error_lines, train


def _line(errors):
    (line,) = errors
    return line


@pytest.fixture
def refused(forks, tmp_path):
    """The one line of a training that is rejected."""

    def start(*options, ranks=1):
        job = forks.start(*options, cwd=tmp_path, ranks=ranks)
        assert job.wait() == [2] * ranks, job.words()
        assert "Traceback" not in job.words()
        return _line([line for line in job.words().splitlines() if "error: " in line.lower()])

    return start


def left_in(folder):
    """The files that a training has written, besides its output."""
    return [path.name for path in folder.iterdir() if path.suffix not in (".log", ".codes")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--epochs", "0"], ["--epochs must be greater than 0 (got 0)"]),
        (["--model", "transformr"], ["transformr", 'did you mean "transformer"']),
        (["--epoch", "3"], ["No such option", "--epochs"]),
        (["--model", "classifier"], ["--data", "data_gen digits"]),
        (["--backend", "nccl", "--device", "cpu"], ["nccl", "CUDA"]),
        (["--discovery", "slurm"], ["SLURM_STEP_ID", "srun"]),
    ],
)
def test_an_invalid_option_is_rejected_before_the_start(tmp_path, refused, options, words):
    line = refused(*options)
    for word in words:
        assert word in line
    assert left_in(tmp_path) == []


def test_an_invalid_option_under_mpiexec_is_reported_once(tmp_path):
    done = train("--epoch", "3", cwd=tmp_path, ranks=3)
    assert done.returncode == 2, done.stderr
    assert "No such option" in _line(error_lines(done))


def test_cuda_without_a_gpu_is_reported(tmp_path, refused, no_gpu):
    line = refused("--device", "cuda", ranks=2)
    assert "finds no cuda device" in line
    assert "--device auto" in line
    assert left_in(tmp_path) == []


def test_a_missing_file_is_one_error_for_all_ranks(tmp_path, refused):
    assert "nope.h5" in refused("--data", "nope.h5", ranks=2)


def test_a_file_with_another_shape_is_rejected(tmp_path, refused):
    with h5py.File(tmp_path / "small.h5", "w") as file:
        file["src"] = np.zeros((8, 1, 64), dtype=np.float32)
        file["tgt"] = np.zeros((8, 20, 64), dtype=np.float32)
    line = refused("--data", "small.h5", "--src-shape", "1,512")
    assert "small.h5" in line
    assert "512" in line


def test_shapes_that_the_model_does_not_support_are_rejected_on_all_ranks(tmp_path, refused):
    line = refused("--src-shape", "1,60", "--tgt-shape", "20,60", "--num-samples", "8", ranks=2)
    assert "8 attention heads" in line
    assert "64" in line


def test_a_truncated_file_is_rejected(tmp_path, refused):
    path = tmp_path / "cut.h5"
    with h5py.File(path, "w") as file:
        file["src"] = np.zeros((64, 1, 64), dtype=np.float32)
        file["tgt"] = np.zeros((64, 20, 64), dtype=np.float32)
    path.write_bytes(path.read_bytes()[:9000])
    assert "cut.h5" in refused("--data", str(path), ranks=2)


def test_an_unwritable_summary_is_rejected_before_the_training(tmp_path, refused):
    (tmp_path / "folder").mkdir()
    options = ["--src-shape", "1,64", "--tgt-shape", "20,64", "--num-samples", "8"]
    assert "--summary folder" in refused(*options, "--summary", "folder", ranks=2)
    assert not (tmp_path / "data").exists()


def test_integer_data_is_converted_to_floats(tmp_path, forks):
    with h5py.File(tmp_path / "int.h5", "w") as file:
        file["src"] = np.arange(160, dtype=np.int32).reshape(16, 10) % 7
        file["tgt"] = np.arange(16, dtype=np.int64).reshape(16, 1) % 3
    options = ["--model", "linear", "--data", "int.h5", "--epochs", "1", "--batch-size", "4"]
    forks.run(*options, cwd=tmp_path, ranks=1)


def test_scalar_samples_are_supported(tmp_path, forks):
    # 17 samples: rank 1 gets an empty share of the last step.
    with h5py.File(tmp_path / "flat.h5", "w") as file:
        file["src"] = np.arange(17, dtype=np.float32) / 17
        file["tgt"] = np.arange(17) % 3
    options = ["--model", "linear", "--data", "flat.h5", "--epochs", "1", "--batch-size", "4"]
    forks.run(*options, cwd=tmp_path, ranks=2)


def test_a_label_beyond_the_number_of_classes_is_reported(tmp_path, forks):
    with h5py.File(tmp_path / "labels.h5", "w") as file:
        file["src"] = np.zeros((16, 10), dtype=np.float32)
        file["tgt"] = np.arange(16) % 5
        file.attrs["num_classes"] = 4
    options = ["--model", "classifier", "--data", "labels.h5", "--epochs", "1", "--batch-size", "8"]
    job = forks.start(*options, cwd=tmp_path, ranks=2)
    assert job.wait() == [1, 1]
    assert "the label 4, but the model has 4 classes (0 to 3)" in _line(job.errors())
    assert "Traceback" not in job.words()
