"""The threads that run continuations, and how a blocked thread makes room.

A continuation may block: in a result, in a call to a peer.  With a fixed number of threads that is a deadlock sooner
or later (pytorch#48790).  So every wait of the runtime says that it blocks (`blocking`), and whoever owns the thread
starts another in its place.  Other executors join with `add_blocking_hook`.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

from streamrt import forks
from streamrt.errors import ClosedError, ExhaustedError
from streamrt.log import Log

DEFAULT_THREADS = 4  # continuations that run at once; those that block do not count
MAX_THREADS = 1024  # far above any sane number of blocked continuations, far below what a process can hold
IDLE_SECONDS = 10.0
_log = Log("streamrt")

Until = Callable[[], bool] | None
BlockingHook = Callable[[Until], AbstractContextManager[None] | None]
_hooks: tuple[BlockingHook, ...] = ()


class CallbackPool:
    """Runs tasks in the order of `submit`, at most `threads` at once, not counting those that are blocked.

    There are at most `MAX_THREADS` threads; tasks that wait for one of these are logged, once.
    """

    def __init__(self, threads: int = DEFAULT_THREADS, name: str = "streamrt-callback") -> None:
        """A pool with no thread yet.  Does not touch the device."""
        if threads < 1:
            raise ValueError(f"threads={threads}: callbacks need at least one")
        self.threads = threads
        self._name = name
        self._condition = threading.Condition(threading.Lock())
        self._tasks: deque[Callable[[], None]] = deque()
        self._alive = self._idle = self._running = self._blocked = self._made = 0
        forks.renew(self, _condition=lambda: threading.Condition(threading.Lock()))
        self._closed = self._complained = False
        self._complaint = ""  # why there is no thread for a task that may run
        self._mine = threading.local()

    def submit(self, task: Callable[[], None]) -> None:
        """Queues a task.  Does not block the host.

        Raises `ClosedError` after `close`, `ExhaustedError` where no thread can be started and none is there.
        """
        with self._condition:
            if self._closed:
                raise ClosedError(f"{self._name} is closed and runs nothing more")
            self._tasks.append(task)
            self._grow()
            if not self._alive and not self._running:  # nobody is there who would ever run it
                self._tasks.pop()
                raise ExhaustedError(f"{self._name} cannot start a thread: {self._complaint}; end some, or fewer calls")
            complaint = None if self._complained else self._complaint
            self._complained |= bool(complaint)
        if complaint:
            _log.warning("tasks of %s have to wait for its threads: %s", self._name, complaint)

    def try_turn(self) -> bool:
        """Takes a turn for the calling thread, which is not the pool's, if one is free and nobody waits for it.

        Until `end_turn` the thread counts as one of the pool's.  Does not block the host.
        """
        with self._condition:
            if self._closed or self._tasks or self._running - self._blocked >= self.threads:
                return False
            self._running += 1
        self._mine.inside = True
        return True

    def end_turn(self) -> None:
        """Gives back what `try_turn` took.  Does not block the host."""
        self._mine.inside = False
        with self._condition:
            self._running -= 1
            self._grow()

    def _may_run(self) -> bool:
        return bool(self._tasks) and self._running - self._blocked < self.threads

    def _grow(self) -> None:
        """Under the lock: if a task may run, wakes or starts a thread for it."""
        if not self._may_run():
            return
        if self._idle:
            self._condition.notify()
        elif self._alive >= MAX_THREADS:
            self._complaint = f"all {MAX_THREADS} of them are there and {self._blocked} are blocked"
        else:
            try:
                threading.Thread(target=self._work, name=f"{self._name}-{self._made + 1}", daemon=True).start()
            except RuntimeError as error:
                self._complaint = str(error)
                return
            self._alive += 1
            self._made += 1

    def _work(self) -> None:
        self._mine.inside = True
        while (task := self._next()) is not None:
            try:
                task()
            except BaseException:  # noqa: BLE001 - a continuation reports to its own future; what is left here is a fault
                _log.exception("a task of %s raised", self._name)
            finally:
                del task
                with self._condition:
                    self._running -= 1

    def _next(self) -> Callable[[], None] | None:
        """The next task, or None when this thread should end."""
        with self._condition:
            while not self._may_run():
                spare = self._alive - self._blocked > self.threads
                if not self._tasks and (self._closed or spare):
                    break
                self._idle += 1
                woken = self._condition.wait(IDLE_SECONDS)
                self._idle -= 1
                if not woken and not self._tasks:
                    break
            if not self._may_run():
                self._alive -= 1
                return None
            self._running += 1
            task = self._tasks.popleft()
            self._grow()  # a wake-up may have been meant for more than one task
            return task

    def blocking(self, until: Until = None) -> AbstractContextManager[None] | None:
        """What a wait of the calling thread is entered with, so that another task may take its turn; None: nothing.

        None outside the pool's threads, and inside another such wait.  Whatever the wait is for (`until`), others bring
        it about.  Does not touch the device.
        """
        return self._handing_on() if getattr(self._mine, "inside", False) else None

    @contextmanager
    def _handing_on(self) -> Iterator[None]:
        self._mine.inside = False
        with self._condition:
            self._blocked += 1
            self._grow()
        try:
            yield
        finally:
            self._mine.inside = True
            with self._condition:
                self._blocked -= 1

    def close(self) -> None:
        """Lets the threads end once the queue is empty.  Does not block the host."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()


_shared = CallbackPool()
forks.renew(sys.modules[__name__], _shared=CallbackPool)


def callback_pool() -> CallbackPool:
    """The process's pool for continuations that name no executor.  Does not touch the device."""
    return _shared


def add_blocking_hook(hook: BlockingHook) -> Callable[[], None]:
    """Adds a maker of context managers to enter around every wait of the runtime, in any thread; returns what removes
    it.

    It is for owners of threads: outside their own threads it returns None.  It is called with what the wait is for: a
    function that says whether it is there, None for a wait for a device.  Who owns all threads may bring it about
    before the wait begins.  Does not touch the device.
    """
    global _hooks
    _hooks = (*_hooks, hook)

    def remove() -> None:
        global _hooks
        _hooks = tuple(other for other in _hooks if other is not hook)

    return remove


class blocking:
    """Wraps whatever blocks the calling thread, so that the owner of the thread can start another.

    `until` says whether what is waited for is there; None where it is a device.  Does not touch the device.
    """

    __slots__ = ("_entered", "_until")

    def __init__(self, until: Until = None) -> None:
        self._until = until
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        try:
            for hook in (_shared.blocking, *_hooks):
                manager = hook(self._until)
                if manager is not None:
                    manager.__enter__()
                    self._entered.append(manager)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._entered:
            self._entered.pop().__exit__(kind, error, trace)
