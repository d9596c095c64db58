"""Timeouts: what is taken for one, and until when it lasts.  Standard library only."""

from __future__ import annotations

import numbers
import time

LONGEST_SECONDS = 1e9
_USUAL = (float, int)


def waitable(timeout: float) -> float:
    """A timeout as waits of the system take it, which know neither infinity nor thousands of years.

    Raises `TypeError` for what is no number of seconds, `ValueError` for NaN.  Does not touch the device.
    """
    if type(timeout) not in _USUAL:
        _check_number(timeout)
    if timeout != timeout:  # an integer may be beyond all floats, so `math.isnan` is none to ask
        raise ValueError(f"timeout={timeout!r} says nothing; give a number of seconds, math.inf for no end")
    return min(timeout, LONGEST_SECONDS)


def _check_number(timeout: object) -> None:
    if not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout={timeout!r} is no number; give a number of seconds")


def deadline_of(timeout: float | None) -> float | None:
    """The deadline of a timeout in seconds, infinity among them.  Raises as `waitable`.  Does not touch the device."""
    return None if timeout is None else time.monotonic() + waitable(timeout)


def remaining(deadline: float) -> float:
    """Seconds until a deadline of `time.monotonic`, at least 0.  Does not touch the device."""
    return max(0.0, deadline - time.monotonic())
