"""Shared memory between simulated processes, in both orders: the whole protocol, under seeded schedules, with deaths.

What a missing order does shows as wrong bytes, and what a loss must never do is that too: whoever looks behind a wait
whose signal never came is told so, at whatever step the peer has died.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import numpy as np
import pytest
from simulation import Joint, Script, World
from traffic import BIG, Program, check_once, overwrite, pattern, traffic

import streamrt
from streamrt.testing import without
from transport import ordering
from transport.channels import waits
from transport.channels.signals import Signals
from transport.channels.waits import Waits
from transport.errors import PeerLostError
from transport.service import Service

SCHEDULES = ["lazy", "random", "priority"]
ORDERS = ["host", "stream"]
EXHAUSTED = ["lazy", *(pytest.param(name, marks=pytest.mark.whole) for name in ("random", "priority"))]
WHOLE = os.environ.get("STREAMRT_WHOLE") == "1"
STRIDE = 4
SEEDS = 6 if WHOLE else 4
LARGE = 20_000  # float32: more than travels inside a message


def sweep(seed: int, schedule: str, order: str) -> tuple[tuple[Any, ...], Counter[str]]:
    """One run of traffic between processes that share memory; how many arrays went in which order."""
    with World(seed, schedule, order=order) as world:
        joint, runs, callers = traffic(world)
        world.settle()
        check_once(runs, callers)
        assert (joint.drivers[0].closed, joint.drivers[1].closed) == (None, None)
        assert joint.peer.order == joint.back.order == order
        world.check_quiet()
        joint.peer.close()
        world.settle()
        assert all(driver.closed is not None and driver.closed.graceful for driver in joint.drivers)
        return world.record, sum((Counter(driver.transfers.ordered.out) for driver in joint.drivers), Counter())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_values_are_right_and_nothing_is_left_under_every_schedule(schedule: str, order: str) -> None:
    gone: Counter[str] = Counter()
    for seed in range(SEEDS):
        gone += sweep(seed, schedule, order)[1]
    assert gone[order] > 10
    assert order == "stream" or not gone["stream"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_default_takes_both_orders_where_a_stream_may_wait(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On virtual devices it takes host order alone: this is for two GPUs."""
    assert sweep(0, schedule, "auto")[1]["stream"] == 0
    monkeypatch.setattr(ordering, "pays", lambda *_: True)
    gone: Counter[str] = Counter()
    for seed in range(SEEDS):
        gone += sweep(seed, schedule, "auto")[1]
    assert gone["stream"] + gone["host"] > 10
    if schedule == "lazy":
        assert gone["stream"] > 5


@pytest.mark.whole
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_values_are_right_under_many_seeds(schedule: str) -> None:
    for seed in range(100, 115):
        sweep(seed, schedule, "stream")


# deaths ---------------------------------------------------------------------------------------------------------------


def much_later(values: np.ndarray[Any, Any], device: str) -> Any:
    """An array that the current stream writes after much else: agents ask devices, and each question may run some."""
    array = streamrt.empty(values.shape, "float32", device=device)
    stream = streamrt.current_stream(device)
    for fill in range(30):
        stream.launch(array.fill, float(fill), writes=[array])
    stream.launch(np.copyto, array, values, writes=[array])
    return array


class Server(Program):
    """The functions of `traffic`, and one whose result is not there for long."""

    def __init__(self, world: World, runs: Counter[str]) -> None:
        super().__init__(world, runs)
        self.service.function(self.double_much_later, name="double_much_later")

    def double_much_later(self, token: str, x: Any) -> Any:
        self.runs[token] += 1
        return much_later(np.asarray(x) * 2, str(streamrt.device_of(x)))


