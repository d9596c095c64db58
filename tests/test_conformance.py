"""Conformance: the scenarios of the RPC suite that PyTorch runs against its TensorPipe agent, as rows C1 to C95.

The rows carry the numbers of that suite's scenarios; those that need remote references, async functions or a trace are
not here yet.  On the host backend ``cuda:i`` reads ``host:i``.  What the rows run against:

- 5 makes no connection; 1 to 4, 6 and 69 are about a map that is refused before a call can be made;
- 25 to 32, 34, 37 and 70 call the process itself (`transport.loopback`), as the originals do;
- 71 to 82 are about futures, with no RPC (`future_rows`);
- all others call worker processes.

Rows 47 to 50, 68, 75 to 81 run in two forms, with the user's work written as plain code and as functions that are
`launch`ed, and pass only if both do.  The rows of user streams and views are shown to fail when the wait that they are
about is dropped in the worker.  The last test prints ``conformance: N/M``.
"""

from __future__ import annotations

import collections
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import conformance_service
import future_rows
import numpy as np
import pytest
from rpc_processes import FORCED_TO_UCX

import streamrt
import transport
from streamrt.device import backend_of
from transport.launch.environment import child_environment

HERE = Path(__file__).parent


@dataclass
class Bench:
    """What a row works with: the kind of device, and workers that serve `conformance_service`.

    `form` says how the user's work is written, and `offset` is added to the values, so that no memory has them yet.
    """

    kind: str
    addresses: list[str] = field(default_factory=list)
    torch_address: str = ""
    form: str = "launched"
    offset: float = 0.0
    link: str = ""

    @property
    def label(self) -> str:
        return f"{self.kind} over {self.link}" if self.link else self.kind

    def name(self, place: int | str) -> str:
        return str(place) if isinstance(place, str) else f"{self.kind}:{place}"

    def map(self, entries: dict[Any, Any]) -> dict[str, str]:
        return {self.name(local): self.name(remote) for local, remote in entries.items()}

    def connect(self, entries: dict[Any, Any] | None, worker: int = 0, **options: Any) -> transport.Peer:
        chosen = None if entries is None else self.map(entries)
        return transport.connect(self.addresses[worker], device_map=chosen, name=f"worker{worker}", **options)

    def loopback(self, entries: dict[Any, Any]) -> transport.Peer:
        return transport.loopback(conformance_service.service, device_map=self.map(entries))

    def ones(self, place: int | str, shape: Any = (20, 20), value: float = 1.0) -> Any:
        return streamrt.array(np.full(shape, value, np.float32), device=self.name(place))

    @property
    def count(self) -> int:
        return backend_of(self.kind).device_count()

    def check(self, array: Any, place: int | str, value: Any) -> None:
        assert str(streamrt.device_of(array)) == self.name(place)
        np.testing.assert_array_equal(numpy_of(array), np.broadcast_to(np.float32(value), numpy_of(array).shape))


def numpy_of(array: Any) -> np.ndarray[Any, Any]:
    return array.get() if hasattr(array, "get") else np.asarray(array)


Row = Callable[[Bench], None]
ROWS: dict[int, tuple[str, int, Row]] = {}
FORMS = ("launched", "plain")
IN_TWO_FORMS = {47, 48, 49, 50, 68, *range(75, 82)}
PASSED: collections.defaultdict[str, set[tuple[int, str]]] = collections.defaultdict(set)  # by kind and link


def row(number: int, name: str, devices: int) -> Callable[[Row], Row]:
    """Registers one row; `devices` is how many GPUs it needs."""

    def register(function: Row) -> Row:
        assert number not in ROWS, f"row {number} is there already"
        ROWS[number] = (name, devices, function)
        return function

    return register


# A. Device-map validation ---------------------------------------------------------------------------------------------


@row(1, "device_maps_wrong_worker_name", 2)
def _(bench: Bench) -> None:
    with pytest.raises(ValueError, match="nobody"):
        transport.group({"w1": bench.addresses[0]}, device_maps={"nobody": bench.map({0: 1})})


