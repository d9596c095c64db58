"""Bytes by channel, out of the peers' statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of arrays that one channel carried: to the workers and back."""

    channel: str
    sent: int
    received: int


def traffic(peers: Sequence[Any]) -> dict[str, Traffic]:
    """The sums over the peers' connections so far, by channel.  Does not touch the device."""
    sums: dict[str, Traffic] = {}
    for peer in peers:
        statistics = peer.statistics()
        for channel in {*statistics.bytes_out, *statistics.bytes_in}:
            before = sums.get(channel, Traffic(channel, 0, 0))
            sums[channel] = Traffic(
                channel,
                before.sent + statistics.bytes_out.get(channel, 0),
                before.received + statistics.bytes_in.get(channel, 0),
            )
    return sums


def since(before: dict[str, Traffic], after: dict[str, Traffic]) -> list[Traffic]:
    """What was carried between two calls of `traffic`.  Does not touch the device."""
    none = Traffic("", 0, 0)
    return [
        Traffic(name, now.sent - before.get(name, none).sent, now.received - before.get(name, none).received)
        for name, now in sorted(after.items())
    ]
