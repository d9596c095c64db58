"""The points of one peer that streams here wait for: the receiving half of stream order.

A wait is enqueued when the message is here, which the peer sent after it had enqueued the signal.  Each is kept until
its stream has passed it, so that none is without an end: when the peer is lost, the words are marked lost *first* and
then moved to the highest value that anybody waits for, by plain stores that nothing can hold up.  What was reached
before the mark stays good; of all else `Point.lost` tells whoever looks behind the wait.

A peer that only stands still may go on later, and its late signals would take a released word back.  So as long as a
stream has not passed its wait, the words are released again (`bounds`), and no new wait is enqueued.

*What depends on what*: whatever is enqueued in this process while a point is not reached may depend on it (`foreign`).
So a message to a third process says that its point is *derived*, and when the first one is lost, the derived one is
marked by its own writer, in memory that the third process sees, before anything is released.  What depends on a derived
point goes to anybody in host order, and is checked for the loss when its bytes are there: so no mark has to go further.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from streamrt import forks
from streamrt.buffer import Buffer
from streamrt.device import Device, StreamKey, device_info
from streamrt.errors import DeviceError, StreamrtError
from streamrt.event import Event
from streamrt.segment import STRIDE, Segment, Word, reached
from streamrt.stream import Stream
from streamrt.timeline import Point
from transport.channels import OpenError, bounds, words
from transport.errors import PeerLostError

ORDER_EDGE = "order.wait"
MOST_WAITS = 64
"""Of one connection: a peer's own bound is far below, and a stream that is full would hold up its host."""
WINDOW = 1 << 16
"""How far a value may be from the word, and from those of the same word that are waited for: an honest peer's is next.
All of them are then reached when the highest is, also where the counter wraps."""
GONE = "the connection is over, and nothing waits for its peer any more"

_guarded: list[_Guarded] = []  # memory whose bytes come behind a point, as long as it may be lost and somebody has it
_losses: weakref.WeakSet[Loss] = weakref.WeakSet()  # of values that were taken before their bytes were there
_lock = threading.Lock()
forks.renew(sys.modules[__name__], _lock=threading.Lock, _guarded=list, _losses=weakref.WeakSet)


class _Wait:
    """One wait that is enqueued, and the record behind it."""

    __slots__ = ("derived", "event", "point")

    def __init__(self, point: Point, derived: bool) -> None:
        self.point = point
        self.derived = derived
        self.event: Event | None = None

    def passed(self) -> bool:
        """Whether the stream is past it, or has failed.  Does not block the host."""
        try:
            return self.event is not None and self.event.query()
        except DeviceError:
            return True


class _Guarded(NamedTuple):
    """Memory of ours whose bytes come behind a point."""

    point: Point
    buffer: weakref.ref[Buffer]
    start: int
    end: int

    def idle(self) -> bool:
        """Whether nobody needs to look at it again: the bytes came, or nobody has it."""
        return self.buffer() is None or (self.point.reached() and not self.point.lost)


class Loss:
    """Says of a value that came in stream order whether its bytes never will: asked at each of its uses.

    Who has taken the value before that was known may have made others of it.  So that thread is told at the next thing
    that it sends (`untold`), if no other use has told it.
    """

    def __init__(self, points: Sequence[Point], where: str) -> None:
        """`points` are those behind which the bytes are there, `where` names the call.  Does not touch the device."""
        self._points = tuple(points)
        self._what = f"{where}: the peer was lost before the bytes of its value were there"
        self._error: PeerLostError | None = None

    def __call__(self) -> PeerLostError | None:
        """The error, None as long as the bytes are there or may come.  Does not touch the device."""
        if self._error is None and any_lost(self._points):
            self._error = PeerLostError(self._what)
        if self._error is not None:
            _taken.losses.discard(self)
            self._points = ()
        elif not all(point.reached() for point in self._points):
            _taken.losses.add(self)
            with _lock:
                _losses.add(self)
        elif self.good():
            _taken.losses.discard(self)
            self._points = ()  # whoever keeps the value need not keep the words
        return self._error

    def settle(self) -> None:
        """The words have come to their end: notes what that was, and lets go of them.  Does not touch the device."""
        points = self._points
        if any_lost(points):
            self._error = self._error or PeerLostError(self._what)
        if all(point.reached() for point in points):
            self._points = ()

    def good(self) -> bool:
        """Whether the bytes came.  Does not touch the device."""
        return all(point.reached() and not point.lost for point in self._points)


class _Taken(threading.local):
    """What a thread has taken before its bytes were there."""

    def __init__(self) -> None:
        self.losses: set[Loss] = set()


_taken = _Taken()


class Named(NamedTuple):
    """A signal of the peer's as its descriptor names it: a word's number, its bits, the value, and if it is derived."""

    word: int
    bits: int
    value: int
    derived: bool = False

    @classmethod
    def read(cls, raw: memoryview | bytes) -> Named:
        """Reads and checks it.  Raises `OpenError`.  Does not touch the device."""
        if len(raw) < words.SIGNAL.size:
            raise OpenError("the peer sent a descriptor without the signal that it tells of")
        word, bits, value = words.SIGNAL.unpack_from(raw)
        named = cls(word, bits & ~words.DERIVED, value, bool(bits & words.DERIVED))
        if named.word >= words.WORDS or named.bits not in (32, 64) or named.value >> named.bits:
            raise OpenError(f"the peer named value {named.value} of a word {named.word} of {named.bits} bits")
        return named


