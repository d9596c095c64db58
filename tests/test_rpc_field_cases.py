"""Field cases of calls between processes: lost peers, cut links, late replies, views, sizes, exits.

Each test is named after a case that went wrong for users elsewhere; the report stands in its docstring.
"""

from __future__ import annotations

import concurrent.futures
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rpc_service
from device_arrays import opened, read_on_another_stream
from proxy import TcpProxy
from rpc_processes import WATCHDOG, Worker, chosen, open_descriptors, resident_bytes, until

import streamrt
import transport
from streamrt.testing import Latch, assert_no_host_sync, without
from transport.launch.environment import child_environment

pytest_plugins = ["rpc_fixtures"]

MIB = 1 << 20


@pytest.fixture(scope="module")
def child() -> Iterator[transport.LocalWorker]:
    with transport.local_workers(1) as workers:
        yield workers[0]


def live() -> int:
    return streamrt.memory.statistics().live


def settled(baseline: int) -> None:
    """Waits until this process holds no more than it did."""
    until(lambda: live() <= baseline, lambda: f"{live() - baseline} bytes to be given back")


# B14: the caller writes right after the call --------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "host:0"])
def test_b14_bytes_are_those_of_the_call(peer: transport.Peer, device: str) -> None:
    """pytorch/pytorch#34885, zeromq/pyzmq#1364, ecmwf/earthkit-workflows#207."""
    baseline = live()
    for size, rounds in ((1 << 18, 100), (1 << 24, 4)):
        x = streamrt.array(np.ones(size, np.float32), device=device)
        for _ in range(rounds):
            future = peer.submit("total", x)
            x.fill(0)
            assert future.result(WATCHDOG) == size
            x.fill(1)
    del x, future
    settled(baseline)


def queued_then_overwritten(peer: transport.Peer, value: float, *, ordered: bool = True) -> float:
    """Calls with an array whose writing is still queued, and queues the next write; the stream is closed meanwhile.

    A call that is not `ordered` ends before that, and is waited for that long.
    """
    x = streamrt.array(np.zeros(1 << 18, np.float32), device="host:0")
    stream = streamrt.Stream("host:0")
    with streamrt.using(stream):
        with Latch(stream):
            stream.launch(rpc_service.fill, x, value, writes=[x])
            with assert_no_host_sync():
                future = peer.submit("total", x)
            stream.launch(rpc_service.fill, x, -1.0, writes=[x])
            if ordered:
                assert not future.done()
            else:
                until(future.done, "the call that waits for nothing")
        return float(future.result(WATCHDOG))


@chosen
def test_b14_queued_writes(peer: transport.Peer) -> None:
    """pytorch/pytorch#34885 in stream order: the bytes are those of the call although the call is made first."""
    assert queued_then_overwritten(peer, 1.0) == 1 << 18
    with without("send.wait"):  # with a value of its own, which no memory holds that is used again
        assert queued_then_overwritten(peer, 3.0, ordered=False) != 3 << 18, "the test does not depend on the wait"


@pytest.mark.parametrize("device", ["cpu", "host:0"])
def test_b14_sent_tells_the_truth(worker: Worker, child: transport.LocalWorker, device: str) -> None:
    """Lent arrays may be written as soon as `sent` says so, whatever they go by (zeromq/pyzmq#1364)."""
    with transport.loopback(rpc_service.service) as loopback, transport.connect(worker.address) as remote:
        for target in (loopback, remote, child):
            for size in (1 << 11, 1 << 15, 1 << 18, 1 << 22):
                for _ in range(5):
                    x = streamrt.array(np.ones(size, np.float32), device=device)
                    future = target.submit(rpc_service.total, x, copy=False)
                    future.sent.result(WATCHDOG)
                    x.fill(0)
                    assert future.result(WATCHDOG) == size


@chosen
@pytest.mark.parametrize("device", ["cpu", "host:0"])
def test_b14_nothing_is_sent_to_a_stopped_peer(device: str) -> None:
    """ecmwf/earthkit-workflows#207: the token says done when nobody has read a byte."""
    with Worker() as worker, transport.connect(worker.address) as peer:
        x = streamrt.array(np.ones(1 << 24, np.float32), device=device)
        peer.call("total", x[:10])
        worker.freeze()
        future = peer.submit("total", x, copy=False)
        until(lambda: peer.statistics().bytes_out["staging"] > MIB, "the transfer to begin")
        with pytest.raises(TimeoutError):
            future.sent.result(0.5)
        worker.thaw()
        future.sent.result(WATCHDOG)
        x.fill(0)
        assert future.result(WATCHDOG) == 1 << 24


