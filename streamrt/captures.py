"""Captures under way: which streams belong to one, which events were recorded inside, and what must not be asked.

A driver that is asked for something which no graph can hold (a wait for work outside, a query) ends the whole capture.
So a backend asks here first, and the caller gets a `CaptureError` while the capture goes on.

Only captures that the runtime began (`streamrt.graph`) are known here; `Backend.capturing` knows everybody's.
Source: CUDA programming guide, "Creating a Graph Using Stream Capture", on prohibited and invalid operations.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import TYPE_CHECKING, Protocol

from streamrt import forks
from streamrt.errors import CaptureError

if TYPE_CHECKING:
    from streamrt.device import StreamKey


_NEVER_CAPTURED = {"cuda": (0, 1), "host": (0,)}  # by kind, the handles of null and legacy default streams


class Executable(Protocol):
    """A captured graph, ready to be enqueued as often as wanted; one launch at a time, each behind the one before."""

    @property
    def empty(self) -> bool:
        """Whether it is known that nothing was captured.  Does not touch the device."""

    def launch(self, stream: int) -> None:
        """Enqueues the graph on the stream of that handle, which is of the graph's device.  Does not block the host."""


class Recorder(Protocol):
    """Who captures: what is enqueued on its stream between `begin` and `end` becomes the graph."""

    def begin(self) -> None:
        """Begins the capture, of the calling thread only.  Does not block the host."""

    def end(self) -> Executable:
        """Ends it.  Raises `CaptureError` where there is no graph; then nothing is left of the capture.

        Does not block the host.
        """

    def abort(self) -> None:
        """Ends it and drops what was captured.  Does not block the host."""


class Capture:
    """One capture: the streams in it and, until it has ended, who records."""

    __slots__ = ("ended", "recorder", "streams", "thread")

    def __init__(self, origin: StreamKey, recorder: Recorder) -> None:
        """Made by `Captures.begin`.  Does not touch the device."""
        self.recorder: Recorder | None = recorder
        self.streams: set[StreamKey] = {origin}
        self.thread = threading.get_ident()
        self.ended = False