@row(2, "device_maps_invalid_max_local_device", 1)
def _(bench: Bench) -> None:
    with pytest.raises(ValueError, match="source devices with invalid indices"):
        transport.group({"w1": bench.addresses[0]}, device_maps={"w1": bench.map({bench.count: 0})})


@row(3, "device_maps_invalid_max_remote_device", 1)
def _(bench: Bench) -> None:
    with pytest.raises(ValueError, match="target devices with invalid indices"):
        transport.group({"w1": bench.addresses[0]}, device_maps={"w1": bench.map({0: bench.count})})


@row(4, "device_maps_many_to_one", 2)
def _(bench: Bench) -> None:
    with pytest.raises(ValueError, match="duplicated target devices"):
        bench.connect({1: 0, 0: 0})
    with pytest.raises(ValueError, match="duplicated target devices"):
        transport.merge_device_maps(bench.map({1: 0}), bench.map({0: 0}))


@row(5, "device_maps_one_to_many", 2)
def _(bench: Bench) -> None:
    with pytest.raises(ValueError, match="one-to-one"):
        transport.merge_device_maps(bench.map({0: 1}), bench.map({0: 0}))


@row(6, "device_maps_invalid_min_device", 1)
def _(bench: Bench) -> None:
    for entries in ({-1: 0}, {0: -1}):
        with pytest.raises(RuntimeError, match="negative"):
            transport.connect(bench.addresses[0], device_map=entries)


# B. Placement, one call add(x, y) -------------------------------------------------------------------------------------


def placement(entries: dict[Any, Any], x: int | str, y: int | str, z: int | str, *, to_self: bool = False) -> Row:
    """x and y are on the caller's devices, z on the callee's; the result is on the caller's device that maps to z."""
    targets = {"cpu": "cpu", **entries} if "cpu" not in entries.values() else dict(entries)
    back = {remote: local for local, remote in targets.items()}

    def run(bench: Bench) -> None:
        with bench.loopback(entries) if to_self else bench.connect(entries) as peer:
            result = peer.call(
                "add",
                bench.ones(x, value=1.0),
                bench.ones(y, value=2.0),
                bench.name(targets[x]),
                bench.name(targets[y]),
                bench.name(z),
            )
            bench.check(result, back[z], 3.0)

    return run


IDENTITY, SWAPPED = {0: 0, 1: 1}, {0: 1, 1: 0}
TRIPLES = ((0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1))

row(7, "device_maps_gpu", 2)(placement({0: 1, 1: 0}, 0, 0, 0))
row(8, "device_map_cpu", 0)(placement({"cpu": "cpu"}, "cpu", "cpu", "cpu"))
row(9, "device_map_cpu_to_gpu_default", 1)(placement({"cpu": 0}, "cpu", "cpu", 0))
row(10, "device_map_cpu_to_gpu_non_default", 2)(placement({"cpu": 1}, "cpu", "cpu", 1))
row(11, "device_map_gpu_to_cpu_default", 1)(placement({0: "cpu"}, 0, 0, "cpu"))
row(12, "device_map_gpu_to_cpu_non_default", 2)(placement({1: "cpu"}, 1, 1, "cpu"))
row(13, "device_map_gpu_default", 2)(placement({0: 0}, 0, 0, 0))
row(14, "device_map_gpu_non_default", 2)(placement({1: 1}, 1, 1, 1))
row(15, "device_map_gpu_default_to_non_default", 2)(placement({0: 1}, 0, 0, 1))
row(16, "device_map_gpu_non_default_to_default", 2)(placement({1: 0}, 1, 1, 0))
for offset, (entries, to_self) in enumerate(((IDENTITY, False), (SWAPPED, False), (IDENTITY, True), (SWAPPED, True))):
    for number, triple in enumerate(TRIPLES):
        label = f"device_map_gpu_mixed_{'self_' if to_self else ''}{(offset % 2) * 4 + number + 1}"
        row(17 + offset * 4 + number, label, 2)(placement(entries, *triple, to_self=to_self))


