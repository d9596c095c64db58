"""Who may listen where, and who may be talked to.

Until connections can be authenticated by keys, only addresses that cannot leave the host are allowed: IPv4 loopback,
``::1``, and AF_UNIX paths, whose peers the kernel names (`check_credentials`).  Names are not resolved, but for
``localhost``: what a name server answers is no ground for trust.  Standard library only.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import replace

from transport.address import Address, parse_address
from transport.errors import AddressError, AuthError
from transport.links import PeerCredentials

_WILDCARDS = ("*", "0.0.0.0", "::")


def check_listen(address: str | Address) -> Address:
    """The address, parsed, if a worker may listen there.  Does not touch the device.

    Raises `AuthError` for anything that other hosts can reach, `AddressError` for text that is no address.
    """
    return _checked(address, "listen on")


def check_connect(address: str | Address) -> Address:
    """The address, parsed, if it may be connected to.  Does not touch the device.

    Raises `AuthError` for anything but this host, `AddressError` for text that is no address or has port 0.
    """
    parsed = _checked(address, "connect to")
    if parsed.scheme == "tcp" and parsed.port == 0:
        raise AddressError(f"{parsed}: port 0 is for listeners; give the port that the worker's ready line names")
    return parsed


def check_credentials(credentials: PeerCredentials | None) -> None:
    """Raises `AuthError` unless the peer of an AF_UNIX link runs as our user (or as root).

    None, where the operating system says nothing, passes.  Does not touch the device.
    """
    if credentials is not None and credentials.uid not in (0, os.getuid()):
        raise AuthError(
            f"the peer (process {credentials.pid}) runs as user {credentials.uid}, this process as user "
            f"{os.getuid()}; run both as the same user"
        )


def _checked(address: str | Address, verb: str) -> Address:
    parsed = parse_address(address)
    if parsed.scheme != "tcp":
        return parsed
    if parsed.host == "localhost":
        return replace(parsed, host="127.0.0.1")
    if parsed.host in _WILDCARDS:
        raise AuthError(
            f"refusing to {verb} {parsed}: it means every interface, and connections cannot be authenticated by keys "
            f"yet; use tcp://127.0.0.1:{parsed.port}"
        )
    if not _is_loopback(parsed.host):
        raise AuthError(
            f"refusing to {verb} {parsed}: only loopback (127.0.0.0/8, ::1, localhost) and unix:// are allowed, "
            "because connections cannot be authenticated by keys yet; use tcp://127.0.0.1:"
            f"{parsed.port}, through a tunnel such as `ssh -L` for another host"
        )
    return parsed


def _is_loopback(host: str) -> bool:
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        return False
    if isinstance(number, ipaddress.IPv6Address):
        return number == ipaddress.IPv6Address(1)  # neither mapped IPv4 nor a scope: one spelling of one thing
    return number.is_loopback