@chosen
@pytest.mark.parametrize("scheme", ["tcp://127.0.0.1:0", "ipc://{}/s"])
def test_b14_sent_ends_when_its_agent_is_closed(scheme: str, tmp_path: Path) -> None:
    """What ZeroMQ still holds of a lent array it lets go a while after its socket was closed."""
    with Worker("rpc_service:service", "--listen", scheme.format(tmp_path)) as worker:
        agent = transport.Agent(name="ending")
        peer = transport.connect(worker.address, agent=agent)
        worker.freeze()
        future = peer.submit("total", np.ones(1 << 24, np.float32), copy=False)
        until(lambda: peer.statistics().bytes_out.get("staging", 0) > MIB, "the transfer to begin")
        agent.close(0.1)
        assert isinstance(future.sent.exception(WATCHDOG), transport.PeerLostError)
        assert isinstance(future.exception(WATCHDOG), transport.PeerLostError)


@pytest.mark.parametrize("device", ["cpu", "host:0"])
def test_b14_a_handed_over_array_is_not_sent_before_it_is_read(device: str) -> None:
    """In one process the receiver reads the lender's own memory: `sent` waits for that (pytorch/pytorch#34885)."""
    serving = transport.Agent(name="serving", service=rpc_service.service, threads=1)
    door, waits = threading.Event(), threading.Event()
    with transport.loopback(rpc_service.service, serving=serving) as peer:
        x = streamrt.array(np.ones(1 << 16, np.float32), device=device)
        assert peer.call("total", x) == 1 << 16
        serving.call_soon(lambda: (waits.set(), door.wait(WATCHDOG)))
        assert waits.wait(WATCHDOG)
        future = peer.submit("total", x, copy=False)
        with pytest.raises(TimeoutError):
            future.sent.result(0.3)
        door.set()
        future.sent.result(WATCHDOG)
        x.fill(0)
        assert future.result(WATCHDOG) == 1 << 16
    serving.close()


# B22: calls within calls ----------------------------------------------------------------------------------------------


def test_b22_nested_calls_with_one_thread_each() -> None:
    """pytorch/pytorch#26362, pytorch/pytorch#36755: all threads hold outer calls."""
    agent = transport.Agent(name="first", service=rpc_service.service, threads=1)
    with Worker("rpc_service:service", "--threads", "1") as worker:
        with transport.connect(worker.address, agent=agent) as peer:
            assert peer.call("nested", 3, timeout=WATCHDOG) == 3
            futures = [peer.submit("nested", 3, timeout=WATCHDOG) for _ in range(8)]
            assert [future.result() for future in futures] == [3] * 8
            assert peer.call("nested", 40, timeout=WATCHDOG) == 40
    agent.close()


# B24: the callee dies or hangs ----------------------------------------------------------------------------------------


@chosen
@pytest.mark.parametrize("device", ["cpu", "host:0"])
def test_b24_killed_in_the_middle_of_a_transfer(device: str, name: str) -> None:
    """pytorch/pytorch#25531, pytorch/pytorch#33208.

    The worker stands still, so that no more of the transfer is on its way than the sockets hold.
    """
    with Worker() as worker:
        x = streamrt.array(np.ones(128 * MIB, np.uint8), device=device)
        baseline = live()
        peer = transport.connect(worker.address)
        worker.freeze()
        future = peer.submit("total_behind", x, name)
        until(lambda: peer.statistics().bytes_out["staging"] > 0, "the transfer to begin")
        worker.process.kill()
        error = future.exception(5)
        assert isinstance(error, transport.PeerLostError)
        assert "total_behind" in str(error)
        with pytest.raises(transport.PeerLostError):
            future.sent.result(5)
        with pytest.raises(transport.PeerLostError):
            peer.call("add", 1)
        peer.close()
        del future, error
        settled(baseline)