class Waits:
    """The waits for one connection's peer.  Thread-safe.  Does not block the host."""

    def __init__(self) -> None:
        """Waits for nothing yet.  Does not touch the device."""
        self.failure = ""
        self.table: Segment | None = None
        """Which value of each word is waited for: what others need to release it (`releaser`)."""
        self.words: Segment | None = None
        """The peer's words, once they are here."""
        self.on_first: Callable[[], None] | None = None
        """Called at the first wait, under the lock."""
        self.on_pending: Callable[[], None] | None = None
        """Called at each wait, under the lock, where there was no other."""
        self.on_end: Callable[[], None] | None = None
        """Called when the connection has ended and no stream waits any more."""
        self._lock = threading.RLock()  # what is enqueued may run at once, on the host backend, and be anybody's
        self._pending: list[_Wait] = []
        self._highest: dict[int, Point] = {}
        self._latest: dict[tuple[StreamKey, int], int] = {}  # the value that a stream has waited for last, by word
        self._bits: dict[int, int] = {}  # of each word, as it was first named
        self._kinds: set[str] = set()
        self._over = False

    def attach(self, fd: int) -> None:
        """Maps the peer's words; takes the descriptor over.  What cannot be mapped shows at `wait`.

        Does not touch the device.
        """
        try:
            segment = Segment.attach(fd)
        except (ValueError, OSError) as error:
            self.failure = self.failure or str(error)
            return
        if self.words is not None or segment.nbytes != words.SEGMENT_BYTES:
            self.failure = self.failure or "the peer sent its words twice, or too few"
            segment.close()
            return
        self.words = segment

    def check(self, device: Device, named: Named) -> None:
        """Raises `OpenError` where streams of the device cannot wait for a signal.  Does not block the host."""
        info = device_info(device)
        if self.words is None:
            raise OpenError(f"the peer's words are not mapped here: {self.failure or 'their descriptor did not come'}")
        if not info.self_test or (named.bits == 64 and not info.wait64):
            raise OpenError(f"streams of {device} cannot wait for words of {named.bits} bits")
        self._admit(self._point(self.words, named))
        self._ensure_table()
        if len(self._pending) >= MOST_WAITS and self.collect() and len(self._pending) >= MOST_WAITS:
            raise OpenError(f"{MOST_WAITS} waits for the peer are pending already")

    def wait(self, stream: Stream, named: Named) -> Point:
        """Enqueues on `stream`, a leased one, a wait for a signal of the peer's, and a record behind it.

        Nothing where the word is there already or lost, or the stream waits for it.  `check` comes first.  Does not
        block the host.  Raises `OpenError` once the connection is over, `DeviceError`.
        """
        device = stream.device
        if self.words is None:
            raise OpenError(GONE)
        point = self._point(self.words, named)
        key = (stream.key, named.word)
        if point.word.lost or point.reached() or self._latest.get(key) == named.value:
            return point
        with self._lock:
            if self._over:
                raise OpenError(GONE)
            self._admit(point)
            self._note(point)
            wait = _Wait(point, named.derived)
            self._pending.append(wait)  # before it is enqueued: whoever depends on it finds it
            if len(self._pending) == 1 and self.on_pending is not None:
                self.on_pending()
            with _lock:
                words.waiting[self] = None
            try:
                stream.wait(point, edge=ORDER_EDGE)
                wait.event = stream.record()
            except BaseException:
                self._pending.remove(wait)
                raise
            self._latest[key] = named.value
            self._kinds.add(device.kind)
        return point

    def _point(self, segment: Segment, named: Named) -> Point:
        with self._lock:
            if self._bits.setdefault(named.word, named.bits) != named.bits:
                raise OpenError(f"the peer named word {named.word} with {named.bits} bits, and with others before")
        return Point(Word(segment, named.word * STRIDE, named.bits), named.value)

    def _admit(self, point: Point) -> None:
        """Raises `OpenError` for a value that no signal of an honest peer's has: not all waits could be released."""
        word, value = point.word, point.value
        if word.lost or point.reached():
            return  # nobody waits for it
        highest = self._highest.get(word.index)
        if highest is not None and not reached(value, highest.value, word.bits):
            raise OpenError(f"the peer named value {value} of word {word.index} after {highest.value}")
        pending = [wait.point.value for wait in tuple(self._pending) if wait.point.word.index == word.index]
        if any((value - other) & ((1 << word.bits) - 1) > WINDOW for other in (word.load(), *pending)):
            raise OpenError(f"the peer named value {value} of word {word.index}, which is too far ahead")

    def _note(self, point: Point) -> None:
        word = point.word
        before = self._highest.get(word.index)
        if before is not None and reached(before.value, point.value, word.bits):
            return
        table, first = self._ensure_table(), not self._highest
        self._highest[word.index] = point
        words.note(table, point)
        if first and self.on_first is not None:
            self.on_first()

    def _ensure_table(self) -> Segment:
        with self._lock:
            if self.table is None:
                try:
                    self.table = Segment.create(words.SEGMENT_BYTES, "streamrt-waits")
                except (StreamrtError, OSError) as error:
                    raise OpenError(f"there is no memory to note waits in: {error}") from error
            return self.table

    @property
    def pending(self) -> int:
        """How many waits there are, as far as was looked.  Does not touch the device."""
        return len(self._pending)

    def unreached(self) -> list[tuple[Point, bool]]:
        """The points that streams wait for and that are not there, or are lost; whether each is derived.

        Does not block the host.
        """
        self.collect()
        pending = tuple(self._pending)
        return [(wait.point, wait.derived) for wait in pending if wait.point.lost or not wait.point.reached()]

    def collect(self) -> bool:
        """Forgets the waits that streams have passed; whether there are others.  Does not block the host."""
        passed = [wait for wait in tuple(self._pending) if wait.point.reached() and wait.passed()]
        with self._lock:
            self._pending = [wait for wait in self._pending if wait not in passed]
            if not self._pending:
                with _lock:
                    words.waiting.pop(self, None)
            return bool(self._pending)

    def mark(self) -> None:
        """The peer is lost: what of its points was not reached never will be.  Comes before `release`.  Idempotent.

        Does not touch the device.
        """
        with self._lock:
            self._over = True
            for point in self._highest.values():
                if not point.reached():
                    point.word.mark_lost()
        _spoil()

    def given_up(self) -> bool:
        """Whether a word that is waited for is marked, by its writer or by others.  Does not touch the device."""
        return any(wait.point.lost for wait in tuple(self._pending))

    def release(self) -> None:
        """Lets the streams go on that wait for what is lost, by plain stores.  Does not touch the device."""
        _spoil()  # also for what others have marked
        with self._lock:
            for point in self._highest.values():
                if point.word.lost and not point.reached():
                    point.word.store(point.value)

    def end(self) -> None:
        """No stream waits any more, after `close`: lets go of the words.  Does not block the host."""
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()
        with self._lock:
            self._highest.clear()
            self.table = None
        with _lock:
            taken = tuple(_losses)
        for loss in taken:
            loss.settle()
        _compact()

    def close(self, bound: bounds.Bound) -> None:
        """The connection has ended: nothing new is waited for, and what is waited for has until `bound`.

        Idempotent.  Does not block the host.
        """
        with self._lock:
            self._over = True
            segment, self.words = self.words, None
            self._latest.clear()
        if segment is not None:
            bounds.keep(self, bound, segment, self._kinds)


