"""Arrays in any nesting of values.

The walk goes through containers, dataclasses, objects with ``__dict__`` or ``__slots__`` and registered types; it calls
nothing of theirs.  What it cannot look into (a Lock, an event, a function, a module) holds no arrays as far as we know.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from streamrt.device import Device
from streamrt.event import Event
from streamrt.libraries import library_of
from streamrt.stream import Stream

_LEAVES = (
    Device,  # from here one would come to the backend, and to all that it knows
    Event,
    Stream,
    str,
    bytes,
    bytearray,
    memoryview,
    int,
    float,
    complex,
    type(None),
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.CodeType,
    types.FrameType,
    types.GeneratorType,
    types.CoroutineType,
    types.AsyncGeneratorType,
)
_SEQUENCES = (list, tuple, set, frozenset, deque)
_registered: dict[type, Callable[[Any], Iterable[Any]]] = {}


def register_container(cls: type, parts: Callable[[Any], Iterable[Any]]) -> None:
    """Says how to look into values of a class (and its subclasses): `parts(value)` gives what may hold arrays.

    Does not touch the device.
    """
    _registered[cls] = parts


def find_arrays(value: object) -> list[Any]:
    """Every array in the value, each once, in the order met: depth first, members in their own order.

    Sparse torch tensors are given as their dense parts.  Cycles are followed once.  Does not touch the device.
    """
    found: list[Any] = []
    seen: set[int] = set()
    keep: list[Any] = []  # what a walk makes (a sparse tensor's parts) must live as long as its id counts as seen
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, _LEAVES) or id(item) in seen:
            continue
        seen.add(id(item))
        owner = library_of(item)
        if owner is not None:
            dense = _dense_parts(item) if owner.name == "torch" else None
            if dense is None:
                found.append(item)
                continue
            members: list[Any] = dense
        else:
            members = _members(item)
        keep.append(members)
        stack.extend(reversed(members))
    return found


def _members(item: Any) -> list[Any]:
    for base in type(item).__mro__ if _registered else ():
        parts = _registered.get(base)
        if parts is not None:
            return list(parts(item))
    if isinstance(item, _SEQUENCES):
        return [*item, *_attributes(item)]
    if isinstance(item, Mapping):
        return [*item.keys(), *item.values(), *_attributes(item)]
    return _attributes(item)


def _attributes(item: Any) -> list[Any]:
    members: list[Any] = []
    attributes = getattr(item, "__dict__", None)
    if isinstance(attributes, dict):
        members.extend(attributes.values())
    for base in type(item).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{base.__name__.lstrip('_')}{name}"
            descriptor = base.__dict__.get(name)
            if isinstance(descriptor, types.MemberDescriptorType):
                try:
                    members.append(descriptor.__get__(item, type(item)))
                except AttributeError:  # a slot that was never set
                    continue
    return members


def _dense_parts(tensor: Any) -> list[Any] | None:
    """The dense parts of a sparse torch tensor, None for a dense one."""
    layout = str(tensor.layout)
    if layout == "torch.strided":
        return None
    if layout == "torch.sparse_coo":
        return [tensor._indices(), tensor._values()]
    if layout in ("torch.sparse_csr", "torch.sparse_bsr"):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if layout in ("torch.sparse_csc", "torch.sparse_bsc"):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return None  # describe says what to do