@pytest.mark.parametrize("copy", [True, False])
def test_b24_a_child_killed_in_the_middle_of_a_transfer(copy: bool) -> None:
    """The same over the other kind of link, also with lent memory, which must be free again."""
    x = np.ones(128 * MIB, np.uint8)
    with transport.local_workers(1) as workers:
        baseline = live()
        future = workers[0].submit(rpc_service.total_behind, x, "never", copy=copy)
        until(lambda: sum(workers[0].statistics().bytes_out.values()) > 4 * MIB, "the transfer to begin")
        workers[0].kill()
        assert isinstance(future.exception(5), transport.PeerLostError)
        assert isinstance(future.sent.exception(5), transport.PeerLostError) or future.sent.exception() is None
        settled(baseline)


def test_b24_killed_while_it_runs(name: str) -> None:
    """Several calls are open: each ends, and says that its outcome is unknown."""
    with Worker() as worker, transport.connect(worker.address) as peer:
        futures = [peer.submit("bump_behind", name, name) for _ in range(5)]
        until(lambda: peer.call("count", name) == 5, "all functions to run")
        worker.process.kill()
        for future in futures:
            assert isinstance(future.exception(5), transport.PeerLostError)
        assert isinstance(futures[0].exception(), ConnectionError)


def test_b24_close_returns_when_the_callee_is_stopped(name: str) -> None:
    """pytorch/pytorch#33208: shutdown blocks while sends are pending."""
    with Worker() as worker:
        peer = transport.connect(worker.address)
        running = peer.submit("bump_behind", name, name)
        until(lambda: peer.call("count", name) == 1, "the function to run")
        worker.freeze()
        sending = peer.submit("total", np.ones(64 * MIB, np.uint8))
        started = time.monotonic()
        peer.close(timeout=3)
        assert time.monotonic() - started < 10
        for future in (running, sending):
            assert isinstance(future.exception(WATCHDOG), transport.PeerLostError)
        worker.thaw()
        with transport.connect(worker.address) as again:
            again.call("open_gate", name)
            assert again.call("add", 1) == 2


def test_b24_a_stopped_peer_is_lost_in_time() -> None:
    """With calls open and the process stopped, the peer is lost after `peer_timeout`, and the call has ended."""
    with Worker() as worker:
        peer = transport.connect(worker.address, peer_timeout=1.0)
        worker.freeze()
        future = peer.submit("add", 1)
        error = future.exception(WATCHDOG)
        assert isinstance(error, transport.PeerLostError)
        assert "stopped" in str(error)
        peer.close()


# B26: the link breaks -------------------------------------------------------------------------------------------------


def test_b26_a_call_is_never_run_twice(worker: Worker, peer: transport.Peer, name: str) -> None:
    """pytorch/pytorch#32130, pytorch/pytorch#73601, dask/distributed#5103, dask/distributed#5457."""
    with TcpProxy(worker.port, record=True) as proxy:
        through = transport.connect(proxy.address)
        peer.call("open_gate", name)
        assert through.call("add", 1) == 2
        proxy.hold_replies()
        future = through.submit("bump_behind", name, name)
        until(lambda: peer.call("count", name) == 1, "the request to be delivered")
        assert not future.done()
        proxy.cut()
        error = future.exception(WATCHDOG)
        assert isinstance(error, transport.PeerLostError)
        with pytest.raises(transport.PeerLostError):
            through.call("add", 1)
        through.close()
        assert peer.call("count", name) == 1
        _replay(worker.port, bytes(proxy.requests))
        assert peer.call("count", name) == 1
    assert peer.call("add", 1) == 2


def test_b26_the_error_says_that_the_outcome_is_unknown(worker: Worker, peer: transport.Peer, name: str) -> None:
    """The reader of the message must know that the function may have run."""
    with TcpProxy(worker.port) as proxy, transport.connect(proxy.address) as through:
        future = through.submit("bump_behind", name, name)
        until(lambda: peer.call("count", name) == 1, "the request to be delivered")
        proxy.cut()
        assert "outcome is unknown" in str(future.exception(WATCHDOG))
        peer.call("open_gate", name)


def _replay(port: int, captured: bytes) -> None:
    """Sends captured bytes again, as a new connection, and reads until the worker has had enough of it."""
    assert captured
    with socket.create_connection(("127.0.0.1", port), timeout=WATCHDOG) as sock:
        try:
            sock.sendall(captured)
            sock.settimeout(2.0)
            while sock.recv(1 << 16):
                pass
        except (ConnectionError, TimeoutError):
            pass


