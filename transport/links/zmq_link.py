"""ZeroMQ links over TCP loopback or ipc: `connect` (a DEALER) and `listen` (a ROUTER).

A connecting end speaks first.  Frames of 0.5 to 4 MiB are right for bulk data; `bench/links.py` measures it.
"""

from __future__ import annotations

from transport.address import Address, parse_address
from transport.links.zmq_dealer import DealerLink
from transport.links.zmq_router import ZmqListener


def connect(address: str | Address) -> DealerLink:
    """Begins to connect.  The link breaks if nobody answers; it may be used at once.  Does not block the host.

    Raises `AddressError` for an address that ZeroMQ refuses.
    """
    return DealerLink(parse_address(address))


def listen(address: str | Address) -> ZmqListener:
    """Listens; a port of 0 is resolved in `.address`.  Raises `AddressError` where it is in use.

    Does not block the host.
    """
    return ZmqListener(parse_address(address))
