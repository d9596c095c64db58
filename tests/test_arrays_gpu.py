"""Arrays and guards on GPUs: CuPy, torch, JAX and numba, their current streams, and DLPack between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from streamrt import arrays, hooks
from streamrt.compute import compute_stream
from streamrt.device import Device, backend_of
from streamrt.errors import ArrayError
from streamrt.guard import current_stream, current_streams, run_on, using
from streamrt.libraries import library
from streamrt.libraries.dlpack import Exported
from streamrt.stream import Stream
from streamrt.testing import Latch, assert_no_host_sync, without

pytestmark = pytest.mark.gpu

ZERO, ONE = Device("cuda", 0), Device("cuda", 1)
KINDS = ("cupy", "torch", "jax", "numba")
PAIRS = list(itertools.permutations(KINDS, 2))


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.fixture
def torch() -> Any:
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return module


def need(*kinds: str) -> None:
    for kind in kinds:
        pytest.importorskip("numba.cuda" if kind == "numba" else kind)
        if not library(kind).holds("float32", ZERO):
            pytest.skip(library(kind).refusal("float32", ZERO) or "")


def values(array: Any) -> np.ndarray[Any, Any]:
    return library(arrays.describe(array).library).download(array)


@pytest.fixture(autouse=True)
def _leave_the_default_streams() -> Iterator[None]:
    with using(*(Stream.borrow(0, Device("cuda", index)) for index in range(backend_of("cuda").device_count()))):
        yield


# guards


def test_b01_cupy_streams_set_by_use_come_back(cupy: Any) -> None:
    """cupy/cupy#8377, cupy/cupy#7866: a `with` block forgot the stream that `.use()` had set."""
    first, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    first.use()
    with pytest.raises(KeyError), using(Stream("cuda:0")) as guard:
        assert cupy.cuda.get_current_stream().ptr == guard.streams[0].handle
        with other:
            pass  # CuPy's own block leaves its stack's stream behind
        raise KeyError
    assert cupy.cuda.get_current_stream() is first


def test_a_guard_moves_cupy_and_torch_together(cupy: Any, torch: Any) -> None:
    mine, torchs = cupy.cuda.Stream(non_blocking=True), torch.cuda.Stream()
    mine.use()
    torch.cuda.set_stream(torchs)
    assert {stream.handle for stream in current_streams(ZERO)} >= {mine.ptr, torchs.cuda_stream}
    with using(Stream("cuda:0")) as guard:
        handle = guard.streams[0].handle
        assert (cupy.cuda.get_current_stream().ptr, torch.cuda.current_stream().cuda_stream) == (handle, handle)
    assert cupy.cuda.get_current_stream() is mine
    assert torch.cuda.current_stream() == torchs
    with using(torchs):  # a stream of torch's, in CuPy too
        assert cupy.cuda.get_current_stream().ptr == torchs.cuda_stream
        assert torch.cuda.current_stream().stream_id == torchs.stream_id
    with using(mine):
        assert torch.cuda.current_stream().cuda_stream == mine.ptr


@pytest.mark.gpu2
@pytest.mark.parametrize("body", ["nothing", "device", "streams"])
def test_b02_device_and_both_streams_come_back(cupy: Any, torch: Any, body: str) -> None:
    """pytorch/pytorch#16019, pytorch/pytorch#17439."""
    with cupy.cuda.Device(1):
        there = cupy.cuda.Stream(non_blocking=True).use()
    here = cupy.cuda.Stream(non_blocking=True).use()
    torch_here, torch_there = torch.cuda.Stream(0), torch.cuda.Stream(1)
    torch.cuda.set_stream(torch_there)
    torch.cuda.set_stream(torch_here)
    guarded = Stream("cuda:1")
    with using(guarded):
        assert cupy.cuda.runtime.getDevice() == torch.cuda.current_device() == 1
        assert current_streams(ONE) == [guarded]
        if body == "device":
            cupy.cuda.runtime.setDevice(0)
        if body == "streams":
            torch.cuda.set_stream(torch.cuda.Stream(0))
    assert cupy.cuda.runtime.getDevice() == torch.cuda.current_device() == 0
    assert cupy.cuda.get_current_stream(0) is here
    assert cupy.cuda.get_current_stream(1) is there
    assert torch.cuda.current_stream(0) == torch_here
    assert torch.cuda.current_stream(1) == torch_there


