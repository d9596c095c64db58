"""What is lent: who may write when, and where the lender hears of it."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from streamrt.arrays import describe
from transport import lend
from transport.lend import Lent, unshared


def alone(make: Any) -> bool:
    value = make()
    return bool(unshared(value))


def test_an_array_that_only_the_caller_has_is_unshared() -> None:
    assert alone(lambda: np.zeros(9))
    assert alone(lambda: (np.zeros(9), 3))


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
