# requires: core
"""Streams in one process: a lease, a guard, a record and wait, and a future. Here on the host backend."""

from __future__ import annotations

import numpy as np

import streamrt


def main() -> None:
    """Orders work of two streams on the device; the host waits once, at the end."""
    device = streamrt.open_device("host:0")
    source, target = np.arange(8.0), np.zeros(8)
    pool = streamrt.StreamPool(device)

    with pool.lease() as first, pool.lease() as second:
        first.stream.copy(target.ctypes.data, source.ctypes.data, source.nbytes)
        second.stream.wait(first.stream.record())  # on the device: second's work comes after first's copy
        with streamrt.using(second.stream):
            assert streamrt.current_stream(device) == second.stream
        second.stream.synchronize()
    assert np.array_equal(source, target)

    future: streamrt.DeviceFuture[np.ndarray] = streamrt.DeviceFuture()
    doubled = future.then(lambda value: value * 2)
    future.set_result(target)
    print("copied and doubled:", doubled.result())


if __name__ == "__main__":
    main()
