"""How a child's process ended, in words, for who is told that its connection is lost.

A process is over a moment after its connection, and no thread that polls may be kept waiting for that: who has to wait
is a thread of its own, which is there only then.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections.abc import Callable

from streamrt.log import Log
from transport.process import DEVICE_FAILED

WAIT_SECONDS = 2.0  # a process that holds GPU memory takes a while to end
_REMEDY = "start it again with LocalWorkers.restart, or pipeline(restarts=)"
_log = Log("transport")


class Ending:
    """How one child ended."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._lock = threading.Lock()
        self._waiting: list[Callable[[str], None]] = []

    def known(self, *, graceful: bool = False) -> str:
        """`words` and what to do, to be put behind a message.  Does not block the host."""
        words = self.words(graceful=graceful)
        return f"; the worker {words}; {_REMEDY}" if words else ""

    def words(self, *, graceful: bool = False) -> str:
        """How it ended, "was killed by SIGKILL"; empty while it runs, and where a `graceful` end of the connection says
        enough: but for a failed device, that is what somebody wanted.  Does not block the host.
        """
        code = self._process.poll()
        return "" if code is None or (graceful and code != DEVICE_FAILED) else _words(code)

    def tell(self, listener: Callable[[str], None]) -> None:
        """Calls the listener with what is `known` once the process is over, or after `WAIT_SECONDS`.

        Does not block the host.
        """
        known = self.known()
        if known:
            listener(known)
            return
        with self._lock:
            self._waiting.append(listener)
            if len(self._waiting) > 1:
                return  # there is a thread
        try:
            threading.Thread(target=self._wait, name="streamrt-ending", daemon=True).start()
        except RuntimeError:  # no more threads, or the interpreter is ending: then it is told without
            self._tell_all()

    def _wait(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(WAIT_SECONDS)
        self._tell_all()

    def _tell_all(self) -> None:
        with self._lock:
            listeners, self._waiting = self._waiting, []
        for listener in listeners:
            try:
                listener(self.known())
            except BaseException:  # noqa: BLE001 - a callback's; those behind it are owed to others
                _log.exception("telling how a worker ended failed")


def _words(code: int) -> str:
    if code == DEVICE_FAILED:
        return f"ended with exit code {code}, because its device has failed"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-code}"
