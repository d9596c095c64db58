"""Shared memory between simulated processes: links that carry descriptors, and a death that stops signals.

All sides are one process, and so is what belongs to a process: which streams wait for a peer, and what looks after
words and memory of connections that have ended.  Here each side has its own, and the world looks, in no thread.
"""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from streamrt.device import backend_of
from transport.channels import bounds, retired, waits, words
from transport.driver import Driver
from transport.links import Frame
from transport.links.memory_link import Faults, MemoryLink

if TYPE_CHECKING:
    from simulation import Joint, World


class SharingLink(MemoryLink):
    """A memory link whose messages may bring descriptors."""

    def __init__(self, name: str, faults: Faults, clock: Callable[[], float]) -> None:
        super().__init__(name, faults, clock)
        self._descriptors: collections.deque[list[int]] = collections.deque()  # one entry for each that arrives
        self._taken: list[int] = []

    def send(self, frames: Sequence[Frame], fds: Sequence[int] = ()) -> None:
        peer = self._peer
        assert isinstance(peer, SharingLink)
        before = len(peer._arriving)
        super().send(frames)
        for _ in range(max(0, len(peer._arriving) - before)):
            peer._descriptors.append([os.dup(fd) for fd in fds])

    def receive(self, limit: int = 64) -> list[list[Frame]]:
        self._drop(self.taken_fds())
        messages: list[list[Frame]] = []
        while len(messages) < limit and not self._taken:
            found = super().receive(1)
            if not found:
                break
            messages += found
            self._taken = self._descriptors.popleft()
            if not self.readable or (not self._arriving and self._peer_gone is not None):
                break
        return messages

    def taken_fds(self) -> list[int]:
        """What came with the last message."""
        taken, self._taken = self._taken, []
        return taken

    def _end(self, here: str, there: str) -> None:
        super()._end(here, there)
        while self._descriptors:
            self._drop(self._descriptors.popleft())
        self._drop(self.taken_fds())

    @staticmethod
    def _drop(descriptors: list[int]) -> None:
        for descriptor in descriptors:
            os.close(descriptor)


def pair(faults: Faults, clock: Callable[[], float], *, names: tuple[str, str]) -> tuple[MemoryLink, MemoryLink]:
    """Two connected ends that carry descriptors."""
    first, second = (SharingLink(name, faults, clock) for name in names)
    first._peer, second._peer = second, first
    return first, second


_owners: dict[int, Any] = {}  # the side of each connection's waits


@contextmanager
def driven(world: World) -> Iterator[None]:
    """Inside it nothing of all this has a thread, and points are foreign only to the side whose streams wait."""
    before = retired.keeper.thread, bounds.keeper.thread, bounds.clock, waits.foreign
    retired.keeper.thread = bounds.keeper.thread = object()  # type: ignore[assignment]  # there is one, as far as they know
    enqueue = world.machine.enqueue
    world.machine.enqueue = functools.partial(_enqueue, world, enqueue)
    bounds.clock = lambda: world.now
    waits.foreign = functools.partial(_foreign, waits.foreign)
    try:
        yield
        for _ in range(100):
            look()
            backend_of("host").finish()  # type: ignore[attr-defined]
            if not (bounds.kept() or retired.kept()):
                break
    finally:
        world.machine.enqueue = enqueue
        retired.keeper.thread, bounds.keeper.thread, bounds.clock, waits.foreign = before
        words.waiting.clear()
        words.deriving.clear()
        _owners.clear()
        for joint in world.joints:  # the world itself is kept by whoever remembers a function's signature
            for driver in joint.drivers:
                driver.transfers.sharing = None


def _enqueue(world: World, enqueue: Callable[[Any, Any], None], queue: Any, operation: Any) -> None:
    """What a process has enqueued and has not run when it dies never runs; who waits for a record is not kept."""
    side, run = world.running_side, operation.run
    if side is not None and run is not None and operation.record is None:
        operation.run = lambda: run() if side.alive else None
    enqueue(queue, operation)


_looking: list[None] = []


def look() -> None:
    """What their threads do.  A question to a device may run the world, which comes here again."""
    if _looking:
        return
    _looking.append(None)
    try:
        for keeper in (bounds.keeper, retired.keeper):
            if keeper.entries:
                keeper.look()
    finally:
        _looking.clear()


def prepare(joint: Joint) -> None:
    """Both ends are of one host: each knows whether the other one lives, and no process is started beside them."""
    for number, driver in enumerate(joint.drivers):
        mine, other = joint.ends[number], joint.ends[1 - number]
        driver.peer_gone = lambda other=other: not other.alive  # type: ignore[method-assign, misc]
        driver.transfers.ordered.waits_first = lambda: None  # type: ignore[method-assign]
        driver.transfers.ordered.derives_first = lambda *_: True  # type: ignore[method-assign]
        meet = driver.transfers.meet

        def met(driver: Driver = driver, mine: Any = mine, meet: Callable[[], None] = meet) -> None:
            meet()
            if driver.transfers.sharing is not None:
                _owners[id(driver.transfers.sharing.waits)] = mine

        driver.transfers.meet = met  # type: ignore[method-assign]


def _foreign(real: Callable[[waits.Waits | None], waits.Foreign], besides: waits.Waits | None) -> waits.Foreign:
    mine = None if besides is None else _owners.get(id(besides))
    before = dict(words.waiting)
    others = {one: None for one in before if _owners.get(id(one)) is not mine}
    for one in others:
        words.waiting.pop(one, None)
    try:
        return real(besides)
    finally:
        for one in others:
            words.waiting[one] = None


def forget(driver: Driver) -> None:
    """A process has died: nobody there waits, and its memory counts no more."""
    if driver.transfers.sharing is not None:
        words.waiting.pop(driver.transfers.sharing.waits, None)
        if driver.transfers.sharing.signals is not None:
            words.deriving.pop(driver.transfers.sharing.signals, None)
        driver.transfers.sharing.exports.close(lambda: True)
