"""The process's UCX worker: one thread makes it move, for all connections.

The thread alone uses UCX.  It sleeps when nothing is on its way, so a process with nothing to do uses no CPU; nobody
progresses UCX meanwhile, and nobody has to, for the link says what is coming.

What UCX may touch is held until UCX says that it is over.  When a connection ends, its messages may finish for
`LINGER_SECONDS`; then the endpoint is closed, which ends them, and the memory of a message that was ended in the middle
is kept until the peer's process has gone.

A process of this host that is killed while it writes into our UCX worker's queue, which is shared memory, leaves a gap
there behind which nothing comes any more, from nobody.  So when a peer of this host has died, the worker is given up
with all that is on its way there: it goes again by other channels, and connections made from then on get a new worker.

A forked child has no part in any of it: what is the parent's is left alone there, and not taken apart.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from streamrt import forks
from streamrt.device import Device
from streamrt.log import Log
from transport.channels.ucx import Ucx
from transport.channels.ucx_messages import End, Message
from transport.channels.ucx_traffic import Changed, Traffic

LINGER_SECONDS = 2.0
CLOSE_SECONDS = 3.0  # for the thread, when the process ends
EAGER_SECONDS = 1e-3  # after something has moved, in which UCX is asked again
EAGER_PAUSE_SECONDS = 5e-6  # after so long; without a pause it would keep the interpreter from the program's threads
LONGEST_PAUSE_SECONDS = 1e-3  # a GPU's copies end without an event that could be waited for
_SET_TIMER_SLACK = 29  # of prctl: without it the shortest pause takes ten times as long
_SLACK_NANOSECONDS = 1000
_log = Log("transport")


class UcxWorker:
    """A UCX worker and its thread.  Any thread may ask it for something, under any lock; nothing blocks the host but
    `stop`."""

    def __init__(self) -> None:
        """Starts nothing.  Does not touch the device."""
        self.address = b""
        """Where peers reach it, once it has started."""
        self.failure = ""
        """Why it cannot be used."""
        self._ucx: Ucx | None = None
        self._traffic: Traffic | None = None
        self._ends: dict[bytes, End] = {}
        self._leaving: list[End] = []
        self._linger_until = 0.0
        self._requests: deque[Callable[[], object]] = deque()
        self._changed: Changed = {}
        self._asleep = False
        self.awake = False
        """Whether something is on its way, for which the thread looks again and again."""
        self._wake = -1
        self._moved_at = 0.0
        self._stopping = False
        self._ended = False
        self.spent = False
        """Whether it has worked, and will not any more: another one can be made."""
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    # what connections ask for

    def start(self, device: Device, started: Callable[[], None]) -> None:
        """Starts UCX, if nobody has, on a device that is to be used; `started` hears that `address` is there, or the
        `failure`."""
        with self._lock:
            if self._thread is None:
                self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                self._thread = threading.Thread(target=self._run, args=(device,), name="streamrt-ucx", daemon=True)
                self._thread.start()
        self._ask(lambda: self._changed.setdefault(started))

    def connect(self, address: bytes) -> End:
        """The peer's worker, at an address that the peer has told.  `leave` gives it back."""
        with self._lock:
            end = self._ends.get(address)
            if end is None or end.error:
                end = self._ends[address] = End(address)
            end.users += 1
            return end

    def leave(self, end: End, *, died: bool) -> None:
        """A connection has ended: its messages may finish for a while.  `died`: the peer's process has ended on this
        host, and may have left the queue with a gap."""
        self._ask(lambda: self._left(end, died))

    def send(self, message: Message) -> None:
        """Sends a message once it is `ready`: `posted` when UCX has it, `done` when it has come, else in `error`."""
        self._ask(lambda: self._hand(Traffic.send, message))

    def receive(self, message: Message) -> None:
        """Receives a message into its memory: it is `done` when it is there, or in `error`."""
        self._ask(lambda: self._hand(Traffic.expect, message))

    def abandon(self, message: Message) -> None:
        """Nobody waits for a message any more.  Its memory is kept while UCX may touch it."""
        self._ask(lambda: self._hand(Traffic.abandon, message))

    def refuse(self, end: End, tag: int) -> None:
        """Nobody has asked for the message of a tag from an end, and nobody will."""
        self._ask(lambda: None if self._traffic is None else self._traffic.refuse(end, tag))

    def stop(self) -> None:
        """Ends the thread, and UCX with it unless it may still touch memory.  Blocks the host for some seconds at most.

        Idempotent.
        """
        self._stopping = True
        self._ask(_nothing)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_SECONDS)
        self.leave_alone()

    def leave_alone(self) -> None:
        """Lets nobody take apart what there still is of UCX.  Does not touch the device."""
        if self._ucx is not None:
            self._ucx.keep_for_ever()

    def _ask(self, request: Callable[[], object]) -> None:
        with self._lock:
            if not self._ended:
                self.awake = self._thread is not None
                self._requests.append(request)
                if self._asleep:
                    os.eventfd_write(self._wake, 1)
                return
        request()  # which finds that there is no UCX

    # the thread

    def _run(self, device: Device) -> None:
        self._open(device)
        while not self._stopping:
            moved = bool(self._requests)
            try:
                self._do_requests()
                if self._traffic is not None:
                    moved |= self._traffic.step()
                    self._close_ends()
            except Exception as error:  # noqa: BLE001 - logged, and told to all who wait
                _log.exception("UCX is not used any more, after")
                self._give_up(error)
            self._tell()
            self._rest(moved)
        self._shut_down()

    def _do_requests(self) -> None:
        while self._requests:
            self._requests.popleft()()

    def _tell(self) -> None:
        """Calls back who has something to look at, with nothing of ours held."""
        changed = list(self._changed)
        self._changed.clear()
        for callback in changed:
            callback()

    def _open(self, device: Device) -> None:
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, ctypes.c_ulong(_SLACK_NANOSECONDS), 0, 0, 0)  # of this thread
        try:
            if device.has_streams:
                device.backend.agent_thread(device.index)  # UCX finds the context of the device that it is to use
            ucx = Ucx()
        except Exception as error:  # noqa: BLE001 - whatever UCX cannot do here, other channels can
            self.failure = f"it cannot be started: {type(error).__name__}: {error}"
            return
        self._ucx, self._traffic = ucx, Traffic(ucx, self._changed)
        atexit.register(self.stop)
        self.address = ucx.address

    def _give_up(self, error: Exception) -> None:
        """UCX has done what nobody expects of it."""
        self.failure = f"it has failed: {type(error).__name__}: {error}"
        self.spent = True
        traffic, self._traffic = self._traffic, None
        if traffic is not None:
            traffic.fail_all(self.failure)
        self.leave_alone()

    def _hand(self, step: Callable[[Traffic, Message], object], message: Message) -> None:
        if self._traffic is not None:
            step(self._traffic, message)
        else:
            message.fail(self.failure)
            self._changed[message.changed] = None

    def _rest(self, moved: bool) -> None:
        """Sleeps: not while something moves, and until somebody asks where nothing is on its way."""
        now = time.monotonic()
        if moved:
            self._moved_at = now
            return
        pause: float | None = None
        if self._traffic is not None and (self._traffic.underway or self._leaving or now < self._linger_until):
            barren = now - self._moved_at - EAGER_SECONDS
            pause = min(LONGEST_PAUSE_SECONDS, max(EAGER_PAUSE_SECONDS, barren / 8))
        self.awake = pause is not None
        self._asleep = True
        if not self._requests and not self._stopping:
            select.select([self._wake], [], [], pause)
        self._asleep = False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    # ends

    def _left(self, end: End, died: bool) -> None:
        if died and end.endpoint is not None:
            self.failure = self.failure or "another peer has died, which may have blocked UCX's shared memory"
            self.spent = self._stopping = True
            return
        now = time.monotonic()
        self._linger_until = now + LINGER_SECONDS  # what comes late is dropped, so that its sender can go on
        with self._lock:
            end.users -= 1
        if not end.users and end not in self._leaving:
            end.close_at = now + LINGER_SECONDS
            self._leaving.append(end)

    def _close_ends(self) -> None:
        if self._leaving:
            now = time.monotonic()
            self._leaving = [end for end in self._leaving if not self._closed(end, now)]

    def _closed(self, end: End, now: float) -> bool:
        """Closes an end that nobody uses, if it is time; False where it has to be looked at again."""
        assert self._traffic is not None
        if end.close_at > now and self._traffic.uses(end):
            return False
        with self._lock:
            if end.users:  # another connection to the same process has come
                return True
            if self._ends.get(end.address) is end:
                del self._ends[end.address]
        end.close("the connection has ended")
        self._traffic.forget(end)
        return True

    def _shut_down(self) -> None:
        self.failure = self.failure or "the process ends"
        traffic, self._traffic = self._traffic, None
        if traffic is not None:
            for end in (*self._ends.values(), *self._leaving):
                end.close(self.failure)
            traffic.wind_up()
            until = time.monotonic() + CLOSE_SECONDS / 2
            while traffic.touching and time.monotonic() < until:
                traffic.wind_up()
            if traffic.touching:
                self.leave_alone()
            traffic.fail_all(self.failure)
            self._ucx = None  # and with it goes UCX
            self._ends.clear()
            self._leaving.clear()
            atexit.unregister(self.stop)
        self.awake = False
        with self._lock:
            self._ended = True  # what is asked for from now on is done by who asks
            os.close(self._wake)
        self._do_requests()
        self._tell()


_process_worker: UcxWorker | None = None
_process_lock = threading.Lock()


def process_worker() -> UcxWorker:
    """The process's UCX worker, not yet started where nobody has.  Does not touch the device."""
    global _process_worker
    with _process_lock:
        if _process_worker is None or _process_worker.spent:
            _process_worker = UcxWorker()
        return _process_worker


def progressing() -> bool:
    """Whether UCX's thread looks again and again, so that whoever only waits should leave it the interpreter.

    Does not touch the device.
    """
    return _process_worker is not None and _process_worker.awake


def _forget() -> None:
    """In a forked child."""
    if _process_worker is not None:
        _process_worker.leave_alone()
        atexit.unregister(_process_worker.stop)


forks.renew(sys.modules[__name__], _process_lock=threading.Lock, _process_worker=_forget)


def _nothing() -> None:
    """Asked for to wake the thread."""
