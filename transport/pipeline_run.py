"""One run of a pipeline: the frames in flight, and how each moves from stage to stage.  See `transport.pipeline`."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NoReturn, Self

from streamrt.arrays import convert, device_of
from streamrt.callbacks import blocking
from streamrt.errors import ClosedError
from streamrt.future import DeviceFuture
from streamrt.libraries.nesting import find_arrays
from transport.errors import PeerLostError, RemoteError, TransportError
from transport.launch.functions import ByValue
from transport.pipeline_place import Peer, Pending, Place, clock
from transport.stage_times import Meter, PipelineStatistics

LATENCIES = 100_000
"""Latencies kept for the percentiles, and numbers of lost frames; the oldest go first."""
SHOWN = 20
"""Numbers of lost frames in an error's text; its ``lost`` has them all."""


class StageError(TransportError, RuntimeError):
    """A stage failed on a frame: `stage` is its name, `frame` the number in the source, `__cause__` why."""

    def __init__(self, stage: str, frame: int, cause: BaseException) -> None:
        super().__init__(f"stage {stage!r} failed on frame {frame}: {type(cause).__name__}: {cause}")
        self.stage = stage
        self.frame = frame
        self.__cause__ = cause

    def __reduce__(self) -> tuple[Any, ...]:
        """As what it is made of.  Does not touch the device."""
        return type(self), (self.stage, self.frame, self.__cause__), self.__dict__


class StageLostError(StageError, PeerLostError):
    """A stage has no worker any more, and its place is not filled again; `__cause__` says why.

    `lost`: the numbers of the frames of this `map` that ended with the loss of the stage's workers, in ascending order,
    each with a `StageError` of its own; `frame`: the first number that was not pulled from the source.
    """

    def __init__(self, stage: str, frame: int, lost: Sequence[int], cause: BaseException) -> None:
        super().__init__(stage, frame, cause)
        self.lost = tuple(lost)
        numbers = ", ".join(map(str, self.lost[:SHOWN])) + (", ..." if len(self.lost) > SHOWN else "")
        told = f"frames that ended with it: {numbers}" if self.lost else "no frame ended with it"
        text = (
            f"stage {stage!r} has no worker any more: {cause}; {told}; frame {frame} and what follows was not pulled "
            "from the source: give these to another pipeline"
        )
        self.args = (text,)

    def __reduce__(self) -> tuple[Any, ...]:
        """As what it is made of.  Does not touch the device."""
        return type(self), (self.stage, self.frame, self.lost, self.__cause__), self.__dict__


@dataclass(frozen=True, slots=True)
class Stage:
    """One link of the chain; made by `stage()`."""

    function: Callable[[Any], Any] | str
    name: str
    device: str | None = None
    arrays: str | None = None
    peer: Peer | None = None


