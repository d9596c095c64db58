"""Calls between real processes with arrays on GPUs: order, isolation, loss, capture, and every array library."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from device_arrays import opened, read_on_another_stream
from rpc_processes import FORCED_TO_UCX, Worker, chosen, until

import streamrt
import transport
from streamrt import CaptureError, Stream, memory, using
from streamrt.testing import Latch, assert_no_host_sync, closed, without
from transport.channels import retired

pytestmark = pytest.mark.gpu

ZERO, ONE = "cuda:0", "cuda:1"
SERVICE = "gpu_service:service"


@pytest.fixture(scope="module", params=["tcp", "unix", "unix-stream"])
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Over TCP arrays are staged; over AF_UNIX they go by CUDA IPC, in host order or in stream order."""
    listen = "tcp://127.0.0.1:0" if request.param == "tcp" else f"unix://{tmp_path_factory.mktemp('link')}/socket"
    order = "stream" if request.param == "unix-stream" else "auto"
    with Worker(SERVICE, "--device", ZERO, "--threads", "4", "--listen", listen, "--order", order) as process:
        yield process


@pytest.fixture
def peer(worker: Worker) -> Iterator[transport.Peer]:
    with transport.connect(worker.address) as connected:
        connected.call("total", streamrt.array(np.ones(8, np.float32), device=ZERO))  # kernels are loaded
        yield connected


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.fixture
def sending_edge(peer: transport.Peer) -> str:
    """What keeps the bytes from going before the snapshot's copy has run."""
    if FORCED_TO_UCX:
        return "ucx.send"
    shared = peer.channels()[ZERO] == "shared_memory"
    return "share.ready" if shared and peer.order != "stream" else "send.wait"


def on(values: Any, device: str = ZERO) -> Any:
    return streamrt.array(np.asarray(values), device=device)


def host(array: Any) -> np.ndarray[Any, Any]:
    return array.get() if hasattr(array, "get") else np.asarray(array.cpu() if hasattr(array, "cpu") else array)


# the bytes as of the call ---------------------------------------------------------------------------------------------


def mean_after_overwriting(
    peer: transport.Peer, cupy: Any, stream: Stream, value: int, *, ordered: bool = True
) -> float:
    """Sends an array that is filled late, and overwrites it on the same stream right after the call.

    A call that is not `ordered` ends before the fill does, and is waited for that long.
    """
    with using(stream):
        x = cupy.zeros(1 << 22, dtype=cupy.float32)
        x.fill(1)  # loads the kernel (0 would be a memset), which a closed stream would hold up
        stream.synchronize()
        with Latch(stream):
            x.fill(value)
            future = peer.submit("total", x)
            x.fill(0)
            if not ordered:
                until(future.done, "the call that waits for nothing")
        return float(future.result()) / x.size


def test_b14_the_callee_sees_the_bytes_as_of_the_call(peer: transport.Peer, cupy: Any, sending_edge: str) -> None:
    """pytorch/pytorch#34885, zeromq/pyzmq#1364, ecmwf/earthkit-workflows#207: the caller writes right after a send."""
    stream = Stream(ZERO)
    for value in range(1, 21):
        assert mean_after_overwriting(peer, cupy, stream, value) == value
    with without(sending_edge):
        assert mean_after_overwriting(peer, cupy, stream, 21, ordered=False) != 21, "this cannot show the race"


def test_b14_lent_arrays_may_be_written_when_sent_says_so(peer: transport.Peer, cupy: Any) -> None:
    """pytorch/pytorch#34885: the token is truthful."""
    stream = Stream(ZERO)
    with using(stream):
        x = cupy.ones(1 << 22, dtype=cupy.float32)
        x *= 2  # the kernel is loaded before anything is closed: its first launch would wait for all streams
        latch = Latch(stream)
        x *= 2
        future = peer.submit("total", x, copy=False)
        assert not future.sent.done()
        latch.open()
        future.sent.result(30)
        x.fill(0)
        assert future.result(30) == float(4 << 22)


