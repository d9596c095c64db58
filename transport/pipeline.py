"""Chains of stages over worker processes, with a bounded number of frames in flight.

Rules:
- A frame is in flight from the moment it is pulled from the source until the consumer has it; there are never more than
  `in_flight`.  So a slow consumer stops the source, and nothing piles up between stages beyond that number.
- The consumer's thread pulls the source and makes the first stage's call (a frame is ordered on *its* current streams)
  and takes the last stage's result.  In between, a frame moves on by `DeviceFuture.then`, whether the consumer asks or
  not: the reply of one stage is the argument of the next, still in flight on the device, and no thread waits for it.
- A frame that fails ends with a `StageError` when its turn comes; the other frames go on, and so does the iterator.
- What a stage did is measured where it ran: a call returns (value, (start, end)) by the monotonic clock, which all
  processes of one host share.  The times of a peer on another host, and of functions that are called by name, are those
  that the caller sees.  `transport/stage_times.py` says what becomes of them.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from streamrt.errors import ClosedError
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

    def submit(self, function: Any, /, *arguments: Any, timeout: float | None = None) -> Pending: ...


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


def stage(
    function: Callable[[Any], Any] | str,
    *,
    device: str | None = None,
    arrays: str | None = None,
    name: str | None = None,
    peer: Peer | None = None,
) -> Stage:
    """Describes one stage: a function of one value (a frame: an array, or any nesting of arrays) to the next value.

    `device` and `arrays` are those of the worker that the pipeline starts for it ("cuda:1", "host:0"; "torch", "jax",
    "cupy", "numpy").  With `peer` the stage runs there instead, and is a function of that peer's service or its name.
    Does not touch the device.
    """
    if name is None:
        name = function if isinstance(function, str) else getattr(function, "__name__", type(function).__name__)
    if isinstance(function, str) and peer is None:
        raise ValueError(f"stage {name!r} is given by name: pass peer=, a worker whose service has a function {name!r}")
    return Stage(function, name, device, arrays, peer)


def pipeline(*stages: Stage | Callable[[Any], Any], in_flight: int = 8, timeout: float | None = None) -> Pipeline:
    """A chain of stages, to be entered with `with`: that starts one local worker for each stage without a `peer`.

    `in_flight` bounds the frames between source and consumer, `timeout` (seconds) each stage's call.
    Does not touch the device.
    """
    return Pipeline(tuple(each if isinstance(each, Stage) else stage(each) for each in stages), in_flight, timeout)


def run_stage(function: Callable[[Any], Any], value: Any) -> tuple[Any, tuple[float, float]]:
    """Runs in the worker: the stage's function, and when it began and ended.  Enqueues on the leased streams."""
    start = clock()
    result = function(value)
    return result, (start, clock())


class Pipeline:
    """A running chain.  Its workers live from `__enter__` to `__exit__`, over as many calls of `map` as you like."""

    def __init__(self, stages: tuple[Stage, ...], in_flight: int, timeout: float | None) -> None:
        if not stages:
            raise ValueError("a pipeline needs at least one stage")
        if in_flight < 1:
            raise ValueError(f"in_flight is {in_flight}: at least one frame has to be in flight")
        self.stages = stages
        self.in_flight = in_flight
        self.timeout = timeout
        self.peers: list[Peer] = []
        self._exit = contextlib.ExitStack()
        self._runs: list[Run] = []

    def __enter__(self) -> Self:
        """Starts the workers.  Blocks the host until they are ready."""
        with self._exit as starting:
            own = [each for each in self.stages if each.peer is None]
            started = iter(_start_workers(own, starting) if own else ())
            self.peers = [each.peer if each.peer is not None else next(started) for each in self.stages]
            self._exit = starting.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        """Ends every open `map` and the workers that were started here.  Blocks the host until they are gone."""
        for run in self._runs:
            run.close()
        self.peers = []
        self._exit.__exit__(kind, value, tb)

    def map(self, frames: Iterable[Any], *, ordered: bool = True) -> Run:
        """The frames after the last stage, as an iterator: in their order, or as they come with `ordered=False`.

        `frames` is pulled in the consumer's thread and only when there is room.  `next()` blocks the host until a
        frame's last reply is there and orders it on the current streams; it raises `StageError` for a frame that failed
        (call `next()` again to go on with the others) and what the source raised, once the frames before it are out.
        `close()` it, or leave the pipeline, to give up early.
        """
        if not self.peers:
            raise ClosedError("the pipeline is not running: use `with transport.pipeline(...) as chain:`")
        self._runs = [run for run in self._runs if not run.closed]
        run = Run(self, iter(frames), ordered)
        self._runs.append(run)
        return run

    def statistics(self) -> PipelineStatistics:
        """The statistics of the latest `map`; `ClosedError` before the first.  Does not touch the device."""
        if not self._runs:
            raise ClosedError("nothing ran yet: statistics are those of the latest map()")
        return self._runs[-1].statistics()


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
    error: StageError | None = None


