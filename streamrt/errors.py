"""The runtime's error tree, keyed by what the caller may do next.

Every error of the project derives from `StreamrtError`; the transport's half is in `transport.errors`.
A message says what happened and names the remedy.  Where the standard library has a class for the same
situation (`ValueError`, `TimeoutError`), ours derives from it too, so that plain `except` clauses work.
"""

from __future__ import annotations

import copy


class StreamrtError(Exception):
    """Base of every error that streamrt or transport raises on purpose."""


# The driver's codes after which "the process must be terminated and relaunched" (CUDA driver API, CUresult).
_FAILED = frozenset({214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 807, 911, 999})


class DeviceError(StreamrtError, RuntimeError):
    """The driver refused, or the device has failed.  `code` and `name` are the driver's; 0 where it gave none."""

    def __init__(self, message: str, *, code: int = 0, name: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.name = name

    @property
    def device_failed(self) -> bool:
        """Whether every later call of the device will fail in this process too, and not this one alone."""
        return self.code == 0 or self.code in _FAILED


class LifetimeError(StreamrtError, RuntimeError):
    """Something was used after its release, or dropped while it was still in flight."""


class ClosedError(StreamrtError, RuntimeError):
    """It is closed, by us or in good order by the peer, and nothing was sent; open a new one."""


class PendingError(StreamrtError, RuntimeError):
    """It has not happened yet; wait for it first."""


class UnavailableError(StreamrtError, RuntimeError):
    """A capability or an optional dependency is missing here.  The only error on which a test may skip."""


class ExhaustedError(StreamrtError, RuntimeError):
    """A pool or a memory bound is reached; retry after a release, or raise the bound that the message names."""


class PlacementError(StreamrtError, ValueError, RuntimeError):
    """An array is on a device where it may not be, or a device name is not one.  Nothing was enqueued."""


class ArrayError(StreamrtError, TypeError, ValueError):
    """An array that the target cannot hold (dtype, layout, requires grad, type).  Nothing was enqueued."""


class CaptureError(StreamrtError, RuntimeError):
    """The stream is capturing a graph, and the operation cannot be part of one.  The capture goes on.

    Raised by `capture` itself, it says why there is no graph; then nothing of the capture is left.
    """


class DeadlockError(StreamrtError, RuntimeError):
    """A wait that can never end: the wait-for graph has a cycle, or nobody is left to signal."""


class RaceError(StreamrtError, RuntimeError):
    """Two accesses are not ordered; raised by the sanitizer and by poisoned memory under schedules."""


def again(error: BaseException) -> BaseException:
    """A copy of an error that somebody keeps, to be raised in its place: what is raised keeps the frames that it goes
    through, and all that they hold."""
    fresh: BaseException = copy.copy(error)
    fresh.__cause__, fresh.__suppress_context__ = error.__cause__, error.__suppress_context__
    return fresh
