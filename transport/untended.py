"""Links that callers have read themselves and left: until when the agent's thread leaves them alone.

Who has waited for one reply most often waits for another soon.  Were the agent's thread to read the link in between,
the two would take turns at the interpreter, which costs each more than the work.  So it leaves a link alone for
`LEFT_SECONDS` after its caller has, and one alarm wakes it for all of them: with calls to many peers in turn a link is
left with each call, and the thread reads those of the last `LONGEST_LEFT_SECONDS` together.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from transport.alarm import Alarm

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
        self._over = False  # the agent is: a caller that leaves later finds nobody
        self._since: dict[Driver, float] = {}

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
        with self._lock:
            self._since[driver] = time.monotonic()
            self._set_alarm(LEFT_SECONDS)

    def hold(self, driver: Driver) -> bool:
        """What comes is read a little later, many at once; whether the link was tended until now.

        Does not block the host.
        """
        now = time.monotonic()
        with self._lock:
            since = self._since.setdefault(driver, now)
            self._set_alarm(min(LEFT_SECONDS, since + LONGEST_LEFT_SECONDS - now))
        return since == now

    def tend(self, driver: Driver) -> None:
        """Somebody reads the link from now on, or it is over.  Idempotent.  Does not block the host."""
        with self._lock:
            self._since.pop(driver, None)
            if not self._since and self._set and self._alarm is not None:
                self._alarm.stop()
                self._set = False

    def _set_alarm(self, seconds: float) -> None:
        """A single link's alarm is put off each time; with several it rings for all when it has been set to."""
        if self._alarm is None or seconds <= 0.0:
            return
        if len(self._since) == 1:
            self._alarm.set(seconds)
        elif not self._set:
            self._alarm.set(LONGEST_LEFT_SECONDS)
        self._set = True

    def _ring(self) -> None:
        """On the agent's thread: it reads again what nobody has read for a while."""
        with self._lock:
            if self._alarm is None:
                return
            self._alarm.silence()
            self._set = False
            latest = time.monotonic() - LEFT_SECONDS
            over = [driver for driver, since in self._since.items() if since <= latest]
            for driver in over:
                del self._since[driver]
            if self._since:
                self._set_alarm(LEFT_SECONDS)
        for driver in over:
            if not driver.calls.reading:
                self._agent.resume_reading(driver)

    def after_fork(self) -> None:
        """In a forked child: the links are the parent's.  Does not block the host."""
        self._lock, self._alarm, self._over = threading.Lock(), None, True
        self._since.clear()

    def close(self) -> None:
        """Does not block the host.  Idempotent."""
        with self._lock:
            alarm, self._alarm, self._over = self._alarm, None, True
            self._since.clear()
            if alarm is not None:
                self._agent.unwatch(alarm.fileno())
                alarm.close()
