"""Timeouts that are none are told before anything is waited for."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import streamrt
from streamrt.seconds import LONGEST_SECONDS, deadline_of, remaining, waitable
from streamrt.segment import Segment
from streamrt.timeline import Point


def waits() -> dict[str, Callable[[Any], Any]]:
    """All that takes a timeout, of what has ended already: only the timeout can be wrong."""
    future: streamrt.DeviceFuture[int] = streamrt.DeviceFuture()
    future.set_result(3)
    stream = streamrt.Stream("host:0")
    event = stream.record()
    segment = Segment.create(4096)
    return {
        "result": future.result,
        "exception": future.exception,
        "wait": lambda timeout: future.wait(timeout),
        "synchronize": future.synchronize,
        "wait_all": lambda timeout: streamrt.wait_all([future], timeout),
        "wait_all of none": lambda timeout: streamrt.wait_all([], timeout),
        "stream": stream.synchronize,
        "event": event.synchronize,
        "spin": Point(streamrt.Word(segment, 0), 0).spin,
    }


@pytest.mark.parametrize("name", list(waits()))
def test_what_is_no_number_is_told(name: str) -> None:
    wait = waits()[name]
    for wrong in ("5", [5], {"timeout": 5}, 5j):
        with pytest.raises(TypeError, match=r"^timeout=.* is no number; give a number of seconds"):
            wait(wrong)
    with pytest.raises(ValueError, match=r"^timeout=nan says nothing; give a number of seconds, math\.inf for no end"):
        wait(math.nan)
    for right in (5, 5.0, np.float32(5), np.int64(5), Fraction(5, 2), True, math.inf, 10**400, 0):
        wait(right)


@pytest.mark.parametrize("name", ["result", "exception", "wait", "synchronize"])
def test_it_is_told_of_a_future_that_never_ends(name: str) -> None:
    future: streamrt.DeviceFuture[int] = streamrt.DeviceFuture()
    with pytest.raises(TypeError, match=r"^timeout='5' is no number"):
        getattr(future, name)("5")
    with pytest.raises(TimeoutError):
        getattr(future, name)(-1)
    assert not future.done()


def test_deadlines() -> None:
    assert deadline_of(None) is None
    assert waitable(math.inf) == waitable(10**400) == LONGEST_SECONDS < threading.TIMEOUT_MAX
    due = deadline_of(100)
    assert due is not None
    assert 0 < remaining(due) <= 100
    assert remaining(0.0) == 0.0
