"""One run of a pipeline: the frames in flight, and how each moves from stage to stage.  See `transport.pipeline`."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from streamrt.arrays import convert, device_of
from streamrt.callbacks import blocking
from streamrt.errors import ClosedError
from streamrt.future import DeviceFuture
from streamrt.libraries.nesting import find_arrays
from transport.errors import TransportError
from transport.stage_times import Meter, PipelineStatistics

LATENCIES = 100_000
"""Latencies kept for the percentiles; the oldest go first."""

clock = time.monotonic


class Pending(Protocol):
    """What the pipeline uses of a `streamrt.DeviceFuture`."""

    def result(self, timeout: float | None = None) -> Any: ...
    def exception(self, timeout: float | None = None) -> BaseException | None: ...
    def cancelled(self) -> bool: ...
    def cancel(self) -> bool: ...
    def then(self, function: Callable[[Any], Any], /) -> Any: ...
    def add_done_callback(self, callback: Callable[[Any], object], /) -> None: ...


class Peer(Protocol):
    """What the pipeline uses of a `transport.Peer`."""

    def submit(self, function: Any, /, *arguments: Any, timeout: float | None = None, copy: bool = True) -> Pending: ...


class StageError(TransportError, RuntimeError):
    """A stage failed on a frame: `stage` is its name, `frame` the number in the source, `__cause__` why."""

    def __init__(self, stage: str, frame: int, cause: BaseException) -> None:
        super().__init__(f"stage {stage!r} failed on frame {frame}: {type(cause).__name__}: {cause}")
        self.stage = stage
        self.frame = frame
        self.__cause__ = cause


@dataclass(frozen=True, slots=True)
class Stage:
    """One link of the chain; made by `stage()`."""

    function: Callable[[Any], Any] | str
    name: str
    device: str | None = None
    arrays: str | None = None
    peer: Peer | None = None


def run_stage(
    function: Callable[[Any], Any], value: Any, device_times: bool = False
) -> tuple[Any, tuple[float, float]]:
    """Runs in the worker: the stage's function, and when it began and ended.

    Enqueues on the leased streams what the function does.  With `device_times` blocks the host until the value has
    arrived and until the result is computed.
    """
    if device_times:
        synchronize(value)
    start = clock()
    result = function(value)
    if device_times:
        synchronize(result)
    return result, (start, clock())


def synchronize(value: Any) -> None:
    """Blocks the host until all arrays in the value are computed, also those that JAX computes on the CPU."""
    future: DeviceFuture[Any] = DeviceFuture()
    future.set_result(value)
    future.synchronize()
    for array in find_arrays(value):
        if not device_of(array).has_streams:
            convert(array, "numpy")


@dataclass(slots=True)
class _Frame:
    """One frame in flight: the call that it is in, and the times of its way (see `Meter.add`)."""

    index: int
    room: float
    pulled: float = 0.0
    origin: float = 0.0
    submitted: float = 0.0
    done: float = 0.0
    future: Pending | None = None
    over: bool = False
    error: StageError | None = None


class Run(Iterator[Any]):
    """The iterator of one `Pipeline.map`.  One consumer at a time."""

    def __init__(
        self,
        stages: Sequence[Stage],
        peers: Sequence[Peer],
        source: Iterator[Any],
        *,
        in_flight: int,
        ordered: bool,
        copy: bool,
        timeout: float | None,
        device_times: bool,
    ) -> None:
        """Use `Pipeline.map`.  Does not touch the device."""
        self.closed = False
        self._stages, self._peers = stages, peers
        self._timeout, self._device_times = timeout, device_times
        self._source: Iterator[Any] | None = source
        self._source_error: BaseException | None = None
        self._ordered = ordered
        self._copy = copy
        self._lock = threading.Lock()
        self._open: dict[int, _Frame] = {}
        self._ended: dict[int, _Frame] = {}
        self._endings: queue.SimpleQueue[_Frame | None] = queue.SimpleQueue()
        self._pulled = self._delivered = self._failed = self._most = 0
        self._latencies: deque[float] = deque(maxlen=LATENCIES)
        self._began = self._finished = clock()
        self._room: deque[float] = deque([self._began] * in_flight)
        self._meters = [Meter(self._began, self._began) for _ in stages]

    def __iter__(self) -> Self:
        """Itself.  Does not touch the device."""
        return self

    def __next__(self) -> Any:
        """The next frame that is through.  Blocks the host until its reply is there; see `Pipeline.map`."""
        while True:
            self._collect(block=False)
            frame = self._ready()
            if frame is not None:
                return self._deliver(frame)
            if self.closed:
                raise StopIteration
            if self._room and self._source is not None:
                self._pull()
            elif self._open or self._ended:
                self._collect(block=True)
            else:
                self.closed = True
                if self._source_error is not None:
                    raise self._source_error
                raise StopIteration

    def close(self) -> None:
        """Gives up what is in flight: calls are cancelled, nothing moves on.  Idempotent.  Does not block the host."""
        with self._lock:
            self.closed = True
            frames = list(self._open.values())
            self._open.clear()
            self._ended.clear()
        self._endings.put(None)
        for frame in frames:
            if frame.future is not None:
                frame.future.cancel()
        self._source = None

    def statistics(self) -> PipelineStatistics:
        """What was measured so far; may be called while the run goes on.  Does not touch the device."""
        with self._lock:
            stages = tuple(
                meter.statistics(each.name, each.device) for each, meter in zip(self._stages, self._meters, strict=True)
            )
            latencies = tuple(sorted(self._latencies))
            return PipelineStatistics(
                self._delivered, self._failed, self._finished - self._began, self._most, latencies, stages
            )

    # The consumer's thread ------------------------------------------------------------------------------------------

    def _pull(self) -> None:
        assert self._source is not None
        frame = _Frame(self._pulled, self._room[0])
        frame.pulled = clock()
        try:
            value = next(self._source)
        except StopIteration:
            self._source = None
            return
        except Exception as error:  # noqa: BLE001 - raised once the frames before it are out
            self._source, self._source_error = None, error
            return
        self._room.popleft()
        self._pulled += 1
        frame.origin = clock()
        with self._lock:
            self._open[frame.index] = frame
            self._most = max(self._most, len(self._open) + len(self._ended))
        self._submit(frame, 0, value)

    def _collect(self, *, block: bool) -> None:
        while True:
            try:
                frame = self._endings.get_nowait() if not (block and self._endings.empty()) else self._wait()
            except queue.Empty:
                return
            block = False
            if frame is not None and not self.closed:
                with self._lock:
                    self._open.pop(frame.index, None)
                    self._ended[frame.index] = frame

    def _wait(self) -> _Frame | None:
        """The next ending.  Blocks the host; whoever owns this thread may start another meanwhile."""
        with blocking(lambda: not self._endings.empty()):
            return self._endings.get()

    def _ready(self) -> _Frame | None:
        if not self._ended:
            return None
        if self._ordered:
            return self._ended.pop(self._delivered + self._failed, None)
        return self._ended.pop(next(iter(self._ended)))

    def _deliver(self, frame: _Frame) -> Any:
        last = len(self._stages) - 1
        value: Any = None
        if frame.error is None:
            assert frame.future is not None
            try:
                value = self._measured(frame, last, frame.future.result())
            except Exception as error:  # noqa: BLE001 - becomes the frame's error
                frame.error = StageError(self._stages[last].name, frame.index, error)
        frame.future = None
        now = clock()
        with self._lock:
            self._room.append(now)
            self._finished = now
            if frame.error is None:
                self._delivered += 1
                self._latencies.append(frame.done - frame.pulled)
            else:
                self._failed += 1
        if frame.error is not None:
            raise frame.error
        return value

    # Any thread -----------------------------------------------------------------------------------------------------

    def _submit(self, frame: _Frame, position: int, value: Any) -> None:
        step = self._stages[position]
        frame.submitted = clock()
        try:
            peer, timeout = self._peers[position], self._timeout
            copy = self._copy and position == 0  # a reply is ours, and nobody writes to it
            if isinstance(step.function, str):
                future = peer.submit(step.function, value, timeout=timeout, copy=copy)
            else:
                times = self._device_times
                future = peer.submit(run_stage, step.function, value, times, timeout=timeout, copy=copy)
        except Exception as error:  # noqa: BLE001 - becomes the frame's error
            self._end(frame, StageError(step.name, frame.index, error))
            return
        with self._lock:
            frame.future = future
            closed = self.closed
        if closed:
            future.cancel()
            return
        future.add_done_callback(lambda done: self._done(frame, position, done))
        if position + 1 < len(self._stages):
            forwarded = future.then(lambda reply: self._advance(frame, position, reply))
            forwarded.add_done_callback(lambda done: self._forwarded(frame, position, done))

    def _advance(self, frame: _Frame, position: int, reply: Any) -> None:
        if not self.closed:
            value = self._measured(frame, position, reply)
            self._submit(frame, position + 1, value)

    def _done(self, frame: _Frame, position: int, future: Pending) -> None:
        frame.done = clock()
        if self.closed:
            return
        error = None if future.cancelled() else future.exception()
        if error is not None or future.cancelled():
            cause = error if error is not None else ClosedError("the call was cancelled")
            self._end(frame, StageError(self._stages[position].name, frame.index, cause))
        elif position + 1 == len(self._stages):
            self._end(frame, None)

    def _forwarded(self, frame: _Frame, position: int, forwarded: Pending) -> None:
        error = None if forwarded.cancelled() else forwarded.exception()
        if error is not None and not self.closed:  # lost after it arrived, or refused by the executor
            self._end(frame, StageError(self._stages[position].name, frame.index, error))

    def _end(self, frame: _Frame, error: StageError | None) -> None:
        with self._lock:
            if frame.over:
                return
            frame.over, frame.error = True, error
        self._endings.put(frame)

    def _measured(self, frame: _Frame, position: int, reply: Any) -> Any:
        start, end = frame.submitted, frame.done
        value = reply
        if not isinstance(self._stages[position].function, str):
            value, (began, ended) = reply
            if frame.submitted <= began <= ended <= frame.done:  # else the clocks are those of two hosts
                start, end = began, ended
        with self._lock:
            self._meters[position].add(frame.room, frame.origin, start, end)
        frame.room, frame.origin = 0.0, end
        return value
