"""UCX as streamrt uses it: one worker, endpoints by address, and tag messages.  `ucxx` is imported here alone, when the
first transfer wants it.

ucxx's low-level objects are used, with no thread, future or event loop of its own.  A large message announces itself,
and its bytes move when they are fetched; so what has arrived is looked at first, and only then is UCX given memory to
write to: for a message that somebody wants, and of the size that was said.  Any other is dropped without a byte of it.

Trust: UCX authenticates nobody and does not check what it is sent, and an address is bytes from the peer that UCX
reads.  So addresses are taken from those only who could not be kept from harming this process anyway
(`transport.channels.can_tag`).  Over the network UCX listens on the loopback interface alone, unless `UCX_NET_DEVICES`
says otherwise.  Another user of this host who finds that port can send to it: he cannot guess a tag, so he neither
reads nor replaces anybody's bytes, but nothing keeps him from disturbing UCX itself.  ``UCX_TLS=^tcp`` opens no port.
Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from streamrt.device import Device
from streamrt.views import view_of

OPTIONS = {
    "NET_DEVICES": "lo",  # a worker listens on each network device that it uses
    "KEEPALIVE_INTERVAL": "1s",  # how long a peer may be gone before UCX notices by itself
}
"""UCX's options, where the environment has none of that name (with ``UCX_`` in front)."""
ENVIRONMENT = {
    "UCX_MM_ERROR_HANDLING": "y",  # else shared memory is left out as soon as a peer's death must not hang us
    "UCX_HANDLE_ERRORS": "none",  # a library does not take SIGSEGV from the program,
    "UCX_DEBUG_SIGNO": "",  # nor SIGHUP
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}
"""What UCX reads from the environment alone, where the user has set nothing; it is gone again when UCX has started."""
MAX_ADDRESS_BYTES = 8192 - 16
"""Some hundred bytes, and some kilobytes on a host with many network devices."""
_CLOSE_TRIES, _CLOSE_NANOSECONDS = 20, 10_000_000


@functools.cache
def available() -> bool:
    """Whether ucxx is installed; does not import it.  Does not touch the device."""
    return importlib.util.find_spec("ucxx") is not None


class Ucx:
    """A worker of UCX.  One thread at a time uses it; nothing here blocks the host, but `close_endpoint`."""

    def __init__(self) -> None:
        """Imports ucxx and starts UCX, which takes a moment.  Raises whatever either does."""
        with _environment():
            import ucxx._lib.libucxx as library
            from ucxx._lib.arr import Array

            options = {name: value for name, value in OPTIONS.items() if f"UCX_{name}" not in os.environ}
            self._context = library.UCXContext(config_dict=options, feature_flags=(library.Feature.TAG,))
            self._worker = library.UCXWorker(self._context)
        self._library = library
        self._array = Array
        self._any_tag, self._no_bits = library.UCXXTag(0), library.UCXXTagMask(0)
        self._nothing = Array(np.empty(0, np.uint8))
        self.address = bytes(self._worker.address)
        """Where other workers reach this one."""
        if len(self.address) > MAX_ADDRESS_BYTES:
            raise ValueError(f"its address has {len(self.address)} bytes; name fewer devices in UCX_NET_DEVICES")

    def progress(self) -> bool:
        """Moves what can be moved now; whether anything was."""
        if not self._worker.progress_once():
            return False
        self._worker.progress()
        return True

    def endpoint(self, address: bytes) -> Any:
        """An endpoint to another worker, which hears of its process's end."""
        there = self._library.UCXAddress.create_from_buffer(address)
        return self._library.UCXEndpoint.create_from_worker_address(self._worker, there, endpoint_error_handling=True)

    def send(self, endpoint: Any, tag: int, address: int, nbytes: int, device: Device) -> Any:
        """A request that sends so many bytes at an address of a device."""
        return endpoint.tag_send(self._bytes_at(address, nbytes, device), self._library.UCXXTag(tag))

    def signal(self, endpoint: Any, tag: int) -> Any:
        """A request that sends no bytes."""
        return endpoint.tag_send(self._nothing, self._library.UCXXTag(tag))

    def arrived(self) -> tuple[int, int, Any] | None:
        """The next message that has arrived: its tag, its bytes, and what `fetch` or `drop` takes."""
        probed = self._worker.tag_probe(self._any_tag, self._no_bits, True)
        return (probed.sender_tag.value, probed.length, probed) if probed.matched else None

    def fetch(self, probed: Any, address: int, nbytes: int, device: Device) -> Any:
        """A request that receives a message that has arrived."""
        return self._worker.tag_recv_with_handle(self._bytes_at(address, nbytes, device), probed)

    def drop(self, probed: Any) -> Any:
        """A request that receives nothing of a message that has arrived, and lets its sender go on."""
        return self._worker.tag_recv_with_handle(self._nothing, probed)

    @staticmethod
    def fault(request: Any) -> str:
        """What has ended a request, empty where it has done what it was to do."""
        try:
            request.check_error()
        except Exception as error:  # noqa: BLE001 - UCX's own classes, one for each of its codes
            return f"{type(error).__name__}: {error}"
        return ""

    def keep_for_ever(self) -> None:
        """Lets nobody take it apart, at the interpreter's end neither: it may touch memory, or be another process's."""
        for one in (self, self._context, self._worker, self._library, self._nothing):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))

    def _bytes_at(self, address: int, nbytes: int, device: Device) -> Any:
        if device.kind == "cuda":
            return self._array(_OnDevice(address, nbytes))
        return self._array(view_of(address, nbytes, None))


def close_endpoint(endpoint: Any) -> None:
    """Ends an endpoint and what is on its way there.  Blocks the host for a fraction of a second at most."""
    endpoint.close_blocking(period=_CLOSE_NANOSECONDS, max_attempts=_CLOSE_TRIES)


class _OnDevice:
    """So many bytes of a GPU at an address."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """The environment as UCX wants it, for as long as it starts.

    ucxx sets variables when it is imported, which children would inherit: they are taken away again.
    """
    before = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("UCX_") and name not in before]:
            del os.environ[name]
        os.environ.update(before)
