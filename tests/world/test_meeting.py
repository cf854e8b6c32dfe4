"""The door and the knocks, over real sockets on loopback."""

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from ddp_hpc.errors import RendezvousError, ReportedElsewhereError
from ddp_hpc.world.meeting import Door, candidate_ports, knock, open_listener
from ddp_hpc.world.rendezvous import MeetingPoint, knock_and_wait, wait_for_all

HERE = "127.0.0.1"


@contextmanager
def open_door(key: str = "job-1", expected: set[int] | None = None, timeout_s: float = 20) -> Iterator[Door]:
    """A door that is served in a thread until the block ends."""
    with open_listener([0], loopback_only=True) as listener:
        door = Door(listener, key, {"port": listener.getsockname()[1]})
        helper = threading.Thread(target=door.serve, args=(expected or {-1}, timeout_s))
        helper.start()
        try:
            yield door
        finally:
            door.stop()
            helper.join()
            door.dismiss()


@contextmanager
def foreign_service(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """Another program's port: `answer` deals with each connection."""
    with socket.create_server((HERE, 0)) as server:

        def one(connection: socket.socket) -> None:
            with connection:
                answer(connection)

        def serve() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=one, args=server.accept()[:1]).start()

        threading.Thread(target=serve).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def port_of(door: Door) -> int:
    return door.listener.getsockname()[1]


def closed_port() -> int:
    with socket.create_server((HERE, 0)) as server:
        return server.getsockname()[1]


def test_a_right_knock_gets_the_answer_and_then_the_verdict() -> None:
    with open_door(expected={1}) as door:
        welcome = knock(HERE, [port_of(door)], "job-1", 1, 5)
        assert welcome.answer == {"port": port_of(door)}
    assert welcome.wait_for_go(5) == "go"
    assert door.arrived == {1: socket.gethostname()}


def test_the_candidates_are_the_same_for_all_ranks_and_others_for_another_job() -> None:
    assert candidate_ports("slurm-1.0.0") == candidate_ports("slurm-1.0.0")
    assert candidate_ports("slurm-1.0.0") != candidate_ports("slurm-2.0.0")


def test_candidates_lie_below_the_ports_that_the_kernel_gives_away() -> None:
    for job in range(1000):
        ports = candidate_ports(f"slurm-{job}.0.0")
        assert len(set(ports)) == len(ports) == 32
        assert all(20000 <= port < 32000 for port in ports)


def test_a_taken_candidate_is_passed_over_never_shared() -> None:
    with ExitStack() as stack:
        first, second = candidate_ports("taken-test")[:2]
        stack.enter_context(socket.create_server((HERE, first)))
        door = stack.enter_context(open_listener([first, second], loopback_only=True))
        assert door.getsockname()[1] == second


def test_a_knock_finds_the_door_behind_a_taken_candidate() -> None:
    with foreign_service(lambda c: c.sendall(b"SSH-2.0\r\n")) as taken, open_door() as door:
        assert knock(HERE, [taken, port_of(door)], "job-1", 1, 10).port == port_of(door)


@pytest.mark.parametrize(
    "answer",
    [
        lambda c: c.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        lambda c: c.sendall(b"\x00\xff\xfe\n"),
        lambda c: c.sendall(b"welcome to ProFTPD\n"),
        lambda c: c.sendall(b"x" * 100_000),
        lambda c: None,
    ],
    ids=["http", "bytes", "welcome", "endless", "closes"],
)
def test_a_foreign_service_is_taken_for_no_door(answer: Callable[[socket.socket], object]) -> None:
    with foreign_service(answer) as port:
        start = time.monotonic()
        with pytest.raises(RendezvousError, match=rf"no answer at {HERE}, port {port}, in 1 s: "):
            knock(HERE, [port], "job-1", 1, 1)
        assert time.monotonic() - start < 3


def drip(connection: socket.socket) -> None:
    with suppress(OSError):
        for _ in range(60):
            connection.sendall(b"x")
            time.sleep(0.1)


@pytest.mark.parametrize("answer", [lambda c: time.sleep(4), drip], ids=["silent", "dripping"])
def test_a_foreign_service_that_keeps_one_waiting_costs_no_more_than_the_limit(
    answer: Callable[[socket.socket], object],
) -> None:
    with foreign_service(answer) as port:
        start = time.monotonic()
        with pytest.raises(RendezvousError, match="no answer in time"):
            knock(HERE, [port], "job-1", 1, 1)
        assert time.monotonic() - start < 3


def test_another_jobs_door_turns_one_away() -> None:
    with open_door(key="job-2") as door:
        with pytest.raises(RendezvousError, match="belongs to something else"):
            knock(HERE, [port_of(door)], "job-1", 1, 0.5)
        assert door.arrived == {}


