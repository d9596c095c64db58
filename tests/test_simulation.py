"""Two or three agents and the whole protocol in one process, under seeded schedules.

Every run checks values byte by byte, that each future ends once, that no function runs twice, and that at rest nothing
is held.  Freed and fresh memory is poisoned, so an order that is missing shows as wrong bytes: the calibrations take
edges away and see them.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rpc_processes import HERE, WATCHDOG
from simulation import QUIET, Side, SimulationError, World
from traffic import BIG, Program, check_once, overwrite, pattern, traffic, written_later

import streamrt
from streamrt.errors import DeadlockError
from streamrt.segment import Segment, Word
from streamrt.stream import Stream
from streamrt.testing import Latch, without
from streamrt.timeline import Point
from transport.errors import RemoteError
from transport.launch.environment import child_environment
from transport.peer import Peer
from transport.service import Service

SCHEDULES = ["lazy", "random", "priority"]
TINY = replace(QUIET, window=64 * 1024)  # most messages wait for credit


# schedules ------------------------------------------------------------------------------------------------------------


def sweep(seed: int, schedule: str) -> tuple[Any, ...]:
    """One run of traffic, its limits and ways drawn from the seed too."""
    with World(seed, schedule) as world:
        limits = (QUIET, TINY)[seed % 2]
        joint, runs, callers = traffic(world, limits=limits, apart=seed % 3 != 0)
        world.settle()
        check_once(runs, callers)
        assert (joint.drivers[0].closed, joint.drivers[1].closed) == (None, None)
        world.check_quiet()
        joint.peer.close()
        world.settle()
        assert all(driver.closed is not None and driver.closed.graceful for driver in joint.drivers)
        return world.record


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(6))
def test_values_are_right_and_nothing_is_left_under_every_schedule(seed: int, schedule: str) -> None:
    sweep(seed, schedule)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_values_are_right_under_many_seeds(schedule: str) -> None:
    for seed in range(100, 125):
        sweep(seed, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_same_seed_replays_and_another_one_does_not(schedule: str) -> None:
    """In a process of its own, where nothing that other tests have left takes a turn."""
    program = f"import test_simulation; test_simulation.check_replay({schedule!r})"
    subprocess.run([sys.executable, "-c", program], env=child_environment(), cwd=HERE, timeout=WATCHDOG, check=True)


def check_replay(schedule: str) -> None:
    again = [sweep(5, schedule) for _ in range(2)]
    assert again[0] == again[1]
    assert len(again[0][0]) > 100
    assert len({again[0], *(sweep(seed, schedule) for seed in (11, 17, 23))}) == 4


# deadlocks ------------------------------------------------------------------------------------------------------------


def test_a_call_that_nobody_ends_is_a_deadlock_with_names_and_a_seed() -> None:
    runs: Counter[str] = Counter()
    with World(3, "random") as world:
        a, b = world.side("a"), world.side("b", Program(world, runs).service)
        joint = world.connect(a, b)
        future = joint.peer.submit("stall", "token")
        with pytest.raises(
            SimulationError, match=r"nothing can happen.*World\(seed=3, schedule='random'\).*b run 1"
        ) as caught:
            future.result()
        assert "1 calls open to b" in str(caught.value)
        future.cancel()
        world.settle()
        world.check_quiet()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_device_that_waits_for_ever_is_a_global_deadlock(schedule: str) -> None:
    with Segment.create(4096) as segment, World(0, schedule) as world:
        stream = Stream("host:0")
        stream.wait(Point(Word(segment, 0), 1))
        world.spawn(stream.synchronize, name="client")
        with pytest.raises(SimulationError, match="client raised") as caught:
            world.settle()
        assert isinstance(caught.value.__cause__, DeadlockError)
        assert "waits for word" in str(caught.value.__cause__)
        world.machine.abandon()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_who_waits_for_a_device_lets_the_others_go_on(schedule: str) -> None:
    with Segment.create(4096) as segment, World(0, schedule) as world:
        word = Word(segment, 0)
        first, second = Stream("host:0"), Stream("host:1")
        first.wait(Point(word, 1))

        def write() -> None:
            second.synchronize()
            word.store(1)

        second.launch(list)
        world.spawn(write, name="writer")
        world.spawn(first.synchronize, name="reader")
        first.synchronize()
        world.settle()


def test_polling_for_a_closed_device_is_seen_to_lead_nowhere() -> None:
    runs: Counter[str] = Counter()
    with World(0, "lazy") as world:
        a, b = world.side("a"), world.side("b", Program(world, runs).service)
        joint = world.connect(a, b)
        with Latch(streamrt.current_stream("host:0")) as latch:
            future = joint.peer.submit("double", "token", written_later(pattern("x", 100), "host:0"))
            with pytest.raises(SimulationError, match="waits for a closed latch"):
                future.result()
            latch.open()
            world.run_until(lambda: future.done(), limit=1000)
        assert np.array_equal(future.result(), pattern("x", 100) * 2)


# three processes ------------------------------------------------------------------------------------------------------


def relay(world: World) -> tuple[Peer, Side, Counter[str]]:
    """a calls b, whose function calls c with an array that is not ready: a's peer, c, and what ran there."""
    runs: Counter[str] = Counter()
    service, chain = Service(), []

    @service.function(name="relay")
    def pass_on(token: str, x: Any) -> Any:
        later = written_later(np.array(x) + 1, "host:0")
        return chain[0].peer.call("double_later", token, later)

    a, b, c = world.side("a"), world.side("b", service), world.side("c", Program(world, runs).service)
    chain.append(world.connect(b, c, device_map={"host:0": "host:2"}))
    return world.connect(a, b).peer, c, runs


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(4))
def test_three_processes_in_a_row(seed: int, schedule: str) -> None:
    with World(seed, schedule) as world:
        peer, _, runs = relay(world)
        futures = []
        for number in range(4):
            array = written_later(pattern(str(number), 5000), "host:1")
            futures.append(peer.submit("relay", str(number), array))
            overwrite(array, "host:1")
            del array
        for number, future in enumerate(futures):
            assert np.array_equal(future.result(), (pattern(str(number), 5000) + 1) * 2)
        del future
        futures.clear()
        assert sum(runs.values()) == 4
        world.settle()
        world.check_quiet()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_loss_of_the_last_of_three_reaches_the_first_as_an_error_and_its_connection_goes_on(schedule: str) -> None:
    lost = 0
    for step in range(0, 60, 3):
        with World(step, schedule) as world:
            peer, c, runs = relay(world)
            array = written_later(pattern("x", 5000), "host:1")
            future = peer.submit("relay", "x", array)
            del array
            for _ in range(step):
                world.step()
            world.kill(c)
            world.settle()
            error = future.exception()
            if error is None:
                assert np.array_equal(future.result(), (pattern("x", 5000) + 1) * 2)
            else:
                assert "died" in str(error) or "is gone" in str(error)
                assert isinstance(error, RemoteError)  # not a loss of b
                lost += 1
            assert max(runs.values(), default=0) <= 1
            assert not peer.closed
            assert isinstance(peer.submit("relay", "y", pattern("y", 10)).exception(), RemoteError)
            del future
            world.settle()
            world.check_quiet()
    assert 0 < lost < 20


