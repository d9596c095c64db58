"""Addresses: where a worker listens and where a caller connects, as text that people type.

``tcp://127.0.0.1:7700`` and ``tcp://[::1]:7700`` (ZeroMQ), ``ipc:///run/worker.sock`` (ZeroMQ over AF_UNIX) and
``unix:///run/worker.sock`` (plain AF_UNIX).  A port of 0 lets the listener choose.  Nothing is resolved here: a host
stays the text that was given, and `transport.security` decides which hosts may be used.  Standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from transport.errors import AddressError

SCHEMES = ("tcp", "ipc", "unix")
MAX_PATH_BYTES = 107  # sun_path of AF_UNIX holds 108 bytes with its terminator
_TCP = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s\[\]:/@]+)):(?P<port>\d{1,5})")
_EXAMPLE = "write tcp://127.0.0.1:7700, tcp://[::1]:7700 or unix:///path/to.sock"


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed address: `host` and `port` for tcp, `path` for ipc and unix.  `str` gives the text back."""

    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.scheme != "tcp":
            return f"{self.scheme}://{self.path}"
        host = f"[{self.host}]" if self.is_ipv6 else self.host
        return f"tcp://{host}:{self.port}"

    @property
    def is_ipv6(self) -> bool:
        """Whether the host is written as an IPv6 address.  Does not touch the device."""
        return ":" in self.host

    def with_port(self, port: int) -> Address:
        """The same address with another port.  Does not touch the device."""
        return replace(self, port=port)


def parse_address(text: str | Address) -> Address:
    """Parses an address.  Does not touch the device, resolves nothing.

    Raises `AddressError` for what is no text, an unknown scheme, a missing or impossible port, a path that is relative
    or too long.
    """
    if isinstance(text, Address):
        return text
    if not isinstance(text, str):
        raise AddressError(f"{text!r} is no address; {_EXAMPLE}")
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in SCHEMES:
        raise AddressError(f"{text!r} is not an address of a known kind ({', '.join(SCHEMES)}); {_EXAMPLE}")
    if scheme != "tcp":
        if not rest.startswith("/") or "\0" in rest:
            raise AddressError(f"{text!r}: the path must be absolute; {_EXAMPLE}")
        if len(rest.encode()) > MAX_PATH_BYTES:
            raise AddressError(f"{text!r}: the path of a socket has at most {MAX_PATH_BYTES} bytes; shorten it")
        return Address(scheme, path=rest)
    match = _TCP.fullmatch(rest)
    if match is None:
        raise AddressError(f"{text!r} has no valid host and port; {_EXAMPLE}")
    port = int(match["port"])
    if port > 65535:
        raise AddressError(f"{text!r}: ports go from 0 to 65535")
    return Address("tcp", host=match["v6"] or match["host"], port=port)
