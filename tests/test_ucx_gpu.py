"""Arrays of GPUs over UCX: order, isolation, loss, and whose contexts there are."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from rpc_processes import HERE, WATCHDOG, until
from test_ucx import FORCED, MIB, by_ucx, echo, free_again, needs_ucxx, settled, total

import streamrt
import transport
from streamrt import memory
from streamrt.testing import Latch, assert_no_host_sync, without
from transport.channels import CHANNELS_VARIABLE, retired
from transport.channels.tag_messages import RECEIVE_EDGE, SEND_EDGE
from transport.channels.ucx_worker import process_worker
from transport.launch.environment import child_environment

pytestmark = [pytest.mark.gpu, needs_ucxx]
PAIRS = [("cuda:0", "cuda:0"), pytest.param(("cuda:0", "cuda:1"), marks=pytest.mark.gpu2)]


@pytest.fixture(scope="module", params=PAIRS)
def child(request: pytest.FixtureRequest) -> Iterator[transport.LocalWorker]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CHANNELS_VARIABLE, FORCED)
        workers = transport.local_workers(1, devices=[request.param[1]])
    with workers:
        yield workers[0]


def on(values: Any, device: str = "cuda:0") -> Any:
    return streamrt.array(np.asarray(values), device=device)


def fill(target: Any, value: float) -> None:
    target[...] = value


@pytest.mark.parametrize("count", [1, 1000, 65537, MIB, 16 * MIB + 3, 128 * MIB])
def test_arrays_of_every_size_come_back_equal(child: transport.LocalWorker, count: int) -> None:
    cupy = pytest.importorskip("cupy")
    before = by_ucx(child)
    x = cupy.arange(count, dtype=cupy.uint8) ^ 0x5A
    for _ in range(3):
        assert bool((child.call(echo, x) == x).all())
    assert by_ucx(child) == (before[0] + 3 * count, before[1] + 3 * count)
    assert child.statistics().bytes_out.get("staging", 0) == 0


def test_many_at_once_of_both_kinds_of_memory(child: transport.LocalWorker) -> None:
    futures = []
    for number in range(60):
        futures.append(child.submit(echo, on(np.full(100_000 + number, number, np.float32)), np.full(30_000, number)))
    for number, future in enumerate(futures):
        device, host = future.result(WATCHDOG)
        assert bool((device == number).all())
        assert device.size == 100_000 + number
        assert (host == number).all()
    until(settled, "every receipt")


def test_no_host_waits_and_bytes_go_behind_the_callers_stream(child: transport.LocalWorker) -> None:
    stream = streamrt.Stream("cuda:0")
    child.call(total, on(np.ones(300_000)))
    with streamrt.using(stream):
        x = on(np.zeros(300_000))
        stream.launch(fill, x, 0.25, writes=[x])
        stream.synchronize()
        latch = Latch(stream)
        stream.launch(fill, x, 0.125, writes=[x])
        with assert_no_host_sync():
            future = child.submit(total, x)
        assert child.call(total, np.ones(300_000)) == 300_000  # others pass it
        assert not future.done()
        latch.open()
        assert future.result(WATCHDOG) == 300_000 / 8


def test_without_the_edge_the_bytes_of_before_go(child: transport.LocalWorker) -> None:
    stream = streamrt.Stream("cuda:0")
    with streamrt.using(stream):
        x = on(np.zeros(300_000))
        stream.synchronize()
        latch = Latch(stream)
        stream.launch(fill, x, 0.5, writes=[x])
        with without(SEND_EDGE):
            assert child.submit(total, x).result(WATCHDOG) != 150_000
        latch.open()


def test_memory_is_written_when_its_last_use_is_over(child: transport.LocalWorker) -> None:
    stream = streamrt.Stream("cuda:0")
    x = on(np.full(300_000, 3.0))
    child.call(echo, x)
    latch = Latch(stream)
    future = child.submit(echo, x, reply_stream=stream)
    traffic = process_worker()._traffic
    assert traffic is not None
    until(lambda: traffic._arrived, "the reply to wait for its memory")
    assert not future.done()
    latch.open()
    assert bool((future.result(WATCHDOG) == 3).all())
    latch = Latch(stream)
    with without(RECEIVE_EDGE):
        until(child.submit(echo, x, reply_stream=stream).done, "the reply, into memory that somebody may be using")
    latch.open()


def test_the_reply_is_ordered_on_the_stream_that_is_current_then(child: transport.LocalWorker) -> None:
    for number in range(20):
        stream = streamrt.Stream("cuda:0")
        with streamrt.using(stream):
            y = child.call(echo, on(np.full(500_000, number, np.float32)))
            z = y * 2
            stream.synchronize()
            assert bool((z == 2 * number).all())


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_arrays_of_other_libraries(child: transport.LocalWorker, library: str) -> None:
    module = pytest.importorskip(library)
    if library == "torch":
        x = module.arange(500_000, dtype=module.float32, device="cuda:0")
        assert bool((child.call(echo, x) == x).all())
    else:
        if module.default_backend() != "gpu":
            pytest.skip("this JAX has no GPU")
        x = module.numpy.arange(500_000, dtype="float32")
        assert bool((child.call(echo, x) == x).all())


def test_a_peer_that_is_killed_in_the_middle_ends_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHANNELS_VARIABLE, FORCED)
    held = memory.statistics().live
    for _ in range(2):
        _kill_in_the_middle()
        until(settled, "UCX to end what was on its way")
        until(lambda: retired.kept() == 0, "what was broken off to be given back")
        until(lambda: free_again(held), "memory to be free again")


def _kill_in_the_middle() -> None:
    with transport.local_workers(1, devices=["cuda:0"]) as (worker,):
        x = on(np.ones(32 * MIB, np.float32))
        worker.call(total, x)
        futures = [worker.submit(echo, x) for _ in range(6)]
        traffic = process_worker()._traffic
        assert traffic is not None
        until(lambda: traffic._sent or traffic._fetching or futures[-1].done(), "a transfer to begin")
        worker.kill()
        errors = [future.exception(WATCHDOG) for future in futures]
        assert all(isinstance(error, transport.PeerLostError | None) for error in errors)


@pytest.mark.gpu2
def test_no_context_is_made_on_another_device() -> None:
    program = """
import numpy as np, transport, streamrt
from test_ucx import by_ucx, echo
from test_ucx_gpu import contexts
def there(x):
    return contexts()
with transport.local_workers(1, devices=["cuda:1"]) as (worker,):
    for number in range(3):
        x = streamrt.array(np.ones(1 << 20), device="cuda:1")
        y = worker.call(echo, x)
    assert by_ucx(worker)[1], worker.statistics()
    print(contexts(), worker.call(there, x))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=HERE,
        env=child_environment() | {CHANNELS_VARIABLE: FORCED},
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[1]", "[1]"]


def contexts() -> list[int]:
    """The devices on which this process has a context."""
    driver = ctypes.CDLL("libcuda.so.1")
    found = []
    count = ctypes.c_int()
    assert driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    for index in range(count.value):
        flags, active = ctypes.c_uint(), ctypes.c_int()
        assert driver.cuDevicePrimaryCtxGetState(index, ctypes.byref(flags), ctypes.byref(active)) == 0
        if active.value:
            found.append(index)
    return found
