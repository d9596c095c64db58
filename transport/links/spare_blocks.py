"""Memory for large frames, used again once nobody looks at it: that saves a fresh block's page faults and clearing.

A bytearray cannot grow while a view of it lives, however many views of views there are: so it knows itself whether it
is free, and nobody has to give it back.
"""

from __future__ import annotations

SPARE_BYTES = 16 << 20


class SpareBlocks:
    """Blocks that are handed out as views, at most `SPARE_BYTES` of them kept."""

    def __init__(self) -> None:
        self._blocks: list[bytearray] = []
        self._held = 0

    def take(self, size: int) -> memoryview:
        """A writable view of `size` bytes, whatever is in them; it is the caller's while it, or a part of it, lives.

        Does not block the host.
        """
        for block in self._blocks:
            if size <= len(block) <= 2 * size and _is_free(block):
                return memoryview(block)[:size]
        block = bytearray(size)
        if size <= SPARE_BYTES // 4:
            self._make_room(size)
            if self._held + size <= SPARE_BYTES:
                _is_free(block)  # grows once by the byte with which the later questions are asked
                self._blocks.append(block)
                self._held += size
        return memoryview(block)

    def _make_room(self, size: int) -> None:
        for block in list(self._blocks):
            if self._held + size <= SPARE_BYTES:
                return
            if _is_free(block):
                self._blocks.remove(block)
                self._held -= len(block)


def _is_free(block: bytearray) -> bool:
    try:
        block.append(0)
    except BufferError:
        return False
    block.pop()
    return True
