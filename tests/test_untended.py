"""Links that callers have read and left: one alarm for all of them, after which the agent's thread reads them again."""

from __future__ import annotations

import collections
import select
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import rpc_service
from rpc_processes import until

import transport
from transport import alarm as system_alarm
from transport import untended
from transport.untended import LEFT_SECONDS, LONGEST_LEFT_SECONDS, Untended


class Alarm:
    """One that never rings by itself: the test moves the clock, and rings."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def fileno(self) -> int:
        return -1

    def set(self, seconds: float) -> None:
        self.asked.append(seconds)

    def silence(self) -> None:
        return

    def close(self) -> None:
        return


class Bench:
    """An agent that only notes whose link it reads again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.alarm = Alarm()
        self.resumed: list[Any] = []
        self.ring: Callable[[], None] = lambda: None
        monkeypatch.setattr(untended, "Alarm", lambda: self.alarm)
        monkeypatch.setattr(untended, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.untended = Untended(self)  # type: ignore[arg-type]  # as much of an agent as it needs
        assert self.untended.ready()

    def watch(self, descriptor: int, handler: Callable[[], None]) -> None:
        self.ring = handler

    def unwatch(self, descriptor: int) -> None:
        return

    def resume_reading(self, driver: Any) -> None:
        self.resumed.append(driver)


class Driver:
    """A connection of which only is asked whether somebody reads it."""

    def __init__(self, reading: bool = False) -> None:
        self.calls = SimpleNamespace(reading=reading)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_the_alarm_is_set_once_for_many_calls(bench: Bench) -> None:
    driver: Any = Driver()
    for _ in range(3):
        bench.untended.leave(driver)
        bench.now += LEFT_SECONDS / 4
        bench.untended.tend(driver)
    bench.untended.leave(driver)
    assert bench.alarm.asked == [LEFT_SECONDS]
    bench.now += LEFT_SECONDS / 4
    bench.ring()
    assert bench.resumed == [], "it was left just now"
    assert bench.alarm.asked[1:] == pytest.approx([LONGEST_LEFT_SECONDS - LEFT_SECONDS / 4]), "and is in use"
    bench.now += LONGEST_LEFT_SECONDS
    bench.ring()
    assert bench.resumed == [driver]
    bench.untended.leave(driver)
    assert bench.alarm.asked[2:] == [LEFT_SECONDS], "nobody has called for a while"


def test_one_alarm_serves_all_links_that_are_left(bench: Bench) -> None:
    drivers: list[Any] = [Driver() for _ in range(100)]
    for driver in drivers:
        bench.untended.leave(driver)
        bench.now += LEFT_SECONDS / 50
    assert len(bench.alarm.asked) == 1, "with an alarm for each, a hundred peers wake the agent's thread for each call"
    bench.ring()
    latest = drivers[-49:]
    assert bench.resumed == [driver for driver in drivers if driver not in latest]
    assert len(bench.alarm.asked) == 2, "it rings for those that were left just now, too"
    bench.now += LONGEST_LEFT_SECONDS
    bench.ring()
    assert bench.resumed == drivers


def test_a_link_that_is_read_again_is_left_to_its_reader(bench: Bench) -> None:
    one: Any = Driver()
    other: Any = Driver(reading=True)
    for driver in (one, other):
        bench.untended.leave(driver)
    bench.untended.tend(one)
    bench.now += LONGEST_LEFT_SECONDS
    bench.ring()
    assert bench.resumed == []
    assert len(bench.alarm.asked) == 1, "nobody is left, so nothing rings"


def test_links_are_not_held_for_longer_than_the_longest(bench: Bench) -> None:
    driver: Any = Driver()
    assert bench.untended.hold(driver), "the first time the link has to be taken from the agent's thread"
    for _ in range(8):
        if bench.now >= 100.0 + sum(bench.alarm.asked):
            bench.ring()
        bench.now += LONGEST_LEFT_SECONDS / 8
        assert not bench.untended.hold(driver)
    assert bench.resumed == []
    assert sum(bench.alarm.asked) == pytest.approx(LONGEST_LEFT_SECONDS), "it rings when they are over"
    bench.ring()
    assert bench.resumed == [driver]


def test_without_an_alarm_links_are_not_left(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Alarm:
        raise OSError("no descriptor is left")

    monkeypatch.setattr(untended, "Alarm", refuse)
    assert not Untended(bench).ready()  # type: ignore[arg-type]


def test_nobody_makes_an_alarm_when_the_agent_is_over(bench: Bench) -> None:
    """A caller that leaves after that would leave a descriptor behind."""
    bench.untended.close()
    assert not bench.untended.ready()
    driver: Any = Driver()
    bench.untended.leave(driver)
    bench.ring()
    assert (bench.alarm.asked, bench.resumed) == ([], [])


def test_an_agent_looks_at_those_of_its_peers_only_in_which_something_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = transport.Agent(name="caller of many")
    serving = transport.Agent(name="called", service=rpc_service.service)
    monkeypatch.setattr("transport.peer.default_agent", lambda: agent)
    try:
        peers = [transport.loopback(rpc_service.service, serving=serving) for _ in range(20)]
        for peer in peers:
            assert peer.call("add", 1) == 2
        called, looked = peers[3]._driver, []
        look_at = agent._look_at

        def note(driver: Any, now: float) -> None:
            looked.append((driver, driver in agent.touched, driver.due is not None and driver.due <= now))
            look_at(driver, now)

        monkeypatch.setattr(agent, "_look_at", note)
        for number in range(50):
            assert peers[3].submit("add", number).result(30) == number + 1
        assert all(touched or due for _, touched, due in looked)
        counts = collections.Counter(driver for driver, _, _ in looked)
        assert counts[called] > 0
        others = [driver for driver in agent.drivers if driver is not called]
        assert len(others) == 19
        seen = sum(counts[driver] for driver in others)
        assert 2 * seen < len(others) * counts[called], "each look went to all of them"
        assert agent.open_calls == {}
    finally:
        agent.close()
        serving.close()


def test_a_link_is_read_again_though_the_alarm_rang_before_it_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who starts many calls may lose the core right before it takes the link from the agent's thread."""
    with transport.loopback(rpc_service.service) as peer:
        assert peer.call("add", 1) == 2
        agent = peer._driver.agent
        until(lambda: not agent.untended._left, "the agent's thread to read the link")
        hold, late = agent.untended.hold, []

        def hold_late(driver: Any) -> bool:
            tended = hold(driver)
            if not late:
                late.append(tended)
                until(lambda: driver not in agent.untended._left, "the alarm")
            return tended

        monkeypatch.setattr(agent.untended, "hold", hold_late)
        monkeypatch.setattr("transport.calling.MANY_CALLS", 0)
        future = peer.submit("add", 2)
        assert late == [True]
        until(lambda: not peer._driver.attended, "the agent's thread to read the link again")
        until(future.done, "the reply")
        assert future.result() == 3


def test_the_systems_alarm_rings_once_after_what_was_set_last() -> None:
    alarm = system_alarm.Alarm()
    ready = select.poll()
    ready.register(alarm.fileno(), select.POLLIN)
    try:
        for seconds in (0.001, 0.001, 1e-12, 0.002):
            alarm.set(1e6)
            assert ready.poll(0) == []
            alarm.set(seconds)
            assert ready.poll(30_000)
            alarm.silence()
            assert ready.poll(0) == [], "it rings once"
    finally:
        alarm.close()
    assert alarm.fileno() == -1
