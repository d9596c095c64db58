"""Threads that take turns: each runs only while its owner waits for it, so the owner decides who goes on.

They are threads and not coroutines because plain code runs on them, and because what a thread has of its own (its
current streams, its call) must be its own here too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Killed(BaseException):
    """Ends a thread of a process that was killed, or of a world that is over."""


class Fiber:
    """A thread that runs only while the world lets it."""

    def __init__(self, name: str, body: Callable[[], object]) -> None:
        self.name = name
        self.until: Callable[[], bool] | None = lambda: True  # None: only when the world says so
        self.idle = self.stuck = self.started = self.ended = self.killed = False
        self.error: BaseException | None = None
        self._body = body
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)

    @property
    def ready(self) -> bool:
        return not self.ended and self.until is not None and self.until()

    def resume(self) -> None:
        """Runs it until it parks or ends; on the world's thread."""
        if not self.started:
            self.started = True
            threading.Thread(target=self._run, name=f"simulated-{self.name}", daemon=True).start()
        else:
            self._go.release()
        self._back.acquire()

    def park(self, until: Callable[[], bool] | None) -> None:
        """Gives the turn back until `until`; on its own thread."""
        self.until = until
        self._back.release()
        self._go.acquire()
        self.until = None  # and whatever it refers to
        if self.killed:
            raise Killed

    def kill(self) -> None:
        """Ends it where it stands; on the world's thread."""
        self.killed = True
        if not self.started:
            self.ended = True
        while not self.ended:
            self.resume()
        self._body = _nothing

    def _run(self) -> None:
        try:
            self._body()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self._body = _nothing
        self.ended = True
        self._back.release()


def _nothing() -> None:
    return None
