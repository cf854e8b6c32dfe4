"""A hanging rank is reported: real processes, real signals, and a network that is really cut."""

import os
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ddp_hpc.base.run_outcomes import Cause
from ddp_hpc.discovery.rank_communication import SingleComm
from ddp_hpc.discovery.world import World
from ddp_hpc.training.health import heartbeat as heartbeat_module
from ddp_hpc.training.health.heartbeat import start_heartbeat
from ddp_hpc.training.health.heartbeat_messages import Beat, Limits
from ddp_hpc.training.health.heartbeat_monitor import Monitor
from ddp_hpc.training.process_group.flight_recorder import turn_on_flight_recorder
from tests.conftest import clean_environ
from tests.discovery.simulated_mpi import mpi_world, on_all_ranks
from tests.waiting import PATIENCE

from .beating import LOST

BEATING = Path(__file__).with_name("beating.py")


class Ranks:
    """Ranks of `beating.py`, which are killed at the end."""

    def __init__(self, folder, fault, *limits, size=2):
        argv = [sys.executable, str(BEATING)]
        self.processes = [
            subprocess.Popen(
                [*argv, str(rank), str(size), str(folder), fault, *limits],
                env=clean_environ(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(size)
        ]

    def words_of(self, rank, timeout_s=20):
        """The output and the exit code of a rank."""
        text, _ = self.processes[rank].communicate(timeout=PATIENCE * timeout_s)
        return text, self.processes[rank].returncode


@pytest.fixture
def ranks(tmp_path):
    started = []

    def start(*words, **more):
        started.append(Ranks(tmp_path, *words, **more))
        return started[-1]

    yield start
    for process in (p for job in started for p in job.processes):
        process.kill()
        process.communicate()


def test_working_ranks_are_not_reported_and_end_normally(ranks):
    job = ranks("none:", "hang_s=1", "silent_s=1", "gone_s=0.1", "first_s=5", size=3)
    assert [job.words_of(rank) for rank in range(3)] == [("", 0)] * 3


def test_a_sleeping_rank_is_reported_with_node_step_phase_and_code(ranks, tmp_path):
    text, code = ranks("sleep:2", "hang_s=0.4", size=3).words_of(0)
    assert code == LOST
    assert text.count("\n") == 1
    found = re.match(
        r"rank 2 on n2 has been in step 3 \(data\) for (\S+) s \((.*)\), and all others are waiting; ", text
    )
    assert found, text
    assert 0.4 <= float(found[1]) < 5
    assert re.fullmatch(r"at beating\.py:\d+ read_from_a_dead_server", found[2])
    stack = (tmp_path / "stacks" / "rank00002.txt").read_text()
    assert str(tmp_path / "stacks" / "rank00002.txt") in text
    assert "in main" in stack
    assert "in read_from_a_dead_server" in stack


def test_a_hanging_run_directory_does_not_delay_the_report(ranks, tmp_path):
    (tmp_path / "stacks").mkdir()
    os.mkfifo(tmp_path / "stacks" / "rank00001.txt")  # writing there blocks forever
    text, code = ranks("sleep:1", "hang_s=0.4").words_of(0)
    assert code == LOST
    assert "read_from_a_dead_server), and all others are waiting; if the work was only slow" in text


def test_a_hang_of_rank_0_is_reported(ranks):
    text, _ = ranks("sleep:0", "hang_s=0.4").words_of(0)
    assert text.startswith("rank 0 on n0 has been in step 3 (data)")
    assert "read_from_a_dead_server" in text


def test_a_single_process_monitors_itself(ranks):
    text, code = ranks("sleep:0", "hang_s=0.4", size=1).words_of(0)
    assert (text[: text.index(" for ")], code) == ("rank 0 on n0 has been in step 3 (data)", LOST)
    assert "others" not in text


def test_no_rank_is_blamed_if_all_hang_at_the_same_place(ranks):
    text, _ = ranks("wait:all", "hang_s=0.4").words_of(0)
    assert re.match(
        r"all 2 ranks have been in step 3 \(backward\) for \S+ s \(at beating\.py:\d+ wait_where_all_wait\), "
        "and none is behind: check the network",
        text,
    )


@pytest.mark.parametrize("kind", ["stop", "lock"])
def test_a_rank_that_does_not_answer_is_reported_with_its_last_position(ranks, kind):
    """A stopped process, and one that holds the GIL in C code."""
    text, code = ranks(f"{kind}:1", "hang_s=0.4").words_of(0)
    assert code == LOST
    assert re.match(r"rank 1 on n1 has been .*, and all others are waiting", text), text
    assert "no answer: its process is stopped, or Python is blocked in a C call" in text


@pytest.mark.check
def test_the_limit_of_the_first_step_ends_with_it_even_if_the_rank_then_sends_nothing(ranks):
    """A rank that stops directly after its first step, in the interval between two beats."""
    text, code = ranks("stop:1:1", "hang_s=2", "first_s=60").words_of(0)
    assert code == LOST
    assert text.startswith("rank 1 on n1 has been in step 1 (data) for ")


def test_a_killed_rank_is_reported_as_gone(ranks):
    text, code = ranks("kill:1", "gone_s=0.3").words_of(0)
    assert code == LOST
    assert text.startswith("rank 1 on n1 is gone: the connection closed unexpectedly 0.3 s ago")


def test_other_ranks_learn_at_once_which_rank_is_gone(ranks):
    """For the error of a rank that only knows that a peer has closed its connection."""
    job = ranks("who:1", size=3)
    assert [job.words_of(0)[0], job.words_of(2)[0]] == ["rank 1 on n1\n"] * 2


@pytest.mark.parametrize(
    ("kind", "limit", "words"),
    [
        ("kill", "gone_s=0.3", "rank 0 on n0 is gone: its connection closed"),
        ("stop", "hang_s=0.4", "lost contact with rank 0 on n0: no message for "),
    ],
)
def test_other_ranks_detect_the_loss_of_rank_0(ranks, kind, limit, words):
    job = ranks(f"{kind}:0", limit)
    text, code = job.words_of(1)
    assert text.startswith(words)
    assert code == LOST


@pytest.mark.parametrize(
    ("limits", "of_rank_0", "of_rank_1"),
    [
        (
            "silent_s=1",
            r"rank 1 on n1 is cut off, last seen ",
            r"lost contact with rank 0 on n0: the node or its network is down",
        ),
        (  # the kernel has not given up yet
            "silent_s=60 hang_s=1 first_s=1",
            r"rank 1 on n1 has been .*no answer: its node does not answer: the node, or the network ",
            r"lost contact with rank 0 on n0: no message for \S+ s, and its node does not answer: ",
        ),
    ],
)
@pytest.mark.check
def test_a_cut_network_is_distinguished_from_a_silent_process(tmp_path, limits, of_rank_0, of_rank_1):
    """An unplugged cable closes no connection, so only a time limit detects it."""
    if subprocess.run(["unshare", "-rnpf", "true"], capture_output=True).returncode != 0:
        pytest.skip("no right to a network of its own (unshare -rnpf)")
    rank = f"{sys.executable} {BEATING} %d 2 {tmp_path} cut:1 {limits}"
    both = f"ip link set lo up; {rank % 0} & {rank % 1}; wait"
    done = subprocess.run(
        ["unshare", "-rnpf", "--kill-child", "sh", "-c", both],
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=30,
    )
    lines = sorted(done.stdout.splitlines())
    assert re.match(of_rank_1, lines[0]), done.stdout
    assert re.match(of_rank_0, lines[1]), done.stdout
    assert "its process is stopped" not in done.stdout


@pytest.mark.parametrize(
    ("fault", "size"),
    [
        ("moving:1", 2),  # the others exceed the time limit, but wait for a rank that makes progress
        ("pause:all", 2),  # the job was suspended
        ("pause:0", 1),
    ],
)
def test_ranks_that_make_progress_are_not_ended(ranks, fault, size):
    job = ranks(fault, "hang_s=1", "silent_s=1", size=size)
    assert [job.words_of(rank) for rank in range(size)] == [("", 0)] * size


def _world(rank, size):
    return World(rank=rank, world_size=size, local_rank=rank, local_size=size, hostname="n", launcher="hand")


class _Overhears:
    """A `Comm` that records the values of rank 0."""

    def __init__(self, comm):
        self._comm, self.heard = comm, []

    def bcast(self, value):
        self.heard.append(self._comm.bcast(value))
        return self.heard[-1]

    def combine(self, value, rule):
        return self._comm.combine(value, rule)


def _two_ranks(lost, **limits):
    comms = [_Overhears(comm) for comm in mpi_world(2, 2)]
    limits = {"hang_s": 0.4, "first_s": 60, "gone_s": 0.2} | limits
    heartbeats = on_all_ranks(
        lambda rank: start_heartbeat(
            _world(rank, 2), comms[rank], "127.0.0.1", "127.0.0.1", stacks=None, on_lost=lost.append, **limits
        ),
        2,
    )
    return heartbeats, comms[1].heard[0]


def test_unidentified_connections_are_closed_without_harm():
    lost = []
    heartbeats, (port, nonce, _) = _two_ranks(lost)
    greetings = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\x00\n" * 9,
        b"x" * 5000,
        b"hello 0000000000000000 1 n\n",
        f"hello {nonce} 2 n\n".encode(),  # a rank that does not exist
        f"hello {nonce} -1 n\n".encode(),
        f"hello {nonce} 1 n\n".encode(),  # a rank that has already connected
        f"hello {nonce} one n\n".encode(),
        b"hello\n",
        b"bye\n",
    ]
    for greeting in greetings:
        with socket.create_connection(("127.0.0.1", int(port)), timeout=5) as stranger:
            stranger.sendall(greeting)
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b"", greeting
    time.sleep(0.5)
    assert lost == []
    assert all(heartbeat.thread.thread.is_alive() for heartbeat in heartbeats)
    for heartbeat in reversed(heartbeats):
        heartbeat.close()
    assert not any(heartbeat.thread.thread.is_alive() for heartbeat in heartbeats)
    assert lost == []


def test_silent_connections_are_closed_if_there_are_too_many(monkeypatch):
    monkeypatch.setattr("ddp_hpc.training.health.heartbeat_monitor._MAX_UNIDENTIFIED", 4)
    lost = []
    heartbeats, (port, _, _) = _two_ranks(lost)
    strangers = [socket.create_connection(("127.0.0.1", int(port)), timeout=5) for _ in range(10)]
    for stranger in strangers[:6]:
        assert stranger.recv(1) == b""
    for stranger in strangers:
        stranger.close()
    for heartbeat in reversed(heartbeats):
        heartbeat.close()
    assert lost == []


def test_a_connection_without_the_nonce_is_rejected():
    listener = socket.create_server(("127.0.0.1", 0))
    limits = Limits(silent_s=60, hang_s=60, first_s=60, connect_s=60, gone_s=60, period_s=2, answer_s=5)
    watch = Monitor(_world(0, 2), limits, lambda _: Beat(), (listener, "right"), None, print)
    watch.thread.start()
    answers = []
    for word in ("wrong", "right"):
        with socket.create_connection(listener.getsockname(), timeout=5) as guest:
            guest.sendall(f"hello {word} 1 n\n{Beat().line()}\n".encode())
            with suppress(ConnectionResetError):
                answers.append((word, guest.recv(1)))
    watch.stop()
    watch.thread.join(5)
    assert answers[-1] == ("right", b"\n")
    assert ("wrong", b"\n") not in answers


def test_a_rank_with_a_better_error_has_time_to_report_first():
    lost = []
    heartbeats, _ = _two_ranks(lost, gone_s=0.7)
    heartbeats[1].thread._connection.shutdown(socket.SHUT_RDWR)  # as the kernel does for a dead process
    assert heartbeats[0].gone_ranks(2.0) == "rank 1 on n"
    time.sleep(0.3)
    assert lost == []
    for heartbeat in heartbeats:
        heartbeat.thread.thread.join(5)
    assert sorted((end.rank, end.reason[:6]) for end in lost) == [(0, "rank 0"), (1, "rank 1")]
    assert all(0.7 <= end.silent_s < 5 for end in lost), "the time since the connection was closed"


def test_the_end_of_a_hang_says_for_how_long_the_rank_has_made_no_progress():
    lost = []
    heartbeats, _ = _two_ranks(lost)
    for step in (0, 1):
        for heartbeat in heartbeats:
            heartbeat.at(step, "data")
    began_s = time.monotonic()
    heartbeats[0].thread.thread.join(30)
    [end] = lost
    assert end.cause is Cause.HANG
    assert 0.4 <= end.silent_s <= time.monotonic() - began_s
    heartbeats[1].close()


def test_a_rank_whose_connection_rank_0_has_not_accepted_yet_hears_the_goodbye(monkeypatch):
    listen = Monitor._listen

    def listen_after_the_end(monitor, wait_s):
        if not monitor._stopped.is_set():
            monitor._stopped.wait(10)
        else:
            listen(monitor, wait_s)

    monkeypatch.setattr(Monitor, "_listen", listen_after_the_end)
    lost = []
    heartbeats, _ = _two_ranks(lost)
    heartbeats[0].close()
    time.sleep(0.6)
    assert lost == []
    heartbeats[1].close()


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_closes_first_is_not_reported(first):
    lost = []
    heartbeats, _ = _two_ranks(lost)
    heartbeats[first].close()
    heartbeats[first].close()
    time.sleep(0.6)
    assert lost == []
    heartbeats[1 - first].close()


def test_an_unreachable_port_disables_only_the_heartbeat(monkeypatch):
    def refuse(address, timeout):
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(heartbeat_module.socket, "create_connection", refuse)
    lost = []
    heartbeats, _ = _two_ranks(lost)
    for heartbeat in heartbeats:
        assert "no heartbeat" in heartbeat.note
        assert "rank 1 on n" in heartbeat.note
        assert "Connection refused" in heartbeat.note
        heartbeat.at(0, "data")
        heartbeat.close()
    assert lost == []


def test_positions_are_ordered_by_step_micro_batch_and_phase():
    heartbeat = start_heartbeat(
        _world(0, 1), SingleComm(), "", "", hang_s=60, first_s=60, stacks=None, on_lost=print
    )
    places = []
    for step, phase in [
        (7, "data"),
        (7, "backward"),
        (7, "data"),  # the second micro-batch
        (7, "backward"),
        (7, "optimizer"),
        (8, "data"),
    ]:
        heartbeat.at(step, phase)
        places.append(heartbeat.now().place)
    heartbeat.close()
    assert places == sorted(set(places))


def test_the_first_step_has_a_separate_time_limit():
    heartbeat = start_heartbeat(
        _world(0, 1), SingleComm(), "", "", hang_s=10, first_s=90, stacks=None, on_lost=print
    )
    limits = [heartbeat.now().limit_s]
    for step, phase in [(120, "data"), (120, "exchange"), (121, "data")]:
        heartbeat.at(step, phase)
        limits.append(heartbeat.now().limit_s)
    heartbeat.close()
    assert limits == [90, 90, 90, 10]


def test_the_flight_recorder_writes_to_the_run_directory(tmp_path):
    environ = {"DDP_HPC_RUN_DIR": str(tmp_path / "run")}
    turn_on_flight_recorder(environ)
    assert environ == {
        "DDP_HPC_RUN_DIR": str(tmp_path / "run"),
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "run" / "flight" / "rank_"),
    }
    assert (tmp_path / "run" / "flight").is_dir()


def test_flight_recorder_settings_of_the_user_are_kept(tmp_path):
    own = {
        "DDP_HPC_RUN_DIR": str(tmp_path),
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "7",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/somewhere/rank_",
    }
    environ = dict(own)
    turn_on_flight_recorder(environ)
    assert environ == own


def test_nothing_is_recorded_without_a_writable_run_directory(tmp_path):
    (tmp_path / "file").write_text("")
    for environ in ({}, {"DDP_HPC_RUN_DIR": str(tmp_path / "file")}):
        before = dict(environ)
        turn_on_flight_recorder(environ)
        assert environ == before
