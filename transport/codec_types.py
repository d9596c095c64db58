"""Which types of the user's may be sent, and what they are made of: an explicit registry.

Nothing is looked up by a name that came from the wire but in this table: a peer can name only what both sides have
registered.  Parts are themselves values that the codec encodes, so a sparse matrix is a registered type of dense
arrays.

Parts from the wire may be anything that can be sent, also a range of 10^12 numbers where a list is due.  What is
registered here checks them before it makes anything of them.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from streamrt import forks
from transport.errors import LocalProtocolError

T = TypeVar("T")
ToParts = Callable[[Any], Any]
FromParts = Callable[[Any], Any]

BUILT_IN = (type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, slice, type(Ellipsis))
MAX_NAME = 512


@dataclass(frozen=True, slots=True)
class RegisteredType:
    """One entry of the registry."""

    cls: type
    name: str
    to_parts: ToParts
    from_parts: FromParts


_lock = threading.Lock()
forks.renew(sys.modules[__name__], _lock=threading.Lock)
_by_class: dict[type, RegisteredType] = {}
_by_name: dict[str, RegisteredType] = {}


def register_type(
    cls: type[T], name: str | None = None, to_parts: ToParts | None = None, from_parts: FromParts | None = None
) -> type[T]:
    """Lets values of exactly this class be sent; do it on both sides, in a module that both import.

    `to_parts(value)` gives what it is made of, in types that can be sent (arrays too), and `from_parts(parts)` makes it
    again.  Both may be left out for named tuples, dataclasses and enums, and then this is also a class decorator.
    `name` stands for the class on the wire; it is the module's and the class's name if not given.

    Returns `cls`.  Raises `LocalProtocolError` for what is no class, and for a name that another class has.  Does not
    touch the device.
    """
    if not isinstance(cls, type):
        raise LocalProtocolError(f"{cls!r} is no class; register_type(cls, ...) lets values of a class be sent")
    if cls in BUILT_IN or issubclass(cls, np.ndarray):
        raise LocalProtocolError(f"{cls.__qualname__} is sent as it is; it cannot be registered")
    if to_parts is None or from_parts is None:
        default = default_parts(cls)
        if default is None or to_parts is not from_parts:
            raise LocalProtocolError(
                f"{cls.__qualname__} is no named tuple, dataclass or enum; give register_type to_parts and from_parts"
            )
        to_parts, from_parts = default
    entry = RegisteredType(cls, name or class_name(cls), to_parts, from_parts)
    if len(entry.name) > MAX_NAME:
        raise LocalProtocolError(f"a type's name has at most {MAX_NAME} characters")
    with _lock:
        held = _by_name.get(entry.name)
        if held is not None and held.cls is not cls and class_name(held.cls) != class_name(cls):
            raise LocalProtocolError(f"the name {entry.name!r} is {class_name(held.cls)}'s already; give another one")
        previous = _by_class.get(cls)
        if previous is not None:
            _by_name.pop(previous.name, None)
        if held is not None:
            _by_class.pop(held.cls, None)  # the same class again, from a module that was loaded again
        _by_class[cls] = _by_name[entry.name] = entry
    return cls


def registered_class(cls: type) -> RegisteredType | None:
    """The entry of a class, None if it was not registered.  Does not touch the device."""
    return _by_class.get(cls)


def registered_name(name: str) -> RegisteredType | None:
    """The entry of a name from the wire, None if it was not registered.  Does not touch the device."""
    return _by_name.get(name)


def class_name(cls: type) -> str:
    """The name by which a class is registered if none is given.  Does not touch the device."""
    return f"{cls.__module__}:{cls.__qualname__}"


def default_parts(cls: type) -> tuple[ToParts, FromParts] | None:
    """How named tuples, dataclasses and enums come apart; None for other classes.  Does not touch the device."""
    if issubclass(cls, enum.Enum):
        return lambda value: value.name, lambda name: cls[_exactly(name, str)]
    if issubclass(cls, tuple) and hasattr(cls, "_make") and hasattr(cls, "_fields"):
        return tuple, lambda parts: cls._make(_exactly(parts, tuple))
    if dataclasses.is_dataclass(cls):
        return _dataclass_parts, lambda parts: _make_dataclass(cls, parts)
    return None


def _dataclass_parts(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _make_dataclass(cls: Any, parts: dict[str, Any]) -> Any:
    initial = {field.name for field in dataclasses.fields(cls) if field.init}
    names = {field.name for field in dataclasses.fields(cls)}
    if set(_exactly(parts, dict)) != names:
        raise ValueError(f"fields {sorted(parts)} for a class that has {sorted(names)}")
    value = cls(**{name: part for name, part in parts.items() if name in initial})
    for name in names - initial:
        object.__setattr__(value, name, parts[name])
    return value


def _exactly(parts: Any, kind: type, size: int | None = None) -> Any:
    came: type = type(parts)
    if came is not kind:
        raise TypeError(f"made of a {kind.__name__}, and a {came.__name__} came")
    if size is not None and len(parts) != size:
        raise ValueError(f"made of {size} parts, and {len(parts)} came")
    return parts


def _make_ordered(parts: Any) -> collections.OrderedDict[Any, Any]:
    return collections.OrderedDict(_exactly(pair, tuple, 2) for pair in _exactly(parts, list))


def _make_deque(parts: Any) -> collections.deque[Any]:
    items, most = _exactly(parts, list, 2)
    return collections.deque(_exactly(items, list), None if most is None else _exactly(most, int))


def _make_range(parts: Any) -> range:
    return range(*(_exactly(part, int) for part in _exactly(parts, tuple, 3)))


register_type(collections.OrderedDict, "OrderedDict", lambda value: list(value.items()), _make_ordered)
register_type(collections.deque, "deque", lambda value: [list(value), value.maxlen], _make_deque)
register_type(range, "range", lambda value: (value.start, value.stop, value.step), _make_range)
register_type(bytearray, "bytearray", bytes, lambda parts: bytearray(_exactly(parts, bytes)))
