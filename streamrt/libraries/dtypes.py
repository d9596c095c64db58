"""Canonical dtype names, and what NumPy calls them.

NumPy knows bfloat16 and the eight-bit floats through ml_dtypes only; where that is not installed, arrays of other
libraries that hold them still travel, as bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from streamrt.errors import ArrayError

_NATIVE = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]

# DLPack's type codes of what NumPy does not have by itself (dlpack.h 1.1)
DLPACK_CODES = {
    "bfloat16": 4,
    "float8_e3m4": 7,
    "float8_e4m3": 8,
    "float8_e4m3b11fnuz": 9,
    "float8_e4m3fn": 10,
    "float8_e4m3fnuz": 11,
    "float8_e5m2": 12,
    "float8_e5m2fnuz": 13,
    "float8_e8m0fnu": 14,
}
ITEMSIZES = {name: np.dtype(name).itemsize for name in _NATIVE} | {
    name: 2 if name == "bfloat16" else 1 for name in DLPACK_CODES
}
_dtypes: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in _NATIVE}
_names: dict[np.dtype[Any], str] = {dtype: name for name, dtype in _dtypes.items()}


def itemsize(name: str) -> int:
    """Bytes of one element.  Raises `ArrayError` for a name that is not canonical.  Does not touch the device."""
    size = ITEMSIZES.get(name)
    if size is None:
        raise ArrayError(f"{name!r} is no dtype that can travel; use one of {', '.join(ITEMSIZES)}")
    return size


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of a canonical name.  Raises `ArrayError`, naming ml_dtypes where that is what is missing.

    Does not touch the device.
    """
    found = _dtypes.get(name)
    if found is None:
        itemsize(name)
        try:
            import ml_dtypes
        except ImportError:
            raise ArrayError(f"NumPy and CuPy hold {name} only with ml_dtypes; install ml_dtypes") from None
        if not hasattr(ml_dtypes, name):
            raise ArrayError(f"this ml_dtypes ({ml_dtypes.__version__}) has no {name}; install a newer one")
        found = _dtypes[name] = np.dtype(getattr(ml_dtypes, name))
        _names[found] = name
    return found


def storage_dtype(name: str) -> np.dtype[Any]:
    """A NumPy dtype that moves elements of this name bit by bit, with or without ml_dtypes.

    Does not touch the device.
    """
    if name in DLPACK_CODES:
        return np.dtype(np.uint16 if name == "bfloat16" else np.uint8)
    return numpy_dtype(name)


def canonical(dtype: Any) -> str:
    """The canonical name of a dtype: a name, a NumPy dtype or scalar type, or a dtype of another library.

    Raises `ArrayError` for what has none (other byte orders, structured, object, strings, dates), naming the remedy.
    Does not touch the device.
    """
    name: str
    if isinstance(dtype, np.dtype):
        known = _names.get(dtype)
        if known is not None:
            return known
    elif isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
        if name in ITEMSIZES:
            return name
    elif type(dtype).__module__ == "torch":
        name = str(dtype).removeprefix("torch.")
        itemsize(name)
        return name
    try:
        found = np.dtype(dtype)
    except TypeError:
        itemsize(str(dtype))
        raise ArrayError(f"{dtype!r} is no dtype; use a name such as 'float32'") from None
    return _names.get(found) or _unusual(found)


def _unusual(dtype: np.dtype[Any]) -> str:
    if dtype.names is not None:
        raise ArrayError(f"structured dtype {dtype} cannot travel; send its fields as arrays of their own")
    if dtype.hasobject:
        raise ArrayError("an array of Python objects cannot travel; convert it with .astype to numbers, or send a list")
    if not dtype.isnative:
        raise ArrayError(
            f"{dtype} is not in this machine's byte order; convert it with .astype(dtype.newbyteorder('='))"
        )
    if dtype.name in DLPACK_CODES:
        return canonical(numpy_dtype(dtype.name))
    if dtype.kind in "mM":
        raise ArrayError(f"{dtype} cannot travel; send .view('int64') and the unit")
    if dtype.kind in "iufcb" and dtype.name in ITEMSIZES:
        return dtype.name  # C's long long and its like: another type number, the same memory
    raise ArrayError(f"dtype {dtype} cannot travel; convert it with .astype to one of {', '.join(ITEMSIZES)}")


def byte_strides(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> tuple[int, ...] | None:
    """None if the strides (in bytes) are C-contiguous, whatever they say along axes of one element; else the strides.

    Does not touch the device.
    """
    expected = size
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length == 0:
            return None
        if length != 1:
            if stride != expected:
                return strides if 0 not in shape else None
            expected *= length
    return None


def compact(shape: tuple[int, ...], strides: tuple[int, ...] | None, size: int) -> bool:
    """Whether the elements fill their memory without holes, in any order of axes.  Does not touch the device."""
    if strides is None or 0 in shape:
        return True
    expected = size
    for stride, length in sorted((s, n) for n, s in zip(shape, strides, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= length
    return True


def count(shape: tuple[int, ...]) -> int:
    """Elements in the shape, past 32 bits too.  Does not touch the device."""
    total = 1
    for length in shape:
        total *= length
    return total
