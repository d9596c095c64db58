"""The queues of the host backend, and the machine that runs them.

A stream is a FIFO of operations.  An operation at the head is *enabled* when all that it waits for is met.  Which
enabled operation runs, when, and on which thread is the schedule's choice (`schedules.py`); that one stream's
operations run one after the other, in order, is the machine's.

Rules:

- Operations run with no lock held.  A queue that is running one is marked, so no other thread takes its next.
- A wait for an event binds the version that is newest when the wait is enqueued.
- An operation that raises makes its stream fail: later operations of it are dropped, later queries raise.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from streamrt import forks
from streamrt.errors import DeadlockError, DeviceError
from streamrt.segment import reached

if TYPE_CHECKING:
    from streamrt.host.schedules import Schedule
    from streamrt.segment import Word

LAUNCH = "launch "  # how the kind of an operation begins that runs a function
# A signal that arrives while another thread takes the interpreter lock can go unnoticed until the main thread next
# waits for that lock: without an end to each sleep, Ctrl-C would now and then do nothing.
SIGNAL_POLL_SECONDS = 0.1
WORD_POLL_SECONDS = 0.0005  # a word may be written by another process, which can notify nobody here


class Failure(NamedTuple):
    """What an operation raised, and who that was."""

    error: BaseException
    who: str


class EventState:
    """An event's records: how many were enqueued, on which queue each that has not run stands, which failed."""

    __slots__ = ("failed", "number", "origins", "recorded")

    def __init__(self, number: int) -> None:
        self.number = number
        self.recorded = 0
        self.origins: dict[int, Queue] = {}
        self.failed: dict[int, Failure] = {}

    def __str__(self) -> str:
        return f"event {self.number}"

    def complete(self) -> bool:
        """Whether the newest record has run (or failed)."""
        return self.recorded not in self.origins


class LatchState:
    """A door on a stream."""

    __slots__ = ("machine", "opened")

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.opened = False

    def open(self) -> None:
        """Lets the stream go on.  Does not block the host."""
        self.opened = True
        self.machine.changed()


class EventNeed:
    """An operation waits for an event to reach a version."""

    __slots__ = ("event", "version")

    def __init__(self, event: EventState, version: int) -> None:
        self.event = event
        self.version = version

    def met(self) -> bool:
        return self.version not in self.event.origins  # an earlier record can run after a later one, elsewhere

    def failure(self) -> Failure | None:
        return self.event.failed.get(self.version)

    def __str__(self) -> str:
        return f"event {self.event.number} version {self.version}"


class WordNeed:
    """An operation waits for a word to reach a value."""

    __slots__ = ("value", "word")

    def __init__(self, word: Word, value: int) -> None:
        self.word = word
        self.value = value

    def met(self) -> bool:
        return reached(self.word.load(), self.value, self.word.bits)

    def failure(self) -> Failure | None:
        return None

    def __str__(self) -> str:
        return f"word {self.word.address:#x} to reach {self.value}"


class LatchNeed:
    """An operation waits for a latch."""

    __slots__ = ("latch",)

    def __init__(self, latch: LatchState) -> None:
        self.latch = latch

    def met(self) -> bool:
        return self.latch.opened

    def failure(self) -> Failure | None:
        return None

    def __str__(self) -> str:
        return "a closed latch"


Need = EventNeed | WordNeed | LatchNeed


class Operation:
    """One entry of a queue: `need` (None: enabled at once) and `run` (None: a pure wait).

    `kind` is its name without numbers that differ between two runs of one program, for traces.  `record` is the
    event's version that the operation completes, `signals` the address of the word that it writes.
    """

    __slots__ = ("detail", "done", "kind", "need", "record", "run", "signals")

    def __init__(
        self,
        kind: str,
        run: Callable[[], object] | None,
        need: Need | None = None,
        *,
        detail: object = "",
        record: EventNeed | None = None,
        signals: int | None = None,
    ) -> None:
        self.kind = kind
        self.detail = detail
        self.run = run
        self.need = need
        self.record = record
        self.signals = signals
        self.done = False
        """Whether it has run, or never will."""

    @property
    def launched(self) -> bool:
        """Whether it runs somebody's function.  Does not block the host."""
        return self.kind.startswith(LAUNCH)

    def __str__(self) -> str:
        return f"{self.kind} {self.detail}" if self.detail else self.kind


class Queue:
    """One stream's operations."""

    __slots__ = ("error", "index", "number", "operations", "runner", "running")

    def __init__(self, index: int, number: int) -> None:
        self.index = index
        self.number = number
        self.operations: deque[Operation] = deque()
        self.running: Operation | None = None
        self.runner = (0, 0)
        """The thread that runs it, and in which generation of forks."""
        self.error: Failure | None = None

    @property
    def idle(self) -> bool:
        return not self.operations and self.running is None

    @property
    def enabled(self) -> bool:
        if self.running is not None or not self.operations:
            return False
        need = self.operations[0].need
        return need is None or need.met()

    def __str__(self) -> str:
        return f"stream host:{self.index}#{self.number}"


