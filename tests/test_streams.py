"""`Stream` and `Event` as names: owning, borrowing, naming devices, and what they tell."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from device_bytes import WATCHDOG, fill, opened, put

from streamrt import hooks
from streamrt.device import CPU, Device, default_device_kind, device_info, open_device, parse_device
from streamrt.errors import DeviceError, LifetimeError, PlacementError, UnavailableError
from streamrt.event import Event
from streamrt.segment import Segment, Word
from streamrt.stream import Stream
from streamrt.testing import Latch
from streamrt.timeline import Timeline

BOTH = [pytest.param("host:0", id="host"), pytest.param("cuda:0", id="cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=BOTH)
def device(request: pytest.FixtureRequest) -> Device:
    return opened(request.param)


class Foreign:
    """Anybody's stream, which speaks the CUDA stream protocol."""

    def __init__(self, version: object, handle: object) -> None:
        self.answer = (version, handle)

    def __cuda_stream__(self) -> tuple[object, object]:
        return self.answer


@pytest.mark.parametrize("wrong", [None, 3, "stream", Foreign(0, 7)])
def test_what_is_nothing_to_wait_for(wrong: object) -> None:
    with pytest.raises(TypeError, match="nothing to wait for"):
        Stream("host:0").wait(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no function"):
        Stream("host:0").launch(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_streams_and_events_are_of_this_process_and_have_one_owner(way: Callable[[object], object]) -> None:
    """What was made of them by another would be destroyed twice, or be another queue of another process."""
    stream = Stream("host:0")
    for one in (stream, Stream.borrow(0, "host:0"), stream.record(), Event("host:0")):
        with pytest.raises(TypeError, match="can be neither pickled nor copied"):
            way(one)


def test_what_follows_a_failed_operation_is_refused_and_not_dropped() -> None:
    """Memory that a copy was to fill would be shown as it was."""
    stream = Stream("host:0")

    def kernel() -> None:
        raise ZeroDivisionError

    stream.launch(kernel)
    with pytest.raises(DeviceError, match="make a new stream"):
        stream.launch(print)
    with pytest.raises(DeviceError, match="make a new stream"):
        stream.zero(0, 8)


def test_an_owned_stream_is_destroyed_with_its_object(device: Device) -> None:
    stream = Stream(device)
    handle = stream.handle
    assert handle in device.backend.streams(device.index)
    borrowed = Stream.borrow(handle, device)
    del borrowed
    gc.collect()
    assert handle in device.backend.streams(device.index)
    del stream
    gc.collect()
    assert handle not in device.backend.streams(device.index)


def test_work_of_a_dropped_stream_still_runs(device: Device) -> None:
    stream, other = Stream(device), Stream(device)
    block = put(other, bytes(64))
    door = Latch(stream)
    fill(stream, block, 6)
    mark = stream.record()
    door.stream = other
    del stream
    gc.collect()
    assert not mark.query()
    door.open()
    mark.synchronize(WATCHDOG)


def test_a_foreign_stream_is_borrowed_and_kept(device: Device) -> None:
    mine = Stream(device)
    foreign = Foreign(0, mine.handle)
    stream = Stream.borrow(foreign, device)
    assert stream == mine
    assert stream.owner is foreign
    assert not stream.owned
    assert "borrowed" in repr(stream)
    assert "owned" in repr(mine)


@pytest.mark.parametrize("foreign", [Foreign(1, 5), Foreign(0, "5"), object(), "stream"])
def test_what_is_no_stream_is_refused(foreign: object) -> None:
    with pytest.raises(UnavailableError):
        Stream.borrow(foreign, "host:0")


def test_a_host_stream_is_no_cuda_stream() -> None:
    with pytest.raises(UnavailableError):
        Stream("host:0").__cuda_stream__()


@pytest.mark.gpu
def test_a_cuda_stream_speaks_the_protocol() -> None:
    stream = Stream("cuda:0")
    assert stream.__cuda_stream__() == (0, stream.handle)


def test_cpu_has_no_streams() -> None:
    with pytest.raises(PlacementError, match="cpu has no streams"):
        Stream("cpu")


def test_a_destroyed_handle_is_refused() -> None:
    """Host only: a GPU's driver may have given the number to somebody else."""
    stream = Stream("host:0")
    name = Stream.borrow(stream.handle, "host:0")
    del stream
    gc.collect()
    with pytest.raises(LifetimeError):
        name.record()


def test_records_and_waits_are_told_to_listeners(device: Device) -> None:
    first, second = Stream(device), Stream(device)
    block = put(first, bytes(64))
    told: list[hooks.Record] = []
    remove = hooks.listen(told.append)
    try:
        event = first.record()
        second.wait(event, edge="named")
        first.copy(block.address, block.address + 32, 32)
        second.wait(second)
        second.wait(Event(device), edge="never recorded")
        event.synchronize(WATCHDOG)
    finally:
        remove()
    first.record()
    assert told == [
        hooks.Recorded(first.key, id(event), 1),
        hooks.Waited(second.key, id(event), 1, "named"),
        hooks.Copied(first.key, block.address, block.address + 32, 32),
        hooks.Synchronized("Event.synchronize"),
    ]


def test_waits_for_points_are_told_with_their_word(device: Device) -> None:
    stream = Stream(device)
    with Segment.create(4096) as segment:
        device.backend.map_segment(device.index, segment)
        timeline = Timeline(Word(segment, 64))
        point = timeline.signal(stream)
        told: list[hooks.Record] = []
        remove = hooks.listen(told.append)
        stream.wait(point, edge="reply")
        remove()
        assert told == [hooks.Waited(stream.key, segment.address + 64, 1, "reply")]
        stream.synchronize(WATCHDOG)
        device.backend.unmap_segment(segment)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("cuda:3", "cuda:3"),
        ("cuda", "cuda:0"),
        ("host", "host:0"),
        ("host:12", "host:12"),
        ("cpu", "cpu"),
        (CPU, "cpu"),
        ("cpu:0", "cpu"),
    ],
)
def test_devices_have_one_name(spec: object, name: str) -> None:
    assert str(parse_device(spec)) == name


