"""What is lent: who may write when, and where the lender hears of it."""

from __future__ import annotations

import ctypes
import sys
import weakref
from typing import Any

import numpy as np
import pytest

import transport
from streamrt.arrays import describe
from transport import lend
from transport.lend import Lent, unshared


def alone(make: Any) -> bool:
    value = make()
    return bool(unshared(sys.getrefcount(value), value))


def test_an_array_that_only_the_caller_has_is_unshared() -> None:
    assert alone(lambda: np.zeros(9))
    assert alone(lambda: (np.zeros(9), 3))


def test_an_array_that_somebody_keeps_is_shared() -> None:
    kept: list[Any] = []

    def keep(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        kept.append(array)
        return array

    assert not alone(lambda: keep(np.zeros(9)))
    assert not alone(lambda: (keep(np.zeros(9)), 3))
    assert not alone(lambda: keep(np.zeros(9))[:])


def test_an_array_with_a_weak_reference_is_shared() -> None:
    """Whoever holds one can have the array back at any time, and write to it."""
    kept: list[Any] = []

    def make() -> np.ndarray[Any, Any]:
        array = np.zeros(9)
        kept.append(weakref.ref(array))
        return array

    assert not alone(make)
    assert not alone(lambda: (make(), make()))


def test_a_finaliser_runs_no_callback() -> None:
    """The last reader may go anywhere, also under a lock that the callback wants."""
    array = np.zeros(9)
    lent = Lent(array, describe(array), None)
    reader: object = lent.reader()
    told: list[str] = []
    lent.when_free(lambda: told.append("free"), lambda: told.append("wake"))
    assert told == []
    del reader
    assert told == ["wake"]
    lend.drain()
    assert told == ["wake", "free"]
    lent.when_free(lambda: told.append("at once"), lambda: told.append("wake"))
    assert told[2:] == ["at once"]


@pytest.mark.parametrize("size", [100, 100_000])
def test_what_jax_still_computes_is_lent_when_it_is_there(size: int) -> None:
    """JAX returns at once, and its own threads write the array afterwards."""
    jax = pytest.importorskip("jax")

    @jax.jit
    def slow(x: Any) -> Any:
        for _ in range(6):
            x = jax.numpy.tanh(x @ x / 1000)
        return x.ravel()[:size] + 1.0

    start = jax.numpy.ones((1500, 1500))
    wanted = float(np.asarray(slow(start)).sum())
    service = transport.Service()

    @service.function(name="total")
    def total(x: Any) -> float:
        return float(x.sum())

    with transport.loopback(service) as peer:
        for copy in (None, False, True):
            assert peer.call("total", slow(start + 0), copy=copy) == pytest.approx(wanted, rel=1e-3)
    array = slow(start + 0)
    lend.lend([array])
    assert array.is_ready()


def over_foreign_memory(memory: Any) -> np.ndarray[Any, Any]:
    """An array over memory of C code, which it does not own, and that has no base (PyArray_SimpleNewFromData)."""
    capsule = np._core._multiarray_umath._ARRAY_API  # type: ignore[attr-defined]
    api = ctypes.pythonapi
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    table = ctypes.cast(api.PyCapsule_GetPointer(capsule, None), ctypes.POINTER(ctypes.c_void_p))
    pointer, number = ctypes.c_void_p, ctypes.c_int
    prototype = ctypes.PYFUNCTYPE(
        ctypes.py_object, ctypes.py_object, number, pointer, number, pointer, pointer, number, number, pointer
    )
    shape = (ctypes.c_ssize_t * 1)(len(memory))
    float32, carray = 11, 0x501
    made = prototype(table[93])(
        np.ndarray, 1, ctypes.addressof(shape), float32, None, ctypes.addressof(memory), 0, carray, None
    )
    return made  # type: ignore[no-any-return]


def test_an_array_over_memory_of_others_is_shared() -> None:
    """A camera's frame: whoever filled it fills it again, and no reference of Python tells of him."""
    frame = (ctypes.c_float * 100)()
    array = over_foreign_memory(frame)
    assert array.base is None
    assert not array.flags.owndata
    del array
    assert not alone(lambda: over_foreign_memory(frame))
    assert not alone(lambda: (over_foreign_memory(frame), 1))
