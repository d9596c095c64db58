"""Graphs on a GPU with the libraries themselves: CuPy, torch, both together, numba, and JAX, which is refused."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from device_arrays import WATCHDOG, opened

from streamrt import arrays, memory
from streamrt.compute import compute_stream
from streamrt.device import Device
from streamrt.errors import CaptureError
from streamrt.graph import capture
from streamrt.guard import using
from streamrt.libraries import library
from streamrt.pool import stream_pool
from streamrt.stream import Stream
from streamrt.testing import Latch, assert_no_host_sync

pytestmark = pytest.mark.gpu

ZERO = Device("cuda", 0)
N = 6000


@pytest.fixture
def cupy() -> Any:
    opened("cuda:0")
    return pytest.importorskip("cupy")


@pytest.fixture
def torch() -> Any:
    opened("cuda:0")
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return module


@pytest.fixture(autouse=True)
def _nothing_is_left_capturing() -> Iterator[None]:
    device = opened("cuda:0")
    with using(Stream.borrow(0, device)):
        yield
    assert not device.backend.captures.active
    assert gc.isenabled()
    for handle in device.backend.streams(0):
        assert not device.backend.capturing(0, handle)


@contextmanager
def side() -> Iterator[Stream]:
    with compute_stream(device="cuda:0") as stream:
        assert stream is not None
        yield stream


def one(array: Any) -> float:
    """The one value of all elements, once the current stream has come there."""
    plain = library(arrays.describe(array, detach=True).library).download(array)
    assert (plain == plain.reshape(-1)[0]).all()
    return float(plain.reshape(-1)[0])


def serves(stream: Stream) -> None:
    """A normal kernel on the stream."""
    with using(stream):
        array = arrays.array(np.full(N, 2.0, np.float32), ZERO)
        array *= 2
        assert one(array) == 4.0


# CuPy


def test_host_functions_of_cupy_are_part_of_the_graph(cupy: Any) -> None:
    if "torch" in sys.modules:
        pytest.skip("torch captures, and CuPy keeps its host functions only where it captures itself")
    calls: list[str] = []
    with side() as stream:
        x = cupy.zeros(N, "float32")

        def step(x: Any) -> None:
            x += 1
            if stream.capturing:
                cupy.cuda.get_current_stream().launch_host_func(calls.append, "called")

        graph = capture(step, x)
        for _ in range(3):
            graph.replay()
        stream.synchronize(WATCHDOG)
    assert calls == ["called"] * 3


def test_cupy_with_temporaries_reductions_and_new_contents(cupy: Any) -> None:
    with side():
        x = cupy.ones(N, "float32")

        def step(x: Any) -> Any:
            return (x * 2 + 1) * 3, (x * 2).sum(), x[::-1].copy()

        graph = capture(step, x)
        for value in (2.0, 5.0):
            graph.replay(cupy.full(N, value, "float32"))
            changed, total, reversed_ = graph.result
            assert one(changed) == (value * 2 + 1) * 3
            assert one(total) == value * 2 * N
            assert one(reversed_) == value


def test_a_capture_may_need_more_memory_than_the_pool_has(cupy: Any) -> None:
    """cudaMalloc is forbidden in thread-local capture mode, so the allocator steps out of it."""
    gc.collect()
    with side():
        x = cupy.zeros(1 << 24, "float32")
        cupy.get_default_memory_pool().free_all_blocks()

        def step(x: Any) -> Any:
            large = cupy.empty((3, 1 << 24), "float32")
            large[:] = x
            return large

        graph = capture(step, x, warmup=0)
        graph.replay(cupy.full(1 << 24, 7.0, "float32"))
        assert one(graph.result) == 7.0


def test_temporaries_of_cupy_are_used_again_inside_and_by_nobody_else(cupy: Any) -> None:
    """cupy/cupy#4567: CuPy's graph keeps no memory.  Outside of a capture the same memory is handed out at once."""
    with side() as stream:
        x = cupy.ones(N, "float32")
        where: list[int] = []

        def step(x: Any) -> Any:
            where.clear()
            for _ in range(4):
                temporary = x * 2
                where.append(temporary.data.ptr)
                result = temporary + 1
                del temporary
            return result

        kept = step(x)
        assert where[-1] in {other.data.ptr for other in [cupy.empty(N, "float32") for _ in range(64)]}
        del kept
        graph = capture(step, x)
        inside = set(where)
        assert len(inside) < 4
        others = [cupy.empty(N, "float32") for _ in range(64)]
        assert not inside & {other.data.ptr for other in others}
        for other in others:
            other[:] = 9
        graph.replay()
        assert one(graph.result) == 3.0
        result = graph.result
        graph.replay()
        del graph
        gc.collect()
        stream.synchronize(WATCHDOG)
        memory.drain(everything=True)
        memory.drain(everything=True)
        others += [cupy.empty(N, "float32") for _ in range(64)]
        assert inside & {other.data.ptr for other in others}
        assert result.data.ptr not in {other.data.ptr for other in others}
        for other in others:
            other[:] = 9
        assert one(result) == 3.0