def test_many_small_arrays_of_one_call_are_those_of_the_call(peer: transport.Peer, cupy: Any) -> None:
    """pytorch/pytorch#34885: they share a buffer, those of each library one."""
    torch = pytest.importorskip("torch")
    stream = Stream(ZERO)
    with using(stream):
        arrays = [cupy.full(300 + number, 1, cupy.float32) for number in range(40)]
        tensors = [torch.ones(number, 3, device=ZERO) for number in range(1, 9)]
        arrays[0].fill(2)  # the kernels are loaded before anything is closed
        tensors[0].fill_(2)
        peer.call("each_doubled", [*arrays, *tensors])
        stream.synchronize()
        before = peer.statistics()
        with Latch(stream):
            for number, array in enumerate(arrays):
                array.fill(number)
            for tensor in tensors:
                tensor.fill_(5)
            future = peer.submit("each_doubled", [*arrays, *tensors])
            for array in arrays:
                array.fill(0)
            for tensor in tensors:
                tensor.fill_(0)
        came = future.result(30)
        stream.synchronize()
    after = peer.statistics()
    for number, array in enumerate(came[:40]):
        assert array.shape == (300 + number,)
        assert (host(array) == 2 * number).all()
    for number, array in enumerate(came[40:], 1):
        assert array.shape == (number, 3)
        assert (host(array) == 10).all()
    assert after.messages_out - before.messages_out <= 5  # the call, the two buffers, and perhaps credit


def test_b44_only_the_producing_stream_orders_a_send(peer: transport.Peer, cupy: Any) -> None:
    """dask/distributed#3598, #4034, rapidsai/rapidsmpf#216, rapidsai/rmm#263: a send ordered on the wrong stream."""
    producer, other = Stream(ZERO), Stream(ZERO)
    with using(other):
        y = cupy.zeros(1 << 20, dtype=cupy.float32)
        y += 1
        other.synchronize()
    for value in range(10):
        with using(producer):
            x = cupy.zeros(1 << 20, dtype=cupy.float32)
            producer.synchronize()
            with Latch(producer):
                x.fill(value)
                with assert_no_host_sync():
                    future = peer.submit("total", x)
                with using(other):
                    y += 1
                other.synchronize(20)  # the unrelated stream ends while the producer is closed
                assert not future.done()
            assert future.result(30) == float(value << 20)


def test_a_call_waits_for_no_device(peer: transport.Peer, cupy: Any) -> None:
    """With every stream of the device closed, `submit` returns, and so does a wait for a reply that has come."""
    x = on(np.ones(1000, np.float32))
    arrived = peer.submit("double", x)
    until(arrived.done, "the reply")
    with closed(ZERO), assert_no_host_sync():
        late = peer.submit("double", x)
        arrived.wait(non_blocking=True)
    assert (host(late.result(30)) == 2).all()
    assert (host(arrived.result()) == 2).all()


def test_results_are_ordered_on_the_streams_that_are_current_at_the_wait(peer: transport.Peer, cupy: Any) -> None:
    future = peer.submit("made_late", ZERO, 4.0)
    until(future.done, "the reply's message")
    results = []
    for _ in range(3):
        stream = Stream(ZERO)
        with using(stream):
            results.append((stream, future.result() + 0))
    for stream, result in results:
        stream.synchronize()
        assert (host(result) == 4).all()


def test_a_reply_stream_receives_the_reply(peer: transport.Peer, cupy: Any) -> None:
    stream = Stream(ZERO)
    future = peer.submit("double", on(np.ones(1 << 20, np.float32)), reply_stream=stream)
    value = future.result()
    stream.synchronize()
    assert (host(value) == 2).all()


@chosen
def test_a_reply_is_ordered_on_the_stream_that_is_current_at_the_wait(peer: transport.Peer, cupy: Any) -> None:
    """The message is here, its bytes are not, and another stream reads."""
    device = opened(ZERO)

    def reads(value: float, *, ordered: bool) -> np.ndarray[Any, Any]:
        def start(stream: Stream) -> Any:
            return peer.submit("made_late", ZERO, value, reply_stream=stream)

        return read_on_another_stream(start, device, 1000, ordered=ordered)

    assert (reads(6.0, ordered=True) == 6).all()
    assert (reads(7.0, ordered=False) != 7).any(), "the test does not depend on the wait that it is about"


# devices --------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu2
def test_b30_results_on_a_device_that_no_argument_used(cupy: Any) -> None:
    """pytorch/pytorch#54017, #54560, #53717: such a result is ordered too, or refused with device and peer named."""
    with Worker(SERVICE, "--device", ZERO, "--device", ONE) as process:
        with transport.connect(process.address, device_map={ZERO: ZERO, ONE: ONE}) as peer:
            for value in range(5):
                result = peer.call("made_late", ONE, float(value), timeout=60)
                assert str(streamrt.device_of(result)) == ONE
                with using(Stream(ONE)) as guard:
                    again = peer.submit("made_late", ONE, float(value)).result() + 0
                    guard.streams[0].synchronize()
                    assert (host(again) == value).all()
            doubled, tripled = peer.call("both", on(np.ones(10)), on(np.ones(10), ONE))
            assert (host(doubled) == 2).all()
            assert (host(tripled) == 3).all()
            assert str(streamrt.device_of(tripled)) == ONE
        with transport.connect(process.address, device_map={ZERO: ZERO}, name="the worker") as peer:
            with pytest.raises(transport.DeviceMapError, match="cuda:1"):
                peer.call("made_late", ONE, 1.0, timeout=60)
            assert peer.call("total", on(np.ones(5, np.float32))) == 5.0


