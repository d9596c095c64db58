"""Which device of the peer an array goes to, and where a result comes back to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rpc_processes import WATCHDOG

import streamrt
import transport
from streamrt.device import CPU, Device, parse_device
from transport.device_map import DeviceMap, parse_map
from transport.errors import DeviceMapError

HOST = [Device("host", index) for index in range(4)]


def made(local: list[Device], remote: list[Device], entries: dict[str, str] | None = None) -> DeviceMap:
    parsed = None if entries is None else parse_map(entries, local_kind="host", remote_kind="host")
    return DeviceMap(parsed, local=local, remote=remote, peer="worker")


def test_each_device_goes_to_an_only_one() -> None:
    forward = made(HOST, [HOST[1]]).forward
    assert forward == {**dict.fromkeys(HOST, HOST[1]), CPU: CPU}


def test_else_it_goes_to_the_one_with_its_index() -> None:
    forward = made(HOST, HOST[1:3])
    assert forward.forward == {HOST[1]: HOST[1], HOST[2]: HOST[2], CPU: CPU}
    with pytest.raises(DeviceMapError, match=r"host:0 has no device on 'worker': set device_map=\{'host:0'"):
        forward.request(HOST[0])


def test_a_device_that_is_left_out_is_none_to_map() -> None:
    chosen = DeviceMap(None, local=HOST[:2], remote=HOST, peer="worker", allowed=HOST[:2])
    with pytest.raises(DeviceMapError, match="host:2 is left out by devices= of the connection to 'worker'"):
        chosen.request(HOST[2])


def test_ordinary_memory_stays_what_it_is_also_where_devices_name_it() -> None:
    for remote in ([HOST[1]], HOST, [CPU, HOST[1]]):
        chosen = DeviceMap(None, local=[CPU, HOST[1]], remote=remote, peer="worker", allowed=[CPU, HOST[1]])
        assert chosen.forward == {HOST[1]: HOST[1], CPU: CPU}
    mapped = made(HOST[:1], HOST, {"host:0": "cpu"})
    with pytest.raises(DeviceMapError, match="cpu has no device on 'worker': set device_map="):
        DeviceMap(mapped.forward, local=HOST[:1], remote=HOST, peer="worker", allowed=HOST[:1]).request(CPU)


def test_a_device_that_a_worker_serves_twice_is_one() -> None:
    assert made(HOST[:2], [HOST[1], HOST[1]]).forward == {HOST[0]: HOST[1], HOST[1]: HOST[1], CPU: CPU}


def test_a_result_of_no_array_goes_to_the_first_of_devices() -> None:
    callee = made([HOST[3], HOST[1]], [HOST[0]]).reversed("caller")
    assert callee.replying([])(HOST[0]) == HOST[3]


def test_a_result_comes_back_to_where_the_first_array_was() -> None:
    callee = made(HOST, [HOST[1]]).reversed("caller")
    assert callee.replying(["cpu", "host:3", "host:2"])(HOST[1]) == HOST[3]
    assert callee.replying(["cpu"])(HOST[1]) == HOST[0]
    assert callee.replying([])(CPU) == CPU
    with pytest.raises(DeviceMapError, match="no device of the caller 'caller' maps there"):
        callee.replying(["host:1"])(HOST[2])


def test_a_caller_cannot_have_a_result_sent_where_no_array_of_its_goes() -> None:
    """What a request says of its own devices is from the wire, and counts only where the map has it."""
    callee = made(HOST[:2], [HOST[1]]).reversed("caller")
    assert callee.replying(["host:3", "host:1"])(HOST[1]) == HOST[1]
    assert callee.replying(["host:3"])(HOST[1]) == HOST[0]


def test_a_map_that_is_given_is_one_to_one() -> None:
    callee = made(HOST, HOST, {"host:0": "host:2", "host:2": "host:0"}).reversed("caller")
    assert callee.replying(["host:2"])(HOST[2]) == HOST[0]
    with pytest.raises(DeviceMapError, match="duplicated target devices: host:1"):
        made(HOST, HOST, {"host:0": "host:1", "host:2": "host:1"})


# with worker processes ------------------------------------------------------------------------------------------------


def added(*arrays: Any) -> list[Any]:
    return [array + number for number, array in enumerate(arrays, 1)]


def ones(count: int) -> Any:
    return np.ones(count)


def on(device: str, count: int, value: float) -> Any:
    return streamrt.array(np.full(count, value), device=device)


def device_of(array: Any) -> Device:
    return streamrt.device_of(array)


@pytest.fixture(scope="module", params=["host", "stream"])
def worker(request: pytest.FixtureRequest) -> Any:
    with transport.local_workers(1, devices=["host:1"], order=request.param) as (started,):
        yield started


@pytest.mark.parametrize("count", [4, 5_000, 300_000], ids=["in the body", "in one buffer", "apart"])
def test_arrays_of_all_devices_go_to_a_worker_with_one(worker: Any, count: int) -> None:
    devices = ["host:2", "host:0", "host:1", "host:2"]
    given = [on(device, count, float(number)) for number, device in enumerate(devices)]
    results = worker.call(added, *given, timeout=WATCHDOG)
    for number, result in enumerate(results):
        assert np.array_equal(np.asarray(result), np.full(count, 2.0 * number + 1))
        assert device_of(result) == parse_device("host:2")


@pytest.mark.parametrize("device", ["host:0", "host:1", "host:7"])
def test_an_array_comes_back_to_its_own_device(worker: Any, device: str) -> None:
    for count in (4, 300_000):
        (result,) = worker.call(added, on(device, count, 1.0), timeout=WATCHDOG)
        assert np.array_equal(np.asarray(result), np.full(count, 2.0))
        assert device_of(result) == parse_device(device)


def test_what_is_made_of_no_array_comes_back_as_ordinary_memory(worker: Any) -> None:
    assert device_of(worker.call(ones, 4, timeout=WATCHDOG)) == CPU


def test_a_peer_is_not_given_a_device_that_is_left_out() -> None:
    """`devices=` counts for what the worker's functions send here, too (its map may say what it likes)."""
    service = transport.Service()
    service.function(name="echo")(lambda x: x)
    with transport.loopback(service, devices=["host:0"]) as peer:
        moving = peer._driver.transfers
        for reply in (True, False):
            moving._check_target(HOST[0], reply=reply)
            with pytest.raises(
                streamrt.PlacementError, match="host:2 is not for this connection; arrays may be put on"
            ):
                moving._check_target(HOST[2], reply=reply)