def test_forks_by_cupys_own_events_are_part_of_the_capture(cupy: Any) -> None:
    """The runtime has not seen the fork, and joins it all the same; behind CuPy's own ``with`` the guard's stream is
    current again, as `replay` looks."""
    with side() as stream:
        x, y = cupy.zeros(N, "float32"), cupy.zeros(N, "float32")
        theirs = cupy.cuda.Stream(non_blocking=True)

        def step(x: Any, y: Any) -> None:
            x += 1
            theirs.wait_event(cupy.cuda.get_current_stream().record())
            with theirs:
                y[:] = x
            stream.wait(Stream.borrow(theirs, ZERO))

        graph = capture(step, x, y)
        graph.replay()
        graph.replay()
        assert (one(x), one(y)) == (3.0, 3.0)


def test_what_breaks_a_capture_leaves_streams_and_device_whole(cupy: Any) -> None:
    """A host wait that CuPy passes on: the driver refuses it, and has nothing to give at the end."""
    with side() as stream:
        x = cupy.ones(N, "float32")

        def wait(x: Any) -> None:
            x += 1
            cupy.cuda.runtime.streamSynchronize(stream.handle)

        def swallow(x: Any) -> None:
            with pytest.raises(RuntimeError):
                wait(x)

        for breaking, error in ((wait, RuntimeError), (swallow, CaptureError)):
            with pytest.raises(error):
                capture(breaking, x, warmup=0)
            assert not stream.capturing
            serves(stream)
        serves(Stream(ZERO))
        graph = capture(lambda x: x + 1, x)
        graph.replay()
        assert one(graph.result) == 2.0


def test_what_cupy_itself_refuses_leaves_the_capture_be(cupy: Any) -> None:
    """It raises before the driver is asked, so who goes on after that has a graph."""
    with side() as stream:
        x = cupy.zeros(N, "float32")

        def download(x: Any) -> None:
            x += 1
            cupy.asnumpy(x)

        def swallow(x: Any) -> None:
            with pytest.raises(RuntimeError, match="captur"):
                download(x)

        with pytest.raises(RuntimeError):
            capture(download, x, warmup=0)
        assert not stream.capturing
        serves(stream)
        graph = capture(swallow, x, warmup=0)
        graph.replay()
        graph.replay()
        assert one(x) == 2.0


def test_past_the_limit_a_buffer_does_not_go_back_to_a_capture(cupy: Any) -> None:
    """Its owner captures, so it cannot be made to wait for the use; who allocates elsewhere gets memory as ever."""
    device = opened("cuda:0")
    other, third = Stream(device), Stream(device)
    with side() as stream:
        x = cupy.zeros(N, "float32")
        previous = memory.set_held_limit(0)
        try:
            with Latch(other) as latch:
                buffer = memory.allocate(device, 4 * N, stream)
                buffer.use(other)
                gone = buffer.address
                del buffer
                seen: list[int] = []

                def step(x: Any) -> None:
                    x += 1
                    seen.append(memory.allocate(device, 4 * N, third).address)

                graph = capture(step, x, warmup=0)
                assert gone not in seen
                latch.open()
        finally:
            memory.set_held_limit(previous)
        graph.replay()
        assert one(x) == 1.0


