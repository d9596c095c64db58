"""Bad input: each kind is a different, clear error at the caller, and the connection goes on."""

from __future__ import annotations

import functools
import itertools
import math
import re
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import rpc_service
from rpc_processes import WATCHDOG, Worker

import streamrt
import transport
from streamrt.cuda import create_backend
from streamrt.libraries import NAMES
from transport.errors import AddressError
from transport.launch.environment import child_environment
from transport.limits import Limits
from transport.links import Link, Unreached, schemes, zmq_link
from transport.peer import await_ready, open_peer


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker("rpc_service:service", "--device", "host:0") as running:
        yield running


@pytest.fixture(scope="module")
def torch_worker() -> Iterator[Worker]:
    pytest.importorskip("torch")
    with Worker("rpc_service:torch_service") as running:
        yield running


@pytest.fixture(scope="module")
def jax_worker() -> Iterator[Worker]:
    pytest.importorskip("jax")
    with Worker("rpc_service:jax_service", environment={"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "0"}) as running:
        yield running


@pytest.fixture
def peer(worker: Worker) -> Iterator[transport.Peer]:
    with transport.connect(worker.address, name="the worker") as connected:
        yield connected
        assert connected.call("add", 1) == 2, "the connection did not go on"
        assert connected.statistics().open_calls == 0


# Calls ----------------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """What is called with what, and what must be raised."""

    arguments: Callable[[], tuple[Any, ...]]
    error: type[Exception]
    message: str
    keywords: dict[str, Any]
    before_sending: bool


def case(
    arguments: Callable[[], tuple[Any, ...]],
    error: type[Exception],
    message: str,
    *,
    before_sending: bool = True,
    **keywords: Any,
) -> Case:
    return Case(arguments, error, message, keywords, before_sending)


def a_generator() -> Any:
    yield 1


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def a_cycle() -> list[Any]:
    value: list[Any] = [1]
    value.append(value)
    return value


CASES: dict[str, Case] = {
    "unknown function": case(
        lambda: ("no_such_function", 1), transport.UnknownFunctionError, r"no_such_function.*the service has:.*add",
        before_sending=False,
    ),
    "function that is not registered": case(
        lambda: (math.sin, 1.0), transport.UnknownFunctionError, r"'sin'", before_sending=False
    ),
    "too few arguments": case(lambda: ("add",), TypeError, r"add\(x.*missing.*'x'", before_sending=False),
    "too many arguments": case(lambda: ("add", 1, 2, 3), TypeError, r"add\(x.*too many", before_sending=False),
    "unknown keyword": case(lambda: ("add", 1), TypeError, r"add\(x.*'other'", before_sending=False, other=2),
    "unsupported type": case(lambda: ("echo", threading.Lock()), transport.CodecError, "lock"),
    "deep inside": case(lambda: ("echo", {"a": [1, (a_generator(),)]}), transport.CodecError, "generator"),
    "lambda": case(lambda: ("echo", lambda: 1), transport.CodecError, "function"),
    "where in the value": case(
        lambda: ("echo", {"a": [np.ones(2), np.array([object()])]}), streamrt.ArrayError,
        r"^cannot send args\[0\]\['a'\]\[1\]: an array of Python objects",
    ),
    "object array": case(lambda: ("echo", np.array([object()])), streamrt.ArrayError, "object"),
    "array of text": case(
        lambda: ("echo", 1, [np.array(["text"])]), streamrt.ArrayError, r"^cannot send args\[1\]\[0\]: .*(<U4|str)"
    ),
    "structured array": case(lambda: ("echo", np.zeros(3, [("a", "i4")])), streamrt.ArrayError, "dtype"),
    "foreign byte order": case(lambda: ("echo", np.arange(1000, dtype=">i4")), streamrt.ArrayError, "byte order|>i4"),
    "nested too deeply": case(lambda: ("echo", nested(1000)), transport.CodecError, "deep|nest|level"),
    "contains itself": case(lambda: ("echo", a_cycle()), transport.CodecError, "deep|itself|nest|level"),
    "future": case(lambda: ("echo", streamrt.DeviceFuture()), transport.CodecError, "future|Future"),
    "function name too long": case(lambda: ("x" * 10_000,), transport.LocalProtocolError, "function|name"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CASES))
def test_bad_calls(peer: transport.Peer, name: str) -> None:
    chosen = CASES[name]
    function, *arguments = chosen.arguments()
    before = peer.statistics().messages_out
    with pytest.raises(chosen.error, match=chosen.message):
        peer.submit(function, *arguments, **chosen.keywords).result(WATCHDOG)
    if chosen.before_sending:
        assert peer.statistics().messages_out == before, "something was sent"


def test_the_errors_are_different() -> None:
    """No class stands for two kinds of fault that call for different remedies."""
    faults = {chosen.error for chosen in CASES.values()}
    faults |= {transport.DeviceMapError, transport.AuthError, AddressError, transport.VersionError}
    siblings = {transport.PeerLostError, transport.DeadlineError, transport.RemoteError, streamrt.ClosedError}
    own = {one for one in faults | siblings if issubclass(one, streamrt.StreamrtError)}
    assert len(own) == 12
    assert not any(issubclass(one, other) for one in own for other in own if one is not other)


def test_an_array_on_a_device_that_is_not_mapped(worker: Worker) -> None:
    with transport.connect(worker.address, name="the worker", device_map={"host:1": "host:0"}) as peer:
        before = peer.statistics().messages_out
        with pytest.raises(transport.DeviceMapError, match=r"host:0 .*'the worker'.*device_map="):
            peer.submit("echo", streamrt.array(np.ones(10), device="host:0"))
        assert peer.statistics().messages_out == before
        x = streamrt.array(np.ones(1000), device="host:1")
        assert streamrt.device_of(peer.call("echo", x)) == streamrt.device_of(x)


def test_a_device_that_the_worker_does_not_serve(worker: Worker) -> None:
    with pytest.raises(transport.DeviceMapError, match=r"'the worker'.*host:3"):
        transport.connect(worker.address, name="the worker", device_map={"host:0": "host:3"})
    with pytest.raises(transport.DeviceMapError, match="banana"):
        transport.connect(worker.address, device_map={"banana": "host:0"})


@pytest.mark.parametrize("kind", NAMES)
def test_a_kind_of_array_is_no_name_of_a_service(kind: str) -> None:
    with pytest.raises(transport.LocalProtocolError, match=rf"write Service\(arrays='{kind}'\)"):
        transport.Service(kind)
    assert transport.Service(kind, arrays=kind).name == kind


# Tensors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 5000])
def test_tensors_that_require_grad(peer: transport.Peer, size: int) -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(size, requires_grad=True)
    before = peer.statistics().messages_out
    with pytest.raises(streamrt.ArrayError, match="detach=True"):
        peer.submit("total", x)
    with pytest.raises(streamrt.ArrayError, match="detach=True"):
        peer.submit("total", (x * 2,))
    assert peer.statistics().messages_out == before
    back = peer.call("echo", x, detach=True)
    assert torch.equal(back, x)
    assert not back.requires_grad
    assert x.requires_grad


def test_tensors_with_no_plain_memory(peer: transport.Peer) -> None:
    torch = pytest.importorskip("torch")
    for x in (torch.ones(3, device="meta"), torch.eye(3).to_sparse()):
        with pytest.raises(streamrt.StreamrtError):
            peer.submit("echo", x)


def test_conjugated_and_negated_tensors_arrive_as_they_look(peer: transport.Peer) -> None:
    torch = pytest.importorskip("torch")
    z = torch.full((3000,), 1 + 2j)
    assert torch.equal(peer.call("echo", z.conj()), torch.full((3000,), 1 - 2j))
    assert torch.equal(peer.call("echo", z.conj().imag), torch.full((3000,), -2.0))


# What a target cannot hold --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 5000])
def test_dtypes_that_jax_cannot_hold(jax_worker: Worker, size: int) -> None:
    """Without x64 JAX would make 64-bit values 32-bit and say nothing."""
    with transport.connect(jax_worker.address) as peer:
        for dtype in (np.int64, np.float64, np.uint64, np.complex128):
            with pytest.raises(streamrt.ArrayError, match=r"jax_enable_x64|64"):
                peer.submit("echo", np.ones(size, dtype)).result(WATCHDOG)
        for dtype in (np.int32, np.float32, np.float16, np.bool_, np.complex64):
            back = peer.call("echo", np.ones(size, dtype))
            assert back.dtype == dtype
            assert (back == 1).all()


@pytest.mark.parametrize("size", [3, 5000])
def test_dtypes_that_torch_cannot_hold(torch_worker: Worker, size: int) -> None:
    with transport.connect(torch_worker.address) as peer:
        assert peer.call("kind_of", np.ones(size)).startswith("torch")
        for dtype in (np.float32, np.uint16, np.bool_, np.complex128, np.int64):
            back = peer.call("echo", np.ones(size, dtype))
            assert back.dtype == dtype
        with pytest.raises((streamrt.ArrayError, transport.CodecError)):
            peer.submit("echo", np.ones(size, np.longdouble)).result(WATCHDOG)
        assert (peer.call("echo", np.ones(size)) == 1).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_dtypes_that_plain_numpy_does_not_have(worker: Worker, torch_worker: Worker, dtype: str) -> None:
    """They pass through a NumPy service and come back equal, or are an error; never other values."""
    torch = pytest.importorskip("torch")
    x = (torch.arange(5000) % 7).to(getattr(torch, dtype))
    for process in (worker, torch_worker):
        with transport.connect(process.address) as peer:
            back = peer.call("echo", x)
            assert back.dtype == x.dtype
            assert torch.equal(back.float(), x.float())


# Connections ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "error", "message"),
    [
        ("tcp://192.0.2.7:7700", transport.AuthError, "only loopback"),
        ("tcp://example.com:7700", transport.AuthError, "only loopback"),
        ("tcp://0.0.0.0:7700", transport.AuthError, "every interface"),
        ("tcp://*:7700", transport.AuthError, "every interface"),
        ("tcp://127.0.0.1:0", AddressError, "ready line"),
        ("tcp://127.0.0.1", AddressError, "host and port"),
        ("tcp://127.0.0.1:99999", AddressError, "65535"),
        ("127.0.0.1:7700", AddressError, "tcp://127.0.0.1:7700"),
        ("udp://127.0.0.1:7700", AddressError, "known kind"),
        ("unix://relative/path", AddressError, "absolute"),
        ("", AddressError, "address"),
        (7700, AddressError, "7700 is no address; write tcp://127.0.0.1:7700"),
    ],
)
def test_bad_addresses(address: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        transport.connect(address)
    with pytest.raises(error, match=message):
        transport.group({"one": address})


@pytest.mark.parametrize("scheme", ["tcp", "ipc", "unix"])
def test_nobody_listens(scheme: str, tmp_path: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}" if scheme == "tcp" else f"{scheme}://{tmp_path}/nobody.sock"
    with pytest.raises(transport.PeerLostError) as caught:
        transport.connect(address, timeout=1.0)
    assert type(caught.value) is transport.PeerLostError
    said = str(caught.value)
    assert said.startswith(f"no worker answered at {address} within ")
    assert said.count(address) == 1
    assert "is gone" not in said, "there was no connection"
    assert "is the worker running, and is the address right? Start one with: streamrt-worker " in said
    with pytest.raises(transport.PeerLostError, match=r"//\S+ \('one'\) within"):
        transport.group({"one": address}, timeout=0.5)


@pytest.mark.parametrize("wrong", ["no", 0, 1, [], np.True_, "None"])
def test_copy_is_true_or_false(wrong: Any) -> None:
    """Whatever is neither would be taken for one of them; None is what `call` chooses by itself."""
    x, says = np.ones(3), r"copy=.* is neither True nor False: True takes a snapshot.*False lends"
    with transport.loopback(rpc_service.service) as peer:
        for start in (peer.submit, peer.notify) if wrong == "None" else (peer.submit, peer.call, peer.notify):
            with pytest.raises(transport.LocalProtocolError, match=says):
                start("total", x, copy=None if wrong == "None" else wrong)
            with pytest.raises(transport.LocalProtocolError, match=r"detach=.* is neither True nor False"):
                start("total", x, detach=None if wrong == "None" else wrong)
        assert peer.call("total", x) == peer.call("total", x, copy=True) == peer.call("total", x, copy=False) == 3
    with pytest.raises(transport.LocalProtocolError, match=r"borrow=.* is neither True nor False"):
        transport.Service().function(borrow=wrong)(rpc_service.echo)


class Clock:
    """A clock that goes on by what is slept and by what an attempt takes, and by nothing else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("transport.peer.time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("timeout", [0.01, 0.3, 2.0, 7.77])
def test_it_is_tried_until_the_time_is_over(timeout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    attempts = []

    def refuse(where: str) -> Link:
        attempts.append(clock.now - 1000.0)
        clock.now += 0.001
        raise Unreached("nobody listens there")

    monkeypatch.setattr(schemes, "connect", refuse)
    with pytest.raises(transport.PeerLostError, match=r"within \S+ s: nobody listens there"):
        transport.connect("unix:///nobody", timeout=timeout)
    assert attempts[-1] == pytest.approx(timeout, abs=0.002)
    assert max(b - a for a, b in itertools.pairwise(attempts)) < 0.26


@pytest.mark.parametrize("left", ["little", "enough"])
def test_an_attempt_with_little_time_left_tells_what_was_known_before(
    left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had no time to find out; with time enough the peer that does not answer is the news."""
    clock = Clock(monkeypatch)
    attempts = []

    def reach(where: str) -> Link:
        attempts.append(clock.now)
        if len(attempts) < (3 if left == "enough" else 5):
            clock.now += 0.19 * 5
            raise Unreached("nobody listens there")
        raise transport.DeadlineError("did not answer within 5 s")

    monkeypatch.setattr(schemes, "connect", reach)
    error = transport.DeadlineError if left == "enough" else transport.PeerLostError
    with pytest.raises(error, match="did not answer" if left == "enough" else "nobody listens there"):
        transport.connect("unix:///nobody", timeout=5.0)


@pytest.mark.parametrize("scheme", ["tcp", "ipc", "unix"])
def test_a_worker_that_begins_to_listen_later(scheme: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempts find nobody; the worker listens once one of them has failed for certain."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}" if scheme == "tcp" else f"{scheme}://{tmp_path}/late.sock"
    agent = transport.Agent(name="late", service=rpc_service.service)
    attempts = 0
    connect = schemes.connect

    def counted(where: str) -> Link:
        nonlocal attempts
        attempts += 1
        if attempts == 3:
            accept = functools.partial(agent.add, initiator=False, limits=Limits(same_host=True))
            agent.listen(schemes.listen(address), accept)
        return connect(where)

    monkeypatch.setattr(schemes, "connect", counted)
    try:
        devices = (name for name in ["host:0"])  # each attempt wants them
        with transport.connect(address, timeout=WATCHDOG, devices=devices) as peer:
            assert peer.call("add", 1, y=2) == 3
            assert peer.call("total", streamrt.array(np.ones(3), device="host:0")) == 3
        assert attempts == 3
    finally:
        agent.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"arrays": "bogus"},
        {"devices": ["nonsense:7"]},
        {"devices": "host:0"},
        {"device_map": {"x": "y"}},
        {"default_timeout": -1},
        {"peer_timeout": "5"},
    ],
)
def test_arguments_of_connect_are_read_before_anybody_is_reached(
    wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reached(where: str) -> Link:
        raise AssertionError(f"{where} was tried")

    monkeypatch.setattr(schemes, "connect", reached)
    with pytest.raises((transport.LocalProtocolError, transport.DeviceMapError)):
        transport.connect("tcp://127.0.0.1:9", **wrong)


@pytest.mark.parametrize("devices", ["cuda:0", "host:0", 0, streamrt.open_device("host:1")], ids=str)
def test_one_device_where_a_list_is_wanted(devices: Any) -> None:
    """The letters of a name are no devices."""
    remedy = re.escape(f"devices={devices!r} is no list of devices; write devices=['{devices}']")
    for take in (
        lambda: transport.local_workers(1, devices=devices),
        lambda: transport.Agent(devices=devices),
        lambda: transport.connect("tcp://127.0.0.1:9", devices=devices),
        lambda: transport.loopback(rpc_service.service, devices=devices),
        lambda: transport.group({"one": "tcp://127.0.0.1:9"}, devices=devices),
        lambda: streamrt.DeviceFuture(devices=devices),
    ):
        with pytest.raises((streamrt.PlacementError, transport.DeviceMapError), match=remedy):
            take()


@pytest.mark.skipif(streamrt.cuda_available(), reason="is about a host without a GPU")
def test_without_a_gpu_the_host_backend_is_named() -> None:
    for take in (
        lambda: streamrt.open_device("cuda:0"),
        lambda: streamrt.empty(3, device="cuda:0"),
        lambda: streamrt.Stream("cuda:0"),
        lambda: transport.local_workers(1, devices=["cuda:0"]),
        lambda: transport.Agent(devices=["cuda:0"]),
        lambda: transport.pipeline(transport.stage(rpc_service.echo, device="cuda:0")).__enter__(),
    ):
        with pytest.raises(streamrt.UnavailableError, match="'host:0'"):
            take()


def test_without_cupy_the_host_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(streamrt.UnavailableError, match=r"install streamrt\[cuda12\] or .*, or use 'host:0'"):
        create_backend()


def test_devices_where_a_number_of_workers_is_wanted() -> None:
    with pytest.raises(transport.LocalProtocolError, match=r"'host:0' workers: give a number; devices go by name"):
        transport.local_workers("host:0")  # type: ignore[arg-type]
    with pytest.raises(transport.LocalProtocolError, match="True workers: give a number"):
        transport.local_workers(True)
    with pytest.raises(transport.LocalProtocolError, match=r"devices=\[\] names none; leave it out"):
        transport.local_workers(1, devices=[])


def test_a_list_where_a_stage_is_wanted() -> None:
    def first(x: Any) -> Any:
        return x

    for wrong in ([first, first], (first,)):
        with pytest.raises(TypeError, match=r"give each stage by itself: pipeline\(first, second\)"):
            transport.pipeline(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a stage is a function, or the name of a peer's; this is a int"):
        transport.stage(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout", ["5", [1], None], ids=repr)
def test_ends_with_a_timeout_that_is_no_number_end_nothing(worker: Worker, timeout: Any) -> None:
    with transport.group({"one": worker.address}) as group:
        agent = transport.Agent(name="to be closed")
        for close in (group.close, group["one"].close, agent.close):
            with pytest.raises(TypeError, match=r"^timeout=.* is no number; give a number of seconds"):
                close(timeout)
        assert group["one"].call("add", 1) == 2
        agent.close()


def test_workers_are_not_ended_by_a_timeout_that_is_no_number() -> None:
    with transport.local_workers(1) as workers:
        for close in (workers.close, workers[0].close):
            with pytest.raises(TypeError, match=r"^timeout='5' is no number; give a number of seconds"):
                close("5")  # type: ignore[arg-type]
        assert workers[0].call(rpc_service.add, 1) == 2


def wrong_timeouts() -> list[Any]:
    return ["10", 0, -1.0, float("nan"), [1], pytest.param(10**400, id="an integer beyond all floats")]


@pytest.mark.parametrize("timeout", wrong_timeouts(), ids=repr)
def test_timeouts_that_are_no_seconds(worker: Worker, peer: transport.Peer, timeout: Any) -> None:
    before = peer.statistics().messages_out
    for call in (peer.call, peer.submit):
        with pytest.raises(transport.LocalProtocolError, match=r"^timeout=.*seconds above 0, or None for no deadline"):
            call("add", 1, timeout=timeout)
    assert peer.statistics().messages_out == before, "something was sent"
    for name in ("timeout", "default_timeout", "peer_timeout"):
        options: dict[str, Any] = {name: timeout}
        with pytest.raises(transport.LocalProtocolError, match=rf"^{name}=.*seconds above 0"):
            transport.connect(worker.address, **options)
    with pytest.raises(transport.LocalProtocolError, match="seconds above 0"):
        transport.local_workers(1, timeout=timeout)
    with pytest.raises(transport.LocalProtocolError, match="seconds above 0"):
        transport.local_workers(1, default_timeout=timeout)
    with pytest.raises(transport.LocalProtocolError, match="seconds above 0"):
        transport.pipeline(transport.stage("add", peer=peer), timeout=timeout)


@pytest.mark.parametrize("timeout", [math.inf, 1e300, 1e12, 10**15])
def test_timeouts_without_end(worker: Worker, timeout: float) -> None:
    """Longer than any wait of the system may be: they end when what they wait for is there, and only then."""
    name = uuid.uuid4().hex
    with transport.connect(worker.address, timeout=timeout, default_timeout=timeout) as peer:
        waiting = peer.submit("bump_behind", name, name, timeout=timeout)
        opened = peer.submit("open_gate", name)
        waiting.result(timeout)
        opened.result(timeout)
        peer.call("add", 1, timeout=timeout)
        peer.close(timeout)
    for wait in ("result", "exception", "wait"):
        future: streamrt.DeviceFuture[int] = streamrt.DeviceFuture()
        threading.Timer(0.05, future.set_result, [1]).start()
        getattr(future, wait)(timeout)


def test_a_connection_takes_as_long_as_it_was_given() -> None:
    """Longer than the handshake's own limit, which is for who does not say how long."""
    agent = transport.Agent(name="patient")
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = zmq_link.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        peer = open_peer(link, name="slow", timeout=60.0, agent=agent, wait=False)
        due = peer._driver.next_timeout()
        assert due is not None
        assert due - agent.clock() > 50
        peer.abort()
    agent.close()


def test_something_else_listens() -> None:
    """A server that takes the connection and says nothing that we know: an error within the time given."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(transport.DeadlineError, match=r"did not answer within 0\.5 s"):
            transport.connect(f"tcp://127.0.0.1:{port}", timeout=0.5)

    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
            connection.recv(1 << 16)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        with pytest.raises((transport.PeerLostError, transport.DeadlineError)):
            transport.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}", timeout=3.0)
        thread.join(WATCHDOG)


def test_another_version(worker: Worker, peer: transport.Peer) -> None:
    """Both sides say which versions they speak; the worker goes on serving others."""
    agent = transport.Agent(name="from the future")
    driver = agent.add(
        zmq_link.connect(worker.address), initiator=True, limits=Limits(same_host=True, versions=(7, 9)), name="old"
    )
    with pytest.raises(transport.VersionError, match=r"'old'.*7 to 9.*1"):
        await_ready(driver, WATCHDOG)
    agent.close()
    assert peer.call("add", 1) == 2


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\x00" * 64,
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(range(256)) * 300,
        b"\xff" + b"\0" * 8 + b"\x01\x7f" + b"\0" * 53,
    ],
    ids=["nothing", "zeros", "http", "noise", "half a greeting"],
)
def test_garbage_on_the_workers_port(worker: Worker, peer: transport.Peer, garbage: bytes) -> None:
    with socket.create_connection(("127.0.0.1", worker.port), timeout=WATCHDOG) as sock:
        sock.sendall(garbage)
        assert peer.call("add", 1) == 2
    assert peer.call("add", 2) == 3


def test_messages_that_are_none(worker: Worker, peer: transport.Peer) -> None:
    """Well-formed frames with nonsense in them end that connection, and no other."""
    for frames in ([b"x"], [b""], [b"\x93\x01\x02\x03", b"y" * 100_000], [b"\xdd\xff\xff\xff\xff"]):
        link = zmq_link.connect(worker.address)
        link.send(frames)
        assert peer.call("add", 1) == 2
        link.close()
    assert peer.call("add", 2) == 3


def test_options_that_cannot_be(worker: Worker) -> None:
    with pytest.raises(transport.LocalProtocolError, match="arrays='pandas'"):
        transport.connect(worker.address, arrays="pandas")
    with pytest.raises(transport.LocalProtocolError, match="peer_timeout"):
        transport.connect(worker.address, peer_timeout=-1.0)
    with pytest.raises(transport.DeviceMapError, match="banana"):
        transport.connect(worker.address, devices=["banana"])
    with pytest.raises(transport.LocalProtocolError, match="arrays"):
        transport.Service(arrays="pandas")
    with pytest.raises(transport.LocalProtocolError, match="already"):
        rpc_service.service.function(rpc_service.add)
    with pytest.raises(transport.DeviceMapError, match=r"device_map=3 is no map; write device_map="):
        transport.connect(worker.address, device_map=3)  # type: ignore[arg-type]
    with pytest.raises(transport.LocalProtocolError, match="3 is no class"):
        transport.register_type(3)  # type: ignore[type-var]
    with pytest.raises(transport.LocalProtocolError, match="ndarray is sent as it is"):
        transport.register_type(np.ndarray, "nd", list, np.asarray)
    with pytest.raises(transport.LocalProtocolError, match="name=5 is no text"):
        transport.Service().function(name=5)(rpc_service.add)  # type: ignore[call-overload]
    with pytest.raises(transport.DeviceMapError, match="no list of devices"):
        transport.group({"a": "tcp://127.0.0.1:1"}, devices="host:0")
    with pytest.raises(transport.LocalProtocolError, match="device_maps=0 is no map"):
        transport.group({}, device_maps=0)  # type: ignore[arg-type]
    for maps in ({"addresses": 3}, {"addresses": {}, "device_maps": 3}):
        with pytest.raises(transport.LocalProtocolError, match=r"=3 is no map; write \{name"):
            transport.group(**maps)  # type: ignore[arg-type]
    with pytest.raises(transport.LocalProtocolError, match="arrays='pandas'"):
        transport.stage(rpc_service.add, arrays="pandas")


def test_what_is_no_service() -> None:
    makers: tuple[Callable[..., Any], ...] = (
        functools.partial(transport.local_workers, 1),
        functools.partial(transport.connect, "tcp://127.0.0.1:1", timeout=0.1),
    )
    with pytest.raises(transport.LocalProtocolError, match="a loopback needs a service"):
        transport.loopback(None)  # type: ignore[arg-type]
    for make in makers:
        with pytest.raises(transport.LocalProtocolError, match=r"service=3 is no service: make a transport.Service"):
            make(service=3)
    with pytest.raises(transport.LocalProtocolError, match="service=3 is no service"):
        transport.loopback(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("threads", [0, "2", 1.5, True])
def test_a_number_of_threads_that_cannot_be(threads: Any) -> None:
    for make in (transport.local_workers, lambda count, threads: transport.Agent(threads=threads)):
        with pytest.raises(transport.LocalProtocolError, match=rf"^threads={threads!r}: give a whole number, 1 at"):
            make(1, threads=threads)


def test_a_kind_of_array_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be found out by the first array that a worker is sent, or sends."""
    monkeypatch.setitem(sys.modules, "jax", None)
    says = "^jax is not installed here; install it to use its arrays"
    with pytest.raises(streamrt.UnavailableError, match=says):
        transport.local_workers(1, arrays="jax")
    with pytest.raises(streamrt.UnavailableError, match=says):
        transport.connect("tcp://127.0.0.1:1", arrays="jax", timeout=0.1)
    service = transport.Service(arrays="jax")  # a caller may import the module of a service that it cannot serve
    service.function(rpc_service.add)
    with pytest.raises(streamrt.UnavailableError, match=says):
        service.check_served("host:0")


def test_a_kind_of_array_that_the_workers_device_does_not_have() -> None:
    with pytest.raises(transport.LocalProtocolError, match=r"arrays='cupy' .*: cupy has no arrays on host:0"):
        transport.local_workers(1, arrays="cupy", devices=["host:0"])


def test_stages_that_cannot_be(worker: Worker) -> None:
    with pytest.raises(streamrt.PlacementError, match="'zz' is no device"):
        transport.stage(rpc_service.add, device="zz")
    with transport.connect(worker.address) as peer:
        for wrong in ({"device": "host:1"}, {"arrays": "torch"}):
            with pytest.raises(ValueError, match="for a worker that the pipeline starts; the peer has its own"):
                transport.stage("add", peer=peer, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("variable", "value"),
    [("STREAMRT_DEVICE", "zz"), *(("STREAMRT_HOST_DEVICES", value) for value in ("a", "0", "-1", "1.5"))],
)
def test_an_environment_that_cannot_be(variable: str, value: str) -> None:
    program = "import streamrt; streamrt.array([1.0], device='auto')"
    environment = child_environment() | {variable: value}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=WATCHDOG, check=False
    )
    assert f"PlacementError: {variable}='{value}'" in done.stderr