def test_an_index_is_a_device_of_the_default_kind() -> None:
    assert parse_device(2, default_kind="host") == Device("host", 2)
    assert parse_device(1).kind == default_device_kind()


@pytest.mark.parametrize("name", ["cpu", "host:0", "host:7", "cuda:99999"])
def test_there_is_one_object_for_each_device(name: str) -> None:
    device = parse_device(name)
    assert parse_device(name) is device
    assert Device(device.kind, device.index) is device
    assert pickle.loads(pickle.dumps(device)) is copy.deepcopy(device) is device
    with pytest.raises(AttributeError):
        device.index = 3
    assert (device.kind, device.index) == (parse_device(name).kind, parse_device(name).index)


def test_devices_are_sorted_by_kind_and_index() -> None:
    assert sorted(map(parse_device, ["host:10", "cpu", "host:9", "cuda:1"])) == [
        CPU,
        Device("cuda", 1),
        Device("host", 9),
        Device("host", 10),
    ]


def test_a_device_that_is_named_on_many_threads_is_one() -> None:
    with ThreadPoolExecutor(8) as threads:
        assert len({id(one) for one in list(threads.map(lambda _: Device("host", 4321), range(200)))}) == 1


@pytest.mark.parametrize("spec", ["gpu:0", "cuda:-1", "cuda:x", "host:", "", -1, None, True, 1.5, "cuda:1234567890"])
def test_what_is_no_device_is_refused(spec: object) -> None:
    with pytest.raises(PlacementError):
        parse_device(spec)


def test_a_device_that_is_not_there_is_refused() -> None:
    for name in ("host:999", "host:99999"):
        with pytest.raises(PlacementError, match=f"there is no {name}"):
            open_device(name)


def test_a_device_is_opened_once_and_says_what_it_can_do(device: Device) -> None:
    info = device_info(device)
    assert info is device_info(open_device(device))
    assert info.name
    assert info.uuid
    assert info.self_test
    assert info.wait32


MANY = """
from streamrt import Stream
from streamrt.testing import Latch
held = Stream("cuda:0")
with Latch(held):
    made = [Stream("cuda:0") for _ in range(64)]
    assert not held.query(), "making streams has waited until the latch opened itself, after a minute"
"""


@pytest.mark.gpu
def test_many_streams_can_be_made_while_another_is_held_up() -> None:
    """In a process of its own: how many a driver makes without waiting depends on how many there are."""
    subprocess.run([sys.executable, "-c", MANY], check=True, timeout=50)