@pytest.mark.gpu2
def test_a_thread_whose_current_device_is_another(cupy: Any) -> None:
    with Worker(SERVICE, "--device", ONE) as process, transport.connect(process.address) as peer:
        x = on(np.arange(1000.0, dtype=np.float32), ONE)
        with cupy.cuda.Device(0):
            with transport.connect(process.address, device_map={ONE: ONE}) as other:
                assert other.call("total", x) == float(np.arange(1000.0).sum())
            assert cupy.cuda.runtime.getDevice() == 0
        assert peer.call("kind_of", on(np.ones(3)))[1] == ONE


def test_a_function_is_on_its_leased_stream_behind_a_with_of_its_own(peer: transport.Peer, cupy: Any) -> None:
    before, after = peer.call("after_a_with_of_its_own", on(np.ones(3)))
    assert before == after != 0


def test_b31_a_call_to_oneself_is_isolated(cupy: Any) -> None:
    """pytorch/pytorch#50674, pytorch/tensorpipe#412, #175: the callee's writes never show at the caller."""
    import gpu_service

    with transport.loopback(gpu_service.service) as peer:
        x = on(np.zeros(1000, np.float32))
        assert (host(peer.call("increment", x)) == 1).all()
        assert (host(peer.submit("increment", x, copy=False).result()) == 1).all()
        assert (host(x) == 0).all()
        assert set(peer.statistics().bytes_out) == {"same_process"}


def test_b31_a_peer_that_sees_no_gpu() -> None:
    """pytorch/tensorpipe#412, #175: staging to ordinary memory works, and without a map the error is clear."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    with Worker(SERVICE, "--device", "cpu", environment=hidden) as process:
        with transport.connect(process.address, device_map={ZERO: "cpu"}) as peer:
            result = peer.call("from_host", on(np.arange(100.0)))
            assert str(streamrt.device_of(result)) == ZERO
            np.testing.assert_array_equal(host(result), np.arange(100.0) * 2)
        with transport.connect(process.address) as peer, pytest.raises(transport.DeviceMapError, match="cuda:0"):
            peer.call("from_host", on(np.ones(3)))


# libraries ------------------------------------------------------------------------------------------------------------


def test_torch_tensors_go_and_come_back(peer: transport.Peer) -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(1000, device="cuda:0", dtype=torch.float32)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = x + 1
        result = peer.call("double", x)
        assert isinstance(result, torch.Tensor)
        assert result.device.type == "cuda"
        total = (result + 0).sum()
    side.synchronize()
    assert float(total) == float((np.arange(1000) + 1).sum() * 2)
    assert peer.call("kind_of", x) == ("cupy", ZERO)
    with pytest.raises(streamrt.ArrayError, match="detach"):
        peer.call("double", x.requires_grad_())
    assert float(peer.call("total", x, detach=True)) == float((np.arange(1000) + 1).sum())


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "bool", "complex64", "float16"])
def test_torch_services_and_unusual_dtypes(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    with Worker("gpu_service:torch_service", "--device", ZERO) as process, transport.connect(process.address) as peer:
        x = (torch.arange(64, device="cuda:0") % 2).to(getattr(torch, dtype))
        back, named = peer.call("torch_same", x)
        assert named == str(x.dtype)
        assert (back.dtype, back.shape, back.device) == (x.dtype, x.shape, x.device)
        np.testing.assert_array_equal(host(back.view(torch.uint8)), host(x.view(torch.uint8)))
        if dtype not in ("bool", "float8_e4m3fn"):  # torch's product of these has another dtype, or does not exist
            doubled = peer.call("torch_double", x)
            assert doubled.dtype == x.dtype
            np.testing.assert_array_equal(host(doubled.to(torch.complex64)), np.arange(64) % 2 * 2)


def test_jax_arrays_go_and_come_back(peer: transport.Peer) -> None:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU")
    x = jax.numpy.arange(1000, dtype="float32") + 1
    result = peer.call("double", x)
    assert isinstance(result, jax.Array)
    np.testing.assert_array_equal(np.asarray(result), (np.arange(1000) + 1) * 2)
    with Worker("gpu_service:jax_service", "--device", ZERO) as process, transport.connect(process.address) as other:
        np.testing.assert_array_equal(host(other.call("jax_double", on(np.ones(10, np.float32)))), 2)


# sizes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, (1 << 31) + 1, (1 << 32) + 3])
def test_g1_g2_sizes_from_nothing_to_over_4_gib(peer: transport.Peer, cupy: Any, size: int) -> None:
    x = cupy.arange(size, dtype=cupy.uint32).astype(cupy.uint8) if size < 10 else cupy.empty(size, cupy.uint8)
    if size >= 10:
        for start in range(0, size, 1 << 28):
            stop = min(size, start + (1 << 28))
            x[start:stop] = (cupy.arange(start, stop, dtype=cupy.int64) % 251).astype(cupy.uint8)
    offsets = sorted({offset for offset in (0, (1 << 31) - 1, 1 << 31, 1 << 32, size - 1) if 0 <= offset < size})
    expected = (size, [offset % 251 for offset in offsets])
    assert peer.submit("sample", x, offsets, copy=False).result(120) == expected


# loss -----------------------------------------------------------------------------------------------------------------


@chosen
def test_b24_a_callee_that_is_killed_during_a_transfer(cupy: Any) -> None:
    """pytorch/pytorch#25531, #33208: the future ends, memory is back, and the survivor's streams work."""
    with Worker(SERVICE, "--device", ZERO) as process:
        peer = transport.connect(process.address)
        x = cupy.ones(1 << 27, dtype=cupy.float32)
        peer.call("total", x[:8])
        gc.collect()
        memory.drain(everything=True)
        before = memory.statistics().live
        future = peer.submit("total", x)
        until(lambda: peer.statistics().bytes_out.get("staging", 0) > 1 << 22, "the transfer to be under way")
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(transport.PeerLostError, match="unknown"):
            future.result(5)
        del future

        def given_back() -> bool:
            gc.collect()
            memory.drain(everything=True)
            return memory.statistics().live <= before

        until(given_back, "memory to be back at its baseline")
        stream = Stream(ZERO)
        with using(stream):
            assert float((x[:1000] * 2).sum()) == 2000.0
        peer.close(1)