# B27: late replies ----------------------------------------------------------------------------------------------------


def test_b27_a_late_reply_is_dropped(peer: transport.Peer, name: str) -> None:
    """pytorch/pytorch#33803, pytorch/pytorch#71029."""
    assert peer.call("add", 1) == 2
    here, there = live(), peer.call("held_bytes")
    late = peer.submit("ones_behind", name, 64 * MIB, timeout=0.1)
    with pytest.raises(transport.DeadlineError, match="ones_behind"):
        late.result(WATCHDOG)
    peer.call("open_gate", name)
    for number in range(100):
        assert peer.call("add", number) == number + 1
    until(lambda: peer.call("held_bytes") <= there, "the callee to give its memory back")
    settled(here)
    assert isinstance(late.exception(), transport.DeadlineError)


@chosen
def test_b27_a_reply_that_is_on_its_way(worker: Worker, peer: transport.Peer, name: str) -> None:
    """The time runs out while the reply's bytes come: what has come is given back."""
    with TcpProxy(worker.port) as proxy, transport.connect(proxy.address) as through:
        here = live()
        future = through.submit("ones_behind", name, 64 * MIB)
        proxy.hold_replies()
        peer.call("open_gate", name)
        until(lambda: proxy.returned > 4 * MIB, "the reply to come")
        assert future.cancel()
        proxy.release_replies()
        assert through.call("add", 1) == 2
        settled(here)


# B30: devices of replies ----------------------------------------------------------------------------------------------


def test_b30_a_result_on_a_device_that_no_argument_used(peer: transport.Peer) -> None:
    """pytorch/pytorch#54017, pytorch/pytorch#53717: it is ordered too."""
    for device in ("host:0", "host:1"):
        for _ in range(3):
            result = peer.call("made_late", device, 4.0)
            assert str(streamrt.device_of(result)) == device
            assert (np.asarray(result) == 4).all()


def test_b30_the_order_of_a_reply_matters() -> None:
    """The same in one process, where the wait can be taken away: then the values are wrong (pytorch/pytorch#53717)."""
    with transport.loopback(rpc_service.service) as peer:
        assert (np.asarray(peer.call("made_late", "host:1", 4.0)) == 4).all()
        with without("pull.wait"):
            assert (np.asarray(peer.call("made_late", "host:1", 5.0)) != 5).any()


@chosen
def test_b30_a_reply_is_ordered_on_the_stream_that_is_current_at_the_wait(peer: transport.Peer) -> None:
    """pytorch/pytorch#53717, #54560: the message is here, its bytes are not, and another stream reads."""
    device = opened("host:0")

    def reads(value: float, *, ordered: bool) -> np.ndarray[Any, Any]:
        def start(stream: streamrt.Stream) -> Any:
            return peer.submit("made_late", "host:0", value, reply_stream=stream)

        return read_on_another_stream(start, device, 1000, ordered=ordered)

    assert (reads(6.0, ordered=True) == 6).all()
    assert (reads(7.0, ordered=False) != 7).any(), "the test does not depend on the wait that it is about"


def test_b30_no_map_for_the_reply(worker: Worker) -> None:
    """pytorch/pytorch#54560: an error at the caller that names device and peer; both sides go on."""
    with transport.connect(worker.address, device_map={"host:0": "host:0"}, name="painter") as peer:
        with pytest.raises(transport.DeviceMapError, match="host:1"):
            peer.submit("made_late", "host:1", 4.0).result(WATCHDOG)
        assert peer.call("made_late", "host:0", 4.0)[0] == 4
        x = streamrt.array(np.ones(1000), device="host:1")
        with pytest.raises(transport.DeviceMapError, match=r"host:1.*painter"):
            peer.submit("echo", x)
        assert peer.call("add", 1) == 2


def test_b30_devices_mixed_in_one_message(worker: Worker) -> None:
    """pytorch/pytorch#53717, with the devices crossed."""
    with transport.connect(worker.address, device_map={"host:0": "host:1", "host:1": "host:0"}) as peer:
        x = streamrt.array(np.full(5000, 1.0), device="host:0")
        y = streamrt.array(np.full(5000, 10.0), device="host:1")
        twice_x, twice_y, x_there, y_there = peer.call("on_two", x, y)
        assert (x_there, y_there) == ("host:1", "host:0")
        assert (str(streamrt.device_of(twice_x)), str(streamrt.device_of(twice_y))) == ("host:0", "host:1")
        assert (np.asarray(twice_x) == 2).all()
        assert (np.asarray(twice_y) == 20).all()


