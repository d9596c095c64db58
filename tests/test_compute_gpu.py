"""`compute_stream` and `on_side_stream` on GPUs with CuPy, torch and JAX: whose stream counts, and who is joined.

numba's tests are in test_arrays_gpu.py, which comes last.

The engines are kernels that were loaded before, so that nothing but a latch holds a stream up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
from device_arrays import WATCHDOG

from streamrt import arrays
from streamrt.compute import compute_stream, on_side_stream
from streamrt.device import Device, open_device
from streamrt.errors import CaptureError, LifetimeError
from streamrt.guard import current_stream, current_streams, using
from streamrt.stream import Stream
from streamrt.testing import Latch, assert_no_host_sync, without

pytestmark = pytest.mark.gpu
N = 1 << 16
ZERO = Device("cuda", 0)


@pytest.fixture(scope="module", autouse=True)
def loaded() -> Any:
    open_device("cuda:0")


class Cupy:
    """One library's arrays: made, changed in place on its current stream, and doubled by an engine."""

    def __init__(self) -> None:
        self.module: Any = pytest.importorskip("cupy")

    def full(self, value: float) -> Any:
        return self.module.full(N, value, "float32")

    def fill(self, x: Any, value: float) -> Any:
        x[:] = value
        return x

    def engine(self, x: Any) -> Any:
        return x * 2

    def values(self, x: Any) -> list[float]:
        return sorted(set(self.module.asnumpy(x).tolist()))


class Torch(Cupy):
    def __init__(self) -> None:
        self.module = pytest.importorskip("torch")

    def full(self, value: float) -> Any:
        return self.module.full((N,), value, device="cuda:0")

    def fill(self, x: Any, value: float) -> Any:
        return x.fill_(value)

    def values(self, x: Any) -> list[float]:
        return sorted(set(x.cpu().tolist()))


LIBRARIES: dict[str, Callable[[], Any]] = {"cupy": Cupy, "torch": Torch}


@pytest.fixture(params=LIBRARIES)
def lib(request: pytest.FixtureRequest) -> Any:
    made = LIBRARIES[request.param]()
    warm(made)
    return made


def default() -> Stream:
    return Stream.borrow(0, ZERO)


def warm(lib: Any) -> None:
    """Loads every kernel, on both streams: the first launch of one waits for a latch that is closed."""
    with compute_stream(device="cuda:0"):
        lib.engine(lib.fill(lib.full(1), 1))
    lib.engine(lib.fill(lib.full(1), 1)) + 1
    Latch(Stream("cuda:0")).open()
    synchronize()


def synchronize() -> None:
    import cupy

    cupy.cuda.Device(0).synchronize()


# 1. on the default stream


def input_side(lib: Any, drop: str) -> list[float]:
    x = lib.full(1)
    synchronize()
    with Latch(default()) as latch:
        lib.fill(x, 3)
        with without(drop) if drop else nullcontext(), assert_no_host_sync(), compute_stream(x) as side:
            assert side is not None
            assert current_streams(ZERO) == [side]
            y = lib.engine(x)
        assert current_streams(ZERO) == [default()]
        if drop:
            side.synchronize(WATCHDOG)
        latch.open()
    synchronize()
    return list(lib.values(y))


def test_case_1_the_input_side(lib: Any) -> None:
    """pytorch/TensorRT#3977, #4232."""
    assert input_side(lib, "") == [6.0]
    assert input_side(lib, "guard.enter") == [2.0]


def output_side(lib: Any, drop: str) -> list[float]:
    x = lib.full(3)
    z = lib.full(0)
    synchronize()
    with without(drop) if drop else nullcontext(), compute_stream(x) as side:
        assert side is not None
        y = lib.full(1)
        side.synchronize(WATCHDOG)
        latch = Latch(side)
        lib.fill(y, 8)
    with latch:
        z[:] = y
        if drop:
            default().synchronize(WATCHDOG)
        latch.open()
    synchronize()
    return list(lib.values(z))


def test_case_1_the_output_side(lib: Any) -> None:
    """pytorch/TensorRT#3977, #4232."""
    warm = lib.full(0)
    warm[:] = lib.full(1)
    assert output_side(lib, "") == [8.0]
    assert output_side(lib, "guard.exit") == [1.0]