def test_a_query_of_others_captures_leaves_them_be(cupy: Any) -> None:
    """The driver ends a capture whose stream is queried, so it is asked first, on each query."""
    theirs = cupy.cuda.Stream(non_blocking=True)
    stream = Stream.borrow(theirs, opened("cuda:0"))
    x, spare = cupy.zeros(N, "float32"), cupy.zeros(N, "float32")
    cupy.cuda.Device(0).synchronize()
    with theirs:
        x += 1
        theirs.synchronize()
        theirs.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
        x += 1
        for ask in (stream.query, lambda: stream.synchronize(WATCHDOG)):
            with pytest.raises(CaptureError):
                ask()
        event = stream.record()
        memory.hold(spare, stream)
        del spare  # the record that is to say when it may go would be part of the capture
        memory.drain(everything=True)
        graph = theirs.end_capture()
        with pytest.raises(CaptureError, match="recorded inside a capture"):
            event.query()
        graph.launch(theirs)
    stream.synchronize(WATCHDOG)
    memory.drain(everything=True)
    assert one(x) == 2.0


def test_a_capture_on_an_agents_thread(cupy: Any) -> None:
    """It has a capture mode of its own, which must not forbid its own allocations and queries."""
    found: list[Any] = []

    def work() -> None:
        try:
            ZERO.backend.agent_thread(0)
            with side() as stream:
                x = cupy.zeros(N, "float32")
                mark = Stream(ZERO).record()

                def step(x: Any) -> Any:
                    assert mark.query()
                    return (x + 1) + cupy.zeros((N * 7,), "float32")[:N]

                graph = capture(step, x)
                graph.replay()
                stream.synchronize(WATCHDOG)
                found.append(one(graph.result))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(WATCHDOG)
    assert found == [1.0]


# torch


def test_torch_with_temporaries_and_new_contents(torch: Any) -> None:
    with side():
        x = torch.ones(N, device="cuda")

        def step(x: Any) -> Any:
            return (x * 2 + 1).relu(), (x @ x).reshape(1)

        graph = capture(step, x)
        for value in (2.0, 3.0):
            graph.replay(torch.full((N,), value, device="cuda"))
            assert one(graph.result[0]) == value * 2 + 1
            assert one(graph.result[1]) == pytest.approx(value * value * N)


def test_random_numbers_of_torch_go_on_from_replay_to_replay(torch: Any) -> None:
    with side():
        graph = capture(lambda: torch.rand(64, device="cuda"), device="cuda:0")
        seen = []
        for _ in range(3):
            graph.replay()
            seen.append(tuple(graph.result.cpu().tolist()))
        assert len(set(seen)) == 3
        torch.rand(1, device="cuda")


def test_a_step_of_training_in_a_graph(torch: Any) -> None:
    with side():
        x = torch.ones(N, device="cuda")
        w = torch.full((N,), 2.0, device="cuda", requires_grad=True)

        def step(x: Any, w: Any) -> Any:
            loss = (w * x).sum()
            loss.backward()
            return loss

        graph = capture(step, x, w, warmup=2)
        w.grad.zero_()
        for value in (1.0, 3.0):
            graph.replay(torch.full((N,), value, device="cuda"), None)
        assert one(graph.result) == 2.0 * 3.0 * N
        assert one(w.grad) == 4.0


