"""Copies of ordinary memory, shared out among threads when they are large."""

from __future__ import annotations

import concurrent.futures
import ctypes
import threading
from typing import Any

import numpy as np
import pytest

from streamrt import moves
from streamrt.moves import PART_BYTES, move


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine of four cores."""
    monkeypatch.setattr(moves, "THREADS", 4)


def pattern(nbytes: int) -> np.ndarray[Any, Any]:
    return np.resize(np.arange(251, dtype=np.uint8), nbytes)


@pytest.mark.parametrize("nbytes", [0, 1, PART_BYTES, 2 * PART_BYTES - 1, 2 * PART_BYTES, 3 * PART_BYTES + 7, 1 << 26])
def test_every_byte_is_copied_and_no_other(nbytes: int) -> None:
    source, room = pattern(nbytes), np.full(nbytes + 128, 7, np.uint8)
    move(room.ctypes.data + 64, source.ctypes.data, nbytes)
    assert np.array_equal(room[64 : 64 + nbytes], source)
    assert (room[:64] == 7).all()
    assert (room[64 + nbytes :] == 7).all()


@pytest.mark.parametrize("nbytes", [9, 1 << 25])
def test_numpys_integers_are_taken(nbytes: int) -> None:
    source, target = pattern(nbytes), np.zeros(nbytes, np.uint8)
    given: list[Any] = [np.uint64(target.ctypes.data), np.uint64(source.ctypes.data), np.int64(nbytes)]
    move(*given)
    assert np.array_equal(target, source)


@pytest.mark.parametrize("shift", [1, -1, PART_BYTES, -PART_BYTES])
def test_memory_that_overlaps_is_copied_in_order(shift: int) -> None:
    nbytes = 4 * PART_BYTES
    memory = pattern(nbytes + 2 * PART_BYTES)
    begin = PART_BYTES
    wanted = memory[begin : begin + nbytes].copy()
    move(memory.ctypes.data + begin + shift, memory.ctypes.data + begin, nbytes)
    assert np.array_equal(memory[begin + shift : begin + shift + nbytes], wanted)


def test_where_no_thread_can_be_had_the_caller_copies_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the interpreter is about to end."""
    given: list[Any] = []

    class Refusing(concurrent.futures.ThreadPoolExecutor):
        def submit(self, *args: Any, **kwargs: Any) -> Any:
            if given:
                raise RuntimeError("can't start new thread")
            given.append(args)
            return super().submit(*args, **kwargs)

    with Refusing(1) as pool:
        monkeypatch.setattr(moves, "_helpers", pool)
        source, target = pattern(1 << 25), np.zeros(1 << 25, np.uint8)
        move(target.ctypes.data, source.ctypes.data, source.nbytes)
    assert len(given) == 1
    assert np.array_equal(target, source)


def test_a_copy_that_found_no_thread_is_not_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool keeps what it could start no thread for, and the memory is somebody else's by then."""
    start, refused = threading.Thread.start, []

    def refuse(thread: threading.Thread) -> None:
        refused.append(thread)
        raise RuntimeError("can't start new thread")

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        monkeypatch.setattr(moves, "_helpers", pool)
        source, target = pattern(1 << 25), np.zeros(1 << 25, np.uint8)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        move(target.ctypes.data, source.ctypes.data, source.nbytes)
        monkeypatch.setattr(threading.Thread, "start", start)
        assert refused
        assert np.array_equal(target, source)
        target[:] = 9
        pool.submit(int).result(30)
        pool.shutdown()  # once it has done all that it was given
        assert (target == 9).all()


class Slow:
    """As much of ctypes as is wanted: helpers are held in their copies, and say how many of them are in one."""

    def __init__(self) -> None:
        self.caller = threading.current_thread()
        self.begun, self.door = threading.Event(), threading.Event()
        self.inside: list[int] = []

    def memmove(self, destination: int, source: int, nbytes: int) -> None:
        if threading.current_thread() is self.caller:
            self.called()
        else:
            self.inside.append(destination)
            self.begun.set()
            assert self.door.wait(30)
        ctypes.memmove(destination, source, nbytes)
        if threading.current_thread() is not self.caller:
            self.inside.remove(destination)

    def called(self) -> None:
        """By the caller, for a part of its own: it is interrupted while somebody helps."""
        if not self.door.is_set():
            assert self.begun.wait(30)
            self.door.set()
            raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["copies", "asks for help"])
def test_who_is_interrupted_leaves_when_nobody_writes_any_more(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory may be somebody else's right after."""
    slow = Slow()
    monkeypatch.setattr(moves, "ctypes", slow)
    given: list[Any] = []

    class Interrupted(concurrent.futures.ThreadPoolExecutor):
        def submit(self, *args: Any, **kwargs: Any) -> Any:
            given.append(super().submit(*args, **kwargs))
            if where == "asks for help":
                assert slow.begun.wait(30)
                raise KeyboardInterrupt
            return given[-1]

    if where == "asks for help":
        monkeypatch.setattr(slow, "called", slow.door.set)  # it copies what nobody has taken before it waits
    with Interrupted(3) as pool:
        monkeypatch.setattr(moves, "_helpers", pool)
        source, target = pattern(1 << 25), np.zeros(1 << 25, np.uint8)
        with pytest.raises(KeyboardInterrupt):
            move(target.ctypes.data, source.ctypes.data, source.nbytes)
        inside = list(slow.inside)
        slow.door.set()
        assert inside == []
        assert np.array_equal(target, source)
    assert len(given) == (3 if where == "copies" else 1)
