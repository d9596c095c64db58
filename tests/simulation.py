"""A world of agents in one process: one thing at a time, in virtual time, in the order that a seed chooses.

What runs is what runs in production: agents, drivers, protocols, pools, the host backend's streams.  The world takes
the agents' turns, is their executor and their clock, and joins them by memory links with scripted faults.  Each step is
one of: an agent's turn, a function or client that goes on until it waits, one operation of an enabled stream, the clock
moved to the next arrival, and, when nothing else can happen (or rarely, in between), to the next time-out.

    with World(seed=7, schedule="lazy") as world:
        a, b = world.side("a"), world.side("b", service)
        link = world.connect(a, b)
        future = link.peer.submit("double", x)
        value = future.result()          # any wait of the runtime runs the world until it is over
        world.settle()
        world.check_quiet()

Functions, clients and agents have a thread each, since the current streams of a thread belong to it; but only one of
them runs at any time, so a run is a function of its seed.  `World.record` is that run, comparable.  What fails names
the seed, says who waits for what, and shows the last steps.
"""

from __future__ import annotations

import gc
import math
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

import simulated_sharing
from fiber import Fiber

from streamrt import memory
from streamrt.callbacks import add_blocking_hook
from streamrt.device import backend_of, open_device
from streamrt.pool import stream_pool
from streamrt.testing import schedules
from transport import context
from transport.agent import Agent
from transport.device_map import parse_map
from transport.driver import Driver
from transport.events import PeerGone
from transport.lead import Lead
from transport.limits import Limits
from transport.links.memory_link import Faults, MemoryLink, pair
from transport.peer import Peer
from transport.service import Service

DEVICES = ("host:0", "host:1", "host:2", "host:3")
QUIET = Limits(heartbeat=math.inf, handshake_timeout=math.inf, same_host=True)
"""Nothing happens by itself, so that a world without anything to do is seen to have none."""
ALIVE = Limits(heartbeat=1.0, peer_timeout=5.0, same_host=False)
"""Heartbeats, which show that a last message was lost; such a world never rests: use `run_until` and `run_for`."""
LATENCY = (0.0001, 0.001)
BARREN = 16  # turns of polling agents in a row that brought nothing, after which they are taken to wait for others


class SimulationError(AssertionError):
    """The world cannot go on: a deadlock, a livelock, or an error of a client."""


class Script(Faults):
    """Faults by the number of a message (from 1, both ends counted together), over those that a seed draws."""

    def __init__(self, *, drops: tuple[int, ...] = (), repeats: tuple[int, ...] = (), **drawn: Any) -> None:
        super().__init__(**{"delay": LATENCY, **drawn})
        self.drops, self.repeats = drops, repeats

    @property
    def sent(self) -> int:
        """How many messages both ends have sent."""
        return self._sent

    def copies(self) -> int:
        drawn = super().copies()
        if self._sent in self.drops:
            self.dropped += 1
            return 0
        if self._sent in self.repeats:
            self.repeated += 1
            return 2
        return drawn


class _Executor:
    """Where an agent's functions go: each becomes a fiber."""

    def __init__(self, side: Side) -> None:
        self._side = side

    def submit(self, task: Callable[[], None]) -> None:
        self._side.runs += 1
        self._side.world.spawn(task, name=f"run {self._side.runs}", side=self._side)

    def blocking(self, until: Callable[[], bool] | None = None) -> AbstractContextManager[None]:
        return nullcontext()  # who waits has parked: there is no thread to make room on

    def close(self) -> None:
        return None


class SimulatedAgent(Agent):
    """The agent, with no thread of its own: the world takes its turns."""

    def __init__(self, side: Side, service: Service, *, apart: bool, near: bool) -> None:
        super().__init__(name=side.name, service=service, clock=lambda: side.world.now)
        self.executor = _Executor(side)  # type: ignore[assignment]
        self._apart = apart
        self._near = near

    def info(self) -> dict[str, object]:
        told = super().info()
        if self._near:
            told |= {"process": f"simulated {self.name}"}
        elif self._apart:  # on hosts of their own, as far as each can know
            told |= {"process": f"simulated {self.name}", "boot": f"simulated {self.name}"}
        return told

    def _start(self) -> None:
        return None

    def wake(self) -> None:
        return None

    @property
    def pressing(self) -> bool:
        """Whether a turn has something to do for certain."""
        now = self.clock()
        return bool(self._requests) or any(
            driver.link.readable or _due(driver) <= now for driver in self.drivers if driver.closed is None
        )

    @property
    def polling(self) -> bool:
        """Whether a turn would ask a device."""
        return any(driver.polling for driver in self.drivers)