# 2. on another stream, and whose


def test_case_2_the_arrays_library_decides() -> None:
    """torch is on a stream of the user's, CuPy on the default one: each library's arrays go where it is."""
    cupy, torch = pytest.importorskip("cupy"), pytest.importorskip("torch")
    mine = torch.cuda.Stream()
    x, t = cupy.ones(4), torch.ones(4, device="cuda:0")
    with torch.cuda.stream(mine):
        with compute_stream(t) as stream:
            assert stream is not None
            assert stream.handle == mine.cuda_stream
            assert cupy.cuda.get_current_stream().ptr == mine.cuda_stream
        assert cupy.cuda.get_current_stream().ptr == 0
        assert torch.cuda.current_stream() == mine
        with compute_stream(x) as side:
            assert side is not None
            assert side.handle not in (0, mine.cuda_stream)
            assert torch.cuda.current_stream().cuda_stream == side.handle
        assert torch.cuda.current_stream() == mine
        assert cupy.cuda.get_current_stream().ptr == 0


def test_two_libraries_on_two_streams_are_both_fenced() -> None:
    """What torch's own stream does first is there for a CuPy engine, and the other way round."""
    cupy, torch = Cupy(), Torch()
    warm(cupy)
    warm(torch)
    mine = torch.module.cuda.Stream()
    t = torch.full(1)
    shown = cupy.module.from_dlpack(t)
    cupy.engine(shown)
    synchronize()
    with torch.module.cuda.stream(mine):
        with Latch(Stream.borrow(mine, ZERO)) as latch:
            torch.fill(t, 3)
            with compute_stream(shown):
                y = cupy.engine(shown)
            assert not default().query()
            latch.open()
        assert torch.module.cuda.current_stream() == mine
    synchronize()
    assert cupy.values(y) == [6.0]


# 3. several streams, libraries and devices


def joined(lib: Any, drop: str) -> list[float]:
    x, writer = lib.full(1), Stream("cuda:0")
    synchronize()
    with Latch(writer) as latch:
        with using(writer):
            lib.fill(x, 5)
        with without(drop) if drop else nullcontext(), assert_no_host_sync(), compute_stream((x, writer)) as side:
            assert side is not None
            y = lib.engine(x)
        if drop:
            side.synchronize(WATCHDOG)
        latch.open()
    synchronize()
    return list(lib.values(y))


def test_case_3_a_stream_that_only_the_caller_knows(lib: Any) -> None:
    """pytorch/TensorRT#3977."""
    assert joined(lib, "") == [10.0]
    assert joined(lib, "guard.join") == [2.0]


def test_case_3_a_foreign_stream_object() -> None:
    cupy = Cupy()
    warm(cupy)
    x = cupy.full(1)
    writer = cupy.module.cuda.Stream(non_blocking=True)
    synchronize()
    with Latch(Stream.borrow(writer, ZERO)) as latch:
        with writer:
            cupy.fill(x, 5)
        with compute_stream((x, writer), (x, cupy.module.cuda.Stream.null)):
            y = cupy.engine(x)
        latch.open()
    synchronize()
    assert cupy.values(y) == [10.0]


def jax_input(drop: str) -> list[float]:
    """A JAX array whose memory is filled behind a latch: its definition event says when it is there."""
    cupy, jax = Cupy(), pytest.importorskip("jax")
    source, writer = cupy.full(1), Stream("cuda:0")
    synchronize()
    with Latch(writer) as latch:
        with using(writer):
            cupy.fill(source, 5)
            x = arrays.convert(source, "jax")
        with without(drop) if drop else nullcontext(), compute_stream(x) as side:
            assert side is not None
            shown = arrays.convert(x, "cupy") if not drop else source
            y = cupy.engine(shown)
        if drop:
            side.synchronize(WATCHDOG)
            assert isinstance(x, jax.Array)
        latch.open()
    synchronize()
    return list(cupy.values(y))


def test_case_3_a_jax_array_is_joined_by_its_definition_event() -> None:
    """JAX has no current stream: what it computes is there at an event of its own."""
    cupy = Cupy()
    pytest.importorskip("jax")
    warm(cupy)
    cupy.engine(arrays.convert(arrays.convert(cupy.full(1), "jax"), "cupy"))
    assert jax_input("") == [10.0]
    assert jax_input("guard.join") == [2.0]


