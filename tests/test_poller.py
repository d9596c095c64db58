"""The poller: what is waited for may change at any time, and each event comes to the handler of its descriptor."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from transport.patience import BRIEF_SECONDS, LONG_SECONDS, LONGEST_SECONDS, Patience
from transport.poller import Poller


@pytest.fixture
def poller() -> Iterator[Poller]:
    made = Poller()
    yield made
    made.close()


@pytest.fixture
def ends() -> Iterator[list[socket.socket]]:
    pairs = [socket.socketpair() for _ in range(3)]
    yield [end for pair in pairs for end in pair]
    for pair in pairs:
        for end in pair:
            end.close()


def arrived(poller: Poller) -> list[str]:
    seen: list[str] = []
    for handler, readable, writable in poller.wait(0.0):
        handler(readable, writable)
        seen.append(f"{getattr(handler, '__name__', '')} {'r' if readable else ''}{'w' if writable else ''}")
    return sorted(seen)


def named(name: str) -> object:
    def handler(readable: bool, writable: bool) -> None:
        return

    handler.__name__ = name
    return handler


class Epoll:
    """One at which something is there after so many looks, each of which takes a tenth of a second."""

    def __init__(self, looks: int, clock: list[float]) -> None:
        self.looks = looks
        self.clock = clock
        self.asked: list[float | None] = []

    def poll(self, timeout: float | None) -> list[tuple[int, int]]:
        self.asked.append(timeout)
        self.clock[0] += 0.1
        return [(99, 1)] if timeout is None or len(self.asked) >= self.looks else []


@pytest.mark.parametrize(
    ("timeout", "spin", "looks", "asked"),
    [
        (None, 0.0, 9, [None]),
        (None, -1.0, 9, [None]),
        (None, 0.35, 2, [0, 0]),
        (None, 0.35, 9, [0, 0, 0, 0, None]),
        (30.0, 0.35, 9, [0, 0, 0, 0, 30.0]),
        (0.15, 0.35, 9, [0, 0, 0.15]),
        (0.0, 0.35, 9, [0.0]),
    ],
)
def test_it_looks_for_as_long_as_it_is_told_before_it_sleeps(
    timeout: float | None, spin: float, looks: int, asked: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    poller, clock = Poller(), [100.0]
    poller.close()
    epoll = Epoll(looks, clock)
    monkeypatch.setattr(poller, "_epoll", epoll)
    monkeypatch.setattr("transport.poller.time", SimpleNamespace(monotonic=lambda: clock[0]))
    assert poller.wait(timeout, spin) == [], "nobody handles that descriptor any more"
    assert epoll.asked == asked


def test_who_serves_looks_less_once_it_was_in_vain() -> None:
    """On few cores, where it would take them from the caller."""
    patience = Patience(long=3.0, longest=3.0, brief=1.0)
    assert patience.seconds == 3.0
    patience.note(3.5)
    assert patience.seconds == 1.0
    patience.note(2.0)
    assert patience.seconds == 1.0, "it slept by then"
    patience.note(0.5)
    assert patience.seconds == 3.0


def test_who_serves_looks_longer_for_calls_that_come_a_little_later() -> None:
    """A caller that has several workers in turn would find each asleep."""
    patience = Patience(long=1.0, longest=4.0, brief=1.0)
    for waited, seconds in ((1.1, 4.0), (3.9, 4.0), (4.1, 1.0), (2.0, 4.0), (0.9, 1.0), (100.0, 1.0)):
        patience.note(waited)
        assert patience.seconds == seconds, f"after {waited}"


def test_an_agent_looks_no_longer_than_some_milliseconds() -> None:
    assert BRIEF_SECONDS <= LONG_SECONDS <= LONGEST_SECONDS <= 0.004


def test_interests_change_one_by_one(poller: Poller, ends: list[socket.socket]) -> None:
    for number in (0, 2, 4):
        poller.add(ends[number].fileno(), named(f"link{number}"))  # type: ignore[arg-type]
    assert arrived(poller) == []
    poller.want(ends[2].fileno(), write=True)
    assert arrived(poller) == ["link2 w"]
    for number in (1, 3, 5):
        ends[number].send(b"!")
    assert arrived(poller) == ["link0 r", "link2 rw", "link4 r"]
    poller.want(ends[0].fileno(), read=False)
    poller.want(ends[2].fileno(), read=False)
    assert arrived(poller) == ["link2 w", "link4 r"]
    poller.want(ends[0].fileno(), read=True)
    poller.want(ends[2].fileno(), write=False)
    assert arrived(poller) == ["link0 r", "link4 r"], "the event of one came to another"
    poller.remove(ends[4].fileno())
    poller.want(ends[4].fileno(), read=True)
    assert arrived(poller) == ["link0 r"]


def test_a_descriptor_that_somebody_has_closed_is_told(poller: Poller) -> None:
    ours, theirs = socket.socketpair()
    descriptor = ours.fileno()
    poller.add(descriptor, named("closed"))  # type: ignore[arg-type]
    os.close(ours.detach())
    with pytest.raises(OSError, match="what is polled could not be changed"):
        poller.want(descriptor, write=True)
    theirs.close()


def test_nothing_is_changed_in_one_that_is_closed(poller: Poller, ends: list[socket.socket]) -> None:
    poller.add(ends[0].fileno(), named("link"))  # type: ignore[arg-type]
    poller.close()
    poller.want(ends[0].fileno(), write=True)
