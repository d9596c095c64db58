"""What a child of the litmus does on its GPU: kernels, streams, exported memory, words by their device address.

All memory is set on the stream that uses it, or the device is synchronised before anybody else looks: memory zeroed on
the null stream against a kernel on a non-blocking stream is the commonest false alarm of such a test.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from streamrt.cuda import memops
from streamrt.errors import DeviceError
from streamrt.segment import Segment, Word

WORDS = 1 << 18  # 1 MiB
BYTES = 4 * WORDS
STEP = 2654435761  # odd, so that a pattern never repeats within a buffer
TABLE = 1 << 20
SPIN = 1_000  # nanoseconds

SOURCE = r"""
extern "C" __global__ void store(unsigned* x, unsigned base, unsigned step, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) x[i] = base + i * step;
}
// found[0]: wrong words; found[1]: rounds with a wrong word; found[2]: the last such round.
extern "C" __global__ void check(const unsigned* x, unsigned base, unsigned step, int n, unsigned long long round,
                                 unsigned long long* found) {
  unsigned wrong = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    wrong += x[i] != base + i * step;
  if (wrong) {
    atomicAdd(found, (unsigned long long)wrong);
    if (atomicExch(found + 2, round) != round) atomicAdd(found + 1, 1ull);
  }
}
extern "C" __global__ void spin(long long nanoseconds) {
  long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < nanoseconds);
}
"""

# A kernel that nobody has loaded yet: the driver compiles and loads it at its first use.
FRESH = """.version 7.0
.target sm_70
.address_size 64
.visible .entry fresh_%d(.param .u64 p) { .reg .u64 %%a; .reg .u32 %%b; ld.param.u64 %%a, [p]; mov.u32 %%b, %d;
 st.global.u32 [%%a], %%b; ret; }
"""


class Gpu:
    """One device, its kernels loaded, `streams` non-blocking streams; `runtime` is CuPy's."""

    def __init__(self, device: int, streams: int = 1) -> None:
        import cupy
        import cupy.cuda.runtime

        self.cupy: Any = cupy
        self.runtime: Any = cupy.cuda.runtime
        self.device = device
        cupy.cuda.Device(device).use()
        module = cupy.RawModule(code=SOURCE)
        self._store, self._check = module.get_function("store"), module.get_function("check")
        self._spin = module.get_function("spin")
        self.streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(streams)]
        self.driver = memops.driver()
        self.scratch = self.runtime.malloc(4096)
        self.found = self.runtime.malloc(4096)
        self._loaded = 0
        self.runtime.memset(self.found, 0, 4096)
        self.runtime.memset(self.scratch, 0, 4096)
        memory = self.allocate(BYTES)
        for stream in self.streams:  # everything loaded and every stream used once
            self.store(stream, memory, 1, STEP)
            self.check(stream, memory, 1, STEP, 0)
            self.spin(stream, 0)
            self.copy(stream, memory, memory, 16)
        self.runtime.deviceSynchronize()
        self.runtime.free(memory)

    def allocate(self, nbytes: int) -> int:
        """A cudaMalloc of its own (so that it can be exported at offset 0), zeroed and synchronised."""
        address: int = self.runtime.malloc(nbytes)
        self.runtime.memset(address, 0, nbytes)
        self.runtime.deviceSynchronize()
        return address

    def store(self, stream: Any, address: int, base: int, step: int, words: int = WORDS) -> None:
        """Enqueues a kernel that stores the pattern."""
        cp = self.cupy
        arguments = (address, cp.uint32(base & 0xFFFFFFFF), cp.uint32(step), cp.int32(words))
        self._store((64,), (256,), arguments, stream=stream)

    def check(self, stream: Any, address: int, base: int, step: int, number: int, words: int = WORDS) -> None:
        """Enqueues a kernel that compares memory with the pattern and counts in `found`."""
        cp = self.cupy
        pattern = (cp.uint32(base & 0xFFFFFFFF), cp.uint32(step), cp.int32(words))
        self._check((64,), (256,), (address, *pattern, cp.uint64(number + 1), self.found), stream=stream)

    def spin(self, stream: Any, nanoseconds: int) -> None:
        """Enqueues a kernel that takes this long."""
        self._spin((1,), (1,), (self.cupy.int64(nanoseconds),), stream=stream)

    def copy(self, stream: Any, destination: int, source: int, nbytes: int) -> None:
        """Enqueues a device-to-device copy (between devices, or through a mapping)."""
        self.runtime.memcpyAsync(destination, source, nbytes, 3, stream.ptr)

    def set(self, stream: Any, address: int, value: int, words: int = WORDS) -> None:
        """Enqueues a memset of 32-bit words."""
        memops.check(self.driver.cuMemsetD32Async(address, value & 0xFFFFFFFF, words, stream.ptr), "setting memory")

    def first_launch(self, stream: Any, number: int) -> None:
        """Loads a kernel that was never used, and enqueues its first launch."""
        d = self.driver
        source = (FRESH % (number, number)).encode()
        module = memops.check(d.cuModuleLoadData(source), "loading a kernel")
        function = memops.check(d.cuModuleGetFunction(module, b"fresh_%d" % number), "finding a kernel")
        arguments = ((self.scratch,), (ctypes.c_void_p,))
        launched = d.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream.ptr, arguments, 0)
        memops.check(launched, "launching a new kernel")
        self._loaded += 1

    def take_found(self) -> tuple[int, int]:
        """Wrong words and wrong rounds since the last call.  Blocks the host: synchronises the device."""
        self.runtime.deviceSynchronize()
        counts = np.zeros(3, np.uint64)
        self.runtime.memcpy(counts.ctypes.data, self.found, 24, 2)
        self.runtime.memset(self.found, 0, 24)
        self.runtime.deviceSynchronize()
        return int(counts[0]), int(counts[1])

    def pending(self, stream: Any) -> bool:
        """Whether the stream has work to do."""
        status = self.runtime.streamQuery(stream.ptr)  # Stream.done would hide an error
        if status not in (0, 600):
            raise DeviceError(f"the stream has failed: status {status}", code=status)
        return bool(status)

    def description(self) -> dict[str, Any]:
        """The device's name and the driver's, runtime's and bindings' versions."""
        name = self.runtime.getDeviceProperties(self.device)["name"].decode()
        return {"gpu": name, "driver": self.runtime.driverGetVersion(), "runtime": self.runtime.runtimeGetVersion()}


class Words:
    """The words of a segment with their addresses on a device."""

    def __init__(self, segment: Segment, device: int) -> None:
        self.segment, self.device = segment, device
        self.base = memops.register(segment, device)

    def word(self, index: int, bits: int = 32) -> Word:
        """The word of this number."""
        return Word(self.segment, 64 * index, bits)

    def write(self, stream: Any, word: Word, value: int) -> None:
        """Enqueues a signal."""
        memops.write_word(stream.ptr, self.base + word.offset, value, word.bits)

    def wait(self, stream: Any, word: Word, value: int) -> None:
        """Enqueues a wait."""
        memops.wait_word(stream.ptr, self.base + word.offset, value, word.bits)


def export(gpu: Gpu, address: int) -> str:
    """The IPC handle of an allocation, as text."""
    return bytes(gpu.runtime.ipcGetMemHandle(address)).hex()


def open_mapping(gpu: Gpu, handle: str) -> int:
    """Maps a peer's allocation."""
    address: int = gpu.runtime.ipcOpenMemHandle(bytes.fromhex(handle))
    return address