def test_temporaries_and_results_of_torch_live_with_the_graph(torch: Any) -> None:
    """Outside of a capture the same memory is handed out at once."""
    with side() as stream:
        x = torch.ones(N, device="cuda")
        where: list[int] = []

        def step(x: Any) -> Any:
            temporary = x * 2
            where.append(temporary.data_ptr())
            return temporary + 1

        kept = step(x)
        assert where.pop() in {other.data_ptr() for other in [torch.empty(N, device="cuda") for _ in range(64)]}
        del kept
        graph = capture(step, x)
        inside = where[-1]
        others = [torch.empty(N, device="cuda") for _ in range(64)]
        assert inside not in {other.data_ptr() for other in others}
        for other in others:
            other.fill_(9)
        graph.replay()
        result = graph.result
        with Latch(stream):
            graph.replay()
            del graph, x
            gc.collect()
            memory.drain(everything=True)
            others += [torch.empty(N, device="cuda") for _ in range(64)]
            assert not {inside, result.data_ptr()} & {other.data_ptr() for other in others}
        assert one(result) == 3.0
        memory.drain(everything=True)
        memory.drain(everything=True)
        for other in [torch.empty(N, device="cuda") for _ in range(64)]:
            other.fill_(9)
        assert one(result) == 3.0


def test_b08_side_streams_of_torch_joined_and_not(torch: Any) -> None:
    """pytorch/pytorch#114320, deepseek-ai/DeepEP#62."""
    with side() as stream:
        a, b = torch.zeros(N, device="cuda"), torch.zeros(N, device="cuda")
        theirs = torch.cuda.Stream()

        def step(a: Any, b: Any, joined: bool) -> None:
            a.add_(1)
            theirs.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(theirs):
                torch.mul(a, 2, out=b)
            if joined:
                torch.cuda.current_stream().wait_stream(theirs)

        graph = capture(step, a, b, True)
        a.zero_()
        for _ in range(3):
            graph.replay()
        assert (one(a), one(b)) == (3.0, 6.0)
        for _ in range(2):
            with pytest.raises(CaptureError, match="joined"):
                capture(step, a, b, False, warmup=0)
            assert not stream.capturing
            assert not Stream.borrow(theirs, ZERO).capturing
            pool = stream_pool(ZERO)
            leases = [pool.lease() for _ in range(pool.statistics().created)]
            for lease in leases:
                serves(lease.stream)
                lease.release()
            with torch.cuda.stream(theirs):
                assert one(torch.ones(N, device="cuda") * 3) == 3.0
            assert torch.rand(4, device="cuda").shape == (4,), "torch's generator goes on"
        freed = torch.empty(N, device="cuda")
        where = freed.data_ptr()
        del freed
        others = [torch.empty(N, device="cuda") for _ in range(64)]
        assert where in {other.data_ptr() for other in others}, "torch's allocator goes on"
        graph = capture(step, a, b, True)
        a.zero_()
        graph.replay()
        assert (one(a), one(b)) == (1.0, 2.0)


def test_an_exception_inside_a_capture_of_torch(torch: Any) -> None:
    with side() as stream:
        x = torch.zeros(N, device="cuda")

        def fail(x: Any, early: bool) -> None:
            if not early:
                x.add_(torch.ones(N, device="cuda"))
            raise KeyError("mine")

        for early in (True, False):
            with pytest.raises(KeyError):
                capture(fail, x, early, warmup=0)
            assert not stream.capturing
        with pytest.raises(RuntimeError):  # whatever torch says, and the capture is over
            capture(lambda x: x.add_(1).sum().item(), x, warmup=0)
        assert not stream.capturing
        assert torch.rand(4, device="cuda").shape == (4,)
        graph = capture(lambda x: x.add_(1), x, warmup=0)
        graph.replay()
        assert one(x) == 1.0


# together


def test_cupy_and_torch_in_one_graph(cupy: Any, torch: Any) -> None:
    with side():
        x = cupy.zeros(N, "float32")

        def step(x: Any) -> Any:
            x += 1
            doubled = arrays.convert(x, "torch") * 2
            return arrays.convert(doubled, "cupy") + cupy.ones(N, "float32")

        graph = capture(step, x)
        x.fill(0)
        for count in (1.0, 2.0, 3.0):
            graph.replay()
            assert (one(x), one(graph.result)) == (count, count * 2 + 1)
        graph.replay(torch.full((N,), 9.0, device="cuda"))
        assert one(graph.result) == 21.0


