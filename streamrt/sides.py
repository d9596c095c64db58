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
from streamrt.entries import Stack, bring_back, open_entries
from streamrt.event import Event, event_pool
from streamrt.guard import ENTER_EDGE, EXIT_EDGE, find_current, keepers
from streamrt.libraries import Library, StreamKeeper, loaded
from streamrt.pool import lasting_stream
from streamrt.stream import Stream

_left: defaultdict[Device, deque[tuple[Stream, Event]]] = defaultdict(deque)  # of threads that have ended


class Side:
    """A thread's side stream of a device, the event of its fences, and the default stream that it stands beside.

    `passed_on`: whether the next thread may have it.  Not if per-thread default streams read what was allocated on it:
    the next thread's guards wait for another one.
    """

    __slots__ = ("callers", "event", "passed_on", "stream")

    def __init__(self, stream: Stream, event: Event) -> None:
        self.stream = stream
        self.event = event
        self.callers = [Stream.borrow(0, stream.device)]
        self.passed_on = True

    def __del__(self, left: defaultdict[Device, deque[tuple[Stream, Event]]] = _left) -> None:
        if self.passed_on:  # the thread has ended
            left[self.stream.device].append((self.stream, self.event))


class Mine:
    """One thread's side streams, the innermost of these guards that is open on it, and all guards that are."""

    __slots__ = ("innermost", "sides", "stack")

    def __init__(self) -> None:
        self.sides: dict[Device, Side] = {}
        self.innermost: Opened | None = None
        self.stack: Stack = open_entries()

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

    def forget_closed(self) -> None:
        """Looks for the innermost guard that is not closed."""
        inner = self.innermost
        while inner is not None and inner.closed:
            inner = inner.outer
        self.innermost = inner

    def is_inside(self, opened: Opened) -> bool:
        """Whether a guard is open on the thread."""
        there = self.innermost
        while there is not None and there is not opened:
            there = there.outer
        return there is opened or not opened.entries


class _Thread(threading.local):
    def __init__(self) -> None:
        self.mine = Mine()


thread = _Thread()


DEFAULT = 2
"""Up to here a handle is of the default stream of whichever device is current; any other is of one device."""


class Plan:
    """What there is to ask and to change on a device while the loaded libraries are the same.

    `movable`: the keepers whose current stream can be set, `readers` tells theirs, `here` that of one of them together
    with the current device, and `others` those of the rest; `fenced`: those whose streams can
    only be fenced (numba); `plain`: of arrays that are ready where their library works, by class, what tells the number
    of their device.
    """

    __slots__ = (
        "backend",
        "covers",
        "device",
        "fenced",
        "here",
        "index",
        "libraries",
        "movable",
        "others",
        "plain",
        "readers",
        "same",
    )

    covers: Callable[[Sequence[Any], int], bool]
    same: Callable[[int], bool]

    def __init__(self, device: Device, libraries: tuple[Library, ...]) -> None:
        self.device = device
        self.index = device.index
        self.backend = device.backend
        self.libraries = libraries
        there = keepers(device)
        readers = [(one, one.handle_reader(device)) for one in there]
        self.movable = tuple(one for one, reader in readers if reader is not None)
        self.readers = tuple(reader for _, reader in readers if reader is not None)
        self.here = next(filter(None, (one.here_reader(device) for one in self.movable)), None)
        self.others = tuple(reader for one, reader in readers if reader is not None and one.here_reader(device) is None)
        self.fenced = tuple(one for one in there if one not in self.movable and one.current_stream(device) is not None)
        self.plain: dict[type, Callable[[Any], int]] = {}
        self.covers, self.same = _looks(self)

    def current_streams(self) -> list[Stream]:
        """The distinct current streams of the keepers that can be moved.  Does not touch the device."""
        found: dict[Any, Stream] = {}
        for keeper in self.movable:
            stream = keeper.current_stream(self.device)
            if stream is not None:
                found.setdefault(stream.key, stream)
        return list(found.values()) or [Stream.borrow(self.backend.current_stream(self.index), self.device)]

    def learn(self, array: Any, library: Library) -> None:
        """Notes the class of an array on this device, if its order is what is current."""
        if self.device.kind == "host":
            self.plain[type(array)] = _host_index(library)
        elif library in self.movable:
            index_of = library.index_reader()
            if index_of is not None:
                self.plain[type(array)] = _index_of[type(array)] = index_of


