"""Lent arguments: ``copy=False`` sends an array's own memory, with no snapshot.

The caller promises not to write to it before ``future.sent``.  What is not C-contiguous has to be gathered anyway, so
it is a snapshot in spite of the wish.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from streamrt import memory
from streamrt.arrays import describe
from streamrt.device import CPU, Block, Device
from streamrt.errors import ArrayError, CaptureError
from streamrt.event import Event
from streamrt.guard import current_stream
from streamrt.libraries import ArrayInfo, library_of
from streamrt.libraries.host_memory import is_memory_base, wait_until_computed
from streamrt.stream import Stream
from streamrt.views import view_of

LendAt = Callable[[Device, int, int, object], object]
"""Lets a peer read the user's own memory of a device, from an address so many bytes; keeps the last while it does."""


class Lent:
    """One lent array, with the face of a `memory.Snapshot`."""

    __slots__ = ("_token", "array", "buffer", "event", "export", "info")

    def __init__(self, array: Any, info: ArrayInfo, event: Event | None) -> None:
        self.array = array
        self.info = info
        self.event = event
        self.export: object = None
        """The block by which the peer reads it in place, if it does."""
        self.buffer = _LentMemory(array)
        self._token: weakref.ref[_Token] | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes.  Does not touch the device."""
        return self.info.nbytes

    def host_view(self) -> memoryview:
        """The bytes, for ordinary memory and the host backend.  Does not touch the device."""
        return view_of(self.info.address, self.info.nbytes, self.reader())

    def reader(self) -> object:
        """What a reader of the memory keeps until it has read.  Does not touch the device."""
        token = None if self._token is None else self._token()
        if token is None:
            token = _Token(self.array)
            self._token = weakref.ref(token)
        return token

    def when_free(self, callback: Callable[[], None], wake: Callable[[], None]) -> None:
        """Calls back when nobody reads the bytes any more: a link until it has written them, a stream that copies.

        At once, or in a `drain`, for which `wake` is called: from wherever the last reader goes, so it takes no lock.
        """
        token = None if self._token is None else self._token()
        if token is None:
            callback()
        else:
            number = next(_numbers)
            _awaited.add(number)
            weakref.finalize(token, _free, number, callback, wake).atexit = False


class _Token:
    """Lives as long as anybody reads a lent array's bytes."""

    __slots__ = ("__weakref__", "array")

    def __init__(self, array: Any) -> None:
        self.array = array


_freed: deque[Callable[[], None]] = deque()
_awaited: set[int] = set()  # the readers of which somebody waits to hear
_numbers = itertools.count()
POLL_SECONDS = 0.01


def _free(number: int, callback: Callable[[], None], wake: Callable[[], None]) -> None:
    """Runs in a finaliser, so perhaps inside of anything, with any lock held: what is the user's waits for `drain`."""
    _freed.append(callback)
    _awaited.discard(number)
    wake()


def drain() -> None:
    """Tells those whose lent arrays are free by now.  The caller holds no lock.  Does not block the host."""
    while _freed:
        try:
            callback = _freed.popleft()
        except IndexError:
            return  # another thread was faster
        callback()


def let_go(kept: object) -> None:
    """Drops it in a `drain`: what is the user's may run code of his when it goes.  Takes no lock."""
    _freed.append(functools.partial(_nothing, kept))


def _nothing(kept: object) -> None:
    """It goes with the call that named it."""


def undrained() -> bool:
    """Whether `drain` has something to do.  Does not touch the device."""
    return bool(_freed)


def waiting() -> bool:
    """Whether somebody waits for a lent array to be free.  Does not touch the device."""
    return bool(_awaited or _freed)


def drain_for(seconds: float) -> None:
    """Drains as long as somebody waits, for a time when nobody else does: links may write what is lent for a while
    after they have been closed.  Blocks the host so many seconds at most."""
    over = time.monotonic() + seconds
    drain()
    while _awaited and time.monotonic() < over:
        time.sleep(POLL_SECONDS)  # what frees may be a finaliser, which can tell nobody but by a plain append
        drain()


class _LentMemory:
    __slots__ = ("_array",)

    def __init__(self, array: Any) -> None:
        self._array = array

    def use(self, stream: Stream) -> None:
        memory.use(self._array, stream)


