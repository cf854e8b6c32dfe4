"""Running several checks: one that hangs or crashes is reported and does not affect the others."""

import time

from ddp_hpc.doctor.check_result import Check, Here, ok, warn
from ddp_hpc.doctor.run_checks import CHECKS, chosen, run_checks

GOOD = Check("good", "", lambda _here: ok("fine"))


def test_results_have_the_names_and_the_order_of_the_checks(login: Here) -> None:
    checks = [Check("b", "", lambda _here: warn("x", "do y")), GOOD]
    assert [result.line for result in run_checks(checks, login)] == [
        "warn  b               x; do y",
        "ok    good            fine",
    ]


def test_a_check_that_hangs_fails_and_the_others_continue(login: Here) -> None:
    start_s = time.monotonic()
    results = list(run_checks([Check("stuck", "", lambda _here: time.sleep(60), 0.3), GOOD], login))
    assert results[0].line == (
        "fail  stuck           aborted: no answer within 0.3 s; "
        "other checks are not affected; use --skip stuck to omit this one"
    )
    assert results[1].status == "ok"
    assert time.monotonic() - start_s < 30


def test_a_result_is_one_line_for_any_text(login: Here) -> None:
    nasty = Check("n", "", lambda _here: warn("a\nfail  python  \x1b[2J" + "x" * 5000, "b\rc"))
    (line,) = [result.line for result in run_checks([nasty], login)]
    assert line.isprintable()
    assert len(line) < 600


def test_only_and_skip_select_checks_in_their_usual_order() -> None:
    assert [c.name for c in chosen(("shm", "python"), ())] == ["python", "shm"]
    assert [c.name for c in chosen(("shm", "python"), ("shm",))] == ["python"]
    assert len(chosen((), ("torch",))) == len(CHECKS) - 1
