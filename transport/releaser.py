"""The small process that lets this one's streams go when its agent cannot, and what it is told.

It is started when a stream of this process first waits for a peer's, once, on a thread of its own; it ends with this
process.  Where it cannot be had, the agent releases alone, as it does whenever it can.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from streamrt import forks
from streamrt.errors import UnavailableError
from streamrt.log import Log
from streamrt.segment import Segment
from transport import process, releaser_process

END_SECONDS = 2.0
_log = Log("transport")


@dataclass(frozen=True, slots=True)
class Watched:
    """A process for whose words streams here wait: its `pid` and when it `started`, its `words`, our `table` of the
    values that are waited for, and after how many seconds (`timeout`) of standing still it is lost."""

    pid: int
    started: int
    words: Segment
    table: Segment
    timeout: float


@dataclass(frozen=True, slots=True)
class Derived:
    """Words that streams here signal behind those of other processes: they are marked before anything is released.

    `words` are a connection's, `table` has the values that are derived.
    """

    words: Segment
    table: Segment


class Releaser:
    """The process, and what it is told of.  Thread-safe."""

    def __init__(self) -> None:
        """Starts nothing.  Does not touch the device."""
        self._lock = threading.Lock()
        self._told: dict[int, Watched | Derived] = {}
        self._numbers = itertools.count(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ended = self._complained = False

    @property
    def pid(self) -> int:
        """The process's id, 0 where it does not run.  Does not touch the device."""
        found = self._process
        return 0 if found is None or found.poll() is not None else found.pid

    @property
    def watched(self) -> int:
        """How many peers it watches.  Does not touch the device."""
        return sum(isinstance(one, Watched) for one in tuple(self._told.values()))

    def watch(self, peer: Watched) -> int:
        """Has a peer watched from now on, by a thread that tells the process; the number by which to forget it.

        Does not block the host.
        """
        return self._take(peer)

    def derive(self, words: Segment, table: Segment) -> int | None:
        """Has words of ours marked, from now on, before a peer's are released; the number by which to forget them.

        None where the process runs and cannot be told at this moment: what is derived must not leave then.  Does not
        block the host.
        """
        if not self._lock.acquire(blocking=False):  # a thread starts it, or tells it something
            return None
        try:
            if not self.pid:  # whoever starts it tells of this before it tells of any peer
                return self._take(Derived(words, table))
            number = next(self._numbers)
            self._told[number] = Derived(words, table)
            try:
                self._tell(number, socket.MSG_DONTWAIT)
            except OSError:
                del self._told[number]
                return None
            return number
        finally:
            self._lock.release()

    def _take(self, one: Watched | Derived) -> int:
        number = next(self._numbers)
        self._told[number] = one
        telling = threading.Thread(target=self._tell_all, args=(number,), name="streamrt-releaser", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread is left: the agent releases alone
            telling.start()
        return number

    def forget(self, number: int) -> None:
        """Forgets what has that number.  Idempotent.  Does not block the host."""
        self._told.pop(number, None)
        control = self._control
        if control is not None:
            with contextlib.suppress(OSError):  # it has ended, or is so far behind that it ends with us
                control.send(releaser_process.ORDER.pack(number, 0, 0.0), socket.MSG_DONTWAIT)

    def _tell_all(self, number: int) -> None:
        """Tells the process of one thing; of all, where it has to be started."""
        with self._lock:
            if self._ended:
                return
            try:
                if not self.pid:
                    self._start()
                    derived_first = sorted(self._told.items(), key=lambda item: isinstance(item[1], Watched))
                    for one, _ in derived_first:
                        self._tell(one)
                else:
                    self._tell(number)
            except (OSError, UnavailableError) as error:
                if not self._complained:
                    _log.info("no process beside this one releases its streams: %s", error)
                self._complained = True

    def _start(self) -> None:
        if not sys.executable:
            raise UnavailableError("it is not known which Python runs here")
        if self._control is not None:
            self._control.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            program = str(Path(releaser_process.__file__).resolve())
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", program, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # whoever reads ours until its end must not wait for this one
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._control = ours

    def _tell(self, number: int, flags: int = 0) -> None:
        one = self._told.get(number)
        if one is None or self._control is None:
            return
        if isinstance(one, Derived):
            order = releaser_process.ORDER.pack(number, 0, 0.0)
            socket.send_fds(self._control, [order], [one.words.fd, one.table.fd], flags)
        else:
            pidfd = process.open_pidfd(one.pid, one.started)
            known = [] if pidfd is None else [pidfd]  # none: it has ended
            try:
                order = releaser_process.ORDER.pack(number, one.pid, one.timeout)
                socket.send_fds(self._control, [order], [*known, one.words.fd, one.table.fd])
            finally:
                for descriptor in known:
                    os.close(descriptor)
        if number not in self._told:  # forgotten meanwhile
            self.forget(number)

    def close(self) -> None:
        """Ends the process.  Blocks the host for a moment.  Idempotent."""
        with self._lock:
            self._ended = True
            control, self._control = self._control, None
            if control is not None:
                with contextlib.suppress(OSError):  # it has ended before
                    control.shutdown(socket.SHUT_RDWR)  # a forked child may hold a copy
                control.close()
            if self._process is not None:
                try:
                    self._process.wait(END_SECONDS)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()


_one = Releaser()


def releaser() -> Releaser:
    """This process's.  Does not touch the device."""
    return _one


def _close() -> None:
    _one.close()


atexit.register(_close)
forks.renew(sys.modules[__name__], _one=Releaser)
