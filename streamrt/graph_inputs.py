"""New contents for the static arguments of a graph: all checked before anything is enqueued."""

from __future__ import annotations

from typing import Any, NamedTuple

from streamrt.arrays import describe
from streamrt.buffers import buffer_uses
from streamrt.device import Device
from streamrt.errors import ArrayError, PlacementError
from streamrt.libraries import ArrayInfo, library_of
from streamrt.memory import copy_to
from streamrt.stream import Stream


class Input(NamedTuple):
    """New contents for a captured argument: the array, its description, and that of its place."""

    array: Any
    source: ArrayInfo
    place: ArrayInfo

    def enqueue(self, stream: Stream) -> object:
        """Enqueues on `stream` the copy, behind what the array waits on; returns what must live until it has run."""
        buffer_uses(self.source.address, stream)
        return copy_to(self.array, self.source, self.place.address, stream)


def inputs_of(arguments: tuple[Any, ...], arrays: tuple[Any, ...], device: Device) -> list[Input]:
    """What is to be copied where, checked.  Does not touch the device.  Raises `ArrayError`, `PlacementError`."""
    if len(arrays) != len(arguments):
        raise ArrayError(
            f"{len(arrays)} arrays for {len(arguments)} captured ones; pass one for each of graph.arguments, None to "
            "leave one as it is"
        )
    places = [describe(argument, detach=True) for argument in arguments]
    inputs: list[Input] = []
    for number, (array, argument, place) in enumerate(zip(arrays, arguments, places, strict=True)):
        if array is None or array is argument:
            continue
        which = f"argument {number} ({place.dtype}{list(place.shape)} on {place.device})"
        if library_of(array) is None:
            raise ArrayError(f"{which} takes an array, not {type(array).__name__}; make one with streamrt.array")
        source = describe(array, detach=True)
        if (source.shape, source.dtype) != (place.shape, place.dtype):
            raise ArrayError(
                f"{which} is static, and {source.dtype}{list(source.shape)} does not fit; convert it, or capture anew"
            )
        if place.strides is not None or place.readonly:
            raise ArrayError(f"{which} is read-only or has holes; capture with a writable array that is C-contiguous")
        if not place.nbytes:
            continue
        if source.device is not place.device or source.device is not device:
            raise PlacementError(
                f"{which} takes an array of {device}, not of {source.device}; move it with streamrt.to"
            )
        if (source.address, source.strides) != (place.address, None):
            inputs.append(Input(array, source, place))
    for number, one in enumerate(inputs):
        low, high = _extent(one.source)
        for place in places:
            if place.nbytes and low < place.address + place.nbytes and place.address < high:
                raise ArrayError(f"new contents {number} overlap with a captured argument; copy them aside first")
    return inputs


def _extent(info: ArrayInfo) -> tuple[int, int]:
    if info.strides is None:
        return info.address, info.address + info.nbytes
    reach = [(length - 1) * stride for length, stride in zip(info.shape, info.strides, strict=True)]
    low = info.address + sum(step for step in reach if step < 0)
    return low, info.address + sum(step for step in reach if step > 0) + info.itemsize
