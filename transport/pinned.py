"""Chunks of pinned host memory through which staging copies, recycled by reference count.

A chunk is free again when the last view of it is dropped: the link that writes it, the message that carries it and the
copy that reads it each hold one, so none of them has to say when it is done.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from streamrt import forks
from streamrt.buffers import leave
from streamrt.device import Backend, Block, StreamKey
from streamrt.stream import Stream
from streamrt.views import view_of

CACHED_BYTES = 64 << 20  # freed chunks kept for reuse, per backend
MAX_CHUNK_BYTES = 4 << 20
_CLASSES = (64 << 10, 1 << 20, MAX_CHUNK_BYTES)
SLOT_BYTES = 1024
SLOTTED_BYTES = _CLASSES[0]  # of a chunk that is cut into slots


class PinnedChunk:
    """A piece of pinned memory: `address`, `nbytes` (what was asked for) and `view`, a writable view of it."""

    __slots__ = ("_block", "_pool", "address", "nbytes")

    def __init__(self, pool: PinnedPool, block: Block, nbytes: int) -> None:
        self._pool = pool
        self._block = block
        self.address = block.address
        self.nbytes = nbytes

    @property
    def view(self) -> memoryview:
        """A view that keeps the chunk out of the pool while it lives.  Does not touch the device."""
        return view_of(self.address, self.nbytes, self)

    def __del__(self) -> None:
        self._pool._give_back(self._block)


class PinnedPool:
    """Pinned chunks of one backend, in three sizes.  Thread-safe."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.RLock()  # a chunk may be given back by a finaliser inside `take`
        self._free: dict[int, list[Block]] = {size: [] for size in _CLASSES}
        self._cached = 0
        self._slots: Slots | None = None
        self._most = CACHED_BYTES  # its own: the last chunk may go when this module's names are gone
        forks.renew(self, _lock=threading.RLock)

    def take(self, nbytes: int) -> PinnedChunk:
        """A chunk of at least `nbytes`, at most 4 MiB.  May block the host the first time (memory is pinned)."""
        size = next(size for size in _CLASSES if size >= nbytes)
        with self._lock:
            free = self._free[size]
            block = free.pop() if free else None
            if block is not None:
                self._cached -= size
        if block is None:
            block = self._backend.allocate_pinned(size)
        return PinnedChunk(self, block, nbytes)

    def slot(self, stream: Stream) -> tuple[Slots, int]:
        """`SLOT_BYTES` from which `stream` will copy, and what keeps them until that is enqueued.

        May block the host the first time (memory is pinned).
        """
        while True:
            slots = self._slots
            address = None if slots is None else slots.take(stream)
            if slots is not None and address is not None:
                return slots, address
            self._slots = Slots(self.take(SLOTTED_BYTES))

    def _give_back(self, block: Block) -> None:
        with self._lock:
            if block.nbytes in self._free and self._cached + block.nbytes <= self._most:
                self._cached += block.nbytes
                self._free[block.nbytes].append(block)


class Slots:
    """A chunk that is cut into slots of `SLOT_BYTES`, each used once, for copies from it: so the few bytes of a message
    cost neither a chunk nor an event of their own.  For streams that last as long as the process.  Thread-safe.

    Dropped, it leaves the chunk until the streams that use it have done what is on them then.
    """

    __slots__ = ("_chunk", "_free", "_uses")

    def __init__(self, chunk: PinnedChunk) -> None:
        self._chunk = chunk
        self._free = iter(range(chunk.address, chunk.address + chunk.nbytes, SLOT_BYTES))
        self._uses: dict[StreamKey, Stream] = {}

    def take(self, stream: Stream) -> int | None:
        """The address of a slot from which `stream` will copy, None where all are taken.  Whoever has it keeps the
        slots until the copy is enqueued.  Does not touch the device."""
        self._uses[stream.key] = stream
        return next(self._free, None)

    def __del__(self, leave: Callable[[object, Stream], None] = leave) -> None:
        for stream in self._uses.values():
            leave(self._chunk, stream)


_pools: dict[str, PinnedPool] = {}
_pools_lock = threading.Lock()
forks.renew(sys.modules[__name__], _pools_lock=threading.Lock)


def pinned_pool(backend: Backend) -> PinnedPool:
    """The process's pool for a backend.  Does not touch the device."""
    with _pools_lock:
        if backend.kind not in _pools:
            _pools[backend.kind] = PinnedPool(backend)
        return _pools[backend.kind]