class Captures:
    """The captures under way on the devices of one backend.

    `active` says whether there is any, and `events` names those whose newest record was made inside a capture, also one
    that has ended: while both are empty, who asks pays one look.
    """

    def __init__(self) -> None:
        """No capture.  Does not touch the device."""
        self.active = False
        self.events: dict[int, Capture] = {}
        self._streams: dict[StreamKey, Capture] = {}
        self._lock = threading.RLock()
        forks.renew(self, _lock=functools.partial(_of_this_thread_alone, weakref.ref(self)))

    def begin(self, origin: StreamKey, recorder: Recorder) -> Capture:
        """A new capture of a stream.  Raises `CaptureError` where the stream or the calling thread is in one already.

        Does not touch the device.
        """
        with self._lock:
            if origin in self._streams or self.of_thread() is not None:
                raise CaptureError(NESTED)
            capture = self._streams[origin] = Capture(origin, recorder)
            self.active = True
        return capture

    def end(self, capture: Capture) -> None:
        """The capture is over: its streams are ordinary ones again.  Does not touch the device."""
        with self._lock:
            self._end(capture)

    def _end(self, capture: Capture) -> None:
        capture.ended = True
        capture.recorder = None  # events of the capture may be asked for a long time yet
        for key in capture.streams:
            self._streams.pop(key, None)
        self.active = bool(self._streams)

    def end_of_other_threads(self) -> None:
        """In a forked child: the captures of threads that are not there are over.  Takes no lock: there is one thread,
        and the lock is of the parent.  Does not touch the device."""
        for capture in set(self._streams.values()):
            if capture.thread != threading.get_ident():
                self._end(capture)

    def of(self, stream: StreamKey) -> Capture | None:
        """The capture that a stream belongs to.  Does not touch the device."""
        return self._streams.get(stream)

    def of_thread(self) -> Capture | None:
        """The capture that the calling thread began.  Does not touch the device."""
        thread = threading.get_ident()
        return next((one for one in list(self._streams.values()) if one.thread == thread), None)

    def join(self, stream: StreamKey, capture: Capture) -> None:
        """The stream belongs to the capture until its end.  Does not touch the device."""
        with self._lock:
            if not capture.ended:
                capture.streams.add(stream)
                self._streams[stream] = capture

    def recorded(self, event: int, stream: StreamKey) -> Capture | None:
        """Notes a record of an event on a stream; the capture in which it was made, None outside of any.

        Does not touch the device.
        """
        with self._lock:
            capture = self._streams.get(stream)
            if capture is None:
                self.events.pop(event, None)
            else:
                self.events[event] = capture
        return capture

    def waiting(self, stream: StreamKey, event: int) -> Capture | None:
        """Before a stream waits for an event: the capture in which that is an edge of the graph, None outside of any.

        A stream outside that waits for an event inside belongs to the capture from then on.  Raises `CaptureError`
        where the wait would lead out of a capture or into one, or bring a default stream in, which all threads have.
        Does not touch the device.
        """
        inside, source = self._streams.get(stream), self.events.get(event)
        if source is None:
            if inside is not None:
                raise CaptureError(
                    "a graph cannot wait for work outside of its capture; wait for it before the capture begins, or "
                    "let that stream wait for the captured one first, so that its work is captured too"
                )
            return None
        if source.ended:
            raise CaptureError("the event was recorded inside a capture that has ended; record it again, outside")
        if inside is None:
            if stream[2] in _NEVER_CAPTURED[stream[0]]:
                raise CaptureError(
                    f"the default stream of {stream[0]}:{stream[1]} cannot be part of a graph; let a stream of a pool "
                    "wait for the captured one, and work there"
                )
            self.join(stream, source)
        elif inside is not source:
            raise CaptureError("a graph cannot wait for work of another capture; end one before the other begins")
        return source

    def refuse(self, stream: StreamKey, doing: str) -> None:
        """Raises `CaptureError` if the stream is in a capture; `doing` says what cannot be part of it and what to do.

        Does not touch the device.
        """
        if stream in self._streams:
            raise CaptureError(f"the stream captures a graph, and {doing}")

    def refuse_event(self, event: int) -> None:
        """Raises `CaptureError` if the event's newest record was made inside a capture: it marks no work.

        Does not touch the device.
        """
        if event in self.events:
            raise CaptureError(EVENT)

    def forget_event(self, event: int) -> None:
        """The event is gone.  From finalisers too, so it takes no lock.  Does not touch the device."""
        self.events.pop(event, None)


def _of_this_thread_alone(captures: weakref.ref[Captures]) -> threading.RLock:
    """The lock of a forked child, where only the captures of the thread that forked go on."""
    found = captures()
    if found is not None:
        found.end_of_other_threads()
    return threading.RLock()


def not_ended(error: BaseException) -> CaptureError:
    """What to raise when a driver gives no graph at the end of a capture.  Does not touch the device."""
    said = str(error).partition("\n")[0]
    if "unjoined" in said.lower():
        return CaptureError(
            "work was forked to another stream and not joined; let the captured stream wait for that stream before the "
            f"function returns ({said})"
        )
    return CaptureError(
        f"the capture came to nothing ({said}): the function did what no graph can hold, such as a host wait, a first "
        "launch of a kernel (raise warmup=), an allocation that bypasses CuPy and torch, or a JAX operation"
    )


NESTED = "a capture or a graph inside of a capture is not possible; call the function itself there"
EVENT = (
    "the event was recorded inside a capture, so it marks work of a graph and nothing that runs; record one on the "
    "stream that the graph is replayed on"
)
QUERY = "asking whether it is done has no answer in a graph; ask after a replay"
SYNCHRONIZE = "the host cannot wait for it; wait after a replay"
WORD = "a point has one value, and each replay would need another; signal or wait for it outside of the capture"
LATCH = "a latch in a graph would close at every launch of it; put it before the capture"