def engine_behind_a_latch(cupy: Any, x: Any) -> list[float]:
    caller, private = Stream("cuda:0"), Stream("cuda:0")

    def double() -> None:
        x[:] *= 2

    with using(caller):
        x[:] = 1
        double()
    caller.synchronize(60)
    with using(caller):
        with Latch(caller):
            x[:] = 3
            with assert_no_host_sync():
                run_on(private, double)
            assert not caller.query()
        private.synchronize(60)
        caller.synchronize(60)
    return sorted(set(cupy.asnumpy(x).tolist()))


def test_b10_an_engine_on_a_private_stream(cupy: Any) -> None:
    """Stability-AI/stable-audio-3#80, pytorch/TensorRT#4232: the input side was not synchronised."""
    x = cupy.zeros(1 << 16, "float32")
    assert engine_behind_a_latch(cupy, x) == [6.0]
    with without("guard.enter"):
        assert engine_behind_a_latch(cupy, x) == [3.0]


# DLPack


@pytest.mark.parametrize("kind", ["cupy", "torch", "numba"])
@pytest.mark.parametrize("number", [None, 1, 2, "handle", "object"])
def test_b47_the_named_stream_waits_for_the_producer(kind: str, number: Any) -> None:
    """pytorch/pytorch#101318, #67618, #150217, cupy/cupy#5970, mitsuba-renderer/drjit#198."""
    need(kind)
    array = arrays.array(np.ones(1 << 10, np.float32), "cuda:0", arrays=kind)
    consumer = Stream("cuda:0")
    argument = {"handle": consumer.handle, "object": consumer}.get(number, number)
    waiting = consumer if isinstance(number, str) else Stream.borrow(number or 1, ZERO)
    producer = Stream.borrow(0, ZERO) if kind == "numba" else Stream("cuda:0")  # numba's own is the default stream
    if waiting == producer:
        pytest.skip("the same stream")
    waiting.synchronize(60)
    with using(producer), Latch(producer):
        Exported(library(kind), array, ZERO).__dlpack__(stream=argument)
        assert not waiting.query()
    waiting.synchronize(60)


@pytest.mark.parametrize("kind", KINDS)
def test_b47_minus_one_orders_nothing_and_wrong_numbers_are_errors(kind: str) -> None:
    """pytorch/pytorch#101318: -1 adds no wait; 0 is disallowed; what is no stream is a TypeError."""
    need(kind)
    array = arrays.array(np.ones(4, np.float32), "cuda:0", arrays=kind)
    exported = Exported(library(kind), array, ZERO)
    before = Stream("cuda:0")
    with using(before), Latch(before):
        exported.__dlpack__(stream=-1)
        assert Stream("cuda:0").query()
    for wrong in (0, -2, 1.5, object()):
        with pytest.raises(ArrayError):
            exported.__dlpack__(stream=wrong)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_b47_a_conversion_orders_the_target_stream(source: str, target: str) -> None:
    """pytorch/pytorch#67618 and its like, each library to each, both on streams that are not the default one."""
    need(source, target)
    cupy = pytest.importorskip("cupy")
    base = cupy.zeros(1 << 22, "float32")
    producer = Stream("cuda:0")
    for value in (1.0, 2.0):  # the first round loads every kernel
        with using(producer):
            base[:] = value
            array = base if source == "cupy" else arrays.convert(base, source)
            assert float(values(arrays.convert(array, target)).sum()) == value * (1 << 22)


