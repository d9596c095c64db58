"""The poller: what is waited for may change at any time, and each event comes to the handler of its descriptor."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

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
