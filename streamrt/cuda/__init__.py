"""The CUDA backend: CuPy's streams, events and memory, and the driver's stream memory operations.

CuPy and the driver's bindings are imported when the backend is made, never before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrt.errors import UnavailableError

if TYPE_CHECKING:
    from streamrt.device import Backend


def create_backend() -> Backend:
    """The process's CUDA backend.  Does not block the host.

    Raises `UnavailableError`, naming what is missing: CuPy, the driver's bindings, the driver, or a GPU.
    """
    try:
        import cupy
    except ImportError as error:
        raise UnavailableError(
            f"CuPy cannot be imported ({error}); install streamrt[cuda12] or streamrt[cuda13], or use 'host:0'"
        ) from error
    try:
        available = bool(cupy.cuda.is_available())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise UnavailableError(f"the CUDA driver does not start ({error}); use 'host:0'") from error
    if not available:
        raise UnavailableError("CuPy sees no CUDA driver and no GPU here; use 'host:0', or look at nvidia-smi")
    from streamrt.cuda import memops

    memops.driver()
    from streamrt.cuda.backend import CudaBackend

    return CudaBackend()
