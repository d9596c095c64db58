"""Side streams, and what a guard finds and changes on one device: see `streamrt.compute`.

Most guards find what the one before found: the null stream current in all libraries, on the device that is current.  So
what there is to ask is kept by device (`Plan`), and each thread keeps its side streams with an event each (`Side`).
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from streamrt.device import Device, open_device
from streamrt.event import Event, event_pool
from streamrt.guard import ENTER_EDGE, EXIT_EDGE, bring_back, keepers
from streamrt.libraries import Library, StreamKeeper, loaded
from streamrt.pool import lasting_stream
from streamrt.stream import Stream

_left: defaultdict[Device, deque[tuple[Stream, Event]]] = defaultdict(deque)  # of threads that have ended


class Side:
    """A thread's side stream of a device, the event of its fences, and the default stream that it stands beside."""

    __slots__ = ("callers", "event", "stream")

    def __init__(self, stream: Stream, event: Event) -> None:
        self.stream = stream
        self.event = event
        self.callers = [Stream.borrow(0, stream.device)]

    def __del__(self, left: defaultdict[Device, deque[tuple[Stream, Event]]] | None = _left) -> None:
        if left is not None:  # as it is where the interpreter has ended, too
            left[self.stream.device].append((self.stream, self.event))  # the thread has ended: the next one takes it


class Mine:
    """One thread's side streams, and the innermost guard that is open on it."""

    __slots__ = ("innermost", "sides")

    def __init__(self) -> None:
        self.sides: dict[Device, Side] = {}
        self.innermost: Entry | None = None

    def side(self, device: Device) -> Side:
        """The thread's side stream of a device.  Does not block the host once the device is open."""
        side = self.sides.get(device)
        if side is None:
            try:
                stream, event = _left[device].popleft()
            except IndexError:
                stream, event = lasting_stream(device)
            side = self.sides[device] = Side(stream, event)
        return side


class _Thread(threading.local):
    def __init__(self) -> None:
        self.mine = Mine()


thread = _Thread()


class Plan:
    """What there is to ask and to change on a device while the loaded libraries are the same.

    `movable`: the keepers whose current stream can be set, `readers` tells theirs; `fenced`: those whose streams can
    only be fenced (numba); `plain`: of the movable ones' arrays, by class, what tells a GPU's number.
    """

    __slots__ = ("backend", "device", "fenced", "index", "libraries", "movable", "plain", "readers")

    def __init__(self, device: Device, libraries: tuple[Library, ...]) -> None:
        self.device = device
        self.index = device.index
        self.backend = device.backend
        self.libraries = libraries
        there = keepers(device)
        readers = [(one, one.handle_reader(device)) for one in there]
        self.movable = tuple(one for one, reader in readers if reader is not None)
        self.readers = tuple(reader for _, reader in readers if reader is not None)
        self.fenced = tuple(one for one in there if one not in self.movable and one.current_stream(device) is not None)
        self.plain: dict[type, Callable[[Any], int]] = {}

    def on_null_stream(self) -> bool:
        """Whether everybody is on the device's null stream, and nobody is to be fenced: what most guards find."""
        for reader in self.readers:
            if reader() != 0:
                return False
        return self.backend.current_device == self.index and not self.fenced

    def covers(self, arrays: tuple[Any, ...], handle: int) -> bool:
        """Whether all are on this device, ready where their library works, and that is this stream for everybody."""
        index = self.index
        for array in arrays:
            index_of = self.plain.get(type(array))
            if index_of is None or index_of(array) != index:
                return False
        for reader in self.readers:
            if reader() != handle:
                return False
        return not self.fenced

    def learn(self, array: Any, library: Library) -> None:
        """Notes the class of an array on this device, if its library's current stream can be set."""
        index_of = library.index_reader() if library in self.movable else None
        if index_of is not None:
            self.plain[type(array)] = _index_of[type(array)] = index_of


_plans: dict[Device, Plan] = {}
_gpu_plans: dict[int, Plan] = {}
_index_of: dict[type, Callable[[Any], int]] = {}