def test_libraries_on_different_streams_are_told_apart(cupy: Any, torch: Any) -> None:
    x = cupy.zeros(N, "float32")
    with side() as stream:
        graph = capture(lambda x: x + 1, x)
        with torch.cuda.stream(torch.cuda.Stream()):
            for call in (lambda: capture(lambda x: x + 1, x), graph.replay):
                with pytest.raises(CaptureError, match=r"streamrt\.using"):
                    call()
        graph.replay()
        stream.synchronize(WATCHDOG)


def test_a_replay_does_not_block_the_host_nor_allocate(cupy: Any) -> None:
    with side() as stream:
        x = cupy.zeros(N, "float32")
        graph = capture(lambda x: x * 2 + 1, x)
        new = cupy.ones(N, "float32")
        graph.replay(new)
        stream.synchronize(WATCHDOG)
        used = cupy.get_default_memory_pool().used_bytes()
        with Latch(stream), assert_no_host_sync():
            for _ in range(10):
                graph.replay(new)
            assert not stream.query()
        assert one(graph.result) == 3.0
        assert cupy.get_default_memory_pool().used_bytes() == used


# numba and JAX


def test_numbas_kernels_are_captured_where_they_get_the_stream() -> None:
    opened("cuda:0")
    cuda = pytest.importorskip("numba.cuda")

    @cuda.jit
    def add(array: Any, n: Any) -> None:
        i = cuda.grid(1)
        if i < array.size:
            array[i] += n

    try:
        add[128, 64](arrays.array(np.zeros(N, np.float32), ZERO, arrays="numba"), 1)
    except AttributeError as error:  # this numba-cuda asks for what this NumPy has dropped, so it compiles nothing
        if "module 'numpy' has no attribute" not in str(error):
            raise
        pytest.skip(f"numba-cuda compiles nothing beside NumPy {np.__version__}: {error}")
    with side() as stream:
        inside = arrays.array(np.zeros(N, np.float32), ZERO, arrays="numba")
        beside = arrays.array(np.zeros(N, np.float32), ZERO, arrays="numba")
        theirs = cuda.external_stream(stream.handle)

        def step(inside: Any, beside: Any) -> None:
            add[128, 64, theirs](inside, 1)
            add[128, 64](beside, 1)

        graph = capture(step, inside, beside)
        for _ in range(3):
            graph.replay()
        stream.synchronize(WATCHDOG)
        Stream.borrow(0, ZERO).synchronize(WATCHDOG)
        assert one(inside) == 4.0, "the warm-up and three replays"
        assert one(beside) == 2.0, "the warm-up and the capture, at once"


def test_jax_is_refused_and_may_give_new_contents(cupy: Any) -> None:
    pytest.importorskip("jax")
    if not library("jax").holds("float32", ZERO):
        pytest.skip(library("jax").refusal("float32", ZERO) or "")
    theirs = arrays.array(np.full(N, 5.0, np.float32), ZERO, arrays="jax")
    refused: list[Callable[[Any, Stream], object]] = [
        lambda x, stream: arrays.convert(x, "jax"),
        lambda x, stream: arrays.array(x, ZERO, arrays="jax"),
        lambda x, stream: library("jax").join(theirs, stream),
        lambda x, stream: arrays.convert(theirs, "cupy"),
        lambda x, stream: compute_stream(theirs).__enter__(),
    ]
    with side() as stream:
        x = cupy.ones(N, "float32")
        with pytest.raises(CaptureError, match="convert the array before"):
            capture(lambda x, y: x, x, theirs)
        with pytest.raises(CaptureError, match="convert the array before"):
            capture(lambda x: theirs, x)
        seen: list[str] = []

        def step(x: Any) -> Any:
            for use in refused:
                with pytest.raises(CaptureError):
                    use(x, stream)
                seen.append("refused")
            return x + 1

        graph = capture(step, x, warmup=0)
        assert len(seen) == len(refused)
        graph.replay(theirs)
        assert one(graph.result) == 6.0
    assert one(theirs) == 5.0