def _looks(plan: Plan) -> tuple[Callable[[Sequence[Any], int], bool], Callable[[int], bool]]:
    """The two questions that a guard inside a guard asks.

    The first: are all arrays on this device, ready where their library works, which is on the stream of that handle,
    and is the device current?  The second: are that stream and the device current for everybody?
    """
    index, index_of, readers = plan.index, plan.plain.get, plan.readers
    device_of = plan.backend.device_reader()

    here, others = plan.here, plan.others
    if here is not None and not others:  # the questions below, with no loop and no call that CuPy alone does not need

        def covers_alone(arrays: Sequence[Any], handle: int) -> bool:
            for array in arrays:
                find = index_of(type(array))
                if find is None or find(array) != index:
                    return False
            return here().ptr == handle and (handle > DEFAULT or device_of() == index)

        return covers_alone, lambda handle: here().ptr == handle and (handle > DEFAULT or device_of() == index)

    if here is not None:

        def same(handle: int) -> bool:
            for reader in others:
                if reader() != handle:
                    return False
            return here().ptr == handle and (handle > DEFAULT or device_of() == index)

    else:

        def same(handle: int) -> bool:
            for reader in readers:
                if reader() != handle:
                    return False
            return device_of() == index

    def covers(arrays: Sequence[Any], handle: int) -> bool:
        for array in arrays:
            find = index_of(type(array))
            if find is None or find(array) != index:
                return False
        return same(handle)

    return covers, same


def _host_index(library: Library) -> Callable[[Any], int]:
    """The number of the virtual device that an array is on, -1 for ordinary memory."""

    def index_of(array: Any) -> int:
        device = library.device_of(array)
        return device.index if device.kind == "host" else -1

    return index_of


_plans: dict[Device, Plan] = {}
_gpu_plans: dict[int, Plan] = {}
_index_of: dict[type, Callable[[Any], int]] = {}  # of arrays on GPUs


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
        find = _index_of.get(type(array))
        if find is None:
            return None
        at = find(array)
        if at != index:
            if index >= 0:
                return None
            index = at
    plan = _gpu_plans.get(index)
    return plan if plan is None or plan.libraries is loaded() else plan_of(plan.device)


class Entry:
    """A guard on one device: the stream that it works on, the callers' streams, and what it has to bring back.

    `side` is None where it stays on a caller's stream.  As long as the guard is open it is one of a thread's `Opened`,
    and `shared` counts the guards inside it that found nothing to do.
    """

    __slots__ = ("callers", "closed", "event", "handle", "outer", "plan", "shared", "side", "stream", "tokens")

    event: Event | None
    outer: Opened | None
    tokens: list[tuple[StreamKeeper, Any]]

    def __init__(self, plan: Plan, stream: Stream, callers: list[Stream], side: Side | None) -> None:
        self.plan = plan
        self.stream = stream
        self.handle = stream.handle
        self.callers = callers
        self.side = side
        self.event = None if side is None else side.event
        self.tokens = []
        self.closed = False
        self.shared = 0

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Itself: a group of one."""
        return (self,)

    @property
    def moves(self) -> bool:
        """Whether another stream becomes current for anybody."""
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
        """Makes the stream current in all keepers, and the device, having noted what was."""
        plan = self.plan
        if plan.backend.current_device == plan.index:
            self.exchange()
            return
        self.tokens += find_current(plan.device, plan.movable)
        for keeper in plan.movable:
            token = keeper.push_stream(plan.device, self.stream)
            if token is not None:
                self.tokens.append((keeper, token))

    def fence_others(self) -> None:
        """Lets numba's launches, on the default stream, come behind the stream, and the stream behind them at the end.

        Enqueues, on the default stream, a wait.
        """
        for keeper in self.plan.fenced:
            token = keeper.push_stream(self.plan.device, self.stream)
            if token is not None:
                self.tokens.append((keeper, token))

    def leave(self) -> None:
        """Brings back what was current before; the callers' streams wait for all that the guard worked on, whatever
        fails."""
        self.closed = True
        tokens = self.tokens
        try:
            if len(tokens) == 1:  # of CuPy alone
                tokens[0][0].restore(tokens[0][1])
            else:
                bring_back(tokens)
        finally:
            if self.side is not None and len(self.callers) == 1:
                self.callers[0].wait_by(self.side.event, self.stream, edge=EXIT_EDGE)
            elif self.moves:
                self.fence_out(self)

    def fence(self) -> None:
        """Enqueues, on the callers' streams, waits for all that the guard worked on."""
        if self.moves:
            self.fence_out(self)


