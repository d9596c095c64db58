"""Small arrays of devices that travel together, in one buffer.

A buffer of its own costs each array a slot, a header, a piece of memory and a pull, which for a few thousand bytes is
several times the copy.  So those of one library that go from one device to another are copied one after the other
into one buffer, as of the call like any snapshot; the receiver pulls it once, and its arrays are views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from streamrt import memory
from streamrt.device import Device, parse_device
from streamrt.libraries import ArrayInfo
from transport.events import BufferHeader


class Apart(NamedTuple):
    """An array whose bytes are not in the message: the place of its description, and its header as a buffer."""

    number: int
    array: Any
    info: ArrayInfo
    header: BufferHeader


class Pack(NamedTuple):
    """Arrays that share a buffer, where each begins in it, and its header."""

    members: Sequence[Apart]
    offsets: Sequence[int]
    header: BufferHeader

    def snapshot(self, limit: float | None, allocate_at: memory.Allocate | None) -> memory.Snapshot:
        """Enqueues the copies on the current stream of the arrays' library.  Does not block the host.

        Raises as `streamrt.memory.snapshot`.
        """
        arrays, infos = [one.array for one in self.members], [one.info for one in self.members]
        return memory.snapshot_together(arrays, infos, limit=limit, allocate_at=allocate_at)


def pack(arrays: Sequence[Apart], channel_of: Callable[[Device, Device, int], str]) -> tuple[list[Apart], list[Pack]]:
    """Which arrays go by themselves, and which together, by the channel that `channel_of` names for so many bytes.

    Does not touch the device.
    """
    groups: dict[tuple[str, str, str], list[Apart]] = {}
    alone: list[Apart] = []
    for one in arrays:
        info, header = one.info, one.header
        if info.device.has_streams and 0 < info.nbytes <= memory.SMALL_BYTES:
            groups.setdefault((info.library, header.source, header.device), []).append(one)
        else:
            alone.append(one)
    packs: list[Pack] = []
    for members in groups.values():
        if len(members) == 1:
            alone += members
            continue
        offsets, nbytes = memory.layout([one.info for one in members])
        device, source = members[0].header.device, members[0].header.source
        channel = channel_of(parse_device(source), parse_device(device), nbytes)
        packs.append(Pack(members, offsets, BufferHeader(nbytes, device, channel, source)))
    return alone, packs