def test_a_device_that_has_failed_ends_the_worker_with_a_code_of_its_own() -> None:
    with Worker(SERVICE, "--device", ZERO, keep_errors=True) as process:
        with transport.connect(process.address) as peer:
            with pytest.raises(Exception):
                peer.call("break_device", on(np.zeros(8, np.int32)), timeout=60)
        code, errors = process.wait()
    assert code == 70
    assert "failed" in errors


@chosen
def test_arrays_of_gpus_go_by_shared_memory_and_leave_nothing(cupy: Any) -> None:
    """No byte is staged, every block is released, and the arenas go when the peer does."""
    gc.collect()
    memory.drain(everything=True)
    free = cupy.cuda.runtime.memGetInfo()[0]
    with transport.local_workers(1, devices=[ZERO], device_map={ZERO: ZERO}) as workers:
        peer = workers[0]
        for size in (1, 1000, 1 << 20, (1 << 26) + 1):
            x = cupy.arange(size, dtype=cupy.float32)
            for _ in range(3):
                back = peer.call(cupy_double, x)
                assert bool((back == x * 2).all())
        assert set(peer.statistics().bytes_out) == {"shared_memory"}
        assert set(peer.statistics().bytes_in) == {"shared_memory"}
        sharing = peer._driver.transfers.sharing
        assert sharing is not None
        del back, x

        def released() -> bool:
            memory.drain(everything=True)
            return sharing.exports.used_bytes == 0

        until(released, "the blocks to be free")
    until(lambda: retired.kept() == 0, "the arenas to be dropped")
    cupy.get_default_memory_pool().free_all_blocks()
    until(lambda: cupy.cuda.runtime.memGetInfo()[0] >= free - (64 << 20), "the memory to be back")


def cupy_double(x: Any) -> Any:
    return x * 2


def allocations_of(peer: transport.Peer) -> int:
    """How many of the user's own allocations a peer reads in place."""
    sharing = peer._driver.transfers.sharing
    return 0 if sharing is None else len(sharing.exports._allocations)


def test_b40_lent_memory_is_read_where_it_lies(peer: transport.Peer, worker: Worker, cupy: Any) -> None:
    """numba/numba#3310, cupy/cupy#9436: arrays and views of one block of a pool, by its base and their offsets."""
    block = cupy.empty(4 << 20, dtype=cupy.uint8)
    pieces = [block[number << 20 : (number + 1) << 20].view(cupy.float32) for number in range(4)]
    for number, piece in enumerate(pieces):
        piece.fill(number + 1)
    odd = block.view(cupy.float32)[3:1001]
    for x, value in (*((piece, number + 1) for number, piece in enumerate(pieces)), (odd, 1)):
        future = peer.submit("total", x, copy=False)
        assert future.result(30) == float(value * x.size)
        future.sent.result(30)
    assert allocations_of(peer) == (1 if worker.address.startswith("unix") and not FORCED_TO_UCX else 0)