class Group:
    """A guard on several devices, or on none: its entries, one a device, the last one's device the current one."""

    __slots__ = ("closed", "entries", "handle", "outer", "shared", "stream")

    outer: Opened | None

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        self.entries = entries
        self.outer = None
        self.closed = False
        self.shared = 0
        self.stream = entries[-1].stream if entries else None
        self.handle = 0 if self.stream is None else self.stream.handle

    @property
    def plan(self) -> Group:
        """Itself, which answers the questions of a `Plan`."""
        return self

    def covers(self, arrays: Sequence[Any], handle: int) -> bool:
        """As a `Plan`'s, of all its devices."""
        for array in arrays:
            if not any(self._on(entry.plan, array) for entry in self.entries):
                return False
        return self.same(handle)

    @staticmethod
    def _on(plan: Plan, array: Any) -> bool:
        find = plan.plain.get(type(array))
        return find is not None and find(array) == plan.index

    def same(self, handle: int) -> bool:
        """As a `Plan`'s, of all its devices."""
        for entry in self.entries:
            for reader in entry.plan.readers:
                if reader() != entry.handle:
                    return False
        return not self.entries or self.entries[-1].plan.backend.current_device == self.entries[-1].plan.index

    def leave(self) -> None:
        """As an `Entry`'s; every caller's stream waits for every stream of the guard."""
        self.closed = True
        try:
            bring_back([token for entry in self.entries for token in entry.tokens])
        finally:
            self.fence()

    def fence(self) -> None:
        """As an `Entry`'s; one that the driver refuses does not keep the others from it."""
        failure: BaseException | None = None
        for entry in self.entries:
            for other in self.entries:
                try:
                    entry.fence_out(other)
                except BaseException as error:  # noqa: BLE001 - raised below, when all is fenced
                    failure = failure or error
        if failure is not None:
            raise failure


Opened = Entry | Group
"""A guard that is open on a thread.

``opened.plan.covers(arrays, opened.handle)`` says whether all arrays are ordered by what is current, and that is what
this guard made current; ``opened.plan.same(opened.handle)`` only the latter.
"""
NOWHERE = Group(())
"""Of a guard whose inputs are all in ordinary memory."""


def switch(entries: Sequence[Entry], numba: Sequence[Device]) -> None:
    """Makes all streams current, the last one's device too, or changes nothing; `numba` has inputs on these devices.

    Enqueues what `Entry.fence_others` does.  Does not block the host.
    """
    try:
        for entry in entries:
            entry.switch()
            if entry.plan.fenced and (entry.moves or entry.plan.device in numba):
                entry.fence_others()
    except BaseException:
        bring_back([token for entry in entries for token in entry.tokens])
        raise


def make_current(opened: Opened) -> None:
    """Makes current again what the guard made current.  Does not touch the device."""
    for entry in opened.entries:
        for keeper in entry.plan.movable:
            keeper.set_current_stream(entry.plan.device, entry.stream)
