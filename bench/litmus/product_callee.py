"""The functions of the product's litmus: they compare what arrived, and make what is sent back."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import streamrt
import transport
from bench.litmus.machine import Machine, machine
from streamrt.testing import Latch, without

KEPT = 32  # arrays that are sent back and written again, more than calls are in flight

_service = transport.Service()  # says that `compare_in_place` borrows
_machines: list[Machine] = []
_kept: dict[int, list[Any]] = {}
_dropped = ExitStack()
_doors: list[Latch] = []
_lock = threading.Lock()


def open_machine(device: str, sizes: list[int]) -> None:
    """Loads what the other functions need.  Blocks the host."""
    _machines.append(machine(device))
    for words in sizes:
        _kept[words] = [_machines[0].array(words) for _ in range(KEPT)]


def compare(x: Any, how: str, number: int) -> None:
    """Compares an argument, which was pulled into memory of this process."""
    _machines[0].compare(how, x, number)


@_service.function(borrow=True)
def compare_in_place(x: Any, how: str, number: int) -> None:
    """Compares an argument where it lies, in memory of the caller's process."""
    _machines[0].compare(how, x, number)


def make(like: Any, how: str, number: int, words: int, kept: bool, held: str) -> Any:
    """An array with a round's contents: one that this process keeps and writes again, or one that nobody else has.

    Enqueues on the stream that is current on the device of `like`; `held` is "" or "a while", or "until open_doors".
    """
    made = _machines[0]
    array = _kept[words][number % KEPT] if kept else made.array(words)
    if held == "a while":
        made.hold_up()
    elif held:
        with _lock:
            _doors.append(Latch(streamrt.current_stream(streamrt.device_of(like))))
    made.write(how, array, number)
    return array


def settle() -> None:
    """Blocks the host until what the functions have enqueued before has run."""
    _machines[0].settle()


def open_doors() -> int:
    """Lets go on what `make` has held up; how many streams that were."""
    with _lock:
        doors, _doors[:] = _doors[:], []
    for door in doors:
        door.open()
    return len(doors)


def drop(edge: str) -> None:
    """This process drops the waits of that name, until `restore`."""
    _dropped.enter_context(without(edge))


def restore() -> None:
    """Ends what `drop` began.  Raises `LookupError` where no such wait was met."""
    _dropped.close()


def found() -> list[int]:
    """What the comparisons have found since the last call.  Blocks the host until all have run."""
    return list(_machines[0].found())
