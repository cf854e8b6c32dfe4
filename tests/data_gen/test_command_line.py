"""The command line of `python -m data_gen`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from data_gen import Recipe, default_file_name


def test_without_options_the_default_file_is_written_once(tmp_path, run_generator):
    name = f"data/{default_file_name(Recipe(num_samples=64))}"
    first, second = (run_generator("--num-samples", "64") for _ in range(2))
    assert (first.returncode, first.stdout) == (0, f"{name}\n")
    assert "2.6 MiB written" in first.stderr
    assert (second.returncode, second.stdout) == (0, f"{name}\n")
    assert "reusing the existing file" in second.stderr
    assert [entry.name for entry in (tmp_path / "data").iterdir()] == [
        default_file_name(Recipe(num_samples=64))
    ]


def test_options_become_the_recipe(tmp_path, run_generator):
    options = (
        "--num-samples 5 --src-shape 3 --tgt-shape 2,2 --dtype float64 --seed 9 --distribution learnable"
    )
    done = run_generator(*options.split(), "--output", "x.safetensors")
    assert (done.returncode, done.stdout) == (0, "x.safetensors\n")
    recipe = Recipe(
        num_samples=5, src_shape=(3,), tgt_shape=(2, 2), dtype="float64", seed=9, distribution="learnable"
    )
    assert recipe.fingerprint.encode() in (tmp_path / "x.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sede", "1"], "No such option"),
        (["--num-samples", "0"], "num_samples must be at least 1 (got 0)"),
        (["--src-shape", "1x512"], "shape '1x512'"),
        (["--dtype", "int64"], "'int64' is not one of 'float32'"),
        (["--output", "file.npz"], "unknown suffix '.npz'"),
        (["--seed", "1", "digits"], "put options for digits after that word"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(tmp_path, run_generator, arguments, message):
    done = run_generator(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_imports_no_large_library():
    code = (
        "import sys\n"
        "for name in ('numpy', 'h5py', 'torch', 'sklearn', 'mpi4py'): sys.modules[name] = None\n"
        "sys.argv = ['data_gen', '--help']\n"
        "from data_gen.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("missing", "arguments", "package"),
    [
        ("h5py", "--num-samples 2", "h5py"),
        ("sklearn", "digits", "scikit-learn"),
    ],
)
def test_a_missing_library_is_reported_with_the_command_that_installs_it(
    tmp_path, missing, arguments, package
):
    code = (
        f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['data_gen', *{arguments.split()!r}]\n"
        "from data_gen.cli import main\n"
        f"import os; os.chdir({str(tmp_path)!r})\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "run pip install " in done.stderr
    assert package in done.stderr
