"""What a guard's inputs say: on which devices they are, and what to wait for beyond what is current.

Of an array of CuPy or torch the current stream of its library stands for all that was done to it, as far as anybody
knows.  JAX's arrays have a definition event, numba's a stream of their own, and ``(array, mark)`` names what only the
caller knows.  A stream that waits for such a mark is a use of the array's memory: see `streamrt.points.note_uses`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from streamrt.device import Device, backend_of, default_device_kind, open_device
from streamrt.errors import ArrayError, PlacementError
from streamrt.event import Event
from streamrt.guard import as_stream
from streamrt.libraries import Library, library_of
from streamrt.libraries.nesting import find_arrays
from streamrt.points import JOINED
from streamrt.sides import plan_of
from streamrt.stream import Stream
from streamrt.timeline import Point

Mark = Stream | Event | Point


class Join(NamedTuple):
    """Something to wait for: a mark that the caller named beside arrays, or (None) what an array of a library without
    current streams waits on."""

    arrays: list[Any]
    mark: Mark | None
    library: Library | None
    device: Device | None


class Inputs(NamedTuple):
    """`libraries`: by device, the library of the first array there, the first array's device first; `joins`: what no
    current stream stands for."""

    libraries: dict[Device, Library | None]
    joins: list[Join]

    @property
    def numba(self) -> list[Device]:
        """Where numba has an input."""
        return [one.device for one in self.joins if one.device and one.library and one.library.name == "numba"]


def inputs_of(values: tuple[Any, ...], device: Device | str | None) -> Inputs:
    """Looks into everything.  Raises `ArrayError`, `PlacementError` for what is none.  Does not touch the device."""
    found = Inputs({}, [])
    if device is not None:
        where = open_device(device)
        if not where.has_streams:
            raise PlacementError("cpu has no streams to work on; use 'host:0' or 'cuda:0'")
        found.libraries[where] = None
    some = False
    for value in values:
        if library_of(value) is None and not isinstance(value, _CONTAINERS) and not find_arrays_of(value):
            raise ArrayError(
                f"{value!r} is no array; write (array, stream) for what an array waits on, device= for where to work, "
                "and using(stream) to make a stream current"
            )
        for array, marks in _walk(value, set()):
            some = True
            here = _note(array, found)
            found.joins.extend(Join([array], _mark(mark, here), None, None) for mark in marks)
    if not found.libraries:
        if not some:
            kind = default_device_kind()
            found.libraries[open_device(Device(kind, backend_of(kind).current_device))] = None
        for join in found.joins:  # beside ordinary memory: the mark says where
            if isinstance(join.mark, Point):
                raise ArrayError("a point does not tell its device; say with device= where to work")
            if join.mark is not None:
                found.libraries[join.mark.device] = None
    return found


_CONTAINERS = (list, tuple, set, frozenset, Mapping)


def find_arrays_of(value: Any) -> list[Any]:
    """`find_arrays`, but nothing of what has a meaning of its own here."""
    return [] if isinstance(value, (Device, str)) or is_mark(value) else find_arrays(value)


def arguments_of(values: object) -> list[Any]:
    """The arrays among a function's arguments: in containers and dataclasses, not in other objects (the ``self`` of a
    method may hold anything).  Does not touch the device."""
    return [array for array, _ in _walk(values, set(), strict=False)]


def _walk(value: Any, seen: set[int], *, strict: bool = True) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Each array, with the marks beside it.  `strict` raises `ArrayError` for a mark that would be passed over, and
    looks into objects of all kinds."""
    if library_of(value) is not None:
        yield from ((array, ()) for array in find_arrays(value))  # a sparse one: its parts
        return
    if strict and is_mark(value):
        raise ArrayError(f"{value!r} stands beside no array; write (array, stream) for what an array waits on")
    if not isinstance(value, _CONTAINERS):
        if strict or hasattr(type(value), "__dataclass_fields__"):
            yield from ((array, ()) for array in find_arrays_of(value))
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if strict and type(value) is tuple and len(value) > 1:
        if all(map(is_mark, value[1:])):
            for array, marks in _walk(value[0], seen):
                yield array, (*marks, *value[1:])
            return
        for other in value[1:] if library_of(value[0]) is not None else ():
            if library_of(other) is None and not is_mark(other) and not isinstance(other, _CONTAINERS):
                raise ArrayError(
                    f"{other!r} is no mark of the array beside it; write (array, stream), an event or a point"
                )
    for member in value.values() if isinstance(value, Mapping) else value:
        yield from _walk(member, seen, strict=strict)


def _note(array: Any, found: Inputs) -> Device:
    """Notes one array; returns its device."""
    library: Any = library_of(array)
    device: Device = library.device_of(array)
    if device.has_streams:
        if found.libraries.get(device) is None:
            found.libraries[device] = library
        if library.name in JOINED:
            found.joins.append(Join([array], None, library, device))
        else:
            plan_of(device).learn(array, library)
    return device


def is_mark(value: object) -> bool:
    """Whether a value says when something is ready.  Does not touch the device."""
    return isinstance(value, (Stream, Event, Point)) or hasattr(value, "__cuda_stream__")


def _mark(value: Any, device: Device) -> Mark:
    if isinstance(value, (Stream, Event, Point)):
        return value
    index = getattr(getattr(value, "device", None), "index", getattr(value, "device_id", None))
    if (not isinstance(index, int) or index < 0) and device.has_streams:  # it does not say: the array's, then
        return Stream.borrow(value, device)
    return as_stream(value)
