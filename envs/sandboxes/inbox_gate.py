"""In the box: the way out is a listening socket of the box's own network that the host answers.

A socket belongs to the network it was made in, whoever holds it. So the supervisor makes one and hands it to the host,
and nothing stays in the box that a sweep could end or a policy could take over. The box itself has no interface.
"""

from __future__ import annotations

import socket

HAND_OVER_S = 20.0
BACKLOG = 64


def hand_over(door: str, port: int) -> None:
    """Give the host a socket that listens on the loopback at `port`, and wait until it has it. Raises OSError."""
    with socket.socket(socket.AF_INET) as listener, socket.socket(socket.AF_UNIX) as host:
        listener.bind(("127.0.0.1", port))
        listener.listen(BACKLOG)
        host.settimeout(HAND_OVER_S)
        host.connect(door)
        socket.send_fds(host, [b"g"], [listener.fileno()])
        if not host.recv(1):
            raise ConnectionError("the host did not take the socket")
