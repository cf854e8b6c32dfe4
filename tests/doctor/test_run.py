"""Many checks: one that hangs or dies is one line, and the others are not held up."""

import os
import signal
import time

import pytest

from ddp_hpc.doctor.result import Check, Here, ok, warn
from ddp_hpc.doctor.run import CHECKS, chosen, run_checks
from ddp_hpc.errors import RequestError

GOOD = Check("good", "", lambda _here: ok("fine"))


def test_results_carry_the_checks_name_and_come_in_order(login: Here) -> None:
    checks = [Check("b", "", lambda _here: warn("x", "do y")), GOOD]
    assert [result.line for result in run_checks(checks, login)] == [
        "warn  b               x; do y",
        "ok    good            fine",
    ]


def test_a_check_that_hangs_fails_with_its_name_and_the_rest_go_on(login: Here) -> None:
    start_s = time.monotonic()
    results = list(run_checks([Check("stuck", "", lambda _here: time.sleep(60), 0.3), GOOD], login))
    assert results[0].line == (
        "fail  stuck           given up: no answer within 0.3 s; "
        "the others are not held up by it; --skip stuck leaves it out"
    )
    assert results[1].status == "ok"
    assert time.monotonic() - start_s < 5


def test_a_check_that_takes_its_process_with_it_fails_alone(login: Here) -> None:
    results = list(
        run_checks([Check("abort", "", lambda _here: os.kill(os.getpid(), signal.SIGKILL)), GOOD], login)
    )
    assert results[0].what == "given up: ended by SIGKILL (it said nothing)"
    assert results[1].status == "ok"


def test_checks_run_at_once(login: Here) -> None:
    def work(_here: Here) -> object:
        time.sleep(0.5)
        return ok("")

    start_s = time.monotonic()
    list(run_checks([Check(f"c{i}", "", work) for i in range(6)], login))
    assert time.monotonic() - start_s < 2.0


def test_a_check_may_spoil_its_own_environment_alone(login: Here) -> None:
    def spoil(_here: Here) -> object:
        os.environ["DOCTOR_WAS_HERE"] = "1"
        return ok("")

    list(run_checks([Check("spoil", "", spoil)], login))
    assert "DOCTOR_WAS_HERE" not in os.environ


def test_one_result_is_one_line_whatever_a_program_said(login: Here) -> None:
    nasty = Check("n", "", lambda _here: warn("a\nfail  python  \x1b[2J" + "x" * 5000, "b\rc"))
    (line,) = [result.line for result in run_checks([nasty], login)]
    assert line.isprintable()
    assert len(line) < 600


def test_only_and_skip_choose_by_name_in_the_checks_own_order() -> None:
    assert [c.name for c in chosen(("shm", "python"), ())] == ["python", "shm"]
    assert [c.name for c in chosen(("shm", "python"), ("shm",))] == ["python"]
    assert len(chosen((), ("torch",))) == len(CHECKS) - 1


@pytest.mark.parametrize(("only", "skip"), [(("tourch",), ()), ((), ("tourch",))])
def test_an_unknown_name_is_refused_with_the_nearest(only: tuple[str, ...], skip: tuple[str, ...]) -> None:
    with pytest.raises(RequestError, match=r"tourch: no such check \(did you mean \"torch\"\?\)"):
        chosen(only, skip)


def test_nothing_left_to_run_is_refused() -> None:
    with pytest.raises(RequestError, match="leave no check"):
        chosen(("torch",), ("torch",))


def test_names_are_unique_and_limits_end() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert all(0 < check.limit_s <= 90 for check in CHECKS)


def test_none_of_the_cheap_checks_of_this_machine_gives_up() -> None:
    slow = ("torch", "nccl", "mpi4py", "mpi-launcher", "allreduce", "hdf5-locking")
    results = list(run_checks(chosen((), slow), Here(dict(os.environ))))
    assert not [result.line for result in results if "given up" in result.what]
