"""What is alive in the demo's own process: memory, what other processes share with it, descriptors."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from streamrt import memory
from streamrt.testing import live_resources

SETTLE_SECONDS = 20.0
"""How long it may take to come back: what was exported to the dead goes when its process is seen to be gone."""
LOOK_SECONDS = 0.05
MAPPED = "memfd:streamrt"


@dataclass(frozen=True, slots=True)
class Alive:
    """`live_bytes` of buffers and `blocks` that a backend gave, `segments` of memory shared with other processes,
    `descriptors`, leases of streams, and futures that have not ended."""

    live_bytes: int
    blocks: int
    block_bytes: int
    segments: int
    descriptors: int
    leases: int
    futures: int

    def above(self, baseline: Alive) -> dict[str, int]:
        """By name, what there is more of than in the baseline.  Does not touch the device."""
        changes = {name: getattr(self, name) - getattr(baseline, name) for name in self.__slots__}
        return {name: change for name, change in changes.items() if change > 0}


def alive() -> Alive:
    """What is alive now, after a garbage collection.  Does not block the host."""
    memory.drain(everything=True)
    counted = live_resources()
    return Alive(
        live_bytes=memory.statistics().live,
        blocks=counted.blocks,
        block_bytes=counted.block_bytes,
        segments=sum(MAPPED in line for line in Path("/proc/self/maps").read_text().splitlines()),
        descriptors=counted.fds,
        leases=counted.leases,
        futures=counted.futures,
    )


def settled(baseline: Alive | None = None) -> Alive:
    """What is alive once that changes no more, and has come down to the baseline if there is one.

    Blocks the host, `SETTLE_SECONDS` at most.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    earlier, latest = None, alive()
    while time.monotonic() < deadline and (latest != earlier or (baseline is not None and latest.above(baseline))):
        time.sleep(LOOK_SECONDS)
        earlier, latest = latest, alive()
    return latest
