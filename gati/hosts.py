"""Names and addresses of machines."""

from __future__ import annotations

import ipaddress
import os
import socket

_ANSWERS_S = 10.0
_LAST_PORT = 65535


def is_loopback(host: str) -> bool:
    """Whether a name or address can only be reached from this machine."""
    bare = host.strip("[]").rstrip(".").lower()
    if bare == "localhost" or bare.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


def address_of(host: str, port: int) -> str:
    """`HOST:PORT`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def cluster_address(address: str) -> str:
    """The address of a Ray cluster: for `auto` that in RAY_ADDRESS, as Ray takes it, if it is set."""
    return (os.environ.get("RAY_ADDRESS") or address) if address == "auto" else address


def check_listening(address: str) -> None:
    """Check that something listens at `HOST:PORT`; does nothing for what is no such address, or no port.

    Raises OSError.
    """
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) <= _LAST_PORT
    if host and is_port and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWERS_S).close()
