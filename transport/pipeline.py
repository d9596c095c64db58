"""Chains of stages over worker processes, with a bounded number of frames in flight.

Rules:
- A frame is in flight from the moment it is pulled from the source until the consumer has it; there are never more than
  `in_flight`.  So a slow consumer stops the source, and nothing piles up between stages beyond that number.
- The consumer's thread pulls the source and makes the first stage's call (a frame is ordered on *its* current streams)
  and takes the last stage's result.  In between, a frame moves on by `DeviceFuture.then`, whether the consumer asks or
  not: the reply of one stage is the argument of the next, still in flight on the device, and no thread waits for it.
- A frame that fails ends with a `StageError` when its turn comes; the other frames go on, and so does the iterator.
- With `restarts` a worker that was started here and is lost is followed by another in its place.  The frames that were
  in it are lost, each with its `StageError`, and none is run again: what became of them is unknown.  Those that come to
  the stage meanwhile wait for the next worker (`transport/pipeline_place.py`).
- What a stage did is measured where it ran: a call returns (value, (start, end)) by the monotonic clock, which all
  processes of one host share.  The times of a peer on another host, and of functions that are called by name, are those
  that the caller sees.  `transport/stage_times.py` says what becomes of them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

from streamrt.device import parse_device
from streamrt.errors import ClosedError
from transport.launch.local import LocalWorker, local_workers
from transport.limits import NO_DEADLINE, check_flag, check_seconds
from transport.peer import Peer as ConnectedPeer
from transport.pipeline_place import Peer, Place, Restart
from transport.pipeline_run import Run, Stage, StageCall, StageError, StageLostError
from transport.service import check_kind, check_plain, function_name
from transport.stage_times import PipelineStatistics, StageStatistics

__all__ = [
    "Pipeline",
    "PipelineStatistics",
    "Restart",
    "Run",
    "Stage",
    "StageError",
    "StageLostError",
    "StageStatistics",
    "pipeline",
    "stage",
]


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
    Does not touch the device.  Raises `TypeError` for what is no function, `ValueError` for a name without `peer` and a
    device or a kind of array with one, `LocalProtocolError` for a kind of array that there is not, `PlacementError`
    for what is no device.
    """
    _check_function(function)
    check_kind(arrays)
    if device is not None:
        parse_device(device)
    if peer is not None and (device is not None or arrays is not None):
        raise ValueError("device= and arrays= are for a worker that the pipeline starts; the peer has its own")
    if name is None:
        name = function if isinstance(function, str) else getattr(function, "__name__", type(function).__name__)
    if not isinstance(function, str):
        check_plain(function)
        if isinstance(peer, ConnectedPeer) and not isinstance(peer, LocalWorker):
            function = function_name(function)
    elif peer is None:
        raise ValueError(f"stage {name!r} is given by name: pass peer=, a worker whose service has a function {name!r}")
    return Stage(function, name, device, arrays, peer)


def _check_function(function: object) -> None:
    if not isinstance(function, str) and not callable(function):
        hint = "; give each stage by itself: pipeline(first, second)" if isinstance(function, (list, tuple)) else ""
        raise TypeError(f"a stage is a function, or the name of a peer's; this is a {type(function).__name__}{hint}")


def pipeline(
    *stages: Stage | Callable[[Any], Any],
    in_flight: int = 8,
    timeout: float | None = None,
    device_times: bool = False,
    restarts: int = 0,
) -> Pipeline:
    """A chain of stages, to be entered with `with`: that starts one local worker for each stage without a `peer`.

    `in_flight` bounds the frames between source and consumer, `timeout` (seconds) each stage's call.  A GPU stage's
    times (and JAX's on the CPU) are those of enqueuing its work; with `device_times` they are the device's, for which
    the worker's thread waits for it before and after the function.  Does not touch the device.

    A worker that is lost stays lost, and so do the frames that come to its stage, unless `restarts` says how often in a
    row it may be started again, with no frame through in between; see `map` for the frames.  A peer that was given with
    `peer` is never started again.
    """
    links = tuple(each if isinstance(each, Stage) else stage(each) for each in stages)
    return Pipeline(links, in_flight, timeout, device_times, restarts)