class Scene:
    """One client on `a` that calls `b` with arrays that are not ready for long, and gets such back."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.runs: Counter[str] = Counter()
        self.values = self.losses = 0
        self.sides = tuple(world.side(name, Server(world, self.runs).service) for name in "ab")
        self.joint: Joint = world.connect(*self.sides, faults=Script(seed=world.seed), ready=False)
        self.client = world.spawn(self._client, name="client", side=self.sides[0])

    def _client(self) -> None:
        self.world.wait(self.joint.drivers[0].ready.is_set)
        for token in ("one", "two"):
            futures = []
            for number in range(3):
                name = f"{token} {number}"
                try:
                    array = much_later(pattern(name, LARGE), "host:0")
                    futures.append((name, self.joint.peer.submit("double_much_later", name, array)))
                    overwrite(array, "host:0")
                except PeerLostError:
                    self.losses += 1
            for name, future in futures:
                try:
                    value = future.result()
                    assert np.array_equal(value, pattern(name, LARGE) * 2), f"{name} was taken with wrong bytes"
                    self.values += 1
                except PeerLostError:
                    self.losses += 1
            del futures


def clean(seed: int, schedule: str) -> int:
    with World(seed, schedule, rush=0.0, order="stream") as world:
        scene = Scene(world)
        world.settle()
        assert (scene.values, scene.losses) == (6, 0)
        world.check_quiet()
        return len(world.trace)


def kill_at(step: int, victim: int, seed: int, schedule: str, *, seen: bool) -> Scene:
    with World(seed, schedule, rush=0.0, order="stream") as world:
        scene = Scene(world)
        for _ in range(step):
            world.step()
        world.kill(scene.sides[victim], seen=seen)
        world.settle()
        if victim == 1:
            assert scene.client.ended
            assert scene.values + scene.losses == 6
        survivor = scene.joint.drivers[1 - victim]
        assert survivor.closed is not None
        assert not survivor.closed.graceful
        assert max(scene.runs.values(), default=0) <= 1
        world.check_quiet()
        return scene


@pytest.mark.parametrize("schedule", EXHAUSTED)
@pytest.mark.parametrize("victim", [0, 1], ids=["caller", "callee"])
def test_a_process_killed_at_each_step_gives_no_wrong_value_and_leaves_nothing(victim: int, schedule: str) -> None:
    steps = clean(1, schedule)
    scenes = [
        kill_at(step, victim, 1, schedule, seen=step % 2 == 0)
        for step in range(0, steps, STRIDE if WHOLE or steps < 100 else 3 * STRIDE)
    ]
    assert any(scene.joint.drivers[1 - victim].transfers.ordered.come["stream"] for scene in scenes)
    if victim == 1:
        values = {scene.values for scene in scenes}
        assert values >= {0, 3}
        assert max(values) > 3


@pytest.mark.whole
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_process_killed_at_each_step_of_other_seeds(schedule: str) -> None:
    for seed in range(2, 4):
        for step in range(0, clean(seed, schedule), 3):
            kill_at(step, step // 2 % 2, seed, schedule, seen=False)


def ends_with(world: World) -> list[Any]:
    """What a function refers to, for as long as there is its world: signatures of functions are remembered."""
    found: list[Any] = []
    world._exit.callback(found.clear)
    return found


def relay(world: World) -> tuple[Any, Any, Any, Counter[str]]:
    """a calls b, whose function sends what is made of its argument on to c: a's peer, b, c, and what ran at c."""
    runs: Counter[str] = Counter()
    service, chain = Service(), ends_with(world)

    @service.function(name="relay")
    def pass_on(token: str, x: Any) -> Any:
        later = much_later(np.array(x) + 1, "host:0")
        return chain[0].peer.submit("double_much_later", token, later).result()

    a, b, c = world.side("a"), world.side("b", service), world.side("c", Server(world, runs).service)
    chain.append(world.connect(b, c, device_map={"host:0": "host:2"}))
    return world.connect(a, b).peer, b, c, runs


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("victim", ["b", "c"])
def test_a_death_in_a_row_of_three_gives_no_wrong_value(schedule: str, victim: str) -> None:
    ends: Counter[str] = Counter()
    for step in range(0, 240, 2 * STRIDE):
        with World(step, schedule, order="stream") as world:
            peer, b, c, _ = relay(world)
            futures = {}
            for name in ("x", "y"):
                array = much_later(pattern(name, LARGE), "host:1")
                futures[name] = peer.submit("relay", name, array)
                overwrite(array, "host:1")
            del array
            for _ in range(step):
                world.step()
            world.kill(b if victim == "b" else c)
            world.settle()
            for name, future in futures.items():
                error = future.exception()
                if error is None:
                    assert np.array_equal(future.result(), (pattern(name, LARGE) + 1) * 2)
                    ends["value"] += 1
                else:
                    assert isinstance(error, PeerLostError), "what c was to make is lost, wherever that is seen first"
                    ends["lost"] += 1
            del future, error
            futures.clear()
            world.check_quiet()
    assert ends["lost"] > 5
    assert victim == "b" or ends["value"] > 2


