"""Groups: several peers by name, with all device maps checked before any of them is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

from streamrt.device import Device
from streamrt.seconds import waitable
from transport.device_map import MapSpec
from transport.errors import DeviceMapError, LocalProtocolError
from transport.peer import CONNECT_SECONDS, Peer, connect, list_devices
from transport.service import Service


class Group(Mapping[str, Peer]):
    """Peers by name.  A context manager that closes them."""

    def __init__(self, peers: dict[str, Peer], options: Mapping[str, Any] | None = None) -> None:
        """Use `group`; `options` are those of `connect` for peers that are added later.  Does not touch the device."""
        self._peers = peers
        self._options = dict(options or {})

    def __getitem__(self, name: str) -> Peer:
        return self._peers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._peers)

    def __len__(self) -> int:
        return len(self._peers)

    def add(self, name: str, address: str, *, device_map: MapSpec | None = None) -> Peer:
        """Connects to one more peer, whenever it came up, with the options of the group.

        Blocks the host until the handshake is done.  Raises as `connect`, and `DeviceMapError` for a name in use.
        """
        if name in self._peers:
            raise DeviceMapError(f"the group has a peer {name!r} already; names are unique")
        self._peers[name] = connect(address, name=name, device_map=device_map, **self._options)
        return self._peers[name]

    def close(self, timeout: float = 5.0) -> None:
        """Closes every peer.  Blocks the host `timeout` seconds each at most.  Idempotent."""
        waitable(timeout)  # before any of them is closed
        for peer in self._peers.values():
            peer.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def group(
    addresses: Mapping[str, str],
    *,
    device_maps: Mapping[str, MapSpec] | None = None,
    devices: Iterable[Device | str | int] | None = None,
    arrays: str | None = None,
    service: Service | None = None,
    timeout: float = CONNECT_SECONDS,
    default_timeout: float | None = None,
    peer_timeout: float | None = None,
    order: str | None = None,
) -> Group:
    """Connects to all addresses, by name, and checks all maps before it returns; after an error nothing stays open.

    `timeout` bounds each connection in seconds, `default_timeout` each call; `peer_timeout` and `order` are
    as in `connect`.  Blocks the host until all handshakes are done.

    Raises as `connect`, and `LocalProtocolError` for what is no map of names.
    """
    given_maps = {} if device_maps is None else device_maps
    for option, given in (("addresses", addresses), ("device_maps", given_maps)):
        if not isinstance(given, Mapping):
            raise LocalProtocolError(f"{option}={given!r} is no map; write {{name: ...}}, an entry for each peer")
    maps = dict(given_maps)
    for name in maps:
        if name not in addresses:
            known = ", ".join(sorted(addresses)) or "none"
            raise DeviceMapError(f"device_maps names {name!r}, which is no node of the group; it has: {known}")
    options: dict[str, Any] = {
        "devices": None if devices is None else list_devices(devices),
        "arrays": arrays,
        "service": service,
        "timeout": timeout,
        "default_timeout": default_timeout,
        "peer_timeout": peer_timeout,
        "order": order,
    }
    peers: dict[str, Peer] = {}
    try:
        for name, address in addresses.items():
            peers[name] = connect(address, name=name, device_map=maps.get(name), **options)
    except BaseException:
        for peer in peers.values():
            peer.abort()
        raise
    return Group(peers, options)
