"""Links that callers have read themselves and left: until when the agent's thread leaves them alone.

Who has waited for one reply most often waits for another soon.  Were the agent's thread to read the link in between,
the two would take turns at the interpreter, which costs each more than the work.  So it leaves a link alone for
`LEFT_SECONDS` after its caller has, and one alarm wakes it for all of them.

Setting a timer is dear, above all on a virtual machine (some 10 us, a tenth of a call).  So the alarm that is set is
left to ring, once for all the calls of `LONGEST_LEFT_SECONDS` while there are some, and finds out then which links
have been left for long enough.

Until then the interpreter's switch interval stays short (`responsive`): who has called goes on to wait for a device, or
makes the next call, and would have to wait as long for a busy thread as in the call itself.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from transport.alarm import Alarm
from transport.responsive import keep_short

if TYPE_CHECKING:
    from transport.agent import Agent
    from transport.driver import Driver

LEFT_SECONDS = 0.001
LONGEST_LEFT_SECONDS = 0.004


class Untended:
    """The links of one agent that are left alone, with the time since when."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._alarm: Alarm | None = None
        self._set = False  # it will ring
        self._used = False  # since it was set last, a link was left and is read again: there will be others
        self._over = False  # the agent is: a caller that leaves later finds nobody
        self._left: dict[Driver, tuple[float, float]] = {}  # since when, and when somebody last said so

    def ready(self) -> bool:
        """Whether links can be left alone: the alarm is there, or can be made.  Does not block the host."""
        if self._alarm is None:
            with self._lock:
                if self._alarm is None:
                    return not self._over and self._make_alarm()
        return True

    def _make_alarm(self) -> bool:
        try:
            alarm = Alarm()
            self._agent.watch(alarm.fileno(), self._ring)
        except OSError:
            return False  # no descriptor is left: the agent reads whenever nobody else does
        self._alarm = alarm
        return True

    def leave(self, driver: Driver) -> None:
        """A caller has read the link and goes.  Does not block the host."""
        now = time.monotonic()
        with self._lock:
            self._left[driver] = (now, now)
            if not self._set:
                self._set_alarm(now)

    def hold(self, driver: Driver) -> bool:
        """What comes is read a little later, many at once; whether the link was tended until now.

        Does not block the host.
        """
        now = time.monotonic()
        with self._lock:
            since = self._left[driver][0] if driver in self._left else now
            self._left[driver] = (since, now)
            if not self._set:
                self._set_alarm(now)
        return since == now

    def tend(self, driver: Driver) -> None:
        """Somebody reads the link from now on, or it is over.  Idempotent.  Does not block the host."""
        with self._lock:
            if self._left.pop(driver, None) is not None:
                self._used = True

    def _set_alarm(self, now: float) -> None:
        if self._alarm is None:
            return
        latest = min(since for since, _ in self._left.values()) + LONGEST_LEFT_SECONDS
        seconds = latest - now if self._used else LEFT_SECONDS
        keep_short(self, True)  # until it rings and finds nothing left
        self._alarm.set(max(seconds, LEFT_SECONDS))
        self._set, self._used = True, False

    def _ring(self) -> None:
        """On the agent's thread: it reads again what nobody has read for a while."""
        with self._lock:
            if self._alarm is None:
                return
            self._alarm.silence()
            self._set = False
            now = time.monotonic()
            over = [
                driver
                for driver, (since, last) in self._left.items()
                if last <= now - LEFT_SECONDS or since <= now - LONGEST_LEFT_SECONDS
            ]
            for driver in over:
                del self._left[driver]
            if self._left:
                self._used = True
                self._set_alarm(now)
            else:
                keep_short(self, False)
        for driver in over:
            if not driver.calls.reading:
                self._agent.resume_reading(driver)

    def after_fork(self) -> None:
        """In a forked child: the links are the parent's.  Does not block the host."""
        self._lock, self._alarm, self._over = threading.Lock(), None, True
        self._left.clear()

    def close(self) -> None:
        """Does not block the host.  Idempotent."""
        with self._lock:
            alarm, self._alarm, self._over = self._alarm, None, True
            self._left.clear()
            keep_short(self, False)
            if alarm is not None:
                self._agent.unwatch(alarm.fileno())
                alarm.close()
