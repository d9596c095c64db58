"""`streamrt demo --kill`: one worker of the running pipeline is killed in the middle of a frame.

The worker itself says that it is in the middle of one: its stage calls back before it returns, and is killed in place
of an answer.  So the kill meets a frame for certain, however fast the stage is.
"""

from __future__ import annotations

import functools
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transport.agent import default_agent
from transport.demo import photographs
from transport.demo.check import Check
from transport.demo.plan import VICTIM, Plan
from transport.demo.runs import make_chain
from transport.errors import PeerLostError
from transport.peer import caller
from transport.pipeline import Pipeline, Restart, StageError

RESTARTS = 3

Observer = Callable[[int, Sequence[int]], object]
"""Told how many frames are out, and the numbers of those among them that are lost."""


class Killer:
    """Kills the worker that comes to the middle of its next frame, once, after `arm`."""

    def __init__(self) -> None:
        """Lets workers of this process call `in_the_middle` by its `name`.  Does not touch the device."""
        self.name = f"in the middle {secrets.token_hex(4)}"
        self.pid = 0
        self.killed = 0.0
        self._armed = False
        self._lock = threading.Lock()
        default_agent().service.function(name=self.name)(self.in_the_middle)

    def arm(self) -> None:
        """From now on the next one is killed.  Does not block the host."""
        with self._lock:
            self._armed = True

    def in_the_middle(self) -> None:
        """A worker calls this in the middle of each frame.  Does not block the host."""
        with self._lock:
            if self._armed:
                self._armed = False
                self.pid, self.killed = caller().pid, time.monotonic()
                os.kill(self.pid, signal.SIGKILL)


def told(function: Callable[[Any], Any], name: str, value: Any) -> Any:
    """Runs in the worker: a stage that calls back in the middle of a frame.

    Enqueues on the current streams what the function does; blocks the host for the call back.
    """
    result = function(value)
    caller().call(name)
    return result


@dataclass(slots=True)
class Killed:
    """What came of it.  `known` and `back` are seconds from the kill until the first loss was known, and until the next
    worker was ready; `failed` are frames that failed, but not with their worker."""

    check: Check
    lost: list[int] = field(default_factory=list)
    failed: list[StageError] = field(default_factory=list)
    delivered: int = 0
    delivered_after: int = 0
    pid: int = 0
    known: float = 0.0
    restart: Restart | None = None
    back: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether frames were lost with their worker and no other way, another came, and every output is right.

        Does not touch the device.
        """
        right = bool(self.lost) and not self.failed and not self.check.wrong
        return right and self.restart is not None and self.delivered_after > 0


def chain_to_kill(plan: Plan, killer: Killer) -> Pipeline:
    """The pipeline of the plan's steps, whose middle one calls back to the killer; not yet entered.

    Does not touch the device.
    """
    steps = list(plan.steps)
    victim = steps[VICTIM]
    steps[VICTIM] = replace(victim, function=functools.partial(told, victim.function, killer.name))
    return make_chain(replace(plan, steps=tuple(steps)), restarts=RESTARTS)


def undisturbed(plan: Plan, chain: Pipeline, frame: Callable[[int], Any], observe: Observer) -> None:
    """All frames with nobody killed: afterwards all memory that such a run takes is there.

    Blocks the host until the last frame is there.
    """
    for index, _ in enumerate(chain.map(_frames(plan, frame), copy=False)):
        observe(index + 1, ())


def disturbed(
    plan: Plan, chain: Pipeline, killer: Killer, frame: Callable[[int], Any], check: Check, observe: Observer
) -> Killed:
    """All frames; when that of `plan.kill_at` has been delivered, the middle worker is killed in its next one.

    Blocks the host until the last frame is there.  What was delivered is not checked yet.
    """
    killed = Killed(check)
    for index, output in enumerate(chain.map(_frames(plan, frame), copy=False, return_errors=True)):
        if isinstance(output, StageError):
            if isinstance(output.__cause__, PeerLostError):
                killed.lost.append(output.frame)
            else:
                killed.failed.append(output)
        else:
            killed.delivered += 1
            killed.delivered_after += bool(killer.killed)
            check.add(index, photographs.position(index), output)
        if index == plan.kill_at:
            killer.arm()
        observe(index + 1, killed.lost)
    killed.pid = killer.pid
    for restart in chain.restarts[:1]:
        killed.restart = restart
        killed.known, killed.back = restart.lost - killer.killed, restart.back - killer.killed
    return killed


def _frames(plan: Plan, frame: Callable[[int], Any]) -> Iterator[Any]:
    return (frame(index) for index in range(plan.frames))
