"""Graphs of the host backend: what a function enqueued, kept as a list instead of run, and enqueued again at a replay.

The captured stream's operations go to the stream that the graph is launched on; those of each other stream of the
capture go to a queue of the launch's own, as a GPU's do, whatever that stream is doing now.  A record of the capture is
an edge: each launch has its own marks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from streamrt.captures import Executable
from streamrt.errors import CaptureError
from streamrt.host.scheduler import EventNeed, EventState, Machine, Operation, Queue


@dataclass(frozen=True, slots=True)
class _Mark:
    """A record, by its number in the graph."""

    number: int


@dataclass(frozen=True, slots=True)
class _Wait:
    """A wait for the record of that number."""

    number: int


_Node = tuple[int, Operation | _Mark | _Wait]  # the stream's number in the graph, 0 for the captured one


class HostRecorder:
    """The capture of one stream of a virtual device.

    It knows of each stream of the capture which operations come before what is enqueued next (`_seen`, a count for each
    stream), so that work which the captured stream never waited for is found at the end.
    """

    def __init__(
        self,
        machine: Machine,
        queue_of: Callable[[int, int], Queue],
        numbers: Iterator[int],
        index: int,
        stream: int,
    ) -> None:
        """Made by `HostBackend.recorder`.  Does not touch the device."""
        self._machine, self._queue_of, self._numbers, self._index = machine, queue_of, numbers, index
        self._slots: dict[Queue, int] = {queue_of(index, stream): 0}
        self._seen: list[dict[int, int]] = [{0: 0}]
        self._nodes: list[_Node] = []
        self._marks: dict[int, int] = {}  # of each event the number of its newest record
        self._behind: list[dict[int, int]] = []  # of each record what had come before it

    def begin(self) -> None:
        return None

    def abort(self) -> None:
        self._nodes.clear()

    def end(self) -> Executable:
        joined = self._seen[0]
        for queue, slot in self._slots.items():
            if self._seen[slot].get(slot, 0) > joined.get(slot, 0):
                raise CaptureError(
                    f"work was forked to {queue} and not joined; let the captured stream wait for that stream before "
                    "the function returns"
                )
        streams = [(queue.index, queue.number) for queue in self._slots]
        return HostExecutable(self._machine, self._queue_of, self._numbers, streams, tuple(self._nodes))

    def _slot(self, queue: Queue) -> int:
        slot = self._slots.setdefault(queue, len(self._slots))
        if slot == len(self._seen):
            self._seen.append({})
        return slot

    def add(self, queue: Queue, operation: Operation) -> None:
        """Appends an operation of a stream of the capture.  Does not block the host."""
        slot = self._slot(queue)
        self._seen[slot][slot] = self._seen[slot].get(slot, 0) + 1
        self._nodes.append((slot, operation))

    def record(self, queue: Queue, event: int) -> None:
        """Appends a record.  Does not block the host."""
        slot, number = self._slot(queue), len(self._behind)
        self._marks[event] = number
        self._behind.append(dict(self._seen[slot]))
        self._nodes.append((slot, _Mark(number)))

    def wait(self, queue: Queue, event: int) -> None:
        """Appends a wait for the event's newest record in this capture.  Does not block the host."""
        slot, number = self._slot(queue), self._marks[event]
        seen = self._seen[slot]
        for other, count in self._behind[number].items():
            seen[other] = max(seen.get(other, 0), count)
        self._nodes.append((slot, _Wait(number)))


class HostExecutable:
    """What was recorded, in the order in which it was enqueued."""

    def __init__(
        self,
        machine: Machine,
        queue_of: Callable[[int, int], Queue],
        numbers: Iterator[int],
        streams: list[tuple[int, int]],
        nodes: tuple[_Node, ...],
    ) -> None:
        """Made by `HostRecorder.end`.  Does not touch the device."""
        self._machine, self._queue_of, self._numbers = machine, queue_of, numbers
        self._streams, self._nodes = streams, nodes

    @property
    def empty(self) -> bool:
        return not any(isinstance(node, Operation) for _, node in self._nodes)

    def launch(self, stream: int) -> None:
        (index, _), *forked = self._streams
        queues = [self._queue_of(index, stream)]
        queues += [Queue(there, next(self._numbers)) for there, _ in forked]
        marks: dict[int, EventNeed] = {}
        for slot, node in self._nodes:
            queue = queues[slot]
            if isinstance(node, Operation):
                self._machine.enqueue(queue, node)
            elif isinstance(node, _Mark):
                state = EventState(next(self._numbers))
                self._machine.record(queue, state)
                marks[node.number] = EventNeed(state, state.recorded)
            else:
                need = marks[node.number]
                self._machine.enqueue(queue, Operation("wait for event", None, need, detail=need))
