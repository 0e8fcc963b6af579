"""Ports of the loopback address for servers that tests start."""

import socket


def free_port() -> int:
    """A port that nobody had a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