class _Monitor:
    """A lock, and the condition on it: entering the lock itself costs a tenth of entering it through the condition."""

    __slots__ = ("condition", "lock")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.condition = threading.Condition(self.lock)


class Machine:
    """All queues of all virtual devices, under one schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.idle_hooks: list[Callable[[], bool]] = []
        self._monitor = _Monitor()
        self._waiting = 0
        self._pending: dict[Queue, None] = {}
        self._pumps: dict[int, threading.Thread] = {}
        self._numbers = itertools.count(1)
        forks.renew(self, _monitor=_Monitor, _pumps=dict, _waiting=int)

    # enqueueing

    def enqueue(self, queue: Queue, operation: Operation) -> None:
        """Appends an operation, then lets the schedule run what it likes.  A failed stream drops it."""
        with self._monitor.lock:
            if queue.error is not None:
                self._drop(operation, queue.error)
                return
            queue.operations.append(operation)
            self._pending[queue] = None
        self.schedule.enqueued(self, queue, operation)

    def record(self, queue: Queue, event: EventState) -> None:
        """Enqueues the event's next version."""
        with self._monitor.lock:
            event.recorded += 1
            mark = EventNeed(event, event.recorded)
            event.origins[mark.version] = queue

        def complete() -> None:
            with self._monitor.lock:
                event.origins.pop(mark.version, None)

        self.enqueue(queue, Operation("record", complete, detail=mark, record=mark))

    # running

    def step(
        self, queue: Queue, note: Callable[[Operation], object] | None = None, *, until: Operation | None = None
    ) -> bool:
        """Runs the head of the queue if it is enabled, after telling `note` which it is; False if it was not, and where
        `until` has run already: others' operations behind it are theirs."""
        with self._monitor.lock:
            if queue.running is not None or not queue.operations or (until is not None and until.done):
                return False
            need = queue.operations[0].need
            if need is not None and not need.met():
                return False
            operation = queue.running = queue.operations[0]  # before it is taken out: who asks for `idle` has no lock
            queue.operations.popleft()
            queue.runner = (threading.get_ident(), forks.generation)
        try:
            if note is not None:
                note(operation)
            failure = need.failure() if need is not None else None
            if failure is not None:
                self._fail(queue, operation, failure)
            elif operation.run is not None:
                operation.run()
        except Exception as error:  # noqa: BLE001  (whatever a launched function raises is the stream's failure)
            error.add_note(f"raised by {str(operation)!r} on {queue}")
            self._fail(queue, operation, Failure(error, _who(operation, queue)))
        finally:
            with self._monitor.lock:
                queue.running = None
                operation.done = True
                if not queue.operations:
                    self._pending.pop(queue, None)
                if self._waiting:
                    self._monitor.condition.notify_all()
        return True

    def outlast(self, queue: Queue, until: Operation) -> bool:
        """Whether a queue is worth another look, after the operation that another thread runs on it.

        Not where its head waits for something, nor for a function that was launched, which may take any time and call
        anything, nor where this thread runs it itself and a finaliser or a signal's handler has come in between.
        Blocks the host for as long as a copy takes, and not at all once `until` has run.
        """
        with self._monitor.lock:
            if until.done:
                return True
            running = queue.running
            if running is None:
                return queue.enabled
            if running.launched or not self._is_run_elsewhere(queue):
                return False
        return self.block(lambda: queue.running is not running, None, poll=False)

    def outlast_others(self) -> bool:
        """Whether another thread ran an operation, which has ended now.  Blocks the host for as long as it takes."""
        with self._monitor.lock:
            queue = next(filter(self._is_run_elsewhere, self._pending), None)
            if queue is None:
                return False
            running = queue.running
        return self.block(lambda: queue.running is not running, None, poll=False)

    def stuck(self, done: Callable[[], bool]) -> bool:
        """Whether nothing can run, no other thread runs anything, and it is not `done`: all at one moment."""
        with self._monitor.lock:
            return not (any(queue.enabled or self._is_run_elsewhere(queue) for queue in self._pending) or done())

    @staticmethod
    def _is_run_elsewhere(queue: Queue) -> bool:
        """Whether another thread of this process runs an operation of it: a forked child has none of its parent's."""
        thread, generation = queue.runner
        return queue.running is not None and thread != threading.get_ident() and generation == forks.generation

    def _fail(self, queue: Queue, operation: Operation, failure: Failure) -> None:
        with self._monitor.lock:
            queue.error = failure
            for dropped in (operation, *queue.operations):
                self._drop(dropped, failure)
            queue.operations.clear()

    def _drop(self, operation: Operation, failure: Failure | None) -> None:
        """Whoever waits for a record that is dropped fails too, and never hangs."""
        operation.done = True
        record = operation.record
        if record is not None:
            if failure is not None:
                record.event.failed[record.version] = failure
            record.event.origins.pop(record.version, None)
            self._monitor.condition.notify_all()

    def abandon(self) -> None:
        """Drops everything that is queued and not running; records count as run."""
        with self._monitor.lock:
            for queue in list(self._pending):
                for operation in queue.operations:
                    self._drop(operation, None)
                queue.operations.clear()
                if queue.running is None:
                    del self._pending[queue]

    def enabled_queues(self) -> list[Queue]:
        """The queues whose head could run now, in a stable order."""
        with self._monitor.lock:
            return [queue for queue in self._pending if queue.enabled]

    def pending_queues(self) -> list[Queue]:
        """The queues that hold operations."""
        with self._monitor.lock:
            return [queue for queue in self._pending if not queue.idle]

    # waiting

    def changed(self) -> None:
        """Something outside the queues changed (a latch, a word of this process): blocked operations look again."""
        with self._monitor.lock:
            self._monitor.condition.notify_all()
        self.schedule.changed(self)

    def wait(self, done: Callable[[], bool], need: Need | Queue, timeout: float | None) -> bool:
        """Blocks the host until `done`, by the schedule's means.  False at the timeout."""
        return self.schedule.pursue(self, done, need, timeout)

    def block(self, done: Callable[[], bool], timeout: float | None, *, poll: bool) -> bool:
        """Sleeps on the machine's condition until `done`; other threads run the queues."""
        end = None if timeout is None else time.monotonic() + timeout
        with self._monitor.lock:
            self._waiting += 1
            try:
                while not done():
                    left = None if end is None else end - time.monotonic()
                    if left is not None and left <= 0:
                        return False
                    nap = WORD_POLL_SECONDS if poll else SIGNAL_POLL_SECONDS
                    self._monitor.condition.wait(nap if left is None else min(nap, left))
                return True
            finally:
                self._waiting -= 1

    def wake_pump(self, index: int) -> None:
        """Makes sure that the device's pump thread runs and looks at the queues."""
        with self._monitor.lock:
            if index not in self._pumps:
                thread = threading.Thread(target=self._pump, args=(index,), name=f"streamrt-host-{index}", daemon=True)
                self._pumps[index] = thread
                thread.start()
            self._monitor.condition.notify_all()

    def _pump(self, index: int) -> None:
        while True:
            with self._monitor.lock:
                queue = self._next_for(index)
                while queue is None:
                    self._waiting += 1
                    try:
                        self._monitor.condition.wait(WORD_POLL_SECONDS if self._watches_words(index) else None)
                    finally:
                        self._waiting -= 1
                    queue = self._next_for(index)
            while self.schedule.threaded and self.step(queue):
                pass

    def _next_for(self, index: int) -> Queue | None:
        if not self.schedule.threaded:
            return None
        return next((queue for queue in self._pending if queue.index == index and queue.enabled), None)

    def _watches_words(self, index: int) -> bool:
        return any(
            queue.index == index and queue.operations and isinstance(queue.operations[0].need, WordNeed)
            for queue in self._pending
        )

    def run_idle_hooks(self) -> bool:
        """Lets those who may enqueue or write something (agents in a simulation) do so; True if any did."""
        progressed = [hook() for hook in list(self.idle_hooks)]
        return any(progressed)

    def deadlock(self, need: Need | Queue) -> DeadlockError:
        """The error that says who waits for what, for every queue that holds operations."""
        lines = [
            f"  {queue} waits for {queue.operations[0].need or 'its turn'}, {len(queue.operations)} operation(s) queued"
            for queue in self.pending_queues()
            if queue.operations
        ]
        graph = "\n".join(lines) or "  no stream holds an operation"
        return DeadlockError(f"the host waits for {need}, which can never come:\n{graph}")


def _who(operation: Operation, queue: Queue) -> str:
    place = f"the virtual device host:{queue.index} ({queue})"
    if operation.launched:
        return f"the function {operation.kind.removeprefix(LAUNCH)!r}, launched on {place},"
    return f"{str(operation)!r} on {place}"


def check(what: Queue | EventState) -> None:
    """Raises the sticky failure of a stream, or of an event's newest record, as `DeviceError`.

    Its `__cause__` is what was raised there.
    """
    failure = what.error if isinstance(what, Queue) else what.failed.get(what.recorded)
    if failure is not None:
        error, who = failure
        name = type(error).__name__
        lasting = isinstance(what, Queue) and what.number == 0
        remedy = (
            "start the process again, for this is the default stream"
            if lasting
            else "make a new stream, or start the process again where it is a guard's"
        )
        raise DeviceError(f"{what} failed: {who} raised {name}: {error}; mend that, and {remedy}", name=name) from error
