"""What the product's litmus does on a device: it writes all of an array on the current stream, and compares all of one.

`machine` makes one for a device of either backend.  A round's number decides the contents, so bytes of an earlier
round, and those that were never written, show as wrong words.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, Protocol

import numpy as np

import streamrt
from bench.litmus.gpu import SPIN, STEP
from streamrt.testing import Latch

PRODUCERS = ("kernel store", "memset", "device copy")
SCRIBBLE = 0xEE  # what is written over an array that was sent
MASK = 0xFFFFFFFF
HELD_SPIN = 100 * SPIN
HELD_SECONDS = 1e-3


class Found(NamedTuple):
    """Words that were wrong, rounds with such a word, and rounds that were compared."""

    wrong_words: int
    wrong_rounds: int
    compared: int


class Machine(Protocol):
    """One device of this process.  Everything is enqueued on the stream that is current for the calling thread."""

    def array(self, words: int) -> Any:
        """An array of 32-bit words, whatever is in them."""

    def write(self, how: str, array: Any, number: int, source: Any = None) -> None:
        """Enqueues the contents of a round, in one of the ways of `PRODUCERS`; `source` is memory for the copy."""

    def scribble(self, array: Any) -> None:
        """Enqueues other contents."""

    def hold_up(self) -> None:
        """Enqueues a delay that ends by itself."""

    def compare(self, how: str, array: Any, number: int) -> None:
        """Enqueues a comparison of all words with a round's contents."""

    def settle(self) -> None:
        """Blocks the host until all comparisons have run."""

    def found(self) -> Found:
        """What the comparisons have found since the last call.  Blocks the host until all have run."""


class HostMachine:
    """A virtual device: what writes is queued, comparisons are plain code, which is shown what is ready."""

    def __init__(self, device: streamrt.Device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._found = Found(0, 0, 0)

    def array(self, words: int) -> Any:
        return streamrt.array(np.zeros(words, np.uint32), device=self.device)

    def write(self, how: str, array: Any, number: int, source: Any = None) -> None:
        stream = streamrt.current_stream(self.device)
        contents = _contents(how, array.size, number)
        if how == "device copy":
            source = self.array(array.size) if source is None else source
            stream.launch(np.copyto, source, contents, writes=(source,))
            contents = source
        stream.launch(np.copyto, array, contents, reads=(source,) if how == "device copy" else (), writes=(array,))

    def scribble(self, array: Any) -> None:
        streamrt.current_stream(self.device).launch(array.fill, SCRIBBLE, writes=(array,))

    def hold_up(self) -> None:
        latch = Latch(streamrt.current_stream(self.device))
        timer = threading.Timer(HELD_SECONDS, latch.open)
        timer.daemon = True
        timer.start()

    def compare(self, how: str, array: Any, number: int) -> None:
        wrong = int(np.count_nonzero(np.asarray(array) != _contents(how, array.size, number)))
        with self._lock:
            words, rounds, compared = self._found
            self._found = Found(words + wrong, rounds + bool(wrong), compared + 1)

    def settle(self) -> None:
        return  # they are plain code

    def found(self) -> Found:
        with self._lock:
            found, self._found = self._found, Found(0, 0, 0)
        return found


class CudaMachine:
    """A GPU: CuPy arrays, the litmus's kernels, and comparisons by a kernel on the device."""

    def __init__(self, device: streamrt.Device) -> None:
        from bench.litmus.gpu import Gpu

        self.gpu = Gpu(device.index)
        self._compared = 0
        self._lock = threading.Lock()

    def array(self, words: int) -> Any:
        with self.gpu.cupy.cuda.Device(self.gpu.device):
            return self.gpu.cupy.empty(words, self.gpu.cupy.uint32)

    def write(self, how: str, array: Any, number: int, source: Any = None) -> None:
        gpu, stream = self.gpu, self.gpu.cupy.cuda.get_current_stream()
        if how == "memset":
            gpu.runtime.memsetAsync(array.data.ptr, _byte(number), array.nbytes, stream.ptr)
            return
        if how == "device copy":
            source = self.array(array.size) if source is None else source
        written = source if how == "device copy" else array
        gpu.store(stream, written.data.ptr, *_pattern(how, number), array.size)
        if how == "device copy":
            gpu.copy(stream, array.data.ptr, source.data.ptr, array.nbytes)

    def scribble(self, array: Any) -> None:
        stream = self.gpu.cupy.cuda.get_current_stream()
        self.gpu.runtime.memsetAsync(array.data.ptr, SCRIBBLE, array.nbytes, stream.ptr)

    def hold_up(self) -> None:
        self.gpu.spin(self.gpu.cupy.cuda.get_current_stream(), HELD_SPIN)

    def compare(self, how: str, array: Any, number: int) -> None:
        stream = self.gpu.cupy.cuda.get_current_stream()
        self.gpu.check(stream, array.data.ptr, *_pattern(how, number), number, array.size)
        with self._lock:
            self._compared += 1

    def settle(self) -> None:
        self.gpu.cupy.cuda.Device(self.gpu.device).synchronize()

    def found(self) -> Found:
        with self.gpu.cupy.cuda.Device(self.gpu.device):
            words, rounds = self.gpu.take_found()
        with self._lock:
            compared, self._compared = self._compared, 0
        return Found(words, rounds, compared)


def machine(device: str) -> Machine:
    """The machine of a device.  Blocks the host: opens the device and loads the kernels."""
    opened = streamrt.open_device(device)
    return CudaMachine(opened) if opened.kind == "cuda" else HostMachine(opened)


def _byte(number: int) -> int:
    """A round's byte for a memset: neither 0 nor `SCRIBBLE`."""
    return 1 + number % 200


def _pattern(how: str, number: int) -> tuple[int, int]:
    """The first word of a round, and the step to the next."""
    if how == "memset":
        return _byte(number) * 0x01010101, 0
    return number * STEP & MASK, STEP


def _contents(how: str, words: int, number: int) -> np.ndarray[Any, Any]:
    base, step = _pattern(how, number)
    return (np.arange(words, dtype=np.uint64) * step + base & MASK).astype(np.uint32)