def test_a_jax_function_inside() -> None:
    """JAX works on streams of its own; CuPy arrays go in and come out by DLPack, in order."""
    cupy, jax = Cupy(), pytest.importorskip("jax")
    warm(cupy)
    double = jax.jit(lambda value: value * 2)
    double(arrays.convert(cupy.full(1), "jax")).block_until_ready()

    @on_side_stream
    def engine(x: Any) -> Any:
        return arrays.convert(double(arrays.convert(x, "jax")), "cupy")

    engine(cupy.full(1))
    engine(cupy.full(1)) + 1
    x = cupy.full(1)
    synchronize()
    with Latch(default()) as latch:
        cupy.fill(x, 3)
        y = engine(x)
        z = y + 1
        latch.open()
    synchronize()
    assert cupy.values(z) == [7.0]


@pytest.mark.gpu2
def test_case_3_inputs_of_two_gpus(lib: Any) -> None:
    import cupy

    with cupy.cuda.Device(1):
        there = Stream.borrow(0, open_device("cuda:1"))
        y = cupy.full(N, 1.0, "float32")
        cupy.cuda.Device(1).synchronize()
    x = cupy.full(N, 1.0, "float32")
    (x + y.sum()).sum()
    synchronize()
    with Latch(there) as latch:
        with cupy.cuda.Device(1):
            y[:] = 4
        with compute_stream(x, y) as side:
            assert side is not None
            assert current_stream("cuda:1") != there
            z = cupy.empty_like(x)
            z.data.copy_from_device_async(y.data, y.nbytes, cupy.cuda.get_current_stream())
        assert current_stream("cuda:1") == there
        assert not default().query()
        latch.open()
    synchronize()
    assert sorted(set(cupy.asnumpy(z).tolist())) == [4.0]


# beside torch's memory, and captures


def test_a_torch_results_memory_is_safe_where_the_caller_uses_it() -> None:
    """pytorch/pytorch#111431: held until the caller's stream has done with it, and no record_stream is needed."""
    torch = Torch()
    warm(torch)

    @on_side_stream
    def engine(x: Any) -> Any:
        return x * 2

    x, z = torch.full(3), torch.full(0)
    z[:] = engine(x)
    with compute_stream(x):
        torch.full(99)
    synchronize()
    y = engine(x)
    with compute_stream(x) as side:
        assert side is not None
        with Latch(default()) as latch:
            with using(default()):
                z[:] = y
            del y
            kept = [torch.full(99) for _ in range(4)]
            side.synchronize(WATCHDOG)
            latch.open()
    synchronize()
    assert torch.values(z) == [6.0]
    assert kept


def test_an_input_of_another_stream_cannot_join_a_capture() -> None:
    """pytorch/pytorch#114320, cupy/cupy#4567: a wait for uncaptured work would break the capture; it goes on."""
    cupy = Cupy()
    x, y = cupy.full(1), cupy.full(0)
    outside = Stream("cuda:0")
    with compute_stream(x) as side:
        assert side is not None
        stream = cupy.module.cuda.get_current_stream()
        cupy.module.multiply(x, 2, out=y)
        stream.begin_capture()
        with pytest.raises(CaptureError, match="before the capture"), compute_stream((x, outside)):
            pass
        with compute_stream(x) as inner:  # a guard that has nothing to do is part of it
            assert inner == side
            cupy.module.multiply(x, 2, out=y)
        graph = stream.end_capture()
        x[:] = 4
        graph.launch(stream)
    synchronize()
    assert cupy.values(y) == [8.0]


def test_inside_a_capture_of_torchs_an_idle_library_is_left_out() -> None:
    """CuPy is on its default stream, which cannot be captured: its earlier work is no part of the graph."""
    cupy, torch = Cupy(), Torch()
    warm(cupy)
    warm(torch)
    x, y = torch.full(1), torch.full(0)
    graph = torch.module.cuda.CUDAGraph()
    with torch.module.cuda.graph(graph):
        with compute_stream(x) as stream:
            assert stream is not None
            assert stream.capturing
            assert cupy.module.cuda.get_current_stream().ptr == stream.handle
            y[:] = x * 2
        assert cupy.module.cuda.get_current_stream().ptr == 0
    torch.fill(x, 4)
    graph.replay()
    synchronize()
    assert torch.values(y) == [8.0]