class Foreign(NamedTuple):
    """The `points` of others on which what is made now may depend; `deep`: some are derived themselves; `own`: those of
    the peer to whom it goes, which may fail while that lives."""

    points: tuple[Point, ...] = ()
    deep: bool = False
    own: tuple[Point, ...] = ()

    @property
    def lost(self) -> bool:
        """Whether one of them all is.  Does not touch the device."""
        return any_lost(self.points) or any_lost(self.own)


NOTHING = Foreign()


def foreign(besides: Waits | None) -> Foreign:
    """What streams of this process wait for, and is not there; apart, what is one peer's own, to whom it may be sent.

    Does not block the host.
    """
    if not words.waiting:
        return NOTHING
    with _lock:
        all_waits = list(words.waiting)
    found = [(point, deep, one is besides and not deep) for one in all_waits for point, deep in one.unreached()]
    if not found:
        return NOTHING
    own = tuple(point for point, _, is_own in found if is_own)
    return Foreign(tuple(point for point, _, is_own in found if not is_own), any(deep for _, deep, _ in found), own)


def _spoil() -> None:
    """Marks what this process signals behind points that are lost."""
    for one in tuple(words.deriving):
        one.spoil()


def untold() -> PeerLostError | None:
    """The loss of a value that the calling thread has taken, and of which it was not told; once.

    Does not touch the device.
    """
    for loss in tuple(_taken.losses):
        if (error := loss()) is not None:
            return error
        if loss.good():
            _taken.losses.discard(loss)
    return None


def guard(point: Point, buffer: Buffer) -> None:
    """Notes that the bytes of a buffer come behind a point.  Does not touch the device."""
    _compact(_Guarded(point, weakref.ref(buffer), buffer.address, buffer.address + buffer.nbytes))


def _compact(*more: _Guarded) -> None:
    """Forgets the memory at which nobody has to look again; notes `more`."""
    global _guarded
    with _lock:
        _guarded = [one for one in _guarded if not one.idle()]
        _guarded.extend(more)


def spoiled(address: int) -> bool:
    """Whether what lies at an address should have come from a peer, who was lost before.  Does not touch the device."""
    return any(one.start <= address < one.end and one.point.lost and not one.idle() for one in tuple(_guarded))


def any_lost(points: Iterable[Point]) -> bool:
    """Whether what stood behind one of them never came.  Ask once the bytes are there.  Does not touch the device."""
    return any(point.lost for point in points)