def test_a_knock_before_the_door_is_there_is_tried_again() -> None:
    port = closed_port()
    found: list[int] = []
    guest = threading.Thread(target=lambda: found.append(knock(HERE, [port], "job-1", 1, 10).port))
    guest.start()
    time.sleep(0.5)
    with open_listener([port], loopback_only=True) as listener:
        door = Door(listener, "job-1", {})
        assert door.serve({1}, 10) == set()
        door.dismiss()
    guest.join()
    assert found == [port]


def test_a_closed_port_is_named_with_its_cause() -> None:
    port = closed_port()
    with pytest.raises(
        RendezvousError, match=f"no answer at {HERE}, port {port}, in 0.5 s: Connection refused"
    ):
        knock(HERE, [port], "job-1", 1, 0.5)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "n" * 64, "n1..x", "a\0b"])
def test_a_name_that_does_not_resolve_is_said_to(host: str) -> None:
    with pytest.raises(RendezvousError, match="the name does not resolve"):
        knock(host, [1], "job-1", 1, 0.3)


def test_guests_that_say_nothing_go_away_or_talk_nonsense_do_not_block_the_door() -> None:
    with ExitStack() as stack, open_door(expected={1}) as door:
        for words in (
            None,
            b"",
            b"ddp-hpc-1 job-1",
            b"ddp-hpc-1 job-1 x host\n",
            b"\xff" * 5000,
            b"GET /\r\n",
        ):
            guest = stack.enter_context(socket.create_connection((HERE, port_of(door))))
            if words is None:
                guest.close()
            else:
                guest.sendall(words)
        start = time.monotonic()
        knock(HERE, [port_of(door)], "job-1", 1, 10).connection.close()
        assert time.monotonic() - start < 2
    assert set(door.arrived) == {1}


def test_a_guest_that_vanishes_after_its_welcome_does_not_keep_the_others_waiting() -> None:
    with open_door(expected={1, 2}) as door:
        knock(HERE, [port_of(door)], "job-1", 1, 5).connection.close()
        second = knock(HERE, [port_of(door)], "job-1", 2, 5)
    assert second.wait_for_go(5) == "go"


def test_ranks_that_do_not_come_are_named_to_all_who_did() -> None:
    with open_listener([0], loopback_only=True) as listener:
        point = MeetingPoint(HERE, [listener.getsockname()[1]], "job-1", "a test")
        told: list[BaseException] = []

        def guest() -> None:
            try:
                knock_and_wait(point, "node x (rank 2)", 2, 5, 15)
            except ReportedElsewhereError as error:
                told.append(error)

        thread = threading.Thread(target=guest)
        thread.start()
        door = Door(listener, "job-1", {})
        with pytest.raises(RendezvousError) as caught:
            wait_for_all(door, {1, 2, 3}, 1, HERE)
        thread.join()
    text = str(caught.value)
    assert f"2 of 3 ranks did not come to rank 0 ({socket.gethostname().partition('.')[0]}, {HERE}:" in text
    assert "within 1 s: rank 1, 3; ranks on " in text
    assert [str(error) for error in told] == [f"error {text}"]


def test_a_rank_0_that_dies_sets_its_guests_free() -> None:
    listener = open_listener([0], loopback_only=True)
    point = MeetingPoint(HERE, [listener.getsockname()[1]], "job-1", "a test")
    door = Door(listener, "job-1", {})
    told: list[str] = []

    def guest() -> None:
        try:
            knock_and_wait(point, "node x (rank 1)", 1, 30, 30)
        except RendezvousError as error:
            told.append(str(error))

    thread = threading.Thread(target=guest)
    thread.start()
    door.serve({1}, 10)
    for connection in door._inside:  # as the kernel does for a process that dies
        connection.close()
    listener.close()
    thread.join(5)
    assert len(told) == 1
    assert told[0].startswith(f"node x (rank 1): rank 0 at {HERE}:{point.ports[0]} ended")


def test_a_port_that_was_asked_for_and_is_taken_is_said_to_be() -> None:
    with socket.create_server((HERE, 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"port {port} of .* is taken .*unset MASTER_PORT"):
            open_listener([port], loopback_only=True)


def test_where_no_candidate_is_free_the_first_ones_are_named() -> None:
    with socket.create_server((HERE, 0)) as one, socket.create_server((HERE, 0)) as two:
        ports = [one.getsockname()[1], two.getsockname()[1]]
        with pytest.raises(RendezvousError, match=f"none of the ports {ports[0]}, {ports[1]}, ... is free"):
            open_listener(ports, loopback_only=True)


def test_a_door_for_one_node_is_open_to_loopback_alone() -> None:
    with open_listener([0], loopback_only=True) as listener:
        assert listener.getsockname()[0] == HERE


def test_a_door_for_other_nodes_is_open_to_both_families() -> None:
    with open_listener([0], loopback_only=False) as listener:
        socket.create_connection((HERE, listener.getsockname()[1]), 2).close()
        with pytest.raises(OSError) as caught, socket.socket() as other:  # noqa: PT011 - errno is looked at
            other.bind(("", listener.getsockname()[1]))
        assert caught.value.errno == errno.EADDRINUSE