def test_a_result_is_safe_where_another_library_uses_it() -> None:
    """CuPy is on a stream of its own and torch on the default one: torch's stream is a user of CuPy's memory, too."""
    cupy, torch = Cupy(), Torch()
    warm(cupy)
    warm(torch)
    engine = on_side_stream(cupy.engine)
    with cupy.module.cuda.Stream(non_blocking=True) as mine:
        x, z = cupy.full(3), torch.full(0)
        z[:] = torch.module.from_dlpack(engine(x))
        synchronize()
        y = engine(x)
        shown = torch.module.from_dlpack(y)
        del y
        with Latch(default()) as latch:
            z[:] = shown
            del shown
            fresh = [cupy.full(99) for _ in range(4)]
            mine.synchronize()
            latch.open()
        synchronize()
    assert torch.values(z) == [6.0]
    assert fresh


# A library's own blocks inside a guard


def guard_by_with() -> Any:
    return compute_stream(device="cuda:0")


def guard_by_using() -> Any:
    return using(Stream("cuda:0"))


@pytest.mark.parametrize("guard", [guard_by_with, guard_by_using])
def test_what_cupys_own_with_brings_back_inside_a_guard_is_the_guards_stream(guard: Callable[[], Any]) -> None:
    """A ``with`` of CuPy's goes back to what was entered, not to what `use` has made current: it would leave what
    follows in the guard on the null stream."""
    cupy = Cupy().module
    current = cupy.cuda.get_current_stream

    def blocks() -> None:
        for _ in range(2):
            with cupy.cuda.Stream(non_blocking=True) as own:
                assert current().ptr == own.ptr

    blocks()
    with guard():
        handle = current().ptr
        assert handle == current_stream(ZERO).handle != 0
        blocks()
        assert current().ptr == handle
        with guard():
            blocks()
            blocks()
        assert current().ptr == handle
    assert current().ptr == 0
    with cupy.cuda.Stream(non_blocking=True) as mine:
        with guard():
            blocks()
        assert current() is mine
        blocks()
        assert current() is mine
    assert current().ptr == 0
    other = cupy.cuda.Stream(non_blocking=True).use()
    try:
        with guard():
            blocks()
        assert current() is other, "it was made current by use, and is again"
    finally:
        cupy.cuda.Stream.null.use()
    blocks()
    assert current().ptr == 0


def test_what_cupys_own_with_brings_back_in_a_guarded_generators_step() -> None:
    cupy = Cupy().module
    current = cupy.cuda.get_current_stream
    stream = Stream("cuda:0")

    @using(stream)
    def steps() -> Any:
        for _ in range(3):
            with cupy.cuda.Stream(non_blocking=True):
                pass
            yield current().ptr

    generator = steps()
    for _ in range(3):
        assert next(generator) == stream.handle
        assert current().ptr == 0
        with cupy.cuda.Stream(non_blocking=True):
            pass
        assert current().ptr == 0


@pytest.mark.parametrize("guard", [guard_by_with, guard_by_using])
def test_what_cupys_own_with_brings_back_beside_a_body_that_holds_a_guard(guard: Callable[[], Any]) -> None:
    """Between steps it is what was current there, and in the body's next step the guard's stream."""
    cupy = Cupy().module
    current = cupy.cuda.get_current_stream

    def block() -> None:
        with cupy.cuda.Stream(non_blocking=True) as own:
            assert current() is own

    @using(Stream("cuda:0"))
    def steps() -> Any:
        before = current().ptr
        with guard():
            for _ in range(3):
                block()
                yield current().ptr
        block()
        assert current().ptr == before

    generator, handles = steps(), set()
    for _ in range(3):
        handles.add(next(generator))
        assert current().ptr == 0
        block()
        assert current().ptr == 0
    assert len(handles) == 1
    assert list(generator) == []
    block()
    assert current().ptr == 0

    generator = steps()
    next(generator)
    with ThreadPoolExecutor(1) as pool, contextlib.suppress(LifetimeError):  # the guard is not of that thread
        pool.submit(list, generator).result()
    block()
    assert current().ptr == 0
