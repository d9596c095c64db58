"""What this installation consists of: versions, libraries and devices, for `streamrt info` and for result files."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform

PACKAGES = {
    "numpy": "numpy",
    "cupy": "cupy",
    "torch": "torch",
    "jax": "jax",
    "numba": "numba",
    "zmq": "pyzmq",
    "ucxx": "ucxx",
    "dask": "dask",
}
"""Modules that streamrt works with, and the distributions that they come from (CuPy's and ucxx's carry a suffix)."""


def versions() -> dict[str, str]:
    """Versions of Python, streamrt and the packages that are installed here; imports none of them.

    Does not touch the device.
    """
    found = {"python": platform.python_version(), "streamrt": version_of_streamrt()}
    owners = importlib.metadata.packages_distributions()
    for module, distribution in PACKAGES.items():
        if importlib.util.find_spec(module) is not None:
            found[module] = _version([distribution, *owners.get(module, ())]) or "unknown"
    return found


def version_of_streamrt() -> str:
    """The version of streamrt that is installed here.  Does not touch the device."""
    return _version(["streamrt"]) or "from source"


def _version(distributions: list[str]) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def devices() -> list[str]:
    """The devices that can be opened here, with what they are; opens none of them.  Does not block the host."""
    from streamrt.device import backend_of, cuda_available

    lines = ["host:0 ... (virtual devices in ordinary memory)"]
    if cuda_available():
        lines += [f"cuda:{index}" for index in range(backend_of("cuda").device_count())]
    return lines
