"""The static arrays of a graph: where they are, that they stay there, and new contents for the arguments among them.

A graph works on addresses.  torch lets a tensor change its memory (``x.data =``, `Module.to`, `set_`, `resize_`), so
the memory of the capture is kept by aliases of its own, and a replay looks whether all are where they were.  What the
arguments are is described once; new contents are checked before anything is enqueued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from streamrt.arrays import describe
from streamrt.buffers import buffer_uses
from streamrt.device import Device
from streamrt.errors import ArrayError, PlacementError, StreamrtError
from streamrt.libraries import ArrayInfo, library_of
from streamrt.memory import copy_to
from streamrt.stream import Stream

_SHARE = 16  # how many tensors a replay looks at: each costs some 70 ns


class Input(NamedTuple):
    """New contents for a captured argument: its number, the array, its description, and that of its place."""

    number: int
    array: Any
    source: ArrayInfo
    place: ArrayInfo

    def enqueue(self, stream: Stream) -> object:
        """Enqueues on `stream` the copy, behind what the array waits on; returns what must live until it has run."""
        buffer_uses(self.source.address, stream)
        return copy_to(self.array, self.source, self.place.address, stream)


def memory_of(arrays: Sequence[Any]) -> list[object]:
    """What keeps the memory that the arrays have now, whatever becomes of them.  Does not touch the device."""
    return [library.memory_of(array) for array in arrays if (library := library_of(array)) is not None]


class Static:
    """The arrays of a capture: the arguments, and others that the function refers to."""

    __slots__ = ("_arguments", "_movable", "_next", "_places", "_reader", "_shares")

    def __init__(self, arguments: tuple[Any, ...], referred: Sequence[Any]) -> None:
        """Describes them as they are now, behind the capture.  Does not touch the device."""
        self._arguments = arguments
        self._places: list[ArrayInfo | StreamrtError] = []
        for argument in arguments:
            try:
                self._places.append(describe(argument, detach=True))
            except StreamrtError as error:
                self._places.append(error)  # it matters to who brings new contents
        self._reader: Callable[[Any], int] | None = None
        self._movable: dict[
            int, tuple[Any, int]
        ] = {}  # by id, an array that can be given other memory, and where it is
        for array in (*arguments, *referred):
            library = library_of(array)
            reader = None if library is None else library.address_reader()
            if reader is None:
                continue
            try:
                self._movable[id(array)] = (array, reader(array))
            except RuntimeError:
                continue  # torch's way to say that a wrapper has no memory of its own
            self._reader = reader
        found = list(self._movable.values())
        self._shares = [
            ([array for array, _ in found[at : at + _SHARE]], [address for _, address in found[at : at + _SHARE]])
            for at in range(0, len(found), _SHARE)
        ]
        self._next = 0

    def check(self) -> None:
        """Looks at some arrays, at others the next time, at all where they are few.

        Raises `ArrayError` if one has been given other memory.  Does not touch the device.
        """
        reader = self._reader
        if reader is None:
            return
        at = self._next
        self._next = (at + 1) % len(self._shares)
        arrays, addresses = self._shares[at]
        if list(map(reader, arrays)) != addresses:
            for array in arrays:
                self._check_one(array)

    def _check_one(self, array: Any) -> None:
        _, address = self._movable.get(id(array), (None, None))
        if address is None or self._reader is None or self._reader(array) == address:
            return
        number = next((at for at, argument in enumerate(self._arguments) if argument is array), None)
        which = "an array that the function refers to" if number is None else f"argument {number}"
        raise ArrayError(
            f"{which} ({array.dtype}{list(array.shape)}) has been given other memory since the capture, by x.data =, "
            "Module.to, set_ or resize_, and the graph works on what it had; copy new contents into it in place "
            "(copy_), or capture anew"
        )

    def inputs(self, arrays: tuple[Any, ...], device: Device) -> list[Input]:
        """What is to be copied where, checked.  Does not touch the device.  Raises `ArrayError`, `PlacementError`."""
        if len(arrays) != len(self._arguments):
            raise ArrayError(
                f"{len(arrays)} arrays for {len(self._arguments)} captured ones; pass one for each of graph.arguments, "
                "None to leave one as it is"
            )
        inputs: list[Input] = []
        for number, (array, argument, place) in enumerate(zip(arrays, self._arguments, self._places, strict=True)):
            if array is None or array is argument:
                continue
            if isinstance(place, StreamrtError):
                raise ArrayError(f"argument {number} takes no new contents: {place}")
            self._check_one(argument)
            which = f"argument {number} ({place.dtype}{list(place.shape)} on {place.device})"
            if library_of(array) is None:
                raise ArrayError(f"{which} takes an array, not {type(array).__name__}; make one with streamrt.array")
            source = describe(array, detach=True)
            if (source.shape, source.dtype) != (place.shape, place.dtype):
                raise ArrayError(
                    f"{which} is static, and {source.dtype}{list(source.shape)} does not fit; convert it, or capture "
                    "anew"
                )
            if place.strides is not None or place.readonly:
                raise ArrayError(
                    f"{which} is read-only or has holes; capture with a writable array that is C-contiguous"
                )
            if not place.nbytes:
                continue
            if source.device is not place.device or source.device is not device:
                raise PlacementError(
                    f"{which} takes an array of {device}, not of {source.device}; move it with streamrt.to"
                )
            if (source.address, source.strides) != (place.address, None):
                inputs.append(Input(number, array, source, place))
        for one in inputs:
            self._check_apart(one)
        return inputs

    def _check_apart(self, one: Input) -> None:
        low, high = _extent(one.source)
        for place in self._places:
            if isinstance(place, StreamrtError) or not place.nbytes:
                continue
            if low < place.address + place.nbytes and place.address < high:
                raise ArrayError(
                    f"the new contents of argument {one.number} overlap with a captured argument; copy them aside first"
                )


def _extent(info: ArrayInfo) -> tuple[int, int]:
    if info.strides is None:
        return info.address, info.address + info.nbytes
    reach = [(length - 1) * stride for length, stride in zip(info.shape, info.strides, strict=True)]
    low = info.address + sum(step for step in reach if step < 0)
    return low, info.address + sum(step for step in reach if step > 0) + info.itemsize