@pytest.mark.parametrize(("source", "target"), [("cupy", "torch"), ("torch", "cupy")])
def test_b47_streams_of_two_libraries_that_differ(cupy: Any, torch: Any, source: str, target: str) -> None:
    """pytorch/pytorch#150217: the consumer's own current stream is the one that waits."""
    mine, torchs = cupy.cuda.Stream(non_blocking=True), torch.cuda.Stream()
    array = arrays.array(np.ones(16, np.float32), "cuda:0", arrays=source)
    arrays.convert(array, target)
    cupy.cuda.Device(0).synchronize()
    mine.use()
    torch.cuda.set_stream(torchs)
    producer, consumer = (mine, torchs) if source == "cupy" else (torchs, mine)
    with Latch(Stream.borrow(producer, ZERO)), assert_no_host_sync():
        arrays.convert(array, target)
        assert not Stream.borrow(consumer, ZERO).query()
    Stream.borrow(consumer, ZERO).synchronize(60)


# layouts and dtypes

LAYOUTS: dict[str, Any] = {
    "plain": lambda a: a,
    "transposed": lambda a: a.T,
    "reversed": lambda a: a[:, ::-1],
    "reversed, one long": lambda a: a[:1][::-1],
    "sliced": lambda a: a[::2, 1::2],
    "0-d": lambda a: a[1, 2, ...],
    "empty": lambda a: a[2:2],
    "empty, reversed": lambda a: a[2:2, ::-1],
    "unaligned": lambda a: a.reshape(-1)[1:],
}


@pytest.mark.parametrize(("source", "target"), [*PAIRS, ("cupy", "cupy")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_b48_layouts_arrive_equal(cupy: Any, source: str, target: str, layout: str) -> None:
    """jax-ml/jax#17784, pytorch/pytorch#188023, cupy/cupy#8801, NVIDIA/warp#1619."""
    need(source, target)
    plain = np.arange(24, dtype=np.float32).reshape(3, 8)
    expected = LAYOUTS[layout](plain)
    array = arrays.convert(LAYOUTS[layout](cupy.asarray(plain)), source)
    converted = arrays.convert(array, target)
    assert arrays.describe(converted).library == target
    assert arrays.device_of(converted) == ZERO or not expected.size
    assert values(converted).shape == expected.shape
    assert np.array_equal(values(converted), expected)


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "float16", "complex64", "bfloat16", "float8_e4m3fn"])
def test_b48_dtypes_arrive_bit_by_bit_or_are_refused(source: str, target: str, dtype: str) -> None:
    """tensorflow/tensorflow#51598, cupy/cupy#8801: bool refused, bfloat16 a segmentation fault."""
    need(source, target)
    pytest.importorskip("ml_dtypes")
    if not library(source).holds(dtype, ZERO):
        with pytest.raises(ArrayError):
            arrays.empty((2,), dtype, "cuda:0", source)
        return
    host = arrays.array(np.arange(12).reshape(3, 4) % 3, "cpu", dtype)
    array = arrays.array(host, "cuda:0", arrays=source)
    if not library(target).holds(dtype, ZERO):
        with pytest.raises(ArrayError, match=dtype):
            arrays.convert(array, target)
        return
    assert values(arrays.convert(array, target)).tobytes() == host.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_making_wrapping_and_moving(cupy: Any, kind: str) -> None:
    need(kind)
    made = arrays.empty((2, 3), "float32", "cuda:0", kind)
    assert arrays.device_of(made) == ZERO
    plain = np.arange(6, dtype=np.float32).reshape(2, 3)
    there = arrays.array(plain, "cuda:0", arrays=kind)
    back = arrays.to(there, "cpu")
    assert np.array_equal(np.asarray(back), plain)
    memory = cupy.asarray(plain)
    shown = arrays.wrap(memory.data.ptr, 24, (2, 3), "float32", "cuda:0", memory, kind)
    assert arrays.describe(shown).address == memory.data.ptr
    del memory
    assert np.array_equal(values(shown), plain)
    assert arrays.describe(arrays.wrap(0, 0, (0, 3), "float32", "cuda:0", None, kind)).shape == (0, 3)
    with pytest.raises(ArrayError, match="NumPy cannot hold memory of cuda:0"):
        arrays.convert(there, "numpy")


