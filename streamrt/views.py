"""A memoryview of memory that is known by its address."""

from __future__ import annotations

import ctypes


def view_of(address: int, nbytes: int, keep: object) -> memoryview:
    """A writable view of `nbytes` at `address`; `keep` lives as long as any view of it.  Does not touch the device."""
    array = (ctypes.c_ubyte * nbytes).from_address(address)
    setattr(array, "keep", keep)  # noqa: B010 - an attribute that the class does not declare
    return memoryview(array).cast("B")
