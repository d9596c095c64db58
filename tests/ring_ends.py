"""Two AF_UNIX links in one process that have agreed on rings, as two agents do after their handshake."""

from __future__ import annotations

from transport.links.unix_link import UnixLink, pair


def agree(a: UnixLink, b: UnixLink) -> None:
    """Offers, takes, and says so both ways."""
    a.offer_rings()
    for end in (b, a, b):
        assert end.receive() == []


def ring_pair() -> tuple[UnixLink, UnixLink]:
    """Two ends with rings between them."""
    ours, theirs = pair()
    other = UnixLink(theirs, inherited=True)
    agree(ours, other)
    return ours, other
