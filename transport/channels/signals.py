"""The words that streams of this process signal for one peer: the sending half of stream order.

A message's leased stream waits for its snapshots and signals a word; only then is the descriptor handed on, with the
word and the value (*signal before wait*).  One sealed segment a connection and direction; one word has one writer, a
leased stream, and lives as long as the connection.

A stream that is busy with something else is not used: the signal would come after that, and whoever waits would wait
for it too.  Nor are there more than `MOST_PENDING` signals of a connection that have not run: what goes past it is in
host order, so that no stream of the peer is ever filled up with waits.

A stream that has failed signals nothing any more: then its word is marked lost, by its writer, and whoever waits for it
releases it.  Marked is also a word whose signal is behind a point of a third process that is lost (see `waits`); from
then on the stream has another word.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from streamrt.device import Device, StreamKey, device_info
from streamrt.errors import DeviceError, StreamrtError
from streamrt.event import Event
from streamrt.segment import Segment, WordTable
from streamrt.stream import Stream
from streamrt.timeline import Point, Timeline
from transport.channels import words

MOST_PENDING = 6
"""Signals of one connection that have not run, at most: a pool makes eight streams before it shares busy ones."""
FIRST = 0
"""Where words start."""

Callback = Callable[[], None]


class Signal:
    """One signal that is enqueued: its point, and the record behind it on its stream."""

    __slots__ = ("behind", "callbacks", "derived", "event", "failed", "key", "point")

    def __init__(
        self, point: Point, event: Event, key: StreamKey, behind: tuple[Point, ...] = (), *, derived: bool = False
    ) -> None:
        self.point = point
        self.event = event
        self.key = key
        self.behind = behind
        self.derived = derived
        self.failed = False
        self.callbacks: list[Callback] = []

    @property
    def packed(self) -> bytes:
        """What a descriptor says of it.  Does not touch the device."""
        word = self.point.word
        return words.SIGNAL.pack(word.index, word.bits | (words.DERIVED if self.derived else 0), self.point.value)

    def over(self) -> bool:
        """Whether it has run, or never will because its stream has failed.  Does not block the host."""
        try:
            return self.event.query()
        except DeviceError:
            self.failed = True
            return True

    def settle(self) -> None:
        """It is over: if its stream has failed, gives its word up.  Does not touch the device."""
        if self.failed and not self.point.reached():
            self.point.word.mark_lost()


class Signals:
    """The words of one connection that this side writes.  Thread-safe.  Does not block the host."""

    def __init__(self) -> None:
        """Takes no memory before `fd` is asked for.  Does not touch the device."""
        self._lock = threading.RLock()  # what is enqueued may run at once, on the host backend, and be anybody's
        self._segment: Segment | None = None
        self._table: WordTable | None = None
        self._timelines: dict[StreamKey, Timeline] = {}
        self._kinds: set[str] = set()
        self._pending: list[Signal] = []
        self._closed = False
        self.derived: Segment | None = None
        """Which value of each word is derived: what others need to mark it (`releaser`)."""
        self.on_derived: Callable[[Segment, Segment], bool] | None = None
        """Called with the words and with `derived` before the first derived signal, under the lock: whether that may
        be enqueued.  If not, it is called again before the next."""
        self.on_end: Callable[[], None] | None = None
        """Called when all has run after the connection's end."""

    @property
    def fd(self) -> int:
        """The segment's descriptor, made when first asked for; -1 where the system gives none, and after `close`.

        Does not touch the device.
        """
        with self._lock:
            if self._segment is None and not self._closed:
                try:
                    self._segment = Segment.create(words.SEGMENT_BYTES, "streamrt-signals")
                except (StreamrtError, OSError):
                    self._closed = True  # host order serves
                    return -1
                self._table = WordTable(self._segment)
            return -1 if self._segment is None else self._segment.fd

    def takes(self, device: Device) -> bool:
        """Whether another signal of the device's streams may be enqueued.  Does not block the host."""
        if self._closed or not device_info(device).self_test:
            return False
        return sum(not signal.point.reached() for signal in tuple(self._pending)) < MOST_PENDING

    def signal(self, stream: Stream, foreign: tuple[Point, ...] = (), own: tuple[Point, ...] = ()) -> Signal | None:
        """Enqueues on `stream`, a leased one, a signal of its word and a record behind it; None without a word, or
        where a derived signal cannot be noted.

        `foreign` are points of others that it may be behind, `own` those of the peer itself: ask whether one is lost
        after this, and before the peer hears of it.  Does not block the host.  Raises `DeviceError`.
        """
        device = stream.device
        with self._lock:
            if self.fd < 0:  # also because it was closed a moment ago
                return None
            timeline = self._timelines.get(stream.key)
            if timeline is None or timeline.word.lost:  # others may have marked it
                if self._table is None or not self._table.free:
                    return None
                bits = 64 if device_info(device).wait64 else 32
                timeline = self._timelines[stream.key] = Timeline(self._table.lease(bits), FIRST % (1 << bits))
                self._kinds.add(device.kind)
            derived = self._ensure_derived() if foreign else None
            if foreign and derived is None:
                return None
            signal = Signal(timeline.signal(stream), stream.record(), stream.key, foreign + own, derived=bool(foreign))
            self._pending.append(signal)
            if signal.behind:
                words.deriving[self] = None
            if derived is not None:
                words.note(derived, signal.point)
        return signal

    def _ensure_derived(self) -> Segment | None:
        """Where derived signals are noted, for another process to find them; None where that cannot be had."""
        if self.derived is not None or self._segment is None:
            return self.derived
        try:
            derived = Segment.create(words.SEGMENT_BYTES, "streamrt-derived")
        except (StreamrtError, OSError):
            return None  # host order serves
        if self.on_derived is None or self.on_derived(self._segment, derived):
            self.derived = derived
        return self.derived

    def spoil(self) -> None:
        """Marks the signals lost that are behind a lost point; their streams have other words from now on.

        Before that point is released.  Idempotent.  Does not touch the device.
        """
        with self._lock:
            for signal in self._pending:
                if not signal.point.reached() and any(point.lost for point in signal.behind):
                    signal.point.word.mark_lost()
                    timeline = self._timelines.get(signal.key)
                    if timeline is not None and timeline.word == signal.point.word:
                        del self._timelines[signal.key]

    @property
    def pending(self) -> int:
        """How many signals have not run, as far as was looked.  Does not touch the device."""
        return len(self._pending)

    @property
    def ready(self) -> bool:
        """Whether `look` would find something.  Needs no lock.  Does not block the host."""
        return any(signal.over() for signal in tuple(self._pending))

    def look(self) -> list[Callback]:
        """Forgets the signals that have run; those who waited for them.  Does not block the host."""
        over = [signal for signal in tuple(self._pending) if signal.over()]
        with self._lock:
            over = [signal for signal in over if signal in self._pending]  # another thread may have been here
            self._pending = [signal for signal in self._pending if signal not in over]
            if not any(signal.behind for signal in self._pending):
                words.deriving.pop(self, None)
        for signal in over:
            signal.settle()
        return [callback for signal in over for callback in signal.callbacks]

    def when_run(self, signal: Signal, callback: Callback) -> None:
        """Calls back when a signal has run, which `look` sees, after `close` a thread that frees memory; at once if it
        has.  Does not block the host."""
        with self._lock:
            if signal in self._pending:
                signal.callbacks.append(callback)
                return
        callback()

    def close(self) -> list[Callback]:
        """The connection has ended: nothing is signalled any more; those whose signals have run.  Idempotent.

        Does not block the host.  What is enqueued still runs: its words are mapped until it has, and who waits for it
        is called then.
        """
        with self._lock:
            self._closed = True
            segment, self._segment, self._table = self._segment, None, None
        callbacks = self.look()
        if segment is not None:
            looks = iter([not self._pending])  # the first one is the caller's own, who may hold a lock
            words.retire(segment, self._kinds, lambda: next(looks, True) and self._over())
        return callbacks

    def _over(self) -> bool:
        """Whether all signals have run, after the end of the connection; calls those who waited for them."""
        for callback in self.look():
            callback()
        if self._pending:
            return False
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()
        with self._lock:
            self._timelines.clear()
            self.derived = None
        return True
