"""TCP connections that the kernel closes if the other node no longer answers (tcp(7))."""

from __future__ import annotations

import errno
import socket
import struct

# The fields tcpi_unacked and tcpi_last_ack_recv (in ms) of struct tcp_info in linux/tcp.h.
_TCP_INFO = struct.Struct("24xI28xI")
_CUT_OFF_ERRORS = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


def let_kernel_watch(connection: socket.socket, silent_s: float) -> None:
    """Makes the kernel close the connection with ETIMEDOUT if the other node does not answer.

    `silent_s` is the time limit. The kernel of a process that is stopped or blocked in a C call still
    answers, so only the connection to a node that is down or unreachable is closed. This also works while
    this process itself is blocked.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        connection.setsockopt(socket.IPPROTO_TCP, option, max(1, round(silent_s / 6)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(silent_s * 1000))


def node_answers(connection: socket.socket, within_s: float) -> bool | None:
    """Returns whether the kernel of the other node has acknowledged what was sent, or was heard `within_s`.

    It is None if the kernel cannot tell.
    """
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        num_unanswered, heard_ms = _TCP_INFO.unpack(info)
    except (OSError, struct.error):
        return None
    return bool(num_unanswered == 0 or heard_ms < within_s * 1000)


def is_cut_off(error: OSError) -> bool:
    """Returns whether a connection ended because of the node or the network, rather than because of the
    process at the other end.
    """
    return error.errno in _CUT_OFF_ERRORS
