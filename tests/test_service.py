"""What a service refuses and what it says: at registration, to its set-up, and to callers who are wrong."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import streamrt
import transport
from transport.launch.functions import ChildService, wire_name


async def later(x: Any) -> Any:
    return x


async def one_by_one(x: Any) -> AsyncIterator[Any]:
    yield x


@pytest.mark.parametrize("function", [later, one_by_one, functools.partial(later, 1)])
def test_async_functions_are_refused(function: Any) -> None:
    service = transport.Service()
    with pytest.raises(transport.LocalProtocolError, match="async function, which is not supported"):
        service.function(name="f")(function)
    with pytest.raises(transport.LocalProtocolError, match="async function, which is not supported"):
        wire_name(function, ())
    with pytest.raises(transport.LocalProtocolError, match="later is an async function"):
        service.setup(later)
    assert service.functions == ()


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_a_set_up_is_given_a_name_that_its_library_knows(kind: str) -> None:
    """`torch.nn.Linear(3, 3, device="host:0")` is refused by torch."""
    given: list[str] = []
    service = transport.Service(arrays=kind)
    service.setup(given.append)
    for device in ("host:0", "host:1", "cpu", "cuda:1", "host:0"):
        service.prepare(device)
    assert given == ["cpu", "cpu", "cpu", "cuda:1"]


def test_a_set_up_of_another_kind_is_given_the_name_of_the_device() -> None:
    given: list[str] = []
    service = transport.Service()
    service.setup(given.append)
    for device in ("host:0", "host:1", "cpu", "host:1"):
        service.prepare(device)
    assert given == ["host:0", "host:1", "cpu"]


def test_a_service_with_nothing_to_serve() -> None:
    with pytest.raises(transport.LocalProtocolError, match=r"no function; register one with @service\.function"):
        transport.Service().check_served("host:0")


def test_kinds_of_arrays_that_a_device_does_not_have() -> None:
    service = transport.Service(arrays="cupy")
    service.function(name="f")(lambda x: x)
    with contextlib.suppress(streamrt.UnavailableError):  # where it is not installed, which is another matter
        service.check_served("cuda:0")
    for device in ("host:0", "cpu"):
        with pytest.raises(transport.LocalProtocolError, match=f"cupy has no arrays on {device}; use another library"):
            service.check_served(device)


# Callers --------------------------------------------------------------------------------------------------------------


def limited(x: Any, timeout: float) -> float:
    return float(x) + timeout


def copying(x: Any, *, copy: bool) -> bool:
    return copy


def open_ended(x: Any, **more: Any) -> dict[str, Any]:
    return more


@pytest.fixture
def peer() -> Iterator[transport.Peer]:
    service = transport.Service()
    service.function(limited)
    service.function(copying)
    service.function(open_ended)
    with transport.loopback(service) as connected:
        yield connected


def test_a_parameter_with_the_name_of_an_option(peer: transport.Peer) -> None:
    assert peer.call(limited, 1, 2.0, timeout=30.0) == 3.0
    with pytest.raises(TypeError, match=r"timeout= is an option of the call itself: pass .* by position"):
        peer.call(limited, 1, timeout=30.0)
    with pytest.raises(TypeError, match=r"copy= is an option of the call itself: give .* another name"):
        peer.call(copying, 1, copy=True)
    with pytest.raises(TypeError, match=r"missing a required argument: 'x'$"):
        peer.call(limited)


def test_a_misspelt_keyword_is_named_and_not_what_is_missing_for_it(peer: transport.Peer) -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'copi'; did you mean 'copy'\?$"):
        peer.call(copying, 1, copi=True)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'scale'$"):
        peer.call(limited, 1, scale=2)
    assert peer.call(open_ended, 1, scale=2) == {"scale": 2}
    with pytest.raises(TypeError, match=r"missing a required argument: 'x'$"):
        peer.call(open_ended, scale=2)


def test_a_function_that_is_sent_to_a_peer_which_is_no_child(peer: transport.Peer) -> None:
    with pytest.raises(transport.UnknownFunctionError, match=r"'.*<lambda>' here.*only to one's own children"):
        peer.call(lambda x: x, 1)
    with pytest.raises(transport.UnknownFunctionError, match=r"'absent' here; the service has: .*limited, open_ended$"):
        peer.call("absent", 1)


# Children -------------------------------------------------------------------------------------------------------------


def test_a_function_that_goes_by_value_has_its_own_name() -> None:
    def local(x: Any) -> Any:
        return x

    for function in (local, functools.partial(local, 1)):
        name, args, _ = wire_name(function, (7,))
        assert name == f"{local.__qualname__} (by value)"
        assert args == (function, (7,))
    name, args, _ = wire_name(local, ())
    found = ChildService().find(name)
    assert found.call(local, (7,)) == 7
    with pytest.raises(TypeError, match=r"local\(x: 'Any'\).*missing a required argument: 'x'"):
        ChildService().check_arguments(found, args, {})


def test_a_name_of_any_length_fits() -> None:
    def local() -> None: ...

    local.__qualname__ = "é" * 1000
    assert len(wire_name(local, ())[0].encode()) <= 512


def test_a_function_without_room_for_what_the_setup_made_is_told_so() -> None:
    service = transport.Service()
    service.setup(str)

    @service.function(name="work")
    def work(x: object) -> object:
        return x

    with pytest.raises(TypeError, match=r"work\(x.*; its first argument is what the service's setup made"):
        service.check_arguments(service.find("work"), (1,), {})