def lend(
    arrays: Sequence[Any],
    infos: Sequence[ArrayInfo] | None = None,
    *,
    plain_only: bool = False,
    only: Collection[int] | None = None,
    limit: float | None = None,
    allocate_at: memory.Allocate | None = None,
    lend_at: LendAt | None = None,
) -> list[Lent | memory.Snapshot]:
    """Lends arrays (`infos` describes them); one entry for each.  With `plain_only` those in ordinary memory, with
    `only` those whose `id` is in it; the others are snapshots.  `lend_at` lets the peer read an array's own memory.
    What it cannot, `allocate_at` gives memory for, in which the peer reads a snapshot in place: that one copy is less
    than a link's two, and the array is free at once.

    Enqueues a record on each array's current stream (a copy for those that are not C-contiguous); does not block the
    host, but for what JAX still computes in ordinary memory.  `limit` is the snapshots'.  Raises `CaptureError`,
    `ArrayError`, `ExhaustedError` as `memory.snapshot`.
    """
    infos = list(map(describe, arrays)) if infos is None else infos
    lent: list[Lent | memory.Snapshot] = []
    kept = [
        (plain_only and info.device != CPU) or (only is not None and id(array) not in only) or info.strides is not None
        for array, info in zip(arrays, infos, strict=True)
    ]
    shots = iter(
        memory.snapshot(
            list(itertools.compress(arrays, kept)),
            limit=limit,
            allocate_at=allocate_at,
            infos=list(itertools.compress(infos, kept)),
        )
        if any(kept)
        else ()
    )
    for number, (array, info) in enumerate(zip(arrays, infos, strict=True)):
        if kept[number]:
            lent.append(next(shots))
            continue
        if lend_at is not None and info.device.has_streams:
            one = Lent(array, info, None)
            one.export = lend_at(info.device, info.address, info.nbytes, one.reader())
            if one.export is not None:
                one.event = _recorded(array, info)
                lent.append(one)
                continue
        block = None if allocate_at is None else allocate_at(info.device, info.nbytes)
        if block is not None:
            lent.extend(memory.snapshot([array], limit=math.inf, allocate_at=_giving(block), infos=[info]))
        elif info.device == CPU:
            wait_until_computed(array)
            lent.append(Lent(array, info, None))
        else:
            lent.append(Lent(array, info, _recorded(array, info)))
    return lent


def _recorded(array: Any, info: ArrayInfo) -> Event:
    """A record on the array's current stream, behind all that it waits for.  Raises `CaptureError`."""
    library = library_of(array)
    if library is None:
        raise ArrayError(f"{type(array).__name__} is no array of a library that is loaded; convert it to one")
    stream = library.current_stream(info.device) or current_stream(info.device)
    if stream.capturing:
        raise CaptureError(f"{stream!r} captures a graph, and a call cannot be part of one; call after it")
    memory.join(library, array, info, stream)
    return stream.record()


def _giving(block: Block) -> memory.Allocate:
    return lambda device, nbytes: block


def unshared(references: int, value: Any) -> list[int]:
    """The `id` of each NumPy array of a result (itself, or in a tuple or list) that nobody else can write to.

    Such an array needs no snapshot: the function that made it has returned, and nothing else refers to it or to its
    memory, not even weakly.  CPython's reference counts tell; where they do not (other interpreters, free threading)
    there are none.  The caller holds `value` in one variable and nowhere else, and `references` is ``sys.getrefcount``
    of that variable, asked by himself and first: what a call of a Python function adds to the count depends on who
    evaluates frames, and torch's compiler replaces that for the whole process.

    An address is no reference: code that keeps `array.ctypes.data` and writes there after its function has returned
    writes into the reply that is on its way.  It has to keep the array as well, as for any other owner of memory.
    """
    if not _COUNTS or references > _ONE_VARIABLE:
        return []
    if type(value) is np.ndarray:
        return [id(value)] if _owns(value) else []
    if type(value) not in (tuple, list):
        return []
    return [
        id(value[index])
        for index in range(len(value))
        if type(value[index]) is np.ndarray and sys.getrefcount(value[index]) <= 2 and _owns(value[index])
    ]


def _one_variable() -> int:
    """What `sys.getrefcount` says of an object that one variable holds: 1 where CPython borrows it, else 2."""
    held = object()
    return sys.getrefcount(held)


_ONE_VARIABLE = _one_variable()
_COUNTS = sys.implementation.name == "cpython" and getattr(sys, "_is_gil_enabled", lambda: True)()


def _owns(array: np.ndarray[Any, Any]) -> bool:
    if weakref.getweakrefcount(array):
        return False
    if array.base is None:
        return array.flags.owndata  # else it is over memory of C code, which says of nobody whether he writes there
    return is_memory_base(array.base) and sys.getrefcount(array.base) <= 2