# calibration ----------------------------------------------------------------------------------------------------------


def wrong(seed: int, schedule: str, *, apart: bool = True, lent: bool = False) -> bool:
    """Whether a call of a device array that is not ready for long came back with wrong bytes."""
    runs: Counter[str] = Counter()
    with World(seed, schedule) as world:
        service = Program(world, runs).service
        joint = world.connect(world.side("a", apart=apart), world.side("b", service, apart=apart))
        array = streamrt.empty(BIG, "float32", device="host:0")
        for fill in range(40):  # agents ask the device now and then, and under "lazy" each question runs one of these
            streamrt.current_stream("host:0").launch(array.fill, float(fill), writes=[array])
        streamrt.current_stream("host:0").launch(np.copyto, array, pattern("x", BIG), writes=[array])
        future = joint.peer.submit("double_later", "x", array, copy=not lent)
        return not np.array_equal(future.result(), pattern("x", BIG) * 2)


CALIBRATED: list[tuple[str, Callable[[int, str], bool]]] = [
    ("send.wait", wrong),
    ("snapshot.copy", wrong),
    ("future.wait", wrong),
    ("pull.wait", lambda seed, schedule: wrong(seed, schedule, apart=False)),
    ("send.wait", lambda seed, schedule: wrong(seed, schedule, lent=True)),
]


@pytest.mark.parametrize("schedule", ["lazy", "priority"])  # "random" runs most of what is enqueued at once
@pytest.mark.parametrize(("edge", "run"), CALIBRATED, ids=["send", "snapshot", "future", "pull", "lent"])
def test_without_an_edge_some_seed_gives_wrong_bytes_and_with_it_none(
    edge: str, run: Callable[[int, str], bool], schedule: str
) -> None:
    assert not any(run(seed, schedule) for seed in range(4))
    with without(edge):
        assert any(run(seed, schedule) for seed in range(40))
