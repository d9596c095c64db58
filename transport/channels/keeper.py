"""What outlives its connection: kept until it is over, and looked at by a thread that is there only while something is.

Does not touch the device, but for what `over` and `end` do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from streamrt import forks

T = TypeVar("T")


def _nobody() -> None:
    return None


class Keeper(Generic[T]):
    """Keeps entries until `over(entry)`, then calls `end(entry)`.

    The thread is named `name`; its pause begins at `first` seconds and doubles up to `longest` while nothing ends.
    """

    def __init__(
        self, name: str, over: Callable[[T], bool], end: Callable[[T], object], *, first: float, longest: float
    ) -> None:
        """Keeps nothing yet.  Does not touch the device."""
        self._name, self._over, self._end = name, over, end
        self._first, self._longest = first, longest
        self.entries: list[T] = []
        self.thread: threading.Thread | None = None
        self._lock = threading.Lock()
        forks.renew(self, _lock=threading.Lock, entries=list, thread=_nobody)

    def __len__(self) -> int:
        with self._lock:
            return len(self.entries)

    def keep(self, entry: T) -> None:
        """Looks at the entry, and keeps it if it is not over.  Does not block the host."""
        if self._over(entry):
            self._end(entry)
            return
        with self._lock:
            self.entries.append(entry)
            if self.thread is not None:
                return
            self.thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                self.thread.start()
            except RuntimeError:  # no more threads, or the interpreter is ending: the next one that is kept tries again
                self.thread = None

    def look(self) -> bool:
        """Looks once at all that is kept; whether any is over.  Does not block the host."""
        with self._lock:
            looked = list(self.entries)
        done = [entry for entry in looked if self._over(entry)]
        for entry in done:
            self._end(entry)
        over = set(map(id, done))  # by identity: entries may hold arrays, whose equality is no answer
        with self._lock:
            self.entries[:] = [entry for entry in self.entries if id(entry) not in over]
        return bool(done)

    def _run(self) -> None:
        pause = self._first
        try:
            while True:
                time.sleep(pause)
                pause = self._first if self.look() else min(2 * pause, self._longest)
                with self._lock:
                    if not self.entries:
                        self.thread = None
                        return
        except BaseException:
            with self._lock:
                self.thread = None
            raise