class Pipeline:
    """A running chain.  Its workers live from `__enter__` to `__exit__`, over as many calls of `map` as you like."""

    def __init__(
        self,
        stages: tuple[Stage, ...],
        in_flight: int,
        timeout: float | None,
        device_times: bool,
        restarts: int,
    ) -> None:
        """Use `pipeline`.  Does not touch the device."""
        if not stages:
            raise ValueError("a pipeline needs at least one stage")
        if in_flight < 1:
            raise ValueError(f"in_flight is {in_flight}: at least one frame has to be in flight")
        if timeout is not None:
            check_seconds("timeout", timeout, NO_DEADLINE)
        if restarts < 0:
            raise ValueError(f"restarts is {restarts}: say how often in a row a worker may be started again, or 0")
        self.stages = stages
        self.in_flight = in_flight
        self.timeout = timeout
        self.functions = tuple(
            each.function if isinstance(each.function, str) else StageCall(each.function, each.name, device_times)
            for each in stages
        )
        """What each stage's worker is called with: a function that tells its times beside its result, or a name."""
        self.restart_limit = restarts
        self._places: list[Place] = []
        self._exit = contextlib.ExitStack()
        self._runs: list[Run] = []

    @property
    def peers(self) -> list[Peer]:
        """Who serves the stages now, in their order; empty when it does not run.  Does not touch the device."""
        return [place.peer for place in self._places]

    @property
    def restarts(self) -> list[Restart]:
        """The workers that were lost and started again so far, by stage.  Does not touch the device."""
        return [restart for place in self._places for restart in place.restarts]

    def __repr__(self) -> str:
        state = "running" if self._places else "not running"
        return f"<Pipeline {' -> '.join(each.name for each in self.stages)}, {self.in_flight} in flight, {state}>"

    def __enter__(self) -> Self:
        """Starts the workers.  Blocks the host until they are ready."""
        with self._exit as starting:
            own = iter(
                _start_workers([each for each in self.stages if each.peer is None], self.restart_limit, starting)
            )
            self._places = [next(own) if each.peer is None else Place(each.name, each.peer) for each in self.stages]
            self._exit = starting.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        """Ends every open `map` and the workers that were started here, by an exception at once.

        Blocks the host until they are gone.
        """
        for run in self._runs:
            run.cut()
        places, self._places = self._places, []
        for place in places:
            place.close()
        self._exit.__exit__(kind, value, tb)
        for place in places:
            place.join()

    def map(
        self, frames: Iterable[Any], *, ordered: bool = True, copy: bool = True, return_errors: bool = False
    ) -> Run:
        """The frames after the last stage, as an iterator: in their order, or as they come with `ordered=False`.

        `frames` is pulled in the consumer's thread and only when there is room.  `next()` blocks the host until a
        frame's last reply is there and orders it on the current streams; it raises `StageError` for a frame that failed
        (call `next()` again to go on with the others) and what the source raised, once the frames before it are out.
        With `return_errors` the `StageError` is returned in the frame's place, so that a `for` goes on by itself.
        `close()` it, or leave the pipeline, to give up early; after the latter `next()` raises `ClosedError`.  With
        `copy=False` frames are lent to the first stage, not copied: the source does not write to one again.

        A frame that was in a worker that is lost fails, with `PeerLostError` as the error's `__cause__`, and is not run
        again; that is for you to decide.  With `restarts` the frames behind it wait for the next worker, and if there
        is none any more, `StageLostError` (a `StageError` and a `PeerLostError`) is raised after what is in flight,
        also with `return_errors`: it has the numbers of the frames that were lost, and the source is pulled no further.
        """
        if not self._places:
            raise ClosedError("the pipeline is not running: use `with transport.pipeline(...) as chain:`")
        check_flag("copy", copy, "True copies the frames of the source, False lends them to the first stage")
        self._runs = [run for run in self._runs if not run.closed]
        run = Run(
            self.stages,
            self.functions,
            self._places,
            iter(frames),
            in_flight=self.in_flight,
            ordered=ordered,
            copy=copy,
            return_errors=return_errors,
            timeout=self.timeout,
        )
        self._runs.append(run)
        return run

    def statistics(self) -> PipelineStatistics:
        """The statistics of the latest `map`; `ClosedError` before the first.  Does not touch the device."""
        if not self._runs:
            raise ClosedError("nothing ran yet: statistics are those of the latest map()")
        return self._runs[-1].statistics()


def _start_workers(stages: list[Stage], restarts: int, exits: contextlib.ExitStack) -> list[Place]:
    """One worker a stage; those that differ in nothing but the device are started together.

    One thread each: frames pass a stage one after the other (one that waits for the device lets the next one in).
    """
    alike: dict[tuple[str | None, bool], list[int]] = {}
    for number, each in enumerate(stages):
        alike.setdefault((each.arrays, each.device is None), []).append(number)
    places: dict[int, Place] = {}
    for (arrays, _), numbers in alike.items():
        devices = [device for number in numbers if (device := stages[number].device) is not None]
        started = local_workers(len(numbers), devices=devices or None, arrays=arrays, threads=1)
        workers = exits.enter_context(started)
        for index, number in enumerate(numbers):
            restart = functools.partial(workers.restart, index)
            places[number] = Place(stages[number].name, workers[index], restart, restarts)
    return [places[number] for number in range(len(stages))]