class StageCall(ByValue):
    """A stage's function as it goes to the stage's own worker, under the stage's name.

    Beside its result it tells when it began and ended.
    """

    def __init__(self, function: Callable[[Any], Any], name: str, device_times: bool) -> None:
        """`device_times` as for `pipeline`.  Does not touch the device."""
        super().__init__(function, name)
        self.device_times = device_times

    def __call__(self, value: Any) -> tuple[Any, tuple[float, float]]:
        """Runs in the worker.  Enqueues on the leased streams what the function does.

        With `device_times` blocks the host until the value has arrived and until the result is computed.
        """
        if self.device_times:
            synchronize(value)
        start = clock()
        result = self.function(value)
        if self.device_times:
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
        functions: Sequence[StageCall | str],
        places: Sequence[Place],
        source: Iterator[Any],
        *,
        in_flight: int,
        ordered: bool,
        copy: bool,
        return_errors: bool,
        timeout: float | None,
    ) -> None:
        """Use `Pipeline.map`.  Does not touch the device."""
        self.closed = False
        self._cut = False
        self._stages, self._functions, self._places = stages, functions, places
        self._timeout = timeout
        self._source: Iterator[Any] | None = source
        self._source_error: BaseException | None = None
        self._empty: int | None = None  # the stage whose place is not filled again
        self._lost: deque[tuple[int, int]] = deque(maxlen=LATENCIES)  # frames that ended with a worker; its stage
        self._ordered = ordered
        self._copy = copy
        self._return_errors = return_errors
        self._lock = threading.Lock()
        self._open: dict[int, _Frame] = {}
        self._ended: dict[int, _Frame] = {}
        self._endings: queue.SimpleQueue[_Frame | None] = queue.SimpleQueue()
        self._awake = threading.Event()
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
                if self._cut:
                    raise ClosedError("the pipeline has ended, and this map with it: take its frames inside the `with`")
                raise StopIteration
            self._stop_at_an_empty_place()
            if self._room and self._source is not None:
                self._pull()
            elif self._open or self._ended:
                self._collect(block=True)
            else:
                self.closed = True
                self._raise_what_ended_it()

    def cut(self) -> None:
        """`close`, because the pipeline ends: who still asks for a frame is told so.  Does not block the host."""
        if not self.closed:
            self._cut = True
            self.close()

    def close(self) -> None:
        """Gives up what is in flight: calls are cancelled, nothing moves on.  Idempotent.  Does not block the host."""
        with self._lock:
            self.closed = True
            frames = list(self._open.values())
            self._open.clear()
            self._ended.clear()
        self._endings.put(None)
        self._awake.set()
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

    def _stop_at_an_empty_place(self) -> None:
        """Pulls nothing more once a stage has no worker, for good: that is raised when what is in flight is out."""
        if self._source is not None:
            for position, place in enumerate(self._places):
                if place.given_up is not None:
                    self._source, self._source_error, self._empty = None, place.given_up, position

    def _raise_what_ended_it(self) -> NoReturn:
        error, empty = self._source_error, self._empty
        if error is None:
            raise StopIteration
        if empty is None or isinstance(error, ClosedError):
            raise error
        lost = sorted({frame for frame, position in self._lost if position == empty})
        raise StageLostError(self._stages[empty].name, self._pulled, lost, error)

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
                frame.error = self._error(frame, last, error)
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
        if frame.error is None:
            return value
        if self._return_errors:
            return frame.error
        raise frame.error

    # Any thread -----------------------------------------------------------------------------------------------------

    def _submit(self, frame: _Frame, position: int, value: Any) -> None:
        place = self._places[position]
        peer = place.peer
        frame.submitted = clock()
        try:
            timeout = self._timeout
            copy = self._copy and position == 0  # a reply is ours, and nobody writes to it
            future = peer.submit(self._functions[position], value, timeout=timeout, copy=copy)
        except Exception as error:  # noqa: BLE001 - becomes the frame's error
            following = place.after(peer, error, over=isinstance(error, ClosedError))
            if following is None:
                self._fail(frame, position, error)
            elif position == 0:
                self._wait_for_worker(frame, value, following)
            else:
                self._hold(frame, position, following)
            return
        with self._lock:
            frame.future = future
            closed = self.closed
        if closed:
            future.cancel()
            return
        future.add_done_callback(lambda done: self._done(frame, position, peer, done))
        if position + 1 < len(self._stages):
            self._then(frame, position, future, self._advance)

    def _wait_for_worker(self, frame: _Frame, value: Any, following: Future[Peer]) -> None:
        """Sends a frame of the source, of which nothing was sent, to the next worker.  Blocks the host until there is
        one, or `close`: nobody can write to the frame before it is sent."""
        self._awake.clear()
        following.add_done_callback(lambda _: self._awake.set())
        while not (following.done() or self.closed):
            with blocking(self._awake.is_set):
                self._awake.wait()
        if self.closed:
            return
        error = following.exception()
        if error is None:
            self._submit(frame, 0, value)
        else:
            self._fail(frame, 0, error)

    def _hold(self, frame: _Frame, position: int, following: Future[Peer]) -> None:
        """Keeps a reply of the stage before, of which nothing was sent, until this one has a worker again."""
        reply = frame.future
        assert reply is not None

        def go_on(following: Future[Peer]) -> None:
            error = following.exception()
            if error is None:
                self._then(frame, position - 1, reply, self._resume)
            else:
                self._fail(frame, position, error)

        following.add_done_callback(go_on)

    def _resume(self, frame: _Frame, position: int, reply: Any) -> None:
        if not self.closed:
            self._submit(frame, position + 1, self._value(position, reply))

    def _advance(self, frame: _Frame, position: int, reply: Any) -> None:
        if not self.closed:
            value = self._measured(frame, position, reply)
            self._submit(frame, position + 1, value)

    def _then(self, frame: _Frame, position: int, future: Pending, step: Callable[[_Frame, int, Any], None]) -> None:
        """Takes the frame's next step with the value of a future; a failure to is the frame's."""

        def stepped(done: Pending) -> None:
            error = None if done.cancelled() else done.exception()
            if error is not None and not self.closed:  # lost after it arrived, or refused by the executor
                self._fail(frame, position, error)

        future.then(lambda value: step(frame, position, value)).add_done_callback(stepped)

    def _done(self, frame: _Frame, position: int, peer: Peer, future: Pending) -> None:
        frame.done = clock()
        if self.closed:
            return
        if future.cancelled():
            self._fail(frame, position, ClosedError("the call was cancelled"))
        elif (error := future.exception()) is not None:
            self._places[position].after(peer, error)
            self._fail(frame, position, error)
        else:
            self._places[position].served(peer)
            if position + 1 == len(self._stages):
                self._end(frame, None)

    def _fail(self, frame: _Frame, position: int, cause: BaseException) -> None:
        self._end(frame, self._error(frame, position, cause))

    def _error(self, frame: _Frame, position: int, cause: BaseException) -> StageError:
        if isinstance(cause, PeerLostError) and not isinstance(cause, RemoteError):  # of the function, of another peer
            self._lost.append((frame.index, position))
        return StageError(self._stages[position].name, frame.index, cause)

    def _end(self, frame: _Frame, error: StageError | None) -> None:
        with self._lock:
            if frame.over:
                return
            frame.over, frame.error = True, error
        self._endings.put(frame)

    def _measured(self, frame: _Frame, position: int, reply: Any) -> Any:
        start, end = frame.submitted, frame.done
        if not isinstance(self._stages[position].function, str):
            _, (began, ended) = reply
            if frame.submitted <= began <= ended <= frame.done:  # else the clocks are those of two hosts
                start, end = began, ended
        with self._lock:
            self._meters[position].add(frame.room, frame.origin, start, end)
        frame.room, frame.origin = 0.0, end
        return self._value(position, reply)

    def _value(self, position: int, reply: Any) -> Any:
        return reply if isinstance(self._stages[position].function, str) else reply[0]
