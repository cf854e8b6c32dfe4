"""What the first rank of a node finds: the run directory, and the output of dcgmi."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from ddp_hpc.node_check.node import dcgm_failure_in, node_problems, unseen
from ddp_hpc.node_check.results import LAUNCH


def dcgm_4(severity: int, text: str) -> str:
    """The form of the output of DCGM 4.2.3: a failed result with one warning.

    With severity 5 and a text about persistence mode, this is what a healthy DGX Spark has printed; the exit
    code of dcgmi was 226 (published as a test fixture of the project glimmer).
    """
    warning = {"error_category": 8, "error_id": 29, "error_severity": severity, "warning": text}
    result = {"entity_group": "GPU", "entity_group_id": 1, "entity_id": 3, "status": "Fail"}
    test = {"name": "software", "results": [{**result, "warnings": [warning]}]}
    categories = [{"category": "Deployment", "tests": [test]}]
    report = {"DCGM Diagnostic": {"test_categories": categories}, "metadata": {"version": "4.2.3"}}
    return "Successfully ran diagnostic for group.\n" + json.dumps(report)


@pytest.mark.parametrize("severity", [2, 6])
def test_a_gpu_that_must_be_isolated_or_reset_is_named(severity: int) -> None:
    said = dcgm_failure_in(dcgm_4(severity, "Detected a volatile\ndouble-bit ECC error"))
    assert said == "dcgmi diag: GPU 3: Detected a volatile double-bit ECC error"


@pytest.mark.parametrize("severity", [1, 3, 4, 5])
def test_a_failure_with_which_a_gpu_works_is_no_reason(severity: int) -> None:
    assert dcgm_failure_in(dcgm_4(severity, "Persistence mode for GPU 3 is disabled.")) == ""


@pytest.mark.parametrize(
    "output",
    [
        "",
        "Error: unable to establish a connection to the specified host: localhost\n",
        '{"DCGM GPU Diagnostic": {"test_categories": [{"tests": [{"results": [{"status": "Pass"}]}]}]}}',
        '{"results": "x", "tests": [1, null, {"results": [null, {"warnings": ["text"]}]}]}',
        "{damaged",
    ],
)
def test_other_output_is_no_reason(output: str) -> None:
    assert dcgm_failure_in(output) == ""


def test_the_run_directory_is_visible_if_it_has_the_file_of_this_launch(tmp_path: Path) -> None:
    (tmp_path / LAUNCH).write_text("this")
    assert unseen(tmp_path, "this") == ""
    assert "its content is out of date" in unseen(tmp_path, "another", limit_s=0.1)
    assert "/launch (No such file or directory)" in unseen(tmp_path / "x", "this", limit_s=0.1)


def test_a_file_that_becomes_visible_later_is_waited_for(tmp_path: Path) -> None:
    timer = threading.Timer(0.5, (tmp_path / LAUNCH).write_text, ["this"])
    timer.start()
    assert unseen(tmp_path, "this") == ""
    timer.join()


def test_a_node_without_gpus_and_with_a_run_directory_has_no_problems(tmp_path: Path) -> None:
    (tmp_path / LAUNCH).write_text("this")
    assert node_problems(tmp_path, {"DDP_HPC_LAUNCH": "this", "PATH": "/nonexistent"}) == []


def test_commands_that_report_a_bad_gpu_are_asked(tmp_path: Path) -> None:
    (tmp_path / LAUNCH).write_text("this")
    answers = {
        "nvidia-smi": "NVIDIA A100, 550.1, Default, Enabled, 7\n",
        "dcgmi": dcgm_4(2, "bad"),
    }
    for name, text in answers.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        program.chmod(0o755)
    environ = {"DDP_HPC_LAUNCH": "this", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    said = {problem.kind: problem.text for problem in node_problems(tmp_path, environ)}
    assert "GPU 0 had 7 memory errors that ECC could not correct" in said["nvidia-smi"]
    assert said["dcgmi"] == "dcgmi diag: GPU 3: bad"
