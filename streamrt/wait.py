"""Waiting for many futures at once: any futures of `concurrent.futures`, ours among them."""

from __future__ import annotations

import concurrent.futures
import queue
from collections.abc import Callable, Iterable
from typing import TypeVar

from streamrt.callbacks import blocking
from streamrt.seconds import deadline_of, remaining

T = TypeVar("T")


def wait_all(futures: Iterable[concurrent.futures.Future[T]], timeout: float | None = None) -> list[T]:
    """The values of all, ordered on the current streams; the first error as soon as there is one, whatever still runs.

    Enqueues waits on the calling thread's current streams.  Blocks the host for the messages.  An empty list gives [].
    Raises the first error (of those that have failed already, the first of the list), `CancelledError` for a cancelled
    one, `TimeoutError` when not all have ended within `timeout` seconds.  (pytorch#46931)
    """
    deadline = deadline_of(timeout)
    listed = list(futures)
    for one in listed:
        if not isinstance(one, concurrent.futures.Future):
            raise TypeError(f"{one!r} is no future; wait_all takes what submit gives")
    pending = dict.fromkeys(listed)
    ended: queue.SimpleQueue[concurrent.futures.Future[T]] = queue.SimpleQueue()
    put = ended.put
    for future in pending:
        future.add_done_callback(put)
    left = len(pending)
    try:
        while left:
            try:
                first = ended.get_nowait() if not ended.empty() else _next_ended(ended, deadline)
            except queue.Empty:
                raise TimeoutError(f"{left} of {len(pending)} futures had not ended after {timeout} s") from None
            if (error := first.exception(0)) is not None:  # raises CancelledError for a cancelled one
                raise error
            left -= 1
    finally:
        if left:
            for future in pending:
                _forget(future, put)
    return [future.result(None if deadline is None else remaining(deadline)) for future in listed]


def _forget(future: concurrent.futures.Future[T], callback: Callable[[concurrent.futures.Future[T]], object]) -> None:
    """Takes a callback back: who waits for the same futures again and again leaves nothing on them."""
    with future._condition:
        left: list[object] = future.__dict__["_done_callbacks"]  # a futures' own business: there is no call for it
        if callback in left:
            left.remove(callback)


def _next_ended(
    ended: queue.SimpleQueue[concurrent.futures.Future[T]], deadline: float | None
) -> concurrent.futures.Future[T]:
    with blocking(lambda: not ended.empty()):
        return ended.get(timeout=None if deadline is None else remaining(deadline))
