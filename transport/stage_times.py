"""Where the time of a pipeline's stages goes.

A stage's time, from the run's start to the end of its last call, is split without a rest: busy; waiting for input (no
frame was ready for it, because the source or the stage before was at work); waiting for credit (all frames that may be
in flight were taken); transfer not hidden (its next frame was on the way to it, and nothing else was there to do).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """What one stage's worker did in one run.  Times are seconds; `busy + waiting_* + transfer == elapsed`."""

    name: str
    device: str | None
    frames: int
    elapsed: float
    busy: float
    waiting_input: float
    waiting_credit: float
    transfer: float

    @property
    def rate(self) -> float:
        """Frames a second since the run began.  Does not touch the device."""
        return self.frames / self.elapsed if self.elapsed else 0.0


@dataclass(frozen=True, slots=True)
class PipelineStatistics:
    """What one `Pipeline.map` did so far.  `latencies`: seconds from a frame's pull to its last reply, sorted."""

    frames: int
    failed: int
    elapsed: float
    most_in_flight: int
    latencies: tuple[float, ...]
    stages: tuple[StageStatistics, ...]

    @property
    def rate(self) -> float:
        """Delivered frames a second.  Does not touch the device."""
        return self.frames / self.elapsed if self.elapsed else 0.0

    def latency(self, percent: float) -> float:
        """The latency that `percent` of 100 frames do not exceed, in seconds.  Does not touch the device."""
        return percentile(self.latencies, percent)


@dataclass(slots=True)
class Meter:
    """Splits a stage's time as frames come by.  Calls are added in the order in which they ended."""

    began: float
    last: float
    frames: int = 0
    busy: float = 0.0
    waiting_input: float = 0.0
    waiting_credit: float = 0.0
    transfer: float = 0.0

    def add(self, room: float, origin: float, start: float, end: float) -> None:
        """Adds one call, that ran from `start` to `end`.

        Idle time before it is cut at `room` (when the frame was let in), `origin` (when the source or the stage before
        had made it) and `start`.  Does not touch the device.
        """
        idle = self.last
        for until, kind in ((room, "waiting_credit"), (origin, "waiting_input"), (start, "transfer")):
            until = min(until, start)
            if until > idle:
                setattr(self, kind, getattr(self, kind) + until - idle)
                idle = until
        if end > idle:
            self.busy += end - idle
            self.last = end
        self.frames += 1

    def statistics(self, name: str, device: str | None) -> StageStatistics:
        """What was added so far.  Does not touch the device."""
        return StageStatistics(
            name,
            device,
            self.frames,
            self.last - self.began,
            self.busy,
            self.waiting_input,
            self.waiting_credit,
            self.transfer,
        )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest of the sorted values that `percent` of 100 do not exceed; 0 of none.  Does not touch the device."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else 0.0