class Run(Iterator[Any]):
    """The iterator of one `Pipeline.map`.  One consumer at a time."""

    def __init__(self, chain: Pipeline, source: Iterator[Any], ordered: bool) -> None:
        self.closed = False
        self._chain = chain
        self._source: Iterator[Any] | None = source
        self._source_error: BaseException | None = None
        self._ordered = ordered
        self._lock = threading.Lock()
        self._open: dict[int, _Frame] = {}
        self._ended: dict[int, _Frame] = {}
        self._endings: queue.SimpleQueue[_Frame | None] = queue.SimpleQueue()
        self._pulled = self._delivered = self._failed = self._most = 0
        self._latencies: deque[float] = deque(maxlen=LATENCIES)
        self._began = self._finished = clock()
        self._room: deque[float] = deque([self._began] * chain.in_flight)
        self._meters = [Meter(self._began, self._began) for _ in chain.stages]

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
                meter.statistics(each.name, each.device)
                for each, meter in zip(self._chain.stages, self._meters, strict=True)
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
                frame = self._endings.get(block=block)
            except queue.Empty:
                return
            block = False
            if frame is not None and not self.closed:
                with self._lock:
                    self._open.pop(frame.index, None)
                    self._ended[frame.index] = frame

    def _ready(self) -> _Frame | None:
        if not self._ended:
            return None
        if self._ordered:
            return self._ended.pop(self._delivered + self._failed, None)
        return self._ended.pop(next(iter(self._ended)))

    def _deliver(self, frame: _Frame) -> Any:
        last = len(self._chain.stages) - 1
        value: Any = None
        if frame.error is None:
            assert frame.future is not None
            try:
                value = self._measured(frame, last, frame.future.result())
            except Exception as error:  # noqa: BLE001 - becomes the frame's error
                frame.error = StageError(self._chain.stages[last].name, frame.index, error)
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
        step = self._chain.stages[position]
        frame.submitted = clock()
        try:
            arguments = (step.function, value) if isinstance(step.function, str) else (run_stage, step.function, value)
            future = self._chain.peers[position].submit(*arguments, timeout=self._chain.timeout)
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
        if position + 1 < len(self._chain.stages):
            future.then(lambda reply: self._advance(frame, position, reply))

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
            self._end(frame, StageError(self._chain.stages[position].name, frame.index, cause))
        elif position + 1 == len(self._chain.stages):
            self._end(frame, None)

    def _end(self, frame: _Frame, error: StageError | None) -> None:
        frame.error = error
        self._endings.put(frame)

    def _measured(self, frame: _Frame, position: int, reply: Any) -> Any:
        start, end = frame.submitted, frame.done
        value = reply
        if not isinstance(self._chain.stages[position].function, str):
            value, (began, ended) = reply
            if frame.submitted <= began <= ended <= frame.done:  # else the clocks are those of two hosts
                start, end = began, ended
        with self._lock:
            self._meters[position].add(frame.room, frame.origin, start, end)
        frame.room, frame.origin = 0.0, end
        return value


def _start_workers(stages: list[Stage], exits: contextlib.ExitStack) -> list[Peer]:
    import transport

    return [
        peer
        for each in stages
        for peer in exits.enter_context(transport.local_workers(1, devices=[each.device], arrays=each.arrays))
    ]
