"""LSF's commands as small programs. Their output follows IBM's manual; none was recorded on a real LSF."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from ddp_hpc.errors import DdpHpcError, RequestError
from ddp_hpc.schedulers.deadline import find_deadline, kill_delay_s
from ddp_hpc.schedulers.lsf import query_and_cancel
from ddp_hpc.schedulers.lsf.query_and_cancel import parse_bhist, parse_json, read_job
from tests.queue.conftest import Programs, Run

SCRIPT = "#!/bin/bash\n#BSUB -W 00:10\n#BSUB -o logs/%J.out\nhostname\n"
NOT_FOUND = "Job <7> is not found\n"
BHIST = """
Job <7>, Job Name <train>, User <ann>, Project <default>, Command <#!/bin/bash
                     #BSUB -W 1;date>
Sun Nov 22 19:00:00: Submitted from host <login1>, to Queue <normal>, CWD </scrat
                     ch/ann>, Output File <train-%J.out>;

 RUNLIMIT
 1.0 min of login1
Sun Nov 22 19:00:01: Dispatched 2 Task(s) on Host(s) <a> <b>;
Sun Nov 22 19:00:01: Starting (Pid 12);
"""


def record(**fields: str) -> str:
    """Returns the output of `bjobs -json` with these fields."""
    known = {"JOBID": "7", "STAT": "RUN", "USER": "ann", "JOB_NAME": "train", "SUB_CWD": "/scratch/ann"}
    return json.dumps({"COMMAND": "bjobs", "JOBS": 1, "RECORDS": [{**known, **fields}]})


class TestBjobs:
    def test_hosts_times_and_log_of_a_running_job(self) -> None:
        fields = {"EXEC_HOST": "4*a:4*b", "RUN_TIME": "34 second(s)", "RUNTIMELIMIT": "60.0"}
        job = parse_json(record(**fields, OUTPUT_FILE="train-%J.out"), "7")
        assert (job.phase, job.word, job.end, job.nodes) == ("running", "RUN", "", "a,b")
        assert (job.elapsed_s, job.walltime_s, job.exit_code) == (34, 3600, None)
        assert (job.log, job.name, job.owner) == ("/scratch/ann/train-7.out", "train", "ann")

    @pytest.mark.parametrize(
        ("output", "log"),
        [
            ("$HOME/logs/%J.out", f"{Path.home()}/logs/7.out"),
            ("/logs/%J.%I", "/logs/7.0"),
            ("logs/", "/scratch/ann/logs/7.out"),
            ("", ""),
            ("/dev/null", ""),
        ],
    )
    def test_the_path_of_the_log_is_that_of_lsf(self, output: str, log: str) -> None:
        assert parse_json(record(OUTPUT_FILE=output), "7").log == log

    @pytest.mark.parametrize(
        ("stat", "reason", "code", "end", "exit_code", "signal"),
        [
            ("DONE", "", "", "done", 0, None),
            ("EXIT", "", "75", "failed", 75, None),
            (
                "EXIT",
                "TERM_RUNLIMIT: job killed after reaching LSF run time limit",
                "140",
                "walltime",
                None,
                12,
            ),
            (
                "EXIT",
                "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit",
                "137",
                "memory",
                None,
                9,
            ),
            ("EXIT", "TERM_OWNER: job killed by owner", "130", "cancelled", None, 2),
            ("EXIT", "TERM_OWNER: job killed by owner", "", "cancelled", None, None),
            (
                "EXIT",
                "TERM_EXTERNAL_SIGNAL: job killed by a signal external to LSF",
                "139",
                "failed",
                None,
                11,
            ),
            ("EXIT", "TERM_ORPHAN_SYSTEM: orphan job terminated", "", "dropped", None, None),
            ("EXIT", "TERM_SOMETHING_NEW: unknown", "1", "failed", 1, None),
            ("ZOMBI", "", "", "node", None, None),
        ],
    )
    def test_the_cause_of_the_end_is_read_from_the_termination_reason(
        self, stat: str, reason: str, code: str, end: str, exit_code: int | None, signal: int | None
    ) -> None:
        job = parse_json(record(STAT=stat, EXIT_REASON=reason, EXIT_CODE=code), "7")
        assert (job.phase, job.end, job.exit_code, job.signal) == ("ended", end, exit_code, signal)

    def test_a_waiting_job_has_a_reason(self) -> None:
        job = parse_json(record(STAT="PEND", PEND_REASON="New job is waiting for scheduling;"), "7")
        assert (job.phase, job.reason) == ("waiting", "New job is waiting for scheduling")

    def test_a_suspended_job_is_reported_with_the_command_that_releases_it(self) -> None:
        assert "bresume 7 releases it" in parse_json(record(STAT="PSUSP"), "7").reason

    def test_an_array_is_refused_with_an_example_of_a_job_id(self) -> None:
        two = json.dumps({"RECORDS": [{"JOBID": "7[1]", "STAT": "RUN"}, {"JOBID": "7[2]", "STAT": "RUN"}]})
        with pytest.raises(RequestError, match=r"such as 7\[1\]"):
            parse_json(two, "7")

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", "null", '{"RECORDS": []}', '{"RECORDS": [1]}', record(JOBID="8")]
    )
    def test_invalid_output_is_refused(self, text: str) -> None:
        with pytest.raises(DdpHpcError, match="bjobs -l 7"):
            parse_json(text, "7")

    def test_an_unknown_state_is_refused_with_its_name(self) -> None:
        with pytest.raises(DdpHpcError, match="'LOST'"):
            parse_json(record(STAT="LOST"), "7")

    def test_an_error_of_bjobs_is_reported(self, programs: Programs) -> None:
        programs.answers("bjobs", "", code=255, err="Cannot open the configuration file\n")
        with pytest.raises(DdpHpcError, match="Cannot open the configuration file"):
            read_job("7")


class TestBhist:
    @pytest.mark.parametrize(
        ("line", "end", "exit_code"),
        [
            ("Done successfully. The CPU time used is 1.0 seconds;", "done", 0),
            ("Exited with exit code 75. The CPU time used is 1.0 seconds;", "failed", 75),
            ("Exited by signal 9. The CPU time used is 1.0 seconds;", "failed", None),
            (
                "Exited with exit code 140. The CPU time used is 1 seconds;\n"
                "Sun Nov 22 19:01:09: Completed <exit>; TERM_RUNLIMIT: job killed after reaching LSF "
                "run time limit;",
                "walltime",
                140,
            ),
        ],
    )
    def test_bhist_reports_how_the_job_ended(self, line: str, end: str, exit_code: int | None) -> None:
        job = parse_bhist(f"{BHIST}Sun Nov 22 19:01:09: {line}\n", "7")
        assert job
        assert (job.end, job.exit_code, job.name, job.owner) == (end, exit_code, "train", "ann")
        assert job.log == "/scratch/ann/train-7.out"

    def test_bhist_is_not_used_for_a_job_that_has_not_ended(self) -> None:
        assert parse_bhist(BHIST, "7") is None

    def test_bhist_is_used_for_jobs_unknown_to_bjobs(self, programs: Programs) -> None:
        programs.answers("bjobs", "", code=255, err=NOT_FOUND)
        programs.answers("bhist", f"{BHIST}Sun Nov 22 19:01:09: Done successfully. The CPU time used is 1;\n")
        job = read_job("7")
        assert job
        assert job.end == "done"

    def test_without_bhist_the_job_is_unknown(self, programs: Programs) -> None:
        programs.answers("bjobs", json.dumps({"RECORDS": [{"JOBID": "7", "ERROR": "Job <7> is not found"}]}))
        assert read_job("7") is None
        programs.answers("bhist", "", code=255, err="No matching job found\n")
        assert read_job("7") is None


class TestCommands:
    @pytest.mark.parametrize(
        ("answer", "job_id"),
        [
            ("Job <123> is submitted to queue <gpu>.", "123"),
            ("Job <123> is submitted to default queue <normal>.", "123"),
            ("Job <123>: Job has already finished", None),
            ("123", None),
        ],
    )
    def test_the_job_id_is_in_the_last_line_of_bsub(self, answer: str, job_id: str | None) -> None:
        assert query_and_cancel.job_id_of(answer) == job_id

    def test_submit_passes_the_script_to_the_stdin_of_bsub(
        self, programs: Programs, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "job.sh").write_text(SCRIPT)
        programs.program("bsub", f'cat >"{tmp_path}/read"; echo "Job <12> is submitted to queue <gpu>."')
        done = run("submit", "job.sh", "--account", "abc", "--profile", "generic_lsf")
        assert (done.code, done.out) == (0, "12\n"), done.err
        assert (tmp_path / "read").read_text() == SCRIPT
        assert programs.called("bsub") == ["bsub -P abc"]
        assert (tmp_path / "logs").is_dir()

    def test_options_override_the_directives_of_a_script(
        self, programs: Programs, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "job.sh").write_text(SCRIPT)
        programs.program("bsub", 'echo "Job <12> is submitted to queue <gpu>."')
        options = ["--walltime", "01:30:00", "--queue", "gpu", "--name", "big"]
        assert run("submit", "job.sh", "--profile", "generic_lsf", *options).code == 0
        assert programs.called("bsub") == ["bsub -W 01:30 -q gpu -J big"]
        done = run("submit", "job.sh", "--profile", "generic_lsf", "--nodes", "2")
        assert (done.code, "--nodes and --qos cannot override directives of LSF" in done.err) == (2, True)

    def test_a_refusal_of_bsub_is_reported_with_its_message(
        self, programs: Programs, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "job.sh").write_text(SCRIPT)
        programs.answers("bsub", "", code=255, err="gpu: No such queue. Job not submitted.\n")
        done = run("submit", "job.sh")
        assert done.code == 2
        assert "bsub rejected the job: gpu: No such queue. Job not submitted." in done.err

    def test_status_and_logs_and_cancel_use_the_commands_of_lsf(
        self, programs: Programs, run: Run, tmp_path: Path
    ) -> None:
        log = tmp_path / "train-7.out"
        log.write_text("hello\n")
        programs.answers("bjobs", record(OUTPUT_FILE=str(log), RUN_TIME="5 second(s)"))
        programs.answers("bkill", "Job <7> is being terminated\n")
        assert "running" in run("status", "7").out
        assert run("logs", "7").out == "hello\n"
        assert run("cancel", "7").code == 0
        assert programs.called("bkill") == ["bkill 7"]

    def test_bkill_decides_whether_a_job_is_cancelled(self, programs: Programs) -> None:
        programs.answers("bkill", "", code=255, err="Job <7>: Job has already finished\n")
        assert query_and_cancel.cancel("7") == "Job <7>: Job has already finished"


class TestTheDeadline:
    @pytest.mark.parametrize(
        ("answer", "left_s"),
        [
            ("60.0;600 second(s);0:50 L", 3000),
            ("60.5;600 second(s);0:50 L", 3030),
            ("01:00:00;00:10:00;0:50 L", 3000),
            ("60.0/hostA;600 second(s);0:50 L", 3000),
            ("60.0/hostA;600 second(s);1:00 E", None),
            ("-;600 second(s);-", None),
            ("", None),
        ],
    )
    def test_the_remaining_time_is_the_run_limit_minus_the_run_time(
        self, programs: Programs, answer: str, left_s: int | None
    ) -> None:
        programs.answers("bjobs", f"{answer}\n")
        found = find_deadline({"LSB_JOBID": "7"})
        if left_s is None:
            assert found is None
        else:
            assert found
            assert found.source == "bjobs"
            assert found.at_s - time.time() == pytest.approx(left_s, abs=5)

    def test_the_time_between_signals_is_read_from_lsb_params(self) -> None:
        assert kill_delay_s({"LSB_JOBID": "7"}) == 10.0
