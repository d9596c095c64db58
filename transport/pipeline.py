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
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

from streamrt.errors import ClosedError
from transport.launch.local import local_workers
from transport.limits import NO_DEADLINE, check_seconds
from transport.pipeline_run import Peer, Run, Stage, StageError
from transport.service import check_plain
from transport.stage_times import PipelineStatistics, StageStatistics

__all__ = ["Pipeline", "PipelineStatistics", "Run", "Stage", "StageError", "StageStatistics", "pipeline", "stage"]


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
    if not isinstance(function, str):
        check_plain(function)
    elif peer is None:
        raise ValueError(f"stage {name!r} is given by name: pass peer=, a worker whose service has a function {name!r}")
    return Stage(function, name, device, arrays, peer)


def pipeline(
    *stages: Stage | Callable[[Any], Any], in_flight: int = 8, timeout: float | None = None, device_times: bool = False
) -> Pipeline:
    """A chain of stages, to be entered with `with`: that starts one local worker for each stage without a `peer`.

    `in_flight` bounds the frames between source and consumer, `timeout` (seconds) each stage's call.  A GPU stage's
    times (and JAX's on the CPU) are those of enqueuing its work; with `device_times` they are the device's, for which
    the worker's thread waits for it before and after the function.  Does not touch the device.
    """
    links = tuple(each if isinstance(each, Stage) else stage(each) for each in stages)
    return Pipeline(links, in_flight, timeout, device_times)


class Pipeline:
    """A running chain.  Its workers live from `__enter__` to `__exit__`, over as many calls of `map` as you like."""

    def __init__(self, stages: tuple[Stage, ...], in_flight: int, timeout: float | None, device_times: bool) -> None:
        if not stages:
            raise ValueError("a pipeline needs at least one stage")
        if in_flight < 1:
            raise ValueError(f"in_flight is {in_flight}: at least one frame has to be in flight")
        if timeout is not None:
            check_seconds("timeout", timeout, NO_DEADLINE)
        self.stages = stages
        self.in_flight = in_flight
        self.timeout = timeout
        self.device_times = device_times
        self.peers: list[Peer] = []
        self._exit = contextlib.ExitStack()
        self._runs: list[Run] = []

    def __repr__(self) -> str:
        state = "running" if self.peers else "not running"
        return f"<Pipeline {' -> '.join(each.name for each in self.stages)}, {self.in_flight} in flight, {state}>"

    def __enter__(self) -> Self:
        """Starts the workers.  Blocks the host until they are ready."""
        with self._exit as starting:
            own = [each for each in self.stages if each.peer is None]
            started = iter(_start_workers(own, starting))
            self.peers = [each.peer if each.peer is not None else next(started) for each in self.stages]
            self._exit = starting.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        """Ends every open `map` and the workers that were started here, by an exception at once.

        Blocks the host until they are gone.
        """
        for run in self._runs:
            run.close()
        self.peers = []
        self._exit.__exit__(kind, value, tb)

    def map(self, frames: Iterable[Any], *, ordered: bool = True, copy: bool = True) -> Run:
        """The frames after the last stage, as an iterator: in their order, or as they come with `ordered=False`.

        `frames` is pulled in the consumer's thread and only when there is room.  `next()` blocks the host until a
        frame's last reply is there and orders it on the current streams; it raises `StageError` for a frame that failed
        (call `next()` again to go on with the others) and what the source raised, once the frames before it are out.
        `close()` it, or leave the pipeline, to give up early.  With `copy=False` frames are lent to the first stage,
        not copied: the source does not write to one again.
        """
        if not self.peers:
            raise ClosedError("the pipeline is not running: use `with transport.pipeline(...) as chain:`")
        self._runs = [run for run in self._runs if not run.closed]
        run = Run(
            self.stages,
            self.peers,
            iter(frames),
            in_flight=self.in_flight,
            ordered=ordered,
            copy=copy,
            timeout=self.timeout,
            device_times=self.device_times,
        )
        self._runs.append(run)
        return run

    def statistics(self) -> PipelineStatistics:
        """The statistics of the latest `map`; `ClosedError` before the first.  Does not touch the device."""
        if not self._runs:
            raise ClosedError("nothing ran yet: statistics are those of the latest map()")
        return self._runs[-1].statistics()


def _start_workers(stages: list[Stage], exits: contextlib.ExitStack) -> list[Peer]:
    """One worker a stage; those that differ in nothing but the device are started together.

    One thread each: frames pass a stage one after the other (one that waits for the device lets the next one in).
    """
    alike: dict[tuple[str | None, bool], list[int]] = {}
    for number, each in enumerate(stages):
        alike.setdefault((each.arrays, each.device is None), []).append(number)
    peers: dict[int, Peer] = {}
    for (arrays, _), numbers in alike.items():
        devices = [device for number in numbers if (device := stages[number].device) is not None]
        started = local_workers(len(numbers), devices=devices or None, arrays=arrays, threads=1)
        peers.update(zip(numbers, exits.enter_context(started), strict=True))
    return [peers[number] for number in range(len(stages))]
