"""The three ways to run the stages that the demo measures, over the same frames.

*One process* runs them one after the other and gives the reference outputs; *blocking* calls worker processes and waits
for each reply before the next call; *pipelined* is `transport.pipeline`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from streamrt.device import open_device
from transport.demo import photographs
from transport.demo.arrays import as_kind, to_device, to_host
from transport.demo.check import Check
from transport.demo.plan import Plan
from transport.pipeline import Pipeline, pipeline, stage
from transport.pipeline_run import synchronize
from transport.stage_times import PipelineStatistics, percentile

REFERENCE_FRAMES = 24
"""Frames of the run in one process: they show every position of the window, so that all outputs can be checked."""
BLOCKING_FRAMES = 12
"""Enough for a rate; with nothing to overlap, every frame takes the same time."""

Observer = Callable[[int], object]
"""Told the number of frames that are through."""


@dataclass(slots=True)
class Timed:
    """How one way of running went.  `stages`: seconds that each stage was at work, `seconds` all of it."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    stages: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    @property
    def frames(self) -> int:
        """The frames that ran.  Does not touch the device."""
        return len(self.latencies)

    @property
    def rate(self) -> float:
        """Frames a second.  Does not touch the device."""
        return self.frames / self.seconds if self.seconds else 0.0

    def latency(self, percent: float) -> float:
        """A percentile of the frames' times, in seconds.  Does not touch the device."""
        return percentile(sorted(self.latencies), percent)


def source(plan: Plan) -> Callable[[int], Any]:
    """A function from a frame's number to the frame, on the first step's device.  Blocks the host (the mosaic)."""
    tiled = photographs.mosaic(plan.megapixels)
    if plan.kind == "cuda":
        tiled = to_device(tiled, open_device(plan.steps[0].device))
    return lambda index: photographs.window(tiled, plan.megapixels, index)


def one_process(plan: Plan, frame: Callable[[int], Any], observe: Observer) -> tuple[Timed, dict[int, dict[str, Any]]]:
    """Runs the stages here; returns times and reference outputs by window.  Blocks the host after each stage."""
    timed = Timed()
    reference: dict[int, dict[str, Any]] = {}
    _through(plan, frame(0), None)  # first use of kernels and compilers
    for index in range(min(plan.frames, REFERENCE_FRAMES)):
        began = time.monotonic()
        value = _through(plan, frame(index), timed.stages)
        timed.latencies.append(time.monotonic() - began)
        timed.seconds += timed.latencies[-1]
        reference.setdefault(photographs.position(index), to_host(value))
        observe(index + 1)
    return timed, reference


def _through(plan: Plan, value: Any, stages: list[float] | None) -> Any:
    for number, step in enumerate(plan.steps):
        value = as_kind(value, step.library)
        synchronize(value)
        began = time.monotonic()
        value = step.function(value)
        synchronize(value)
        if stages is not None:
            stages[number] += time.monotonic() - began
    return value


def make_chain(plan: Plan, restarts: int = 0) -> Pipeline:
    """The pipeline of the plan's steps, not yet entered.  Does not touch the device."""
    stages = [stage(s.function, device=s.device, arrays=s.library, name=s.title) for s in plan.steps]
    enqueued = plan.kind == "cuda" or "jax" in plan.libraries
    return pipeline(*stages, in_flight=plan.in_flight, device_times=enqueued, restarts=restarts)


def blocking(plan: Plan, chain: Pipeline, frame: Callable[[int], Any], observe: Observer) -> Timed:
    """Calls the chain's workers in turn and waits for each reply.  Blocks the host at each call."""
    timed = Timed()
    for index in range(-1, min(plan.frames, BLOCKING_FRAMES)):
        began = time.monotonic()
        value, busy = frame(max(index, 0)), []
        for function, peer in zip(chain.functions, chain.peers, strict=True):
            future: Any = peer.submit(function, value)
            future.wait()
            value, (start, end) = future.result()
            busy.append(end - start)
        if index >= 0:  # the first warms up: compilers, pinned memory, mappings
            timed.latencies.append(time.monotonic() - began)
            timed.seconds += timed.latencies[-1]
            timed.stages = [total + each for total, each in zip(timed.stages, busy, strict=True)]
            observe(index + 1)
    return timed


def warm(plan: Plan, chain: Pipeline, frame: Callable[[int], Any]) -> None:
    """As many frames as are in flight, unmeasured: on GPUs each piece of memory is mapped by its readers once.

    Blocks the host.
    """
    if plan.kind == "cuda":
        for _ in chain.map((frame(index) for index in range(plan.in_flight)), copy=False):
            pass


def pipelined(
    plan: Plan, chain: Pipeline, frame: Callable[[int], Any], check: Check, observe: Observer
) -> tuple[PipelineStatistics, dict[int, Any]]:
    """Runs all frames through the chain; returns its statistics and the first and the last output, on the host.

    Blocks the host until the last frame is there.
    """
    shown: dict[int, Any] = {}

    def frames() -> Iterator[Any]:
        return (frame(index) for index in range(plan.frames))

    for index, output in enumerate(chain.map(frames(), copy=False)):
        if index in (0, plan.frames - 1):
            shown[index] = output
        check.add(index, photographs.position(index), output)
        observe(index + 1)
    return chain.statistics(), {index: to_host(output) for index, output in shown.items()}