def test_what_comes_out_of_jax_is_copied_for_libraries_that_write(cupy: Any) -> None:
    need("jax")
    array = arrays.array(np.ones(8, np.float32), "cuda:0", arrays="jax")
    mine = arrays.convert(array, "cupy")
    mine += 1
    assert values(array).tolist() == [1.0] * 8
    assert arrays.describe(arrays.convert(array, "cupy", copy=False)).address == arrays.describe(array).address


@pytest.mark.gpu2
@pytest.mark.parametrize("kind", KINDS)
def test_to_another_gpu_is_ordered_on_both_streams(cupy: Any, kind: str) -> None:
    need(kind)
    plain = np.arange(1 << 16, dtype=np.float32)
    array = arrays.array(plain, "cuda:0", arrays=kind)
    arrays.to(array, "cuda:1")  # loads what it takes
    here, there = Stream("cuda:0"), Stream("cuda:1")
    with using(here, there):
        with Latch(there):
            moved = arrays.to(array, "cuda:1") if kind in ("cupy", "torch") else None
            assert kind not in ("cupy", "torch") or not here.query()
        moved = arrays.to(array, "cuda:1") if moved is None else moved
        assert arrays.device_of(moved) == ONE
        assert np.array_equal(values(moved), plain)


@pytest.mark.gpu2
def test_export_from_a_device_that_is_not_current(cupy: Any, torch: Any) -> None:
    """torch refuses to export such a tensor, and CuPy takes the wrong stream: the device is entered first."""
    with torch.cuda.device(1):
        tensor = torch.arange(8, device="cuda:1")
    assert cupy.cuda.runtime.getDevice() == 0
    array = arrays.convert(tensor, "cupy")
    assert (arrays.device_of(array), cupy.cuda.runtime.getDevice()) == (ONE, 0)
    assert values(array).tolist() == list(range(8))
    assert arrays.device_of(arrays.convert(array, "torch")) == ONE
    assert cupy.cuda.runtime.getDevice() == 0


def test_numba_default_stream_is_fenced_in_and_out() -> None:
    need("numba")
    default, stream = Stream.borrow(0, ZERO), Stream("cuda:0")
    default.synchronize(60)
    with Latch(stream):
        with using(stream):
            assert not default.query()
    default.synchronize(60)
    with using(stream):
        latch = Latch(default)
    assert not stream.query()
    latch.open()
    stream.synchronize(60)


def test_find_arrays_leaves_cuda_events_alone(cupy: Any) -> None:
    array = cupy.ones(2)
    assert arrays.find_arrays({"event": cupy.cuda.Event(), "stream": current_stream(ZERO), "array": array}) == [array]


def test_numba_inside_a_compute_stream() -> None:
    """numba works on the default stream, which is fenced in and out of the guard; an array's own stream is joined."""
    need("numba")
    import cupy
    from numba import cuda

    x, y = cupy.ones(1 << 16, "float32"), cupy.zeros(1 << 16, "float32")
    target = cuda.as_cuda_array(y, sync=False)
    bound = cuda.stream()
    source = cuda.from_cuda_array_interface(x.__cuda_array_interface__, owner=x, sync=False)
    source.stream = bound
    target.copy_to_device(source)
    cupy.cuda.Device(0).synchronize()
    writer = Stream.borrow(int(getattr(bound.handle, "value", bound.handle)), "cuda:0", owner=bound)
    with Latch(writer) as latch:
        with using(writer):
            x[:] = 3
        with compute_stream(source) as side:
            assert side is not None
            assert not side.query()  # it waits for the array's own stream
            target.copy_to_device(source)  # on the default stream
        z = y + 1
        latch.open()
    cupy.cuda.Device(0).synchronize()
    assert sorted(set(cupy.asnumpy(z).tolist())) == [4.0]


def test_many_breaks_are_fenced_once_with_numba_too() -> None:
    need("numba")
    import cupy

    x = cupy.ones(4)
    seen: list[hooks.Record] = []
    with compute_stream(x):
        remove = hooks.listen(seen.append)
        try:
            for _ in range(8):
                with compute_stream(x):
                    pass
        finally:
            remove()
    assert seen == []
