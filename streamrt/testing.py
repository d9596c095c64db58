"""Public tools for tests of stream-ordered code: latches instead of sleeps, and checks that can fail.

- `Latch` and `closed` keep streams from going on, so that "does not wait" is shown and not timed.
- `assert_no_host_sync` fails at the very call that would block the host.
- `live_resources` finds what was not given back.
- `schedules` runs the host backend under a schedule that replays from a seed.
- `without` takes one named wait away: a race test that still passes then proves nothing.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self, cast

from streamrt import hooks
from streamrt.buffers import drain
from streamrt.device import Block, Device, backend_of, open_device
from streamrt.event import Event
from streamrt.host.schedules import create
from streamrt.pool import StreamLease, pooled_streams
from streamrt.stream import Stream

if TYPE_CHECKING:
    from streamrt.host.backend import HostBackend
    from streamrt.host.schedules import Schedule

__all__ = ["Latch", "Resources", "assert_no_host_sync", "closed", "live_resources", "schedules", "without"]


class Latch:
    """A door on a stream: what is enqueued after it does not run until `open`, or the end of the ``with``.

    On a GPU the door opens by itself after a minute, so that a forgotten one hangs nothing for ever.  Load and launch
    every kernel once before: the first launch of a kernel blocks the host while any stream is held up.
    """

    def __init__(self, stream: Stream) -> None:
        """Enqueues a closed door on `stream`."""
        self.stream = stream
        self._handle = stream.device.backend.latch(stream.device.index, stream.handle)
        self._opened = False

    @property
    def opened(self) -> bool:
        """Whether `open` was called.  Does not touch the device."""
        return self._opened

    def open(self) -> None:
        """Lets the stream go on.  Idempotent, from any thread.  Does not block the host."""
        self._opened = True
        self._handle.open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.open()

    def __repr__(self) -> str:
        return f"<Latch on {self.stream!r} {'open' if self._opened else 'closed'}>"


@contextmanager
def closed(*where: Device | str | Stream) -> Iterator[None]:
    """Closes streams by latches for the time of a ``with``: every stream of a device that the runtime made and the
    calling thread's current one, or single streams.

    Enqueues a latch on each stream.  Together with `assert_no_host_sync` it shows that a call waits for no device.
    """
    streams: dict[Stream, None] = {}
    for item in where:
        if isinstance(item, Stream):
            streams[item] = None
            continue
        device = open_device(item)
        backend = device.backend
        for handle in (*backend.streams(device.index), backend.current_stream(device.index)):
            streams[Stream.borrow(handle, device)] = None
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(Latch(stream))
        yield


@contextmanager
def assert_no_host_sync() -> Iterator[None]:
    """Fails, with `AssertionError`, at the first call of this thread inside the ``with`` that blocks the host.

    It is raised before the call blocks, and once more at the end if somebody swallowed it.  Seen is every call of the
    runtime that synchronizes; what other libraries do by themselves shows with `closed`.  Does not touch the device.
    """
    thread = threading.get_ident()
    seen: list[str] = []

    def watch(record: hooks.Record) -> None:
        if isinstance(record, hooks.Synchronized) and threading.get_ident() == thread:
            seen.append(record.what)
            raise AssertionError(f"{record.what} blocks the host inside assert_no_host_sync()")

    remove = hooks.listen(watch)
    try:
        yield
    finally:
        remove()
    if seen:
        raise AssertionError(f"inside assert_no_host_sync() the host was blocked by: {', '.join(seen)}")


@dataclass(frozen=True, slots=True)
class Resources:
    """What is alive in this process.  ``after - before`` is what was made and not given back.

    `streams` and `events` are those outside pools, `leases` those not released, `blocks` and `block_bytes` memory that
    a backend gave, `futures` the device futures that have not ended, `fds` and `threads` the process's.
    """

    streams: int
    events: int
    leases: int
    blocks: int
    block_bytes: int
    futures: int
    fds: int
    threads: int

    def __sub__(self, earlier: Resources) -> dict[str, int]:
        """By name, what has changed since `earlier`; empty when nothing did.  Does not touch the device."""
        changes = {f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)}
        return {name: change for name, change in changes.items() if change}


_WALK_SECONDS = 2.0  # above what listing all objects takes, also on a machine that is busy


def _alive(kinds: Iterable[type]) -> list[Any]:
    """The objects of these types, subclasses among them.

    No other thread takes the interpreter while all objects are in hand: one that is in the middle of making a tuple of
    a generator fails (SystemError) if somebody else has got hold of it.
    """
    wanted: set[type] = set()
    more = list(kinds)
    while more:
        kind = more.pop()
        wanted.add(kind)
        more.extend(kind.__subclasses__())
    usual = sys.getswitchinterval()
    sys.setswitchinterval(_WALK_SECONDS)
    try:
        time.sleep(2 * usual)  # until nobody waits for the interpreter with the interval that was
        everything = gc.get_objects()
        found = list(itertools.compress(everything, map(wanted.__contains__, map(type, everything))))
        del everything
    finally:
        sys.setswitchinterval(usual)
    return found


def live_resources() -> Resources:
    """Counts what is alive, after a garbage collection and a `streamrt.memory.drain`: what small allocations have left
    to a later one is no leak.  Slow (it lists all objects).  Does not block the host."""
    gc.collect()
    drain(everything=True)
    future_module = sys.modules.get("streamrt.future")
    future_class: type | None = getattr(future_module, "DeviceFuture", None)
    streams = events = leases = blocks = block_bytes = futures = 0
    kinds: list[type] = [Stream, Event, StreamLease, Block]
    item = None
    for item in _alive(kinds if future_class is None else [*kinds, future_class]):
        if isinstance(item, Stream):
            streams += item.owned
        elif isinstance(item, Event):
            events += 1
        elif isinstance(item, StreamLease):
            leases += not item.released
        elif isinstance(item, Block):
            blocks += 1
            block_bytes += item.nbytes
        else:
            futures += not item.done()
    del item
    pooled = pooled_streams()
    return Resources(
        streams=streams - pooled,
        events=events - pooled,  # each pool stream has its release event
        leases=leases,
        blocks=blocks,
        block_bytes=block_bytes,
        futures=futures,
        fds=len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
        threads=threading.active_count(),
    )


@contextmanager
def schedules(name: str, seed: int = 0) -> Iterator[Schedule]:
    """Runs the host backend under a schedule, by name: "eager", "threads", or one that replays from its seed: "lazy",
    "random", "priority" (one thread drives everything, freed memory is poisoned and reused at once).

    Yields the schedule; its `trace` lists what ran, the same for the same program and seed.  At the end what is still
    queued is run.  Blocks the host.  Raises `DeadlockError`, with who waits for whom, if something never can.
    """
    backend = cast("HostBackend", backend_of("host"))
    backend.finish()
    previous = backend.use_schedule(create(name, seed))
    try:
        yield backend.machine.schedule
        backend.finish()
    finally:
        backend.abandon()
        backend.use_schedule(previous)


class _Dropped(frozenset[str]):
    """The dropped edges, which notes each that somebody asked for."""

    hits: set[str]

    def __contains__(self, edge: object) -> bool:
        found = super().__contains__(edge)
        if found:
            self.hits.add(cast("str", edge))
        return found


@contextmanager
def without(edge: str) -> Iterator[None]:
    """Drops the waits of that name (`Stream.wait(..., edge=)`) inside the ``with``, in all threads of the process.

    Raises `LookupError` at the end if no wait of that name was met, so that a mistyped name cannot make a test pass.
    Does not touch the device.
    """
    before = hooks.dropped
    dropped = _Dropped({*before, edge})
    dropped.hits = set()
    hooks.dropped = dropped
    try:
        yield
    finally:
        hooks.dropped = before
        if isinstance(before, _Dropped):
            before.hits |= dropped.hits & before  # what an outer `without` dropped was met, too
    if edge not in dropped.hits:
        raise LookupError(f"no wait named {edge!r} was met inside without({edge!r}); check the name of the edge")
