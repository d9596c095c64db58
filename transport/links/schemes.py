"""Which kind of link an address means: tcp and ipc are ZeroMQ's, unix is a plain AF_UNIX socket.

Only addresses that `transport.security` allows get this far.  ZeroMQ is loaded where an address asks for it.
"""

from __future__ import annotations

from transport.address import Address
from transport.links import Link, Listener, unix_listener
from transport.security import check_connect, check_listen


def connect(address: str | Address) -> Link:
    """A link to the address.  Blocks the host at most five seconds (unix), does not block it otherwise.

    Raises `AuthError`, `AddressError`; `Unreached` where nobody listens on a path, `LinkBroken` for what else keeps it
    from connecting there.  Over tcp and ipc a refused connection breaks the link later.
    """
    parsed = check_connect(address)
    if parsed.scheme == "unix":
        return unix_listener.connect(parsed)
    from transport.links import zmq_link

    return zmq_link.connect(parsed)


def listen(address: str | Address) -> Listener:
    """A listener on the address.  Raises `AuthError`, `AddressError`.  Does not block the host."""
    parsed = check_listen(address)
    if parsed.scheme == "unix":
        return unix_listener.listen(parsed)
    from transport.links import zmq_link

    return zmq_link.listen(parsed)