# C. Several devices in one message ------------------------------------------------------------------------------------


def multi_gpu(bench: Bench, peer: transport.Peer) -> None:
    x, y = bench.ones(0, value=5.0), bench.ones(1, value=2.0)
    total, difference = peer.call("two", x, y, bench.name(1), bench.name(0))
    bench.check(total, 0, 7.0)
    bench.check(difference, 1, 3.0)


@row(33, "device_maps_multi_gpu", 2)
def _(bench: Bench) -> None:
    merged = transport.merge_device_maps(bench.map({0: 1}), bench.map({1: 0}))
    with transport.connect(bench.addresses[0], device_map=merged) as peer:
        multi_gpu(bench, peer)


@row(34, "device_maps_multi_gpu_self", 2)
def _(bench: Bench) -> None:
    with bench.loopback({0: 1, 1: 0}) as peer:
        multi_gpu(bench, peer)


@row(35, "device_maps_in_options", 2)
def _(bench: Bench) -> None:
    maps = {"w1": bench.map({0: 1, 1: 0})}
    with transport.group({"w1": bench.addresses[0]}, device_maps=maps) as group:
        multi_gpu(bench, group["w1"])


def return_to_gpu(bench: Bench, peer: transport.Peer) -> None:
    x, y = bench.ones("cpu", value=6.0), bench.ones("cpu", value=2.0)
    results = peer.call("four", x, y, [bench.name(index) for index in range(4)])
    for result, place, value in zip(results, (3, 0, 1, 2), (8.0, 4.0, 12.0, 3.0), strict=True):
        bench.check(result, place, value)


RING = {0: 1, 1: 2, 2: 3, 3: 0}


@row(36, "device_maps_return_to_gpu", 4)
def _(bench: Bench) -> None:
    with bench.connect(RING) as peer:
        return_to_gpu(bench, peer)


@row(37, "device_maps_return_to_gpu_self", 4)
def _(bench: Bench) -> None:
    with bench.loopback(RING) as peer:
        return_to_gpu(bench, peer)


# D. Missing maps and errors -------------------------------------------------------------------------------------------


def cpu_call_works(bench: Bench, peer: transport.Peer) -> None:
    result = peer.call("add", bench.ones("cpu"), bench.ones("cpu"), "cpu", "cpu", "cpu", timeout=30)
    bench.check(result, "cpu", 2.0)


def refused_request(bench: Bench, peer: transport.Peer) -> None:
    with pytest.raises(RuntimeError, match=r"set device_map=") as caught:
        peer.call("same", bench.ones(0))
    assert isinstance(caught.value, transport.DeviceMapError)
    assert not isinstance(caught.value, TimeoutError)


def refused_reply(bench: Bench, peer: transport.Peer) -> None:
    with pytest.raises(RuntimeError, match="Response device mapping is not available") as caught:
        peer.call("make", bench.name(0), 1.0)
    assert isinstance(caught.value, transport.DeviceMapError)
    assert not isinstance(caught.value, TimeoutError)


def every_thread_is_free(peer: transport.Peer) -> None:
    """As many calls as the worker has threads run at once: none is leaked or blocked."""
    name = uuid.uuid4().hex
    futures = [peer.submit("meet", name, THREADS) for _ in range(THREADS)]
    assert [future.result() for future in futures] == [THREADS] * THREADS


RPC_TIMEOUT = 60.0  # seconds; the originals' default


def refused(how: Callable[[Bench, transport.Peer], None], times: int) -> Row:
    def run(bench: Bench) -> None:
        with bench.connect({}, default_timeout=RPC_TIMEOUT) as peer:
            for _ in range(times):
                how(bench, peer)
            cpu_call_works(bench, peer)
            if times > 1:
                every_thread_is_free(peer)

    return run


THREADS = 4  # of the workers below
row(38, "device_maps_missing_config", 1)(refused(refused_request, 1))
row(40, "device_maps_missing_config_loop", 1)(refused(refused_request, THREADS + 5))
row(41, "device_maps_missing_config_response", 1)(refused(refused_reply, 1))
row(42, "device_maps_missing_config_response_loop", 1)(refused(refused_reply, THREADS + 5))


