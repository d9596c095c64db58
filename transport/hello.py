"""What a peer says of itself in its hello, checked before anything is done with it.

The wire bounds sizes and nesting; here are the names, counts and types.  Whatever is wrong ends the connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from streamrt.device import Device, parse_device
from streamrt.errors import PlacementError
from transport.errors import DeviceMapError, RemoteProtocolError

MAX_DEVICES = 1024  # and functions
MAX_TEXT = 256
MAX_PID = 1 << 22  # the kernel's own limit


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """A peer, as it described itself.  `entries` is the device map of an initiator that gave one."""

    name: str
    pid: int
    started: int
    boot: str
    pid_namespace: str
    process: str
    devices: tuple[Device, ...]
    device_count: int
    functions: tuple[str, ...]
    entries: dict[Device, Device] | None


def parse_hello(info: Mapping[str, object]) -> PeerInfo:
    """Reads a hello's info.  Does not touch the device.  Raises `RemoteProtocolError`, `DeviceMapError`."""
    return PeerInfo(
        name=_text(info, "name"),
        pid=_number(info, "pid", MAX_PID),
        started=_number(info, "started", 1 << 62),
        boot=_text(info, "boot"),
        pid_namespace=_text(info, "pid_namespace"),
        process=_text(info, "process"),
        devices=tuple(_device(name) for name in _list(info, "devices")),
        device_count=_number(info, "device_count", MAX_DEVICES),
        functions=tuple(_function(name) for name in _list(info, "functions")),
        entries=_entries(info),
    )


def _text(info: Mapping[str, object], name: str) -> str:
    value = info.get(name, "")
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise RemoteProtocolError(f"the peer's hello has no usable {name!r}")
    return value


def _number(info: Mapping[str, object], name: str, limit: int) -> int:
    value = info.get(name, 0)
    if type(value) is not int or not 0 <= value <= limit:
        raise RemoteProtocolError(f"the peer's hello has no usable {name!r}")
    return value


def _list(info: Mapping[str, object], name: str) -> list[object]:
    value = info.get(name, [])
    if not isinstance(value, list) or len(value) > MAX_DEVICES:
        raise RemoteProtocolError(f"the peer's hello has no usable {name!r}")
    return value


def _device(name: object) -> Device:
    if not isinstance(name, str):
        raise RemoteProtocolError("the peer's hello names a device that is no name")
    try:
        return parse_device(name)
    except PlacementError as error:
        raise RemoteProtocolError(f"the peer's hello names a device that is none: {error}") from error


def _function(name: object) -> str:
    if not isinstance(name, str):
        raise RemoteProtocolError("the peer's hello names a function that is no name")
    return name


def _entries(info: Mapping[str, object]) -> dict[Device, Device] | None:
    if info.get("map") is None:
        return None
    entries: dict[Device, Device] = {}
    for pair in _list(info, "map"):
        if not isinstance(pair, list) or len(pair) != 2:
            raise RemoteProtocolError("the peer's hello has a device map that is none")
        source, target = _device(pair[0]), _device(pair[1])
        if source in entries or target in entries.values():
            raise DeviceMapError(f"the peer's device map is not one-to-one: {source} -> {target}")
        entries[source] = target
    return entries
