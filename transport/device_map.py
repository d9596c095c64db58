"""Device maps: which device of the peer an array of ours goes to, and back.

Requests use it, replies use its reverse, so the callee needs no map of its own.  ``cpu`` stands for ordinary memory and
maps to ``cpu`` unless the map says otherwise.

Rules:

- Without a map, each device goes to the peer's only device, else to the device with the same index.
- A map that is given is one-to-one.  Where all go to an only device, a result comes back to where the call's first
  array was, or to our first device if the call had none.
- With a map, also an empty one, only what it names is mapped (and ``cpu``).
- Errors name the device and the peer, and come before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from streamrt.device import CPU, Device, default_device_kind, parse_device
from streamrt.errors import PlacementError
from transport.errors import DeviceMapError

MapSpec = Mapping[Any, Any]


def parse_map(spec: MapSpec, *, local_kind: str, remote_kind: str) -> dict[Device, Device]:
    """Reads ``{"cuda:0": "cuda:1", "cpu": "cpu"}``; plain indices mean the default kind of their side.

    Raises `DeviceMapError` for what is no map, a name that is no device, a negative index, or two devices with one
    target.
    """
    if not isinstance(spec, Mapping):
        raise DeviceMapError(
            f"device_map={spec!r} is no map; write device_map={{'cuda:0': 'cuda:1'}}, ours to the peer's"
        )
    parsed: dict[Device, Device] = {}
    for source, target in spec.items():
        try:
            local = parse_device(source, default_kind=local_kind)
            remote = parse_device(target, default_kind=remote_kind)
        except PlacementError as error:
            raise DeviceMapError(f"device map {dict(spec)!r}: {error}") from error
        if local in parsed:
            raise DeviceMapError(f"device map {dict(spec)!r} names {local} twice; a map is one-to-one")
        if remote in parsed.values():
            raise DeviceMapError(
                f"device map {dict(spec)!r} has duplicated target devices: {remote}; a map is one-to-one"
            )
        parsed[local] = remote
    return parsed


def merge(first: Mapping[Device, Device], second: Mapping[Device, Device]) -> dict[Device, Device]:
    """Adds entries to a map.  Raises `DeviceMapError` where the two disagree or the result is not one-to-one."""
    merged = dict(first)
    for local, remote in second.items():
        if merged.get(local, remote) != remote:
            raise DeviceMapError(f"{local} is mapped to {merged[local]} already, not to {remote}; a map is one-to-one")
        if any(target == remote and source != local for source, target in merged.items()):
            raise DeviceMapError(f"duplicated target devices: {remote} is the target of another device already")
        merged[local] = remote
    return merged


def merge_device_maps(*specs: MapSpec) -> dict[str, str]:
    """Puts maps together, as if each added to the one before.  Does not touch the device.

    Raises `DeviceMapError` where two disagree, or the result is not one-to-one.
    """
    kind = default_device_kind()
    merged: dict[Device, Device] = {}
    for spec in specs:
        merged = merge(merged, parse_map(spec, local_kind=kind, remote_kind=kind))
    return {str(local): str(remote) for local, remote in merged.items()}


class DeviceMap:
    """The map of one connection as one side sees it.

    `entries` is None for the default rule.  `local` and `remote` are the devices that the two sides have (``cpu`` not
    listed), `peer` is the name for messages, `allowed` the local devices that `devices=` permits (None: all),
    `count` how many the peer has, also those that it does not serve.
    """

    def __init__(
        self,
        entries: Mapping[Device, Device] | None,
        *,
        local: Iterable[Device],
        remote: Iterable[Device],
        peer: str,
        allowed: Iterable[Device] | None = None,
        count: int = 0,
    ) -> None:
        self.peer = peer
        self.count = count
        self.local = tuple(dict.fromkeys(local))
        self.remote = tuple(dict.fromkeys(remote))
        self.allowed = None if allowed is None else frozenset(allowed)
        self.explicit = entries is not None
        self.forward = dict(entries) if entries is not None else self._default()
        if CPU not in self.forward and CPU not in self.forward.values():
            self.forward[CPU] = CPU
        self.plain = self.forward.get(CPU) == CPU  # ordinary memory stays ordinary memory
        self.backward: dict[Device, Device] = {}
        for local_device, remote_device in self.forward.items():
            self.backward.setdefault(remote_device, local_device)

    def _default(self) -> dict[Device, Device]:
        ours = [device for device in self.local if device.has_streams]
        theirs = {device.index: device for device in self.remote if device.has_streams}
        if len(theirs) == 1:
            return dict.fromkeys(ours, *theirs.values())
        return {device: theirs[device.index] for device in ours if device.index in theirs}

    def check(self) -> None:
        """Raises `DeviceMapError` for an index that a side does not have, or a source outside `devices=`."""
        for source, target in self.forward.items():
            if source.has_streams and source.index >= source.backend.device_count():
                raise DeviceMapError(
                    f"device map to {self.peer!r} has source devices with invalid indices: {source}; here are "
                    f"{_names(self.local)}"
                )
            if target.has_streams and target not in self.remote:
                fault = (
                    "unexpected target devices" if target.index < self.count else "target devices with invalid indices"
                )
                raise DeviceMapError(
                    f"device map to {self.peer!r} has {fault}: {target}; {self.peer!r} serves {_names(self.remote)}"
                )
            if self.allowed is not None and self.explicit and source.has_streams and source not in self.allowed:
                raise DeviceMapError(
                    f"device map to {self.peer!r} has unexpected source devices: {source} is not in devices="
                    f"{_names(self.allowed)}"
                )

    def request(self, device: Device) -> Device:
        """Where an argument on our `device` goes.  Raises `DeviceMapError` naming device, peer and remedy."""
        target = self.forward.get(device)
        if target is None and device.has_streams and device not in (self.allowed or (device,)):
            raise DeviceMapError(
                f"{device} is left out by devices= of the connection to {self.peer!r}; name it there too"
            )
        if target is None:
            raise DeviceMapError(
                f"{device} has no device on {self.peer!r}: set device_map={{'{device}': ...}} where you connect; "
                f"{self.peer!r} has {_names(self.remote)}"
            )
        return target

    def reversed(self, peer: str) -> DeviceMap:
        """The same map as the other side uses it for calls and replies of its own."""
        other = DeviceMap({}, local=self.remote, remote=self.local, peer=peer)
        other.forward, other.backward = dict(self.backward), dict(self.forward)
        other.plain = self.plain
        return other

    def replying(self, sources: Iterable[str]) -> Callable[[Device], Device]:
        """Where a result on each of the callee's devices goes; `self` is the callee's view (its devices are the
        sources).

        `sources` are the caller's devices that the arrays of the call were on: of those that go to one device the first
        counts.  What it gives raises `DeviceMapError` naming device, peer and remedy.
        """
        if len(self.backward) == len(self.forward):
            return self._reply
        homes: dict[Device, Device] = {}
        for name in sources:
            source = parse_device(name)
            if (target := self.backward.get(source)) is not None:
                homes.setdefault(target, source)
        return lambda device: homes.get(device) or self._reply(device)

    def _reply(self, device: Device) -> Device:
        source = self.forward.get(device)
        if source is None:
            raise DeviceMapError(
                f"Response device mapping is not available: the result is on {device} of the callee, and no "
                f"device of the caller {self.peer!r} maps there; add device_map={{...: '{device}'}} where it connects"
            )
        return source


def _names(devices: Iterable[Device]) -> str:
    return ", ".join(str(device) for device in sorted(devices)) or "no devices but cpu"