@row(39, "device_maps_missing_config_not_timeout", 1)
def _(bench: Bench) -> None:
    """The error does not come from a timeout: all of it, with the shutdown, ends before one could.  A watchdog."""
    started = time.monotonic()
    with bench.connect({}, default_timeout=RPC_TIMEOUT) as peer:
        refused_request(bench, peer)
    assert time.monotonic() - started < RPC_TIMEOUT


@row(45, "device_mismatch", 1)
def _(bench: Bench) -> None:
    with transport.connect(bench.torch_address, device_map=bench.map({0: 0})) as peer:
        with pytest.raises(RuntimeError, match="device") as caught:
            peer.call("mismatch", bench.ones(0))
        assert isinstance(caught.value, transport.RemoteError)
        assert "mismatch" in caught.value.traceback_text


# E. User streams ------------------------------------------------------------------------------------------------------


@row(47, "custom_stream", 2)
def _(bench: Bench) -> None:
    value = bench.offset + 3
    with bench.connect({0: 1}) as peer:
        bench.check(peer.call("double_late", bench.ones(0, value=value), bench.form), 0, 2 * value)


@row(48, "custom_stream_multi", 2)
def _(bench: Bench) -> None:
    values = [bench.offset + number for number in range(20)]
    with bench.connect({0: 1}) as peer:
        futures = [peer.submit("double_late", bench.ones(0, value=value), bench.form) for value in values]
        for value, future in zip(values, futures, strict=True):
            bench.check(future.result(), 0, 2 * value)


def nested(bench: Bench, count: int) -> None:
    values = [bench.offset + number + 1 for number in range(count)]
    with bench.connect({0: 1, 1: 0}) as peer:
        futures = [
            peer.submit(
                "nested",
                *(bench.ones(0, value=factor * value) for factor in (1, 2, 3)),
                bench.form,
                bench.addresses[1],
                bench.map({0: 1, 1: 0}),
            )
            for value in values
        ]
        for value, future in zip(values, futures, strict=True):
            bench.check(future.result(), 0, 6 * value)


row(49, "custom_stream_nested", 2)(lambda bench: nested(bench, 1))
row(50, "custom_stream_nested_multi", 2)(lambda bench: nested(bench, 5))


# G. Views, the devices option -----------------------------------------------------------------------------------------


@row(68, "tensor_view_as_return_value", 1)
def _(bench: Bench) -> None:
    values = [bench.offset + number for number in range(5)]
    with bench.connect({0: 0}) as peer:
        futures = [peer.submit("first_piece", bench.ones(0, (100, 200), value), bench.form) for value in values]
        for value, future in zip(values, futures, strict=True):
            result = future.result()
            assert result.shape == (100, 200)
            bench.check(result, 0, value)


@row(69, "devices_option_mismatch", 2)
def _(bench: Bench) -> None:
    with pytest.raises(ValueError, match="unexpected source devices"):
        bench.connect({0: 0}, devices=[bench.name(1)])


@row(70, "devices_option_mismatch_reverse", 2)
def _(bench: Bench) -> None:
    """The peer serves device 0 alone (its own devices option), and the map aims at its device 1."""
    limited = transport.Agent(name="limited", service=conformance_service.service, devices=[bench.name(0)])
    try:
        with pytest.raises(ValueError, match="unexpected target devices"):
            transport.loopback(conformance_service.service, device_map=bench.map({0: 1}), serving=limited)
    finally:
        limited.close(1.0)


# H. Futures, no RPC ---------------------------------------------------------------------------------------------------

for number, (label, devices, function) in future_rows.ROWS.items():
    row(number, label, devices)(lambda bench, function=function: function(bench.kind, bench.form))


# The suite ------------------------------------------------------------------------------------------------------------


