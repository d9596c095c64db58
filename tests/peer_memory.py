"""What a connection has shared: the bytes that went by a channel, and the memory that it exports."""

from __future__ import annotations

import transport
from transport.channels import SHARED_MEMORY
from transport.channels.exports import Exports


def by(peer: transport.Peer, channel: str = SHARED_MEMORY) -> tuple[int, int]:
    """Bytes that went to the peer and that came from it."""
    found = peer.statistics()
    return found.bytes_out.get(channel, 0), found.bytes_in.get(channel, 0)


def exports_of(peer: transport.Peer) -> Exports:
    """The memory that this side exports to the peer."""
    sharing = peer._driver.transfers.sharing
    assert sharing is not None
    return sharing.exports