def plan_of(device: Device) -> Plan:
    """What there is to ask on a device now.  Does not block the host once the device is open."""
    libraries = loaded()
    plan = _plans.get(device)
    if plan is None or plan.libraries is not libraries:
        plan = _plans[device] = Plan(open_device(device), libraries)
        if device.kind == "cuda":
            _gpu_plans[device.index] = plan
    return plan


def plan_of_plain(arrays: Sequence[Any]) -> Plan | None:
    """The plan of the one GPU of arrays that are ready where their library works, which is what most inputs are."""
    index = -1
    for array in arrays:
        index_of = _index_of.get(type(array))
        if index_of is None:
            return None
        at = index_of(array)
        if at != index:
            if index >= 0:
                return None
            index = at
    plan = _gpu_plans.get(index)
    return plan if plan is None or plan.libraries is loaded() else plan_of(plan.device)


class Entry:
    """One guard on one device: the stream that it works on, the callers' streams, and what it has to bring back.

    `side` is None where it stays on a caller's stream.
    """

    __slots__ = ("callers", "event", "plan", "side", "stream", "tokens")

    event: Event | None
    tokens: list[tuple[StreamKeeper, Any]]

    def __init__(self, plan: Plan, stream: Stream, callers: list[Stream], side: Side | None) -> None:
        self.plan = plan
        self.stream = stream
        self.callers = callers
        self.side = side
        self.event = None if side is None else side.event
        self.tokens = []

    @property
    def moves(self) -> bool:
        """Whether what is current changes for anybody."""
        return self.side is not None or len(self.callers) > 1

    def _mark(self) -> Event:
        event = self.event = event_pool(self.plan.device).lease()
        return event

    def fence_in(self) -> None:
        """Enqueues, on the stream, waits for those of the callers."""
        stream = self.stream
        for caller in self.callers:
            if caller is not stream:
                stream.wait_by(self.event or self._mark(), caller, edge=ENTER_EDGE)

    def fence_out(self, other: Entry) -> None:
        """Enqueues, on the callers' streams of another entry (or of this one), waits for this one's stream."""
        stream = self.stream
        for caller in other.callers:
            if caller is not stream:
                caller.wait_by(self.event or self._mark(), stream, edge=EXIT_EDGE)

    def wait_for(self, other: Entry) -> None:
        """Enqueues, on the stream, a wait for another entry's."""
        self.stream.wait_by(other.event or other._mark(), other.stream, edge=ENTER_EDGE)

    def exchange(self) -> None:
        """Makes the stream current in all keepers, where the device is the current one; or changes nothing."""
        device, stream, tokens = self.plan.device, self.stream, self.tokens
        try:
            for keeper in self.plan.movable:
                tokens.append((keeper, keeper.exchange(device, stream)))
        except BaseException:
            bring_back(tokens)
            raise

    def switch(self) -> None:
        """Makes the stream current in all keepers; lets numba's launches, on the default stream, come behind it."""
        plan, stream, tokens = self.plan, self.stream, self.tokens
        device = plan.device
        if self.moves:
            for keeper in plan.movable:  # all before any is set: the driver's device is one for all
                tokens.append((keeper, keeper.save(device)))
            for keeper in plan.movable:
                keeper.set_current_stream(device, stream)
        for keeper in plan.fenced:
            token = keeper.set_current_stream(device, stream)
            if token is not None:
                tokens.append((keeper, token))


def switch(entries: Sequence[Entry]) -> None:
    """Makes all streams current, the last one's device too, or changes nothing.  Does not block the host."""
    try:
        for entry in entries:
            entry.switch()
    except BaseException:
        bring_back([token for entry in entries for token in entry.tokens])
        raise


def leave(entries: Sequence[Entry]) -> None:
    """Brings back what was current before, in reverse order; every caller's stream waits for all that the guard worked
    on, whatever fails.  Does not block the host."""
    if len(entries) == 1:
        (entry,) = entries
        try:
            bring_back(entry.tokens)
        finally:
            if entry.moves:
                entry.fence_out(entry)
        return
    try:
        bring_back([token for entry in entries for token in entry.tokens])
    finally:
        for entry in entries:
            for other in entries:
                entry.fence_out(other)