class WorkerProcess:
    """A ``streamrt-worker`` of its own, ended with the fixture."""

    def __init__(self, service: str, kind: str, listen: str) -> None:
        count = backend_of(kind).device_count()
        devices = [part for index in range(count) for part in ("--device", f"{kind}:{index}")]
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "transport.worker",
                f"conformance_service:{service}",
                "--threads",
                str(THREADS),
                "--listen",
                listen,
                *devices,
            ],
            stdout=subprocess.PIPE,
            text=True,
            cwd=HERE,
            env=child_environment(),
        )
        assert self.process.stdout is not None
        with self.process.stdout as output:
            line = output.readline()
        found = re.search(r"listen=(\S+)", line)
        assert found is not None, f"the worker said {line!r}"
        self.address = found[1]

    def stop(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@pytest.fixture(
    scope="module",
    params=["host", pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cuda-unix", marks=pytest.mark.gpu)],
)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Over TCP arrays are staged; over AF_UNIX those of GPUs go by CUDA IPC."""
    kind, _, link = str(request.param).partition("-")
    folder = tmp_path_factory.mktemp("links")
    listen = [f"unix://{folder}/{number}" if link else "tcp://127.0.0.1:0" for number in range(3)]
    workers = [WorkerProcess("service", kind, listen[number]) for number in range(2)]
    torch_worker = WorkerProcess("torch_service", kind, listen[2])
    yield Bench(kind, [worker.address for worker in workers], torch_worker.address, link=link)
    codes = [worker.stop() for worker in (*workers, torch_worker)]
    assert codes == [0, 0, 0], "a worker did not drain cleanly on SIGTERM"


def in_form(bench: Bench, number: int, form: str, offset: float = 0.0) -> Bench:
    name, devices, _ = ROWS[number]
    if bench.kind == "cuda" and bench.count < devices:
        pytest.skip(f"row {number} ({name}) needs {devices} GPUs")
    return replace(bench, form=form, offset=offset)


def forms_of(number: int) -> tuple[str, ...]:
    return FORMS if number in IN_TWO_FORMS else FORMS[:1]


CASES = [(number, form) for number in sorted(ROWS) for form in forms_of(number)]


@pytest.mark.parametrize(
    ("number", "form"),
    [pytest.param(*case, id=f"c{case[0]}" + ("-plain" if case[1] == "plain" else "")) for case in CASES],
)
def test_row(bench: Bench, number: int, form: str) -> None:
    """One row of the table; the id names it."""
    ROWS[number][2](in_form(bench, number, form))
    PASSED[bench.label].add((number, form))


IN_STREAM_ORDER = os.environ.get("STREAMRT_ORDER") == "stream"
JOIN, SEND, SHARE, UCX = conformance_service.JOIN_EDGE, "send.wait", "share.ready", "ucx.send"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("number", "edge"), [(47, JOIN), (48, JOIN), (49, JOIN), (50, JOIN), (68, SEND)])
def test_without_the_wait_in_the_worker_the_row_sees_wrong_bytes(
    bench: Bench, number: int, edge: str, form: str
) -> None:
    offset = 1000.0 * number + 500 * FORMS.index(form)
    ROWS[number][2](in_form(bench, number, form, offset))  # also loads kernels, which would wait for a closed latch
    with bench.connect({}) as control:
        sending = UCX if FORCED_TO_UCX else SHARE if bench.link and not IN_STREAM_ORDER else SEND
        control.call("drop", sending if edge == SEND else edge, 1.0)
        try:
            with pytest.raises(AssertionError, match="Arrays are not equal"):
                ROWS[number][2](in_form(bench, number, form, offset + 250))
        finally:
            control.call("restore")


def test_report(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the count, and fails if a row that could run did not pass (when all were asked for)."""
    possible = {number for number, (_, devices, _) in ROWS.items() if bench.kind == "host" or devices <= bench.count}
    passed = {number for number in possible if all((number, form) in PASSED[bench.label] for form in forms_of(number))}
    with capsys.disabled():
        sys.stdout.write(f"\nconformance: {len(passed)}/{len(possible)} ({bench.label})\n")
    if PASSED[bench.label]:
        assert passed == possible
