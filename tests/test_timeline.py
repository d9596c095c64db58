"""Timelines and points: values in the order of their signals, cyclic, and lost data is never a value."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from streamrt.cuda import memops
from streamrt.errors import DeviceError, UnavailableError
from streamrt.segment import Segment, Word
from streamrt.timeline import Point, Timeline


class Backend:
    """Takes signals and runs them when told; the first one can be held inside the call."""

    def __init__(self) -> None:
        self.enqueued: list[int] = []
        self.hold = threading.Event()
        self.hold.set()
        self.second_inside = threading.Event()
        self.first_inside = threading.Event()
        self.refuse = False

    def write_word(self, index: int, stream: int, word: Word, value: int) -> None:
        if self.refuse:
            raise DeviceError("refused", code=1, name="CUDA_ERROR_INVALID_VALUE")
        if self.first_inside.is_set():
            self.second_inside.set()
        self.first_inside.set()
        self.hold.wait(60)
        self.enqueued.append(value)


@pytest.fixture
def segment():
    with Segment.create(4096) as made:
        yield made


@pytest.fixture
def backend():
    return Backend()


@pytest.fixture
def stream(backend) -> Any:
    return SimpleNamespace(device=SimpleNamespace(backend=backend, index=0), handle=1)


@pytest.mark.parametrize(
    ("bits", "start"), [(32, 0), (32, 2**31 - 100), (32, 2**32 - 100), (64, 2**63 - 100), (64, 2**64 - 100)]
)
def test_points_come_in_order_across_the_wrap(segment, bits, start):
    timeline = Timeline(Word(segment, 0, bits), start)
    word, mask = timeline.word, 2**bits - 1
    points = [Point(word, (start + k) & mask) for k in range(1, 201)]
    assert not any(point.reached() for point in points)
    for k, point in enumerate(points):
        assert timeline.signal_host() == point == timeline.last
        assert point.reached()
        assert not any(later.reached() for later in points[k + 1 :])
    assert all(point.reached() for point in points)


def test_a_signal_is_enqueued_and_does_not_move_the_word_by_itself(segment, backend, stream):
    timeline = Timeline(Word(segment, 0), 2**32 - 2)
    points = [timeline.signal(stream) for _ in range(3)]
    assert [point.value for point in points] == backend.enqueued == [2**32 - 1, 0, 1]
    assert not any(point.reached() for point in points)
    timeline.word.store(0)  # the stream got to the second
    assert [point.reached() for point in points] == [True, True, False]


def test_a_refused_signal_uses_no_value(segment, backend, stream):
    timeline = Timeline(Word(segment, 0))
    backend.refuse = True
    with pytest.raises(DeviceError):
        timeline.signal(stream)
    backend.refuse = False
    assert timeline.signal(stream).value == 1


def _two_signals(timeline: Timeline, backend: Backend, stream: Any) -> tuple[bool, list[int]]:
    """Holds one thread inside its signal and lets another one try: did it get in, and which values were taken?"""
    backend.hold.clear()
    values: list[int] = []
    threads = [threading.Thread(target=lambda: values.append(timeline.signal(stream).value)) for _ in range(2)]
    threads[0].start()
    assert backend.first_inside.wait(60)
    threads[1].start()
    got_in = backend.second_inside.wait(0.2)
    backend.hold.set()
    for thread in threads:
        thread.join(60)
    return got_in, sorted(values)


def test_value_and_signal_are_taken_under_one_lock(segment, backend, stream):
    assert _two_signals(Timeline(Word(segment, 0)), backend, stream) == (False, [1, 2])
    assert backend.enqueued == [1, 2]


def test_without_the_lock_two_threads_take_one_value(segment, backend, stream):
    """The calibration of the test above."""
    timeline = Timeline(Word(segment, 0))
    timeline._lock = contextlib.nullcontext()
    assert _two_signals(timeline, backend, stream) == (True, [1, 1])


@pytest.mark.parametrize("start", [0, 2**31 - 3, 2**32 - 3])
def test_points_reached_before_the_loss_stay_good_and_the_others_are_lost(segment, start):
    word = Word(segment, 0)
    timeline = Timeline(word, start)
    good = [timeline.signal_host() for _ in range(3)]
    never = [Point(word, (start + k) & 0xFFFFFFFF) for k in (4, 5, 6)]
    assert not any(point.lost for point in good + never)
    word.mark_lost()
    assert not any(point.reached() for point in never)  # marked before they are released
    word.store(never[-1].value)
    assert all(point.reached() for point in good + never)
    assert [point.lost for point in good + never] == [False] * 3 + [True] * 3


def test_a_late_signal_of_a_frozen_writer_does_not_make_a_lost_point_good(segment):
    word = Word(segment, 0)
    point = Point(word, 5)
    word.mark_lost()
    word.store(9)  # released
    word.store(5)  # the writer came back
    assert point.reached()
    assert point.lost


def test_spin_ends_in_time_and_sees_another_process(segment):
    point = Point(Word(segment, 0), 1)
    assert not point.spin(0)
    assert not point.spin(2e-3)
    child = f"from streamrt.segment import *; Word(Segment.attach({segment.fd}), 0).store(1)"
    process = subprocess.Popen([sys.executable, "-c", child], pass_fds=(segment.fd,))
    try:
        assert point.spin(60)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert point.spin(0)


def test_without_the_bindings_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(memops, "_driver", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(UnavailableError, match="streamrt\\[cuda13\\]"):
        memops.driver()


@pytest.mark.gpu
def test_the_self_test_passes_and_a_segment_is_registered_once(segment):
    assert memops.self_test(0)
    address = memops.register(segment, 0)
    assert memops.register(segment, 0) == address
    memops.unregister(segment)
    memops.unregister(segment)


@pytest.mark.gpu
def test_a_refused_wait_names_the_driver_s_error():
    with memops.entered(0) as d:
        stream = int(memops.check(d.cuStreamCreate(1), "making a stream"))
        with pytest.raises(DeviceError, match=r"waiting for a word.*CUDA_ERROR") as caught:
            memops.wait_word(stream, 2, 1, 32)
        assert caught.value.code
        memops.check(d.cuStreamDestroy(stream), "destroying a stream")
