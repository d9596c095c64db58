"""Two agents over links that lose, repeat and delay messages, and between processes that die, at every point in turn.

A lost message ends the connection and says so; a repeated one is dropped; a late one harms nothing.  Whatever happens,
every future ends once, no function runs twice, no wrong byte is delivered, and the survivors hold nothing.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from simulation import ALIVE, LATENCY, QUIET, Joint, Script, Side, World
from traffic import BIG, Program, check_once, overwrite, pattern, traffic, written_later

from transport.errors import PeerLostError
from transport.limits import Limits

SCHEDULES = ["lazy", "random", "priority"]
# For what goes through all messages or steps: one schedule in the quick tests, all in the others.
EXHAUSTED = ["lazy", *(pytest.param(name, marks=pytest.mark.slow) for name in ("random", "priority"))]


class Scene:
    """One client on `a` that calls `b`: a device array, a nested call back, three chunks of staging, a notify."""

    def __init__(self, world: World, faults: Script, limits: Limits = QUIET) -> None:
        self.world = world
        self.runs: Counter[str] = Counter()
        self.values = 0
        self.losses: list[str] = []
        self.too_late = False  # a kill found the client at its end
        self.sides = tuple(world.side(name, Program(world, self.runs).service) for name in "ab")
        self.joint: Joint = world.connect(*self.sides, limits=limits, faults=faults, ready=False)
        self.client = world.spawn(self._client, name="client", side=self.sides[0])

    def _client(self) -> None:
        self.world.wait(self.joint.drivers[0].ready.is_set)
        for call in (self._device, self._nested, self._big, self._notify):
            try:
                call()
                self.values += 1
            except PeerLostError as error:
                self.losses.append(str(error))

    def _device(self) -> None:
        array = written_later(pattern("device", 700), "host:0")
        future = self.joint.peer.submit("double_later", "device", array)
        overwrite(array, "host:0")
        del array
        assert np.array_equal(future.result(), pattern("device", 700) * 2)

    def _nested(self) -> None:
        assert np.array_equal(
            self.joint.peer.call("bounce", "nested", pattern("nested", 800), 2), pattern("nested", 800) + 3
        )

    def _big(self) -> None:
        array = written_later(pattern("big", BIG), "host:1")
        assert np.array_equal(self.joint.peer.call("double", "big", array), pattern("big", BIG) * 2)

    def _notify(self) -> None:
        sent = self.joint.peer.notify("hear", "notify", pattern("notify", 1000))
        self.world.wait(sent.done)
        sent.result()

    @property
    def ended(self) -> bool:
        return self.client.ended

    def closed(self) -> list[str]:
        """Why the drivers that live have closed."""
        closed = [
            driver.closed
            for side, driver in zip(self.sides, self.joint.drivers, strict=True)
            if side.alive and driver.closed is not None
        ]
        assert not any(one.graceful for one in closed)
        return [one.reason for one in closed]

    def check(self) -> None:
        """Whatever happened: every future of the client has ended, nothing ran twice, nothing is held."""
        assert max(self.runs.values(), default=0) <= 1, self.runs
        if self.sides[0].alive:
            assert self.ended
            assert self.values + len(self.losses) == 4
        self.world.check_quiet()


def clean(seed: int, schedule: str) -> tuple[int, int]:
    """Steps and messages of the scene when nothing goes wrong."""
    with World(seed, schedule, rush=0.0) as world:
        scene = Scene(world, Script(seed=seed))
        world.settle()
        assert scene.values == 4
        assert sum(scene.runs.values()) == 6
        scene.check()
        return len(world.trace), scene.joint.faults.sent


# links ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", EXHAUSTED)
def test_each_lost_message_ends_the_connection_and_every_future(schedule: str) -> None:
    """(The first two are the handshake's: they are missed by its time-out, or by the session that never began.)"""
    outcomes: Counter[bool] = Counter()
    for number in range(1, clean(0, schedule)[1] + 1):
        with World(0, schedule) as world:
            scene = Scene(world, Script(seed=0, drops=(number,)), limits=ALIVE)
            world.run_until(lambda scene=scene: scene.ended)
            world.run_for(30.0)
            scene.check()
            assert scene.joint.faults.dropped == 1
            reasons = scene.closed()
            assert len(reasons) == 2, f"message {number} was lost and {reasons} is all that came of it"
            told = ("was lost", "no handshake", "silent") if number > 2 else ("no handshake", "another session")
            assert any(word in reason for reason in reasons for word in told), (number, reasons)
            for loss in scene.losses:
                assert (
                    "outcome is unknown" in loss
                    or "it was not sent" in loss
                    or "is gone" in loss
                    or "not sent to" in loss
                )
            outcomes[bool(scene.losses)] += 1
    assert outcomes[True] > 10


@pytest.mark.parametrize("schedule", EXHAUSTED)
def test_each_repeated_message_is_dropped(schedule: str) -> None:
    for number in range(1, clean(0, schedule)[1] + 1):
        with World(0, schedule) as world:
            scene = Scene(world, Script(seed=0, repeats=(number,)))
            world.settle()
            scene.check()
            assert (scene.values, scene.joint.faults.repeated) == (4, 1)
            assert sum(scene.runs.values()) == 6
            assert sum(driver.protocol.statistics().duplicates for driver in scene.joint.drivers) == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_delayed_messages_are_harmless(schedule: str) -> None:
    for seed in range(4):
        with World(seed, schedule) as world:
            scene = Scene(world, Script(seed=seed, delay=(0.0, 3.0)), limits=ALIVE)
            world.run_until(lambda scene=scene: scene.ended)
            world.run_for(10.0)
            assert scene.values == 4
            assert scene.closed() == []
            scene.check()


def storm(seed: int, schedule: str) -> tuple[int, int]:
    """Traffic over links that lose, repeat and delay at random; calls lost, messages lost."""
    with World(seed, schedule) as world:
        faults = Script(seed=seed, drop=0.01, repeat=0.05, delay=(LATENCY[0], 0.05))
        joint, runs, callers = traffic(world, limits=ALIVE, faults=faults, apart=seed % 3 != 0)
        faults.drop = 0.0  # heartbeats show what was lost until now
        world.run_for(30.0)
        check_once(runs, callers)
        assert all((driver.closed is not None) == (faults.dropped > 0) for driver in joint.drivers)
        world.check_quiet()
        return sum(caller.lost for caller in callers), faults.dropped


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_storms_give_values_or_clean_errors(schedule: str) -> None:
    found = [storm(seed, schedule) for seed in range(10)]
    assert any(lost for lost, _ in found)
    assert any(not lost and not dropped for lost, dropped in found)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_many_storms(schedule: str) -> None:
    assert sum(storm(seed, schedule)[0] for seed in range(100, 120)) > 5


# processes ------------------------------------------------------------------------------------------------------------


def kill_at(step: int, victim: int, seed: int, schedule: str, *, seen: bool) -> Scene:
    """Runs the scene for some steps, kills one of the two processes, and looks at what the other one makes of it."""
    with World(seed, schedule, rush=0.0) as world:
        scene = Scene(world, Script(seed=seed))
        for _ in range(step):
            world.step()
        side: Side = scene.sides[victim]
        scene.too_late = scene.ended
        world.kill(side, seen=seen)
        world.settle()
        scene.check()
        assert scene.closed(), "the survivor has not noticed"
        for loss in scene.losses:
            assert "died" in loss or "has ended" in loss or "not sent" in loss or "is gone" in loss, loss
        return scene


@pytest.mark.parametrize("schedule", EXHAUSTED)
@pytest.mark.parametrize("victim", [0, 1], ids=["caller", "callee"])
def test_a_process_killed_at_each_step_leaves_nothing_open(victim: int, schedule: str) -> None:
    # Up to a kill that finds the client at its end: how many steps that takes moves with what earlier tests have left
    # to be given back.
    most, scenes = 2 * clean(1, schedule)[0], list[Scene]()
    while not (scenes and scenes[-1].too_late):
        step = len(scenes)
        assert step < most, "the client does not end"
        scenes.append(kill_at(step, victim, 1, schedule, seen=step % 2 == 0))
    ran = {sum(scene.runs.values()) for scene in scenes}
    assert ran >= {
        0,
        1,
        2,
        3,
        4,
    }  # the points lie before, between and in all functions, the last of which is a notify's:
    assert max(ran) >= 5  # it may run before its sender has heard that it is sent, and the client ends
    if victim == 1:
        assert {scene.values for scene in scenes} == {0, 1, 2, 3, 4}
        assert any("outcome is unknown" in loss for scene in scenes for loss in scene.losses)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_process_killed_at_each_step_of_other_seeds(schedule: str) -> None:
    for seed in range(2, 5):
        for step in range(0, clean(seed, schedule)[0], 2):
            kill_at(step, step // 2 % 2, seed, schedule, seen=False)


@pytest.mark.parametrize("schedule", EXHAUSTED)
def test_a_process_that_dies_right_after_each_message_leaves_nothing_open(schedule: str) -> None:
    victims = set()
    for number in range(1, clean(0, schedule)[1] + 1):
        with World(0, schedule) as world:
            scene = Scene(world, Script(seed=0, kill_after=number))
            while all(link.connected for link in scene.joint.links):
                assert world.step()
            (victim,) = (n for n, link in enumerate(scene.joint.links) if "killed" in repr(link))
            world.kill(scene.sides[victim])
            world.settle()
            scene.check()
            assert scene.closed(), "the survivor has not noticed"
            victims.add(victim)
    assert victims == {0, 1}