def ahead(world: World) -> tuple[Any, Any, Any]:
    """a calls b, whose function returns what its stream will make of what c's stream will make; nobody's host waits."""
    runs: Counter[str] = Counter()
    service, chain = Service(), ends_with(world)

    @service.function(name="ahead")
    def make(token: str, x: Any) -> Any:
        reply = chain[0].peer.submit("double_much_later", token, streamrt.array(np.asarray(x), device="host:0"))
        chain[0].ends[0].world.wait(reply.done)
        if (error := reply.exception()) is not None:
            raise error
        stream = streamrt.current_stream("host:0")
        with streamrt.device_guard("host:0"):
            result = streamrt.empty(LARGE, "float32", device="host:0")
            reply._points.order_on(stream)  # as a GPU's result() does
            stream.launch(np.add, reply._result, 1, result, reads=[reply._result], writes=[result])
            return result

    a, b, c = world.side("a"), world.side("b", service), world.side("c", Server(world, runs).service)
    chain.append(world.connect(b, c, device_map={"host:0": "host:2"}))
    return world.connect(a, b), b, c


def killed_ahead(step: int, victim: str, schedule: str) -> tuple[str, int]:
    """What became of the value when one of them was killed at a step, and how many replies were derived."""
    with World(step, schedule, order="stream") as world:
        joint, b, c = ahead(world)
        future = joint.peer.submit("ahead", "x", pattern("x", LARGE))
        for _ in range(step):
            world.step()
        world.kill(b if victim == "b" else c)
        world.settle()
        try:
            value = future.result()
            assert np.array_equal(value, pattern("x", LARGE) * 2 + 1), "x was taken with wrong bytes"
            end = "value"
            del value
        except PeerLostError:
            end = "lost"
        derived = joint.drivers[0].transfers.sharing is not None and joint.drivers[0].transfers.ordered.come["stream"]
        del future
        world.check_quiet()
        return end, int(derived)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("victim", ["b", "c"])
def test_a_death_behind_a_derived_value_is_a_loss_of_that(schedule: str, victim: str) -> None:
    ends = [killed_ahead(step, victim, schedule) for step in range(0, 150, STRIDE)]
    assert {end for end, _ in ends} == {"value", "lost"}
    if schedule == "lazy":
        assert ("lost", 1) in ends, "no reply was here before its bytes were lost"


def test_if_what_is_derived_were_not_marked_wrong_bytes_would_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrates the test above."""
    monkeypatch.setattr(Signals, "spoil", lambda self: None)
    with pytest.raises(AssertionError, match="wrong bytes"):
        for step in range(0, 150, 2):
            killed_ahead(step, "c", "lazy")


# calibration ----------------------------------------------------------------------------------------------------------


def wrong(seed: int, schedule: str) -> bool:
    """Whether a call of an array that is not ready for long came back with wrong bytes."""
    runs: Counter[str] = Counter()
    with World(seed, schedule, order="stream") as world:
        joint = world.connect(world.side("a"), world.side("b", Program(world, runs).service))
        array = much_later(pattern("x", BIG), "host:0")
        return not np.array_equal(joint.peer.submit("double_later", "x", array).result(), pattern("x", BIG) * 2)


@pytest.mark.parametrize("schedule", ["lazy", "priority"])
@pytest.mark.parametrize("edge", [waits.ORDER_EDGE, "send.wait", "snapshot.copy"])
def test_without_an_edge_some_seed_gives_wrong_bytes_and_with_it_none(edge: str, schedule: str) -> None:
    assert not any(wrong(seed, schedule) for seed in range(4))
    with without(edge):
        assert any(wrong(seed, schedule) for seed in range(40))


def test_if_a_loss_were_not_marked_wrong_bytes_would_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrates the deaths above, under the schedule that runs things last."""

    def release(self: Waits) -> None:
        for point in self._highest.values():
            point.word.store(point.value)

    steps = {seed: clean(seed, "lazy") for seed in (1, 2, 3)}
    monkeypatch.setattr(Waits, "mark", lambda self: None)
    monkeypatch.setattr(Waits, "release", release)
    found = 0
    for seed, last in steps.items():
        for step in range(last // 3, last, 3):
            try:
                kill_at(step, 1, seed, "lazy", seen=True)
            except Exception as error:
                found += "wrong bytes" in str(error.__cause__)
            if found:
                return
    raise AssertionError("no wrong bytes were taken")