def test_b41_memory_that_cannot_be_exported_is_lent_all_the_same(peer: transport.Peer, cupy: Any) -> None:
    """openucx/ucx#7110, #10065, pytorch/pytorch#179618: pools of the driver, managed memory, JAX."""
    kinds = {"async pool": cupy.cuda.MemoryAsyncPool().malloc, "managed": cupy.cuda.malloc_managed}
    want = float(sum(range(1 << 18)))
    before = allocations_of(peer)
    for name, allocator in kinds.items():
        with cupy.cuda.using_allocator(allocator):
            x = cupy.arange(1 << 18, dtype=cupy.float64)
        future = peer.submit("total", x, copy=False)
        assert future.result(30) == want, name
        future.sent.result(30)
    y = cupy.arange(1 << 18, dtype=cupy.float64)
    assert float(y.sum()) == want, "no error is left behind"
    assert allocations_of(peer) == before


def test_a_function_that_borrows_reads_in_place(peer: transport.Peer, cupy: Any) -> None:
    for copy in (True, False):
        x = cupy.arange(1 << 22, dtype=cupy.float32)
        future = peer.submit("ends", x, copy=copy)
        assert future.result(30) == float((1 << 22) - 1)
        future.sent.result(30)
        x.fill(7)
        assert peer.call("ends", x, copy=copy) == 14.0


@chosen
@pytest.mark.parametrize("moment", ["pull", "function"])
def test_a_peer_that_dies_with_shared_memory_mapped(cupy: Any, moment: str) -> None:
    """The survivor's streams work, and nothing is kept for the dead.  A reply that came before is a right one."""
    with transport.local_workers(1, devices=[ZERO], device_map={ZERO: ZERO}) as workers:
        peer = workers[0]
        x = cupy.ones(1 << 26, dtype=cupy.float32)
        peer.call(cupy_double, x)
        futures = [peer.submit(cupy_double if moment == "pull" else sleep_after, x) for _ in range(3)]
        os.kill(peer.pid, signal.SIGKILL)
        for future in futures:
            error = future.exception(10)
            if error is None and moment == "pull":
                assert bool((future.result() == 2).all())
            else:
                assert isinstance(error, transport.PeerLostError)
    until(lambda: retired.kept() == 0, "the arenas to be dropped")
    stream = Stream(ZERO)
    with using(stream):
        assert float((x[:1000] * 2).sum()) == 2000.0


def sleep_after(x: Any) -> Any:
    threading.Event().wait(20)
    return x


# graph capture --------------------------------------------------------------------------------------------------------


def test_g10_a_call_inside_a_capture_is_refused_and_the_capture_goes_on(peer: transport.Peer, cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    x = on(np.ones(256, np.float32))
    y = on(np.zeros(256, np.float32))
    cupy.cuda.Device(0).synchronize()
    with stream:
        cupy.add(x, 1, out=y)  # loaded before the capture
        stream.synchronize()
        stream.begin_capture()
        cupy.add(x, 1, out=y)
        with pytest.raises(CaptureError):
            peer.submit("total", x)
        graph = stream.end_capture()
        y.fill(0)
        graph.launch(stream)
        stream.synchronize()
    assert (host(y) == 2).all()
    assert peer.call("total", x) == 256.0


def test_g10_a_capture_beside_a_busy_agent_is_undisturbed(peer: transport.Peer, cupy: Any) -> None:
    x = on(np.ones(1 << 18, np.float32))
    stop = threading.Event()
    done = []

    def keep_busy() -> None:
        while not stop.is_set():
            done.append(float(peer.submit("total", x).result(60)))

    thread = threading.Thread(target=keep_busy)
    thread.start()
    try:
        until(lambda: len(done) > 3, "calls to flow")
        stream = cupy.cuda.Stream(non_blocking=True)
        y = on(np.zeros(256, np.float32))
        cupy.cuda.Device(0).synchronize()
        for _ in range(20):
            with stream:
                cupy.add(y, 1, out=y)
                stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
                for _ in range(20):
                    cupy.add(y, 1, out=y)
                graph = stream.end_capture()
                graph.launch(stream)
                stream.synchronize()
        assert (host(y) == 20 * 21).all()
    finally:
        stop.set()
        thread.join(60)
    assert set(done) == {float(1 << 18)}
