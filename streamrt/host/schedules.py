"""Which enabled operation runs next: the schedules of the host backend.

- `Eager`: an operation runs when it is enqueued if all that it waits for is met, else the device's pump thread runs it.
- `Threads`: the pump threads run everything; for bugs of locks and of the GIL.
- `Lazy`, `Random`, `Priority`: no thread runs anything by itself.  What a host wait needs is run on the waiting thread,
  so that one thread drives everything and a seed replays it.  `Lazy` runs only what is needed, as late as is legal;
  `Random` picks among the enabled; `Priority` gives streams random priorities with a few change points (Burckhardt et
  al., "A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs", ASPLOS 2010).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

from streamrt.host.scheduler import EventNeed, Machine, Need, Operation, Queue, WordNeed


class Schedule(Protocol):
    """A policy.  `threaded`: pump threads run; `trace` lists the choices of a replaying schedule."""

    name: str
    threaded: bool
    trace: list[str]

    def enqueued(self, machine: Machine, queue: Queue, operation: Operation) -> None:
        """The operation was appended to the queue."""

    def changed(self, machine: Machine) -> None:
        """A latch was opened or a word written."""

    def pursue(self, machine: Machine, done: Callable[[], bool], need: Need | Queue, timeout: float | None) -> bool:
        """Blocks the host until `done`.  False at the timeout."""

    def nudge(self, machine: Machine, need: Need | Queue) -> None:
        """A query has said "not yet": a replaying schedule makes one step, so that polling loops end."""


class Eager:
    """Runs an operation on the enqueueing thread when it can."""

    name = "eager"
    threaded = True

    def __init__(self) -> None:
        self.trace: list[str] = []

    def enqueued(self, machine: Machine, queue: Queue, operation: Operation) -> None:
        while not operation.done:  # and no longer: other threads may go on for ever
            # Another thread may be running what comes before, or this one: plain code is not to see it undone.
            if not machine.step(queue, until=operation) and not machine.outlast(queue, operation):
                break
        if not queue.idle:
            machine.wake_pump(queue.index)

    def changed(self, machine: Machine) -> None:
        for queue in machine.pending_queues():
            machine.wake_pump(queue.index)

    def pursue(self, machine: Machine, done: Callable[[], bool], need: Need | Queue, timeout: float | None) -> bool:
        if done():
            return True
        for queue in machine.pending_queues():
            machine.wake_pump(queue.index)
        return machine.block(done, timeout, poll=isinstance(need, WordNeed))

    def nudge(self, machine: Machine, need: Need | Queue) -> None:
        return None


class Threads(Eager):
    """Runs everything on the pump threads."""

    name = "threads"

    def enqueued(self, machine: Machine, queue: Queue, operation: Operation) -> None:
        machine.wake_pump(queue.index)


class _Replaying:
    """What the schedules that replay from a seed share: one thread, a trace, and a deadlock report."""

    name = "replaying"
    threaded = False

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.trace: list[str] = []
        self._names: dict[Queue, str] = {}

    def enqueued(self, machine: Machine, queue: Queue, operation: Operation) -> None:
        return None

    def changed(self, machine: Machine) -> None:
        return None

    def choose(self, machine: Machine, need: Need | Queue) -> Queue | None:
        """The queue whose head runs next, or None when nothing can."""
        raise NotImplementedError

    def last_resort(self, machine: Machine) -> Queue | None:
        """The queue that runs when `choose` has none and no idle hook could do anything, before it is a deadlock."""
        return None

    def run_one(self, machine: Machine, queue: Queue) -> None:
        """Runs the head of the queue and notes the choice."""
        name = self._names.setdefault(queue, f"host:{queue.index}~{len(self._names)}")  # the same in every replay
        machine.step(queue, lambda operation: self.trace.append(f"{name}: {operation.kind}"))

    def nudge(self, machine: Machine, need: Need | Queue) -> None:
        queue = self.choose(machine, need)
        if queue is not None:
            self.run_one(machine, queue)
        else:
            machine.run_idle_hooks()

    def pursue(self, machine: Machine, done: Callable[[], bool], need: Need | Queue, timeout: float | None) -> bool:
        while not done():
            queue = self.choose(machine, need)
            if queue is not None:
                self.run_one(machine, queue)
            elif not machine.idle_hooks and machine.outlast_others():
                continue  # in a program of several threads, of which another one may have run what is waited for
            elif not machine.run_idle_hooks() and not done():
                queue = self.last_resort(machine)
                if queue is not None:
                    self.run_one(machine, queue)
                elif not machine.idle_hooks and not machine.stuck(done):
                    continue
                elif timeout is not None:
                    return False
                else:
                    raise machine.deadlock(need)
        return True


class Lazy(_Replaying):
    """Runs only what the waiting host needs, as late as is legal: every missing wait shows."""

    name = "lazy"

    def choose(self, machine: Machine, need: Need | Queue) -> Queue | None:
        return self._towards(machine, need, ())

    def last_resort(self, machine: Machine) -> Queue | None:
        return next(iter(machine.enabled_queues()), None)  # a launched function may write the word, nobody can know

    def _towards(self, machine: Machine, need: Need | Queue, path: tuple[Queue, ...]) -> Queue | None:
        queue = self._source(machine, need)
        if queue is None or queue.idle or queue in path:
            return None
        if queue.enabled:
            return queue
        head = queue.operations[0].need
        return None if head is None else self._towards(machine, head, (*path, queue))

    @staticmethod
    def _source(machine: Machine, need: Need | Queue) -> Queue | None:
        if isinstance(need, Queue):
            return need
        if isinstance(need, EventNeed):
            return need.event.origins.get(need.version)
        if isinstance(need, WordNeed):
            for queue in machine.pending_queues():
                if any(operation.signals == need.word.address for operation in queue.operations):
                    return queue
        return None


class Random(_Replaying):
    """Picks among the enabled at random, also when something is enqueued."""

    name = "random"

    def enqueued(self, machine: Machine, queue: Queue, operation: Operation) -> None:
        while self.random.random() < 0.4:
            enabled = machine.enabled_queues()
            if not enabled:
                return
            self.run_one(machine, self.random.choice(enabled))

    def choose(self, machine: Machine, need: Need | Queue) -> Queue | None:
        enabled = machine.enabled_queues()
        return self.random.choice(enabled) if enabled else None


class Priority(_Replaying):
    """Runs the enabled stream of the highest priority; at a few random steps the running one drops to the lowest."""

    name = "priority"

    def __init__(self, seed: int = 0, changes: int = 3, horizon: int = 200) -> None:
        super().__init__(seed)
        self._priorities: dict[Queue, float] = {}
        self._host = self.random.random()
        self._changes = {self.random.randrange(horizon) for _ in range(changes)}
        self._steps = 0

    def _priority(self, queue: Queue) -> float:
        if queue not in self._priorities:
            self._priorities[queue] = self.random.random()
        return self._priorities[queue]

    def enqueued(self, machine: Machine, queue: Queue, operation: Operation) -> None:
        while True:
            above = [queue for queue in machine.enabled_queues() if self._priority(queue) > self._host]
            if not above:
                return
            self.run_one(machine, max(above, key=self._priority))

    def choose(self, machine: Machine, need: Need | Queue) -> Queue | None:
        enabled = machine.enabled_queues()
        return max(enabled, key=self._priority) if enabled else None

    def run_one(self, machine: Machine, queue: Queue) -> None:
        self._steps += 1
        if self._steps in self._changes:
            self._priorities[queue] = -self.random.random()
        super().run_one(machine, queue)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "eager": Eager,
    "threads": Threads,
    "lazy": Lazy,
    "random": Random,
    "priority": Priority,
}


def create(name: str, seed: int = 0) -> Schedule:
    """A schedule by name; the seed counts for the replaying ones.  Does not touch the device.  Raises `ValueError`."""
    if name not in SCHEDULES:
        raise ValueError(f"there is no schedule {name!r}; use one of {', '.join(SCHEDULES)}")
    maker = SCHEDULES[name]
    return maker() if name in ("eager", "threads") else maker(seed)
