"""Futures of values with device arrays.

A `DeviceFuture` has two ends: the *message* (the host knows the value) and the *device* (the arrays hold it).
Completing records, per device, where the value was made; using it makes those streams wait that are current then, and
no others.

Rules:

- A future ends once: the first completion wins, later ones are dropped without harm.  What goes wrong while completing
  (the search of the value, a device outside `devices=`) is the future's error: it is never left pending.
- No lock is held while a value is searched, an event recorded or a callback run.
- Lost data is never a value: after `mark_lost` every use raises, also of the futures that were derived from it.
- A wait says that it blocks (`streamrt.callbacks.blocking`), so a continuation may wait for anything.

Sources: the TensorPipe RFC on CUDA streams (`CudaFuture`, `Future.wait(non_blocking=)`); pytorch#48789, pytorch#42869,
pytorch#54475, pytorch#46931, pytorch#48790.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED, PENDING
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from streamrt.callbacks import blocking, callback_pool
from streamrt.device import Device, current_devices, listed_devices, parse_device
from streamrt.errors import ArrayError, PendingError, PlacementError, again
from streamrt.guard import using
from streamrt.log import Log
from streamrt.points import NO_POINTS, ReadyPoints, misplaced
from streamrt.pool import stream_pool
from streamrt.seconds import deadline_of, remaining
from streamrt.stream import Stream
from streamrt.wait import wait_all

if TYPE_CHECKING:
    import asyncio

__all__ = ["DeviceFuture", "SupportsSubmit", "blocking_wait", "wait_all"]

T = TypeVar("T")
Hook = Callable[["DeviceFuture[Any]"], None]
SPINS = 50  # turns of an event loop before an await sleeps between its questions
POLL_SECONDS = 0.0005
_CANCELLED = (CANCELLED, CANCELLED_AND_NOTIFIED)
_ENDED = (FINISHED, *_CANCELLED)
_log = Log("streamrt")
_blocking_wait = True


class SupportsSubmit(Protocol):
    """What `then` asks of an executor: `concurrent.futures.Executor` is one."""

    def submit(self, task: Callable[[], None], /) -> Any:
        """Runs the task some time, on a thread of its own choice.  Does not block the host."""


class _Loss:
    """A cell shared by a future and all that were derived from it."""

    error: BaseException | None = None
    ask: Callable[[], BaseException | None] | None = None

    def found(self) -> BaseException | None:
        """The error of a loss that is known by now."""
        if self.ask is not None:
            told = self.ask()  # also when it is known: it may note who was told
            if self.error is None:
                self.error = told
        return self.error


def blocking_wait(enabled: bool | None = None) -> bool:
    """Whether `wait` blocks the host for the device when not told otherwise; sets it if `enabled` is given.

    On at first.  Returns the setting before.  Does not touch the device.  (RFC: `NCCL_BLOCKING_WAIT`, then
    `non_blocking=`.)
    """
    global _blocking_wait
    previous = _blocking_wait
    if enabled is not None:
        _blocking_wait = enabled
    return previous


class DeviceFuture(concurrent.futures.Future[T]):
    """A value that is coming, with the points at which its device arrays are ready.

    `devices` is what the value may be on (names, indices or device objects; any device by default).  For those who
    complete it from a peer: `sent` is the future of "the arguments may be written again", `on_cancel` hears of a
    cancellation, `settle` is called by a blocking wait before it returns, so that a loss that has arrived is noticed,
    and `fetch` by who waits for the message: it may bring that itself, for so many seconds at most.
    """

    def __init__(
        self,
        devices: Iterable[Any] | None = None,
        *,
        sent: concurrent.futures.Future[None] | None = None,
        on_cancel: Hook | None = None,
        settle: Hook | None = None,
    ) -> None:
        """A pending future.  Does not touch the device.  Raises `PlacementError` for ``cpu``, which has no index."""
        # What the base class sets, but for its condition: see `_condition`.
        self._state = PENDING
        self._result: Any = None
        self._exception: BaseException | None = None
        self._waiters = []
        self._done_callbacks: list[Callable[[Any], object]] = []
        self._lock = threading.RLock()
        self._blocked: threading.Condition | None = None
        self.allowed = None if devices is None else frozenset(map(_indexed, listed_devices(devices)))
        self.on_cancel = on_cancel
        self.fetch: Callable[[DeviceFuture[T], float | None], None] | None = None
        self.settle = settle
        self._sent = sent
        self._claimed = False  # somebody completes or cancels it; under the lock
        self._points = NO_POINTS
        self._context: tuple[Device, ...] = ()  # the devices that were current where it was completed
        self._loss = _Loss()
        self._losses: tuple[_Loss, ...] = (self._loss,)

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        """What the base class and `concurrent.futures.wait` lock and wait on, made when first asked for: most futures
        end before anybody blocks on them."""
        with self._lock:
            if self._blocked is None:
                self._blocked = threading.Condition(self._lock)
            return self._blocked

    # completing

    def set_result(
        self,
        result: T,
        streams: Iterable[Stream] | None = None,
        *,
        lost: Callable[[], BaseException | None] | None = None,
    ) -> None:
        """Completes it.  Enqueues a record on each stream on which the value was made: per device the calling thread's
        current streams, or those of `streams` on that device.  `lost` is asked at each use, after the device is done
        where the use waits for that, whether the data behind the value will never come: the error to raise, or None.
        It must not block.

        Does not block the host, and never raises for the value's sake: a value on a device outside `devices=`, or one
        whose search fails, makes the future fail.  A second completion, or one after `cancel`, is dropped.
        """
        if self.done():
            return
        try:
            points = ReadyPoints.of(result, streams, self.allowed)
        except Exception as error:  # noqa: BLE001 - whatever the search raises belongs to who waits (pytorch#54475)
            self.set_exception(error)
            return
        self._end(result, None, points, current_devices(), lost)

    def set_ready(self, result: T) -> None:
        """Completes it with a value that needs no ordering: it has no device arrays, or they are complete.

        Does not touch the device.  A second completion, or one after `cancel`, is dropped.
        """
        self._end(result, None, NO_POINTS, current_devices())

    def set_exception(self, exception: BaseException | None) -> None:
        """Makes it fail.  Dropped when it has ended already.  Does not touch the device."""
        self._end(None, exception, NO_POINTS, current_devices())

    def _end(
        self,
        result: T | None,
        error: BaseException | None,
        points: ReadyPoints,
        context: tuple[Device, ...],
        lost: Callable[[], BaseException | None] | None = None,
    ) -> None:
        """As `set_result` and `set_exception` of the base class, once, and waking those who block if there are any."""
        with self._lock:
            if self._claimed:
                return
            self._claimed = True
            self._loss.ask = lost
            self._points, self._context = points, context
            self._result, self._exception = result, error
            self._state = FINISHED
            for waiter in self._waiters:
                if error is None:
                    waiter.add_result(self)
                else:
                    waiter.add_exception(self)
            if self._blocked is not None:
                self._blocked.notify_all()
        self._invoke_callbacks()

    def cancel(self) -> bool:
        """Gives up: whether it is cancelled now.  Whoever waits is told, also `concurrent.futures.wait`.

        Does not touch the device: what was enqueued goes on, and a late value is dropped.
        """
        with self._lock:
            if self._claimed or self.running():
                return self.cancelled()
            self._claimed = True
        super().cancel()
        super().set_running_or_notify_cancel()
        if self.on_cancel is not None:
            try:
                self.on_cancel(self)
            except Exception:  # noqa: BLE001 - who cancels is not to blame for the hook; the log has it
                _log.exception("on_cancel of %r raised", self)
        return True

    def set_running_or_notify_cancel(self) -> bool:
        """For executors; see `concurrent.futures.Future`.  False when it was cancelled.  Does not touch the device."""
        return False if self.cancelled() else super().set_running_or_notify_cancel()

    def mark_lost(self, error: BaseException) -> None:
        """The data behind the value will never come: from now on every use of it, and of what was derived by `then`,
        raises `error`.  Does not touch the device.  Idempotent."""
        if self._loss.error is None:
            self._loss.error = error
        self.set_exception(error)

    def _invoke_callbacks(self) -> None:
        """Runs all of them, as each belongs to somebody else; then raises what broke one of them off (Ctrl-C)."""
        broken: BaseException | None = None
        for callback in self._done_callbacks:
            try:
                callback(self)
            except Exception:  # noqa: BLE001 - who completes is not to blame for a callback; the log has it
                _log.exception("a callback of %r raised", self)
            except BaseException as error:  # noqa: BLE001 - raised again below
                broken = error
        if broken is not None:
            raise broken

    # asking, without the base class's condition

    def done(self) -> bool:
        """Whether it has ended: with a value, an error, or cancelled.  Does not touch the device."""
        return self._state in _ENDED

    def cancelled(self) -> bool:
        """Whether it was cancelled.  Does not touch the device."""
        return self._state in _CANCELLED

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        """Calls `function` with this future when it has ended, on the thread that ends it; at once if it has.

        Does not touch the device.
        """
        with self._lock:
            if not self.done():
                self._done_callbacks.append(function)
                return
        try:
            function(self)
        except Exception:  # noqa: BLE001 - as for one that is called later
            _log.exception("a callback of %r raised", self)

    # using

    def _check_lost(self) -> None:
        for loss in self._losses:
            if (error := loss.found()) is not None:
                raise again(error)

    def _message(self, timeout: float | None) -> T:
        """The value, as soon as the host knows it.  Orders nothing."""
        self._check_lost()
        if not self.done():
            with blocking(self.done):
                try:
                    return super().result(self._fetched(timeout))
                except TimeoutError:
                    if not self.done():
                        raise TimeoutError(
                            f"no value came within {timeout} s; it still may: wait again, or cancel()"
                        ) from None
                    raise  # the value is a TimeoutError itself
        if self._state == FINISHED and self._exception is None:
            value: T = self._result
            return value
        return super().result(0)

    def _fetched(self, timeout: float | None) -> float | None:
        """Lets the calling thread bring the message itself; what is left of the time to wait for it."""
        deadline = deadline_of(timeout)
        if self.fetch is not None:
            self.fetch(self, timeout)
        return None if deadline is None else remaining(deadline)

    def _require(self, deadline: float | None) -> None:
        if self._points.on_host and not self._points.host_ready():
            with blocking():
                self._points.require(deadline)

    def result(self, timeout: float | None = None) -> T:
        """The value, ordered on the current streams.

        Enqueues waits on the calling thread's current streams of each device of the value, of every loaded library.
        Blocks the host for the message only (on the host backend also for the memory, which plain code may touch).
        Who goes on by other means than these streams calls `synchronize`: after a loss that is what raises.
        Raises what the computation raised, `TimeoutError`, `CancelledError`.
        """
        deadline = deadline_of(timeout)
        value = self._message(timeout)
        if self._points is not NO_POINTS:  # else there is nothing that could be late
            self._points.order()
            self._require(deadline)
        self._check_lost()
        return value

    def wait(self, timeout: float | None = None, *, non_blocking: bool | None = None) -> None:
        """Waits as the RFC has it: makes the current streams wait, and the host for the message.

        Enqueues waits on the calling thread's current streams, as `result`.  Unless `non_blocking`, blocks the host,
        interruptibly, until the device is done, too; None takes the process's `blocking_wait`.  Raises as `result`.
        """
        deadline = deadline_of(timeout)
        self._message(timeout)
        self._points.order()
        if not (non_blocking if non_blocking is not None else not _blocking_wait):
            self._synchronize(deadline)
        self._check_lost()

    def synchronize(self, timeout: float | None = None) -> None:
        """Blocks the host, interruptibly, until the value is there on its devices.  Orders no stream.

        Raises as `result`, and what was lost meanwhile.
        """
        deadline = deadline_of(timeout)
        self._message(timeout)
        self._synchronize(deadline)
        self._check_lost()

    def _synchronize(self, deadline: float | None) -> None:
        with blocking():
            self._points.synchronize(deadline)
        if self.settle is not None:
            self.settle(self)

    def value(self) -> T:
        """The value, with no stream ordered after it: for who orders by other means.  Raises `PendingError` before the
        end.  Blocks the host on the host backend only, until the memory may be touched."""
        if not self.done():
            raise PendingError(f"{self!r} has not ended; use result(), or wait for it first")
        value = self._message(0)
        self._require(None)
        self._check_lost()
        return value

    def ready(self) -> bool:
        """Whether it has ended and its arrays are there.  Does not block the host.  Raises after a loss."""
        self._check_lost()
        if not self.done():
            return False
        there = self._points.query()  # a future that failed has no points
        self._check_lost()  # what was lost is let go on after it was marked
        return there

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error, None for a value.  Blocks the host for the message.  Raises `TimeoutError`, `CancelledError`."""
        deadline_of(timeout)  # whether it is one is said in any case
        for loss in self._losses:
            if (error := loss.found()) is not None:
                return error
        if self._state == FINISHED:
            return self._exception
        if self.done():
            return super().exception(0)
        with blocking(self.done):
            return super().exception(self._fetched(timeout))

    @property
    def sent(self) -> concurrent.futures.Future[None]:
        """The future of "the arguments may be written again"; done where nothing is sent.

        Does not touch the device.
        """
        if self._sent is None:
            done: concurrent.futures.Future[None] = concurrent.futures.Future()
            done.set_result(None)
            self._sent = done
        return self._sent

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of the value, empty before the end.  Does not touch the device."""
        return self._points.devices

    def __await__(self) -> Generator[Any, None, T]:
        """As `result`, in a coroutine: the streams that are current in the task that awaits wait.

        Does not block the host, nor the event loop.  A cancelled task cancels the future, as with asyncio's own.
        """
        return self._awaited().__await__()

    async def _awaited(self) -> T:
        import asyncio  # loaded by whoever awaits; to all others it is a tenth of what importing us takes

        if not self.done():
            await self._woken(asyncio.get_running_loop())
        value = self._message(0)
        self._points.order()
        turns = 0
        while self._points.on_host and not self._points.host_ready():
            await asyncio.sleep(0 if turns < SPINS else POLL_SECONDS)
            turns += 1
        self._check_lost()
        return value

    async def _woken(self, loop: asyncio.AbstractEventLoop) -> None:
        import asyncio

        waiter: asyncio.Future[None] = loop.create_future()

        def finish() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def wake(_: object) -> None:
            try:
                loop.call_soon_threadsafe(finish)
            except RuntimeError:
                _log.debug("the event loop that awaited %r is closed", self)

        self.add_done_callback(wake)
        try:
            await waiter
        except asyncio.CancelledError:
            self.cancel()
            raise

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """A future is of this process.  Does not touch the device."""
        raise ArrayError("a future cannot be pickled or sent; send its value (result()), or a remote reference")

    # continuing

    def then(
        self, function: Callable[[Any], Any], executor: SupportsSubmit | None = None, *, with_future: bool = False
    ) -> DeviceFuture[Any]:
        """The future of `function(value)`, which runs when this one has ended.

        It gets the value (with `with_future` the ended future itself, also a failed one) and runs on `executor` (by
        default a pool of the process that grows when its threads block), with fresh leased streams current that already
        wait for the value, and the device current that was current where this future was completed.  Enqueues nothing
        on the caller's streams.  Does not block the host.

        If it returns a future, the result is that one's.  If it raises, or this future failed, the result fails.
        Raises `TypeError` for what is no function.
        """
        if not callable(function):
            raise TypeError(f"{function!r} is no function; then(function) calls it with the value")
        child: DeviceFuture[Any] = DeviceFuture(self.allowed)
        child._losses = (*self._losses, child._loss)

        def run() -> None:
            if not child.cancelled():
                self._continue(child, function, with_future)

        def schedule(_: object) -> None:
            try:
                (executor or callback_pool()).submit(run)
            except Exception as error:  # noqa: BLE001 - an executor that refuses must not leave the child pending
                child.set_exception(error)

        self.add_done_callback(schedule)
        return child

    def _continue(self, child: DeviceFuture[Any], function: Callable[[Any], Any], with_future: bool) -> None:
        """Runs a continuation on the executor's thread; whatever happens, the child ends."""
        with ExitStack() as stack:
            try:
                value = self if with_future else self._message(0)
                # The first device of each kind becomes the current one.
                devices = dict.fromkeys((*self._context, *self._points.devices, *sorted(self.allowed or ())))
                streams = [stack.enter_context(stream_pool(device, "callee").lease()).stream for device in devices]
                for stream in streams:
                    self._points.order_on(stream)
                if streams:
                    stack.enter_context(using(*streams))
                self._require(None)
                self._check_lost()
                result = function(value)
            except BaseException as error:  # noqa: BLE001 - it is the child's now (pytorch#54475)
                child.set_exception(error)
                return
            if isinstance(result, concurrent.futures.Future):
                result.add_done_callback(child._adopt)
            else:
                child.set_result(result)

    def _adopt(self, other: concurrent.futures.Future[Any]) -> None:
        """Ends as another future has: its value, its points, its losses."""
        if other.cancelled():
            self.cancel()
        elif (error := other.exception(0)) is not None:
            self.set_exception(error)
        elif not isinstance(other, DeviceFuture):
            self.set_result(other.result(0))
        elif self.allowed is not None and not self.allowed.issuperset(other.devices):
            self.set_exception(misplaced(other.devices, self.allowed))
        else:
            self._losses = (*self._losses, *other._losses)
            self._end(super(DeviceFuture, other).result(0), None, other._points, other._context)


def _indexed(spec: Any) -> Device:
    device = parse_device(spec)
    if not device.has_streams:
        raise PlacementError(
            f"the devices of a future have indices, got {device}: what is on cpu is ready with the message"
        )
    return device
