"""Chunks of pinned host memory through which staging copies, recycled by reference count.

A chunk is free again when the last view of it is dropped: the link that writes it, the message that carries it and the
copy that reads it each hold one, so none of them has to say when it is done.
"""

from __future__ import annotations

import sys
import threading

from streamrt import forks
from streamrt.device import Backend, Block
from streamrt.views import view_of

CACHED_BYTES = 64 << 20  # freed chunks kept for reuse, per backend
MAX_CHUNK_BYTES = 4 << 20
_CLASSES = (64 << 10, 1 << 20, MAX_CHUNK_BYTES)


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

    def _give_back(self, block: Block) -> None:
        with self._lock:
            if block.nbytes in self._free and self._cached + block.nbytes <= self._most:
                self._cached += block.nbytes
                self._free[block.nbytes].append(block)


_pools: dict[str, PinnedPool] = {}
_pools_lock = threading.Lock()
forks.renew(sys.modules[__name__], _pools_lock=threading.Lock)


def pinned_pool(backend: Backend) -> PinnedPool:
    """The process's pool for a backend.  Does not touch the device."""
    with _pools_lock:
        if backend.kind not in _pools:
            _pools[backend.kind] = PinnedPool(backend)
        return _pools[backend.kind]
