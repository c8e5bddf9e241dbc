"""Addresses of servers."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Tells whether a name or address is this machine itself, which no proxy leads to."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
