"""Copies of ordinary memory, shared out among threads when they are large."""

from __future__ import annotations

import concurrent.futures
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


def test_who_is_interrupted_leaves_when_nobody_writes_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory may be somebody else's right after."""
    begun, door = threading.Event(), threading.Event()
    waits = []

    class Late(concurrent.futures.ThreadPoolExecutor):
        def submit(self, function: Any, *args: Any, **kwargs: Any) -> Any:
            def late() -> Any:
                begun.set()
                assert door.wait(30)
                return function(*args)

            return super().submit(late)

    wait = concurrent.futures.wait

    def interrupted(parts: Any) -> Any:
        waits.append(len(parts))
        if len(waits) == 1:
            assert begun.wait(30)
            raise KeyboardInterrupt
        door.set()
        return wait(parts)

    with Late(3) as pool:
        monkeypatch.setattr(moves, "_helpers", pool)
        monkeypatch.setattr(concurrent.futures, "wait", interrupted)
        source, target = pattern(1 << 25), np.zeros(1 << 25, np.uint8)
        with pytest.raises(KeyboardInterrupt):
            move(target.ctypes.data, source.ctypes.data, source.nbytes)
        assert np.array_equal(target, source)
    assert waits == [3, 3]