def _due(driver: Driver) -> float:
    due = driver.next_timeout()
    return math.inf if due is None else due


class Side:
    """A simulated process: its agent, and the threads that run in it."""

    def __init__(self, world: World, name: str, service: Service, *, apart: bool, near: bool) -> None:
        self.world, self.name, self.near = world, name, near
        self.agent = SimulatedAgent(self, service, apart=apart, near=near)
        self.alive = True
        self.runs = 0
        self.turns = Fiber(f"{name} agent", self._take_turns)
        self.turns.until = None

    def _take_turns(self) -> None:
        context.set_leading(Lead())
        while True:
            self.agent.turn()
            self.turns.park(None)


@dataclass
class Joint:
    """A connection of two sides: the links, the drivers, and what users see."""

    ends: tuple[Side, Side]
    links: tuple[MemoryLink, MemoryLink]
    drivers: tuple[Driver, Driver]
    faults: Script
    peer: Peer = field(init=False)
    back: Peer = field(init=False)

    def __post_init__(self) -> None:
        self.peer, self.back = map(Peer, self.drivers)


class World:
    """Sides, links, time and the dice.  A context manager; one at a time in a process."""

    def __init__(self, seed: int = 0, schedule: str = "lazy", *, rush: float = 0.01, order: str = "") -> None:
        """`rush` is the probability that the clock goes to the next time-out while something else could happen.  With
        an `order` its sides share memory, and ask for that order."""
        self.seed, self.name, self.rush = seed, schedule, rush
        self.near, self.order = bool(order), order
        self.random = random.Random(seed)
        self.now = 100.0
        self.trace: list[str] = []
        self.sides: dict[str, Side] = {}
        self.joints: list[Joint] = []
        self.machine = backend_of("host").machine  # type: ignore[attr-defined]
        self._fibers: list[tuple[Side | None, Fiber]] = []
        self._running: Fiber | None = None
        self._main = threading.current_thread()
        self._progress = self._barren = 0
        self._exit = ExitStack()
        self._baseline: dict[str, int] = {}

    # its life ---------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(_no_collections())
            _warm()
            self.schedule = stack.enter_context(schedules(self.name, self.seed))
            stack.callback(add_blocking_hook(self._blocked))
            if self.near:
                stack.enter_context(simulated_sharing.driven(self))
            self.machine.idle_hooks.append(self._idle)
            stack.callback(self.machine.idle_hooks.remove, self._idle)
            self._baseline = resources()
            stack.callback(self._end)
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._exit.__exit__(*exc)

    def _end(self) -> None:
        for _, fiber in self._fibers:
            fiber.kill()
        for side in self.sides.values():
            if side.alive:
                side.turns.kill()
                side.agent.close(0.0)
        self._fibers.clear()

    # what is in it ----------------------------------------------------------------------------------------------------

    def side(self, name: str, service: Service | None = None, *, apart: bool = True, near: bool | None = None) -> Side:
        """A new process.  With ``apart=False`` it knows that it is this very one, so that buffers are handed over; with
        `near` (the world's by default) it is one of the same host and user, so that memory is shared."""
        near = self.near if near is None else near
        side = self.sides[name] = Side(self, name, service or Service(), apart=apart, near=near)
        return side

    def connect(
        self,
        a: Side,
        b: Side,
        *,
        limits: Limits = QUIET,
        faults: Script | None = None,
        device_map: dict[str, str] | None = None,
        ready: bool = True,
    ) -> Joint:
        """Joins two sides; `a` begins.  Runs the world until both are ready, unless told otherwise."""
        faults = faults if faults is not None else Script(seed=self.seed)
        make = simulated_sharing.pair if a.near and b.near else pair
        links = make(faults, lambda: self.now, names=(a.name, b.name))
        entries = None if device_map is None else parse_map(device_map, local_kind="host", remote_kind="host")
        drivers = (
            a.agent.add(
                links[0], initiator=True, limits=limits, name=b.name, device_map=entries, order=self.order or None
            ),
            b.agent.add(links[1], initiator=False, limits=limits, name=a.name),
        )
        joint = Joint((a, b), links, drivers, faults)
        if a.near and b.near:
            simulated_sharing.prepare(joint)
        self.joints.append(joint)
        if ready:
            rush, self.rush = self.rush, 0.0  # no handshake is cut short
            self.run_until(lambda: all(driver.ready.is_set() for driver in drivers))
            self.rush = rush
        return joint

    def spawn(self, body: Callable[[], object], *, name: str, side: Side | None = None) -> Fiber:
        """Runs a function on a thread of its own: a client, or what an agent wants run."""
        fiber = Fiber(f"{side.name} {name}" if side is not None else name, body)
        self._fibers.append((side, fiber))
        return fiber

    @property
    def running_side(self) -> Side | None:
        """Whose thread it is that runs; None for the test's own."""
        for side in self.sides.values():
            if self._running is side.turns:
                return side
        return next((side for side, fiber in self._fibers if fiber is self._running), None)

    def kill(self, side: Side, *, seen: bool = False) -> None:
        """Ends a process as SIGKILL does: nothing of it runs again, what it had sent still arrives.

        `seen`: its peers are told of it, as by a pidfd, beside finding the end of the link.
        """
        self.trace.append(f"kill {side.name}")
        side.alive = False
        others = [joint.drivers[1 - number] for joint in self.joints for number in (0, 1) if joint.ends[number] is side]
        for joint in self.joints:
            for number in (0, 1):
                if joint.ends[number] is side:
                    joint.links[number].kill()
        side.turns.kill()
        for owner, fiber in self._fibers:
            if owner is side:
                fiber.kill()
        self._fibers = [entry for entry in self._fibers if entry[0] is not side]
        _forget(side)
        for driver in others:
            if seen and driver.closed is None:
                driver.fact(PeerGone(f"process {side.name} has ended"))

    # running ----------------------------------------------------------------------------------------------------------

    def step(self, horizon: float = math.inf) -> bool:
        """Does one thing, not after `horizon`; False when nothing can be done."""
        if self.near:
            simulated_sharing.look()
        choices = list(self._choices(horizon))
        later = self._next_timeout()
        if later < math.inf and later <= horizon and (not choices or self.random.random() < self.rush):
            choices = [(f"time-out at {later:.6f}", lambda: self._advance(later))]
        if not choices:
            return self._wake_the_stuck()
        what, action = choices[self.random.randrange(len(choices))]
        self.trace.append(what)
        action()
        return True

    def _choices(self, horizon: float) -> Iterator[tuple[str, Callable[[], None]]]:
        for side in self.sides.values():
            if not side.alive:
                continue
            if side.turns.until is not None:  # in the middle of a turn
                if side.turns.ready:
                    yield f"{side.name} goes on", lambda side=side: self._resume(side.turns)  # type: ignore[misc]
            elif side.agent.pressing:
                yield f"{side.name} turn", lambda side=side: self._resume(side.turns)  # type: ignore[misc]
            elif side.agent.polling and self._barren < BARREN:
                yield f"{side.name} polls", lambda side=side: self._poll(side)  # type: ignore[misc]
        for _, fiber in self._fibers:
            if fiber.ready:
                yield fiber.name, lambda fiber=fiber: self._resume(fiber)  # type: ignore[misc]
        if self.name != "lazy" and (queues := self.machine.enabled_queues()):
            yield "device", lambda: self._run_device(self.schedule.choose(self.machine, queues[0]))  # type: ignore[attr-defined]
        arrivals = [
            link.next_arrival
            for joint in self.joints
            for side, link in zip(joint.ends, joint.links, strict=True)
            if side.alive and link.next_arrival is not None and link.next_arrival > self.now
        ]
        if arrivals and (first := min(arrivals)) <= horizon:
            yield f"arrival at {first:.6f}", lambda: self._advance(first)

    def _next_timeout(self) -> float:
        drivers = [driver for side in self.sides.values() if side.alive for driver in side.agent.drivers]
        return min((due for driver in drivers if (due := _due(driver)) > self.now), default=math.inf)

    def _advance(self, now: float) -> None:
        self._went()
        self.now = now

    def _went(self) -> None:
        self._progress += 1
        self._barren = 0

    def _run_device(self, queue: Any) -> None:
        self._went()
        self.schedule.run_one(self.machine, queue)  # type: ignore[attr-defined]

    def _poll(self, side: Side) -> None:
        before = (len(self.schedule.trace), [joint.faults.sent for joint in self.joints], len(self._fibers))
        barren, progress = self._barren, self._progress
        self._resume(side.turns)
        if before == (len(self.schedule.trace), [joint.faults.sent for joint in self.joints], len(self._fibers)):
            self._barren, self._progress = barren + 1, progress

    def _resume(self, fiber: Fiber) -> None:
        if not fiber.idle:
            self._went()
        previous, self._running = self._running, fiber
        fiber.idle = False
        try:
            fiber.resume()
        finally:
            self._running = previous
        if fiber.ended:
            self._fibers = [entry for entry in self._fibers if entry[1] is not fiber]
            if fiber.error is not None:
                raise SimulationError(f"{fiber.name} raised; {self._where()}") from fiber.error

    def _wake_the_stuck(self) -> bool:
        """Nothing can happen any more, so who waits for a device is told that it waits for ever."""
        for fiber in (*(fiber for _, fiber in self._fibers), *(side.turns for side in self.sides.values())):
            if fiber.idle and not fiber.ended:
                self.trace.append(f"{fiber.name} is stuck")
                fiber.stuck = True
                self._progress += 1
                self._resume(fiber)
                return True
        return False

    @contextmanager
    def _blocked(self, until: Callable[[], bool] | None) -> Iterator[None]:
        if until is not None:
            self.wait(until)
        yield

    def wait(self, until: Callable[[], bool]) -> None:
        """Waits, on the test's thread or on a fiber, until something holds."""
        if self._running is not None:
            if not until():
                self._running.park(until)
        elif threading.current_thread() is self._main:
            self.run_until(until)

    def _idle(self) -> bool:
        """The host waits for or asks a device, and no operation can run: others may enqueue or write something.

        Not for a driver, which asks under its lock and comes again.
        """
        if any(driver.lock._is_owned() for joint in self.joints for driver in joint.drivers):
            return False
        fiber, seen = self._running, self._progress
        if fiber is None:
            return threading.current_thread() is self._main and self.step()
        fiber.idle, fiber.stuck = True, False
        fiber.park(lambda: self._progress > seen)
        return not fiber.stuck

    def run_until(self, condition: Callable[[], bool], limit: int = 100_000) -> None:
        """Runs until a condition holds.  Raises `SimulationError` for a deadlock, or after `limit` steps."""
        self._barren = 0  # the test may have done anything since
        for _ in range(limit):
            if condition():
                return
            if not self.step():
                raise SimulationError(f"nothing can happen any more; {self._where()}")
        raise SimulationError(f"{limit} steps were not enough: a livelock; {self._where()}")

    def run_for(self, seconds: float, limit: int = 100_000) -> None:
        """Runs for some virtual seconds."""
        horizon = self.now + seconds
        for _ in range(limit):
            if not self.step(horizon):
                self.now = horizon
                return
        raise SimulationError(f"{limit} steps were not enough for {seconds} s: a livelock; {self._where()}")

    def settle(self, limit: int = 100_000) -> None:
        """Runs until nothing is left to do, on the devices too.  For worlds without heartbeats."""
        for _ in range(limit):
            if not self.step():
                if not (self.name == "lazy" and (queues := self.machine.enabled_queues())):
                    return
                self._run_device(queues[0])
        raise SimulationError(f"{limit} steps were not enough: a livelock; {self._where()}")

    # what became of it ------------------------------------------------------------------------------------------------

    @property
    def record(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """All that was chosen, by the world and by the schedule of the devices."""
        return tuple(self.trace), tuple(self.schedule.trace)

    def _where(self) -> str:
        waiting = [fiber.name for _, fiber in self._fibers if not fiber.ended]
        calls = [
            f"{len(driver.calls.open)} calls open to {driver.name}, {len(driver.served.calls)} running"
            for side in self.sides.values()
            if side.alive
            for driver in side.agent.drivers
        ]
        queues = [
            f"{queue} waits for {queue.operations[0].need or 'its turn'}"
            for queue in self.machine.pending_queues()
            if queue.operations
        ]
        return (
            f"repeat it with World(seed={self.seed}, schedule={self.name!r}); at {self.now:.6f} s after "
            f"{len(self.trace)} steps; waiting: {waiting}; {calls}; {queues}; last steps: {self.trace[-12:]}"
        )

    def check_quiet(self) -> None:
        """At rest nothing is held: the tables are empty, credit is back, memory and streams are as at the beginning.

        The test has dropped its arrays and futures.
        """
        for joint in self.joints:
            for number, driver in enumerate(joint.drivers):
                if not joint.ends[number].alive:
                    continue
                said = driver.protocol.statistics()
                where = f"{joint.ends[number].name}: {said}; {self._where()}"
                assert (said.calls, said.serving, said.waiting, said.sending, said.held) == (0, 0, 0, 0, 0), where
                assert (len(driver.calls.open), len(driver.served.calls), driver.polling) == (0, 0, False), where
                assert not driver.transfers.outgoing, where
                assert not driver.transfers.incoming, where
                if driver.closed is None:
                    assert said.outstanding == joint.drivers[1 - number].protocol.statistics().owed, where
        found = self.left()
        assert not found, f"left behind: {found}; {self._where()}"

    def left(self) -> dict[str, int]:
        """What is held beyond what was held at the beginning, once the devices have run what was enqueued."""
        gc.collect()
        for _ in range(3):  # what is given back may enqueue a record, and what that frees another one
            memory.drain(everything=True)
            backend_of("host").finish()  # type: ignore[attr-defined]
        now = resources()
        return {name: now[name] - before for name, before in self._baseline.items() if now[name] > before}


def _forget(side: Side) -> None:
    """A killed process's memory is gone: what its drivers held is dropped, with no word to anybody."""
    for joint in side.world.joints:
        for number in (0, 1):
            if joint.ends[number] is side:
                driver = joint.drivers[number]
                for table in (
                    driver.transfers.outgoing,
                    driver.transfers.incoming,
                    driver.calls.open,
                    driver.served.calls,
                ):
                    table.clear()  # type: ignore[attr-defined]
                simulated_sharing.forget(driver)
                driver.transfers._sending.clear()
                driver.transfers._draining.clear()
                driver.transfers._held.clear()
                driver._completions.clear()
                driver.protocol.drain()
    side.agent._drivers.clear()
    side.agent._requests.clear()
    side.agent._close_all()


def resources() -> dict[str, int]:
    """Memory of the runtime, and leases of streams."""
    held = memory.statistics()
    found = {name: getattr(held, name) for name in ("live", "buffers", "held", "held_arrays", "snapshots")}
    for name in DEVICES:
        for role in ("caller", "callee"):
            found[f"{role} leases on {name}"] = stream_pool(open_device(name), role).statistics().leased  # type: ignore[arg-type]
    return found


def _warm() -> None:
    """Makes all streams of the pools, so that the first world of a process finds what every later one finds."""
    for name in DEVICES:
        for role in ("caller", "callee"):
            pool = stream_pool(open_device(name), role)  # type: ignore[arg-type]
            for lease in [pool.lease() for _ in range(pool.size)]:
                lease.release()
            pool.statistics()
    backend_of("host").finish()  # type: ignore[attr-defined]
    memory.drain(everything=True)


@contextmanager
def _no_collections() -> Iterator[None]:
    """When cycles are collected depends on what ran before; inside a world it happens where the world says so."""
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
        gc.collect()
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
