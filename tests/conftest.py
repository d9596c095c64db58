"""What all tests share: which devices there are, and hypothesis' profiles.  Nothing is imported from here."""

from __future__ import annotations

import ctypes
import functools
import os
import signal

import hypothesis
import pytest

# A shell lets its background jobs ignore SIGINT, and their children inherit that; the tests of Ctrl-C need it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# JAX would take most of a GPU's memory, and the workers of the same test need some.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Nothing here is timed by the wall clock: on a shared two-core machine a deadline only makes failures that say nothing.
hypothesis.settings.register_profile("default", deadline=None, max_examples=60)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


# Whole files that run worker processes: minutes on two cores, so `make check` leaves them to `make test`.
WITH_WORKERS = {
    "test_arenas",
    "test_conformance",
    "test_demo",
    "test_device_maps",
    "test_examples",
    "test_forks",
    "test_inlined",
    "test_kills",
    "test_kills_held",
    "test_local_workers",
    "test_order",
    "test_pipeline",
    "test_releaser",
    "test_rpc",
    "test_rpc_bad_input",
    "test_rpc_field_cases",
    "test_shared_memory",
    "test_ucx",
    "test_worker",
}
# Files that load numba, whose default stream every guard of the process fences from then on: that orders two streams
# which a test of a race wants unordered.  They come last.
WITH_NUMBA = {"test_arrays_gpu", "test_graph_gpu"}
# Whole files that replay many seeds.  They come first, in a process where no other test has left anything to be given
# back, which takes turns in their worlds.
SIMULATIONS = {"test_simulation", "test_simulation_faults", "test_simulation_order"}


@functools.cache
def cuda_devices() -> int:
    """How many CUDA devices the driver shows to this process; 0 without a driver.  Asked once, and only if needed."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def _second(item: pytest.Item) -> bool:
    """Whether a test of ordinary memory, which has no streams, is here for the other order once more."""
    spec = getattr(item, "callspec", None)
    plain = getattr(item, "originalname", "") in (
        "test_arrays_arrive_equal",
        "test_sizes_around_the_threshold_and_a_page",
    )
    return plain and spec is not None and spec.params.get("child") == "stream" and spec.params.get("dtype") != "f8"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what only a whole run has, unless STREAMRT_WHOLE is 1.

    Marks what runs worker processes or many seeds, and skips what needs more devices than there are.  With
    STREAMRT_REQUIRE_GPU set, having no device is an error.
    """
    if os.environ.get("STREAMRT_WHOLE") != "1":
        left = [item for item in items if item.get_closest_marker("whole") or _second(item)]
        if left:
            config.hook.pytest_deselected(items=left)
            items[:] = [item for item in items if item not in left]
    for item in items:
        if item.path.stem in WITH_WORKERS:
            item.add_marker(pytest.mark.workers)
        if item.path.stem in SIMULATIONS:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: (item.path.stem in WITH_NUMBA, item.path.stem not in SIMULATIONS))
    for marker, needed in (("gpu", 1), ("gpu2", 2)):
        marked = [item for item in items if item.get_closest_marker(marker)]
        if not marked or cuda_devices() >= needed:
            continue
        if os.environ.get("STREAMRT_REQUIRE_GPU") and cuda_devices() == 0:
            raise pytest.UsageError("STREAMRT_REQUIRE_GPU is set and no CUDA device can be used here")
        reason = f"needs {needed} CUDA device(s), {cuda_devices()} here"
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_report_header() -> str:
    """The devices, where somebody asked for them."""
    asked = os.environ.get("STREAMRT_REQUIRE_GPU")
    return f"CUDA devices: {cuda_devices()}" if asked else "CUDA devices: not asked for"
