"""TCP has no lines: what is sent as two may arrive as one piece, and one in many."""

import json
import socket
import threading

import pytest

from ddp_hpc.world.meeting import Door, knock


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def _answer(listener, *pieces):
    """Accepts one guest and sends the pieces as they are, each by itself."""

    def serve():
        guest, _ = listener.accept()
        with guest:
            guest.recv(4096)
            guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for piece in pieces:
                guest.sendall(piece)
                threading.Event().wait(0.05)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def test_a_verdict_in_the_same_piece_as_the_welcome_is_not_lost(listener):
    """Rank 0 lets the last guest in and sends everyone on at once: seen on a real Slurm, one run in six."""
    port = listener.getsockname()[1]
    _answer(listener, b'welcome {"port": 1}\ngo\n')
    welcome = knock("127.0.0.1", [port], "key", 3, 5.0)
    assert welcome.answer == {"port": 1}
    assert welcome.wait_for_go(5.0) == "go"


def test_an_answer_in_many_pieces_is_put_together(listener):
    port = listener.getsockname()[1]
    text = f"welcome {json.dumps({'port': 7})}\ngo\n".encode()
    _answer(listener, *(text[i : i + 5] for i in range(0, len(text), 5)))
    welcome = knock("127.0.0.1", [port], "key", 3, 5.0)
    assert (welcome.answer, welcome.wait_for_go(5.0)) == ({"port": 7}, "go")


def test_many_guests_at_once_all_hear_the_verdict(listener):
    door = Door(listener, "key", {"port": 1})
    port = listener.getsockname()[1]
    verdicts = {}

    def guest(number):
        verdicts[number] = knock("127.0.0.1", [port], "key", number, 10.0).wait_for_go(10.0)

    guests = [threading.Thread(target=guest, args=(number,)) for number in range(1, 65)]
    for thread in guests:
        thread.start()
    assert door.serve(set(range(1, 65)), 10.0) == set()
    door.dismiss()
    for thread in guests:
        thread.join(10)
    assert verdicts == dict.fromkeys(range(1, 65), "go")