# B31: calls to oneself ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "host:0"])
@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("size", [10, 100_000])
def test_b31_what_the_callee_writes_does_not_show(device: str, copy: bool, size: int) -> None:
    """pytorch/pytorch#50674, pytorch/tensorpipe#412: the same isolation in one process as between two."""
    with transport.loopback(rpc_service.service) as peer:
        x = streamrt.array(np.zeros(size, np.float32), device=device)
        result = peer.submit("increment", x, copy=copy).result(WATCHDOG)
        assert (np.asarray(result) == 1).all()
        assert (np.asarray(x) == 0).all()
        result += 1
        assert (np.asarray(peer.call("increment", x)) == 1).all()


# B33: exits -----------------------------------------------------------------------------------------------------------

UNREACHABLE = """
import sys, transport
try:
    peer = transport.connect(sys.argv[1], timeout=2.0)
    peer.submit("add", 1)
except (transport.PeerLostError, transport.DeadlineError) as error:
    print(type(error).__name__, error)
"""


def test_b33_exit_with_an_unreachable_peer() -> None:
    """zeromq/pyzmq#102, zeromq/libzmq#2586, zeromq/pyzmq#537."""
    done = subprocess.run(
        [sys.executable, "-c", UNREACHABLE, f"tcp://127.0.0.1:{closed_port()}"],
        capture_output=True, text=True, env=child_environment(), timeout=WATCHDOG, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(("PeerLostError", "DeadlineError"))


def test_b33_exit_with_calls_open(worker: Worker) -> None:
    """A program that just ends, with a call open and arguments on their way."""
    script = (
        "import sys, numpy, transport\n"
        "peer = transport.connect(sys.argv[1])\n"
        "peer.submit('bump_behind', 'never', 'never')\n"
        "peer.submit('total', numpy.ones(1 << 26, numpy.uint8))\n"
        "sys.exit(7)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, worker.address],
        capture_output=True, text=True, env=child_environment(), timeout=WATCHDOG, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (7, "")


def nothing_left(descriptors: int, threads: int) -> None:
    """Waits until this process has no more descriptors and threads than it had."""
    until(lambda: open_descriptors() <= descriptors, lambda: f"{open_descriptors() - descriptors} descriptors to close")
    until(lambda: threading.active_count() <= threads, lambda: f"these to end: {threading.enumerate()}")


def test_b33_agents_and_peers_leave_nothing_behind(worker: Worker) -> None:
    """50 agents made and closed: descriptors and threads are back where they were."""

    def one(address: str) -> None:
        agent = transport.Agent(name="passing", threads=1)
        try:
            timeout = 5.0 if address == worker.address else 0.5  # for so long it tries again
            with transport.connect(address, agent=agent, timeout=timeout) as peer:
                assert peer.call("add", 1) == 2
        except transport.PeerLostError:
            assert address != worker.address
        finally:
            agent.close()

    unreachable = f"tcp://127.0.0.1:{closed_port()}"
    one(worker.address)
    one(unreachable)
    transport.Agent(name="idle").close()
    descriptors, threads = open_descriptors(), threading.active_count()
    for number in range(50):
        one(worker.address if number % 5 else unreachable)
        transport.Agent(name="idle").close()
    nothing_left(descriptors, threads)


def test_b33_local_peers_leave_nothing_behind() -> None:
    """The same with loopback."""
    for _ in range(2):
        transport.loopback(rpc_service.service).close()
    descriptors, threads = open_descriptors(), threading.active_count()
    for _ in range(20):
        with transport.loopback(rpc_service.service) as peer:
            assert peer.call("add", 1) == 2
    nothing_left(descriptors, threads)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


# B34: close right after sending ---------------------------------------------------------------------------------------


def test_b34_a_graceful_close_loses_nothing(worker: Worker, peer: transport.Peer, name: str) -> None:
    """zeromq/pyzmq#404, zeromq/libzmq#1922, zeromq/pyzmq#1934: linger is no proof of delivery."""
    before = len(peer.call("notes"))
    sender = transport.connect(worker.address)
    sums = []
    for number in range(10):
        data = np.full(4 * MIB, number, np.uint8)
        sums.append((number, zlib.crc32(data)))
        sender.notify("note_behind", number, data, name)
    closing = threading.Thread(target=sender.close, args=(WATCHDOG,))
    closing.start()
    until(lambda: len(peer.call("notes")) - before >= 5, "the receiver to be busy")
    assert closing.is_alive(), "the close did not wait for what was slow"
    peer.call("open_gate", name)
    closing.join(WATCHDOG)
    assert not closing.is_alive()
    assert sorted(peer.call("notes")[before:]) == sums


# B36: more than 2 and 4 GiB -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "by"),
    [
        pytest.param(2**31 - 1, "worker", marks=pytest.mark.whole),
        pytest.param(2**31, "child", marks=pytest.mark.whole),
        (2**31 + 1, "child"),
        (2**32 + 3, "worker"),
    ],
)
def test_b36_large_arrays(size: int, by: str) -> None:
    """zeromq/libzmq#4418, zeromq/libzmq#4768, zeromq/libzmq#4135, zeromq/pyzmq#1199, msgpack/msgpack-python#532,
    msgpack/msgpack-python#181, PaddlePaddle/Paddle#53936.  Lent, for a copy of it need not fit."""
    offsets = [place for place in (0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, size - 1) if place < size]
    x = rpc_service.pattern(size)
    before = resident_bytes(os.getpid())
    with ExitStack() as stack:
        if by == "worker":
            worker = stack.enter_context(Worker())
            peer = stack.enter_context(transport.connect(worker.address))
        else:
            peer = stack.enter_context(transport.local_workers(1))[0]
        found = peer.submit(rpc_service.sample, x, offsets, copy=False).result()
        here, there = resident_bytes(os.getpid()) - before, resident_bytes(peer.pid, "VmHWM")
    assert found[0] == size
    assert found[1] == [place % 251 for place in offsets]
    assert found[2] == rpc_service.checksum(x)
    del x
    assert here < 2**28, "the caller made a copy"
    assert there < size + 2**29, "the callee held more than one copy"


@pytest.mark.slow
def test_b36_large_results(child: transport.LocalWorker) -> None:
    """The way back, with more than the snapshot limit."""
    size = 2**31 + 1
    result = child.call(rpc_service.pattern, size)
    assert result.size == size
    assert [int(result[place]) for place in (0, 2**31 - 1, 2**31)] == [place % 251 for place in (0, 2**31 - 1, 2**31)]
    assert child.call(rpc_service.add, 1) == 2


def test_b36_past_the_snapshot_limit(peer: transport.Peer) -> None:
    """What cannot be copied as of the call is refused with the remedy, and nothing is sent."""
    previous = streamrt.memory.set_snapshot_limit(MIB)
    try:
        with pytest.raises(streamrt.ExhaustedError, match="copy=False"):
            peer.submit("total", np.ones(2 * MIB, np.uint8))
        assert peer.submit("total", np.ones(2 * MIB, np.uint8), copy=False).result(WATCHDOG) == 2 * MIB
    finally:
        streamrt.memory.set_snapshot_limit(previous)


# B46: views, aliases, layouts -----------------------------------------------------------------------------------------


def test_b46_a_view_sends_what_it_shows(worker: Worker) -> None:
    """pytorch/pytorch#35766: the whole storage is shipped."""
    with TcpProxy(worker.port) as proxy, transport.connect(proxy.address) as peer:
        base = np.ones(64 * MIB, np.uint8)
        assert peer.call("total", base[:1]) == 1
        assert peer.call("total", base[: 100 * 5000 : 5000]) == 100
        assert peer.call("total", base[:1], timeout=WATCHDOG) == 1
        assert proxy.forwarded < MIB
        assert sum(peer.statistics().bytes_out.values()) < MIB


@chosen
def test_b46_one_array_many_times(worker: Worker) -> None:
    """dask/distributed#3109: its bytes are sent once, also as different objects over the same memory."""
    with TcpProxy(worker.port) as proxy, transport.connect(proxy.address) as peer:
        x = np.ones(MIB, np.uint8)
        entries, different, found = peer.call("how_many", [x] * 1000)
        assert (entries, different, found) == (1000, 1, 1000.0 * MIB)
        assert MIB < proxy.forwarded < 2 * MIB
        values = [np.full(MIB // 8, value, np.uint8) for value in range(5)]
        a, b, c, d, e = values
        same, sums = peer.call("same_object", [a, b, c], [c, d, e])
        assert same
        assert sums == [value * float(MIB // 8) for value in (0, 1, 2, 2, 3, 4)]
        assert proxy.forwarded < 3 * MIB


def layouts() -> dict[str, Any]:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    return {
        "scalar": np.array(3.0),
        "empty": np.empty(0, np.int8),
        "empty inside": np.empty((3, 0, 2)),
        "bool": base > 5,
        "complex64": (base + 1j * base).astype(np.complex64),
        "reversed": base[::-1, ::-1],
        "transposed": base.T,
        "strided": base[::2, 1::3],
        "broadcast": np.broadcast_to(np.float32(5), (100, 100)),
        "offset": base[1:, 1:],
        "half": base.astype(np.float16),
        "unsigned": np.arange(1000, dtype=np.uint64) << 53,
        "large reversed": np.arange(100_000, dtype=np.int32)[::-1],
        "large broadcast": np.broadcast_to(np.arange(1000, dtype=np.int32), (300, 1000)),
        "large strided": np.arange(1_000_000, dtype=np.int16)[::7],
    }


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("case", sorted(layouts()))
def test_b46_shapes_layouts_and_dtypes(peer: transport.Peer, case: str, copy: bool) -> None:
    """ray-project/ray#58063, pytorch/pytorch#134755: equal values, shape and dtype."""
    x = layouts()[case]
    back = peer.submit("echo", x, copy=copy).result(WATCHDOG)
    assert (back.shape, back.dtype) == (x.shape, x.dtype)
    np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize("shape", [(), (7,), (300, 200)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "bool", "complex64"])
def test_b46_tensors(peer: transport.Peer, shape: tuple[int, ...], dtype: str) -> None:
    """pytorch/pytorch#134755, with what NumPy has no dtype for."""
    torch = pytest.importorskip("torch")
    x = torch.ones(shape).to(getattr(torch, dtype))
    back = peer.call("echo", x)
    assert (back.shape, back.dtype) == (x.shape, x.dtype)
    assert torch.equal(back.to(torch.complex64), x.to(torch.complex64))
    assert back.requires_grad is False


def test_b46_handed_on_and_dropped(peer: transport.Peer, other: Worker) -> None:
    """pytorch/pytorch#35766: what was received goes to a third process, and is dropped at once."""
    for size in (10, 1 << 22):
        for device in ("cpu", "host:0"):
            x = streamrt.array(np.ones(size, np.float32), device=device)
            assert peer.call("hand_on", other.address, x) == size
    assert peer.call("through", other.address, "echo", np.arange(5000))[4999] == 4999


# Load -----------------------------------------------------------------------------------------------------------------


def test_b20_replies_race_with_cancellation_and_deadlines(peer: transport.Peer) -> None:
    """agronholm/pythonfutures#86, rapidsai/ucxx#281: late completions do no harm, and the link goes on."""
    x = np.ones(50_000)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = [peer.submit("echo", x, timeout=0.0005 * (number % 8 + 1)) for number in range(200)]
        list(pool.map(lambda future: future.cancel(), futures[::3]))
    outcomes = {type(_outcome(future)) for future in futures}
    assert outcomes <= {np.ndarray, transport.DeadlineError, concurrent.futures.CancelledError}
    assert [peer.call("add", number) for number in range(100)] == list(range(1, 101))
    until(lambda: peer.statistics().open_calls == 0, "no call to be left")


def _outcome(future: Any) -> Any:
    try:
        return future.result(WATCHDOG)
    except (transport.DeadlineError, concurrent.futures.CancelledError) as error:
        return error


def test_b24_sigkill_is_told_by_the_process_not_by_silence() -> None:
    """Nothing is open: the next call fails at once with the reason, and closing is quick."""
    with Worker() as worker:
        peer = transport.connect(worker.address)
        os.kill(worker.pid, signal.SIGKILL)
        until(lambda: peer.closed, "the loss to be noticed")
        with pytest.raises(transport.PeerLostError):
            peer.submit("add", 1)
        peer.close()
