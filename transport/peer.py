"""`Peer`: the other end of a connection, as users see it; `connect` and `loopback` make one."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Self

from streamrt.callbacks import blocking
from streamrt.device import Device, default_device_kind, listed_devices, parse_device, quiet
from streamrt.errors import ClosedError, PlacementError
from streamrt.future import DeviceFuture
from streamrt.guard import as_stream
from streamrt.libraries import check_installed
from streamrt.seconds import waitable
from streamrt.stream import Stream
from transport import ordering
from transport.agent import Agent, default_agent
from transport.context import current_call
from transport.device_map import MapSpec, parse_map
from transport.driver import Driver
from transport.errors import DeadlineError, DeviceMapError, LocalProtocolError, PeerLostError
from transport.launch.functions import ROOT, wire_name
from transport.limits import FOREVER, NO_DEADLINE, Limits, check_flag, check_seconds
from transport.links import Link, LinkBroken, Unreached, schemes, unix_link
from transport.responsive import responsive
from transport.service import Service, check_kind, check_service, function_name

CONNECT_SECONDS = 10.0
HANDSHAKE_GRACE = 1.0  # so that who waits for the handshake gives up before the protocol does
FIRST_PAUSE_SECONDS = 0.02  # between two attempts to reach a worker that is not there yet
LONGEST_PAUSE_SECONDS = 0.25
LAST_SECONDS = 1.0  # an attempt that has less, and does not end in time, says what the one before said
NOT_THERE = (
    "is the worker running, and is the address right? Start one with: streamrt-worker MODULE:SERVICE --listen ADDRESS"
)
QUIET_SECONDS = 0.1  # between two looks at whether a peer that was dropped has calls open
COPY = (
    "True takes a snapshot of the arrays as of this call, False lends them, not to be written to before future.sent; a "
    "function's own parameter of that name is passed by position"
)
NO_STREAMS: Mapping[Device, Stream] = {}


@dataclass(frozen=True, slots=True)
class PeerStatistics:
    """What went over a connection: bytes of buffers by channel, buffers of devices that went by shared memory by order
    ("host" or "stream"), calls open and running, and the protocol's counters."""

    bytes_out: dict[str, int]
    bytes_in: dict[str, int]
    open_calls: int
    running_calls: int
    messages_out: int
    messages_in: int
    orders_out: dict[str, int]
    orders_in: dict[str, int]


class Peer:
    """The other end of a connection.  Thread-safe; a context manager that closes it.

    One that is dropped while its connection is open says so with a `ResourceWarning`, and closes it: what is open then
    may end.
    """

    _owns = False
    """Whether the connection is to end with it: not where it was made for a function that a peer has called."""

    def __init__(self, driver: Driver, *, default_timeout: float | None = None) -> None:
        """Use `connect`, `loopback`, `local_workers` or `group`.  Does not touch the device."""
        self._driver = driver
        self._default_timeout = default_timeout
        self._on_close: Callable[[float], None] | None = None

    @classmethod
    def of(cls, driver: Driver) -> Peer:
        """The peer at the other end of a driver's connection.  Does not touch the device."""
        return cls(driver)

    # calls

    def submit(
        self,
        function: Callable[..., Any] | str,
        /,
        *args: Any,
        timeout: float | None = None,
        copy: bool = True,
        detach: bool = False,
        reply_stream: Any = None,
        **kwargs: Any,
    ) -> DeviceFuture[Any]:
        """Calls a function of the peer; returns at once.

        Enqueues on the current streams a snapshot of each array argument, so that the callee sees the bytes as of this
        call, and nothing else; does not block the host.  ``copy=False`` lends the arrays instead: do not write to them
        before ``future.sent``.  `timeout` in seconds (default: the connection's), `detach` sends tensors that require
        grad without it.  `reply_stream` (a stream, or one per device) receives the reply in place of leased streams,
        for who orders by hand; if one captures a graph when the reply comes, the future ends with a `CaptureError`.
        A function's own parameter with the name of an option is passed by position.  Raises
        `DeviceMapError`, `ArrayError`, `CodecError`, `ExhaustedError`, `PeerLostError`, `ClosedError`, and for an
        option of the wrong type `LocalProtocolError`, before anything is sent; whatever happens later ends the future.
        """
        streams = {} if reply_stream is None else _by_device(reply_stream)
        with quiet(), responsive():
            return self._start(function, args, kwargs, timeout, copy, detach, notify=False, reply_streams=streams)

    def call(
        self,
        function: Callable[..., Any] | str,
        /,
        *args: Any,
        timeout: float | None = None,
        copy: bool | None = None,
        detach: bool = False,
        **kwargs: Any,
    ) -> Any:
        """`submit`, then ``result()``: the value is ordered on the current streams.

        `timeout`, `copy` and `detach` are options of the call; a function's own parameter of such a name is passed by
        position.
        The calling thread waits, so arrays in ordinary memory need no snapshot: they are lent until it returns, and no
        other thread may write to them meanwhile.  ``copy=True`` takes snapshots of these too, ``copy=False`` lends all.
        Blocks the host until the reply's message is here, not until the device is done.  Raises what the function
        raised (`RemoteError`, and the built-in class where it is one), `DeadlineError`, `PeerLostError`.
        """
        if copy is None and not self._driver.calls.lends:
            copy = True  # the link may read what it was given after the call has returned
        with quiet(), responsive():
            future = self._start(function, args, kwargs, timeout, copy, detach, notify=False, waits=True)
            try:
                with blocking(future.done):
                    self._driver.calls.read_until(future)
                return future.result()
            except BaseException:
                self._driver.calls.give_up(future)  # nobody can take its result any more
                raise

    def notify(
        self,
        function: Callable[..., Any] | str,
        /,
        *args: Any,
        copy: bool = True,
        detach: bool = False,
        **kwargs: Any,
    ) -> Future[None]:
        """Calls a function of the peer with no reply; its errors are logged there.

        Enqueues on the current streams as `submit` does; does not block the host.  The host future that is returned
        ends when all has been handed to the link; a graceful `close` waits until the peer has run it.
        """
        with quiet(), responsive():
            return self._start(function, args, kwargs, None, copy, detach, notify=True).sent

    def _start(
        self,
        function: Callable[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        copy: bool | None,
        detach: bool,
        *,
        notify: bool,
        reply_streams: Mapping[Device, Stream] = NO_STREAMS,
        waits: bool = False,
    ) -> DeviceFuture[Any]:
        if copy is not None or not waits:
            check_flag("copy", copy, COPY)
        check_flag("detach", detach, "True sends tensors that require grad without it")
        if self._driver.ending is not None and not isinstance(function, str):  # to a child of ours, not to its parent
            name, args, root = wire_name(function, args)
        else:
            name, root = function_name(function), ROOT
        if timeout is None:
            timeout = self._default_timeout
        else:
            check_seconds("timeout", timeout, NO_DEADLINE)
        return self._driver.calls.submit(
            name,
            (args, kwargs),
            timeout=timeout,
            copy=copy,
            detach=detach,
            notify=notify,
            reply_streams=reply_streams,
            root=root,
            waits=waits,
        )

    # what it is

    @property
    def name(self) -> str:
        """The peer's name.  Does not touch the device."""
        return self._driver.name

    @property
    def functions(self) -> tuple[str, ...]:
        """The functions that the peer's service said it has.  Does not touch the device."""
        info = self._driver.peer_info
        return () if info is None else info.functions

    @property
    def pid(self) -> int:
        """The peer's process id, on its own host.  Does not touch the device."""
        pid = self._driver.remote_info.get("pid", 0)
        return pid if isinstance(pid, int) else 0

    @property
    def device_map(self) -> dict[str, str]:
        """Which device of ours goes to which of the peer's.  Does not touch the device."""
        return {str(local): str(remote) for local, remote in self._driver.device_map().forward.items()}

    def channels(self, nbytes: int = 1 << 20) -> dict[str, str]:
        """By which channel an array of `nbytes` on a device of ours goes to the peer: ``{"cuda:0": "shared_memory"}``.

        What both sides said of themselves decides (`transport.channels`), and what has turned out not to work since; an
        array for which a channel has no room goes by the next all the same.  Does not touch the device.
        """
        driver = self._driver
        return {
            str(local): driver.transfers.channel(local, remote, nbytes)
            for local, remote in driver.device_map().forward.items()
        }

    @property
    def order(self) -> str:
        """How arrays of devices are ordered that go by shared memory, as both sides have agreed: "host" when they are
        there, "stream" by streams that wait for the peer's, "auto" where each pays.  Does not touch the device.
        """
        return self._driver.transfers.ordered.agreed

    @property
    def closed(self) -> bool:
        """Whether the connection has ended.  Does not touch the device."""
        return self._driver.closed is not None

    def statistics(self) -> PeerStatistics:
        """A snapshot of the connection's counters.  Does not touch the device."""
        driver = self._driver
        counted = driver.protocol.statistics()
        return PeerStatistics(
            bytes_out=dict(driver.transfers.bytes_out),
            bytes_in=dict(driver.transfers.bytes_in),
            open_calls=len(driver.calls.open),
            running_calls=len(driver.served.calls),
            messages_out=counted.messages_sent,
            messages_in=counted.messages_received,
            orders_out=dict(driver.transfers.ordered.out),
            orders_in=dict(driver.transfers.ordered.come),
        )

    def __repr__(self) -> str:
        return f"<Peer {self.name!r} {self._state()}>"

    def _state(self) -> str:
        closed = self._driver.closed
        if closed is None:
            return f"{len(self._driver.calls.open)} calls open"
        if closed.graceful:
            return "closed"
        return f"{'lost' if self._driver.broke else 'closed'}: {closed.reason}"

    # the end

    def close(self, timeout: float = 5.0) -> None:
        """Ends the connection: open calls may finish within `timeout` seconds, then they fail with `PeerLostError`.

        Blocks the host that long at most.  Idempotent.
        """
        seconds = waitable(timeout)
        self._driver.goodbye()
        with blocking(self._driver.ended.is_set):
            if not self._driver.ended.wait(seconds):
                self._driver.abort("closed by this side before its calls had ended")
        if self._on_close is not None:
            on_close, self._on_close = self._on_close, None
            on_close(timeout)

    def abort(self) -> None:
        """Ends the connection at once: open calls fail with `PeerLostError`.  Does not block the host.  Idempotent."""
        self._driver.abort("aborted by this side")
        if self._on_close is not None:
            on_close, self._on_close = self._on_close, None
            closing = threading.Thread(target=on_close, args=(0.0,), name="streamrt-abort", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread is left for it: then the exit closes it
                closing.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        """Does not wait for anything: it may run anywhere and on any thread, so the agent's thread begins the rest."""
        if self._owns and self._driver.closed is None:
            self._driver.agent.call_soon(functools.partial(_apart, self._close_when_quiet))
            warnings.warn(f"dropped, but not closed: {self!r}; use it in a with, or close it", ResourceWarning, 2, self)

    def _close_when_quiet(self) -> None:
        """Closes it once no call is open, either way: an open one may need more of them.  Blocks the host till then."""
        driver = self._driver
        while driver.calls.open or driver.served.calls:
            if driver.ended.wait(QUIET_SECONDS):
                break
        self.close()


def _apart(close: Callable[[], None]) -> None:
    """Has a thread close what nobody refers to; where none can be had the exit closes it."""
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=close, name="streamrt-dropped", daemon=True).start()


def _owned(peer: Peer) -> Peer:
    """The peer, with which its connection ends."""
    peer._owns = True
    return peer


def _by_device(streams: Any) -> dict[Device, Stream]:
    given = [as_stream(one) for one in (streams if isinstance(streams, (list, tuple)) else [streams])]
    return {stream.device: stream for stream in given}


def caller() -> Peer:
    """The peer that called the function which runs here: it can be called back.  Does not touch the device.

    Raises `LocalProtocolError` outside a call.
    """
    return Peer.of(current_call().driver)


def connect(
    address: str,
    *,
    device_map: MapSpec | None = None,
    devices: Iterable[Device | str | int] | None = None,
    arrays: str | None = None,
    name: str = "",
    service: Service | None = None,
    timeout: float = CONNECT_SECONDS,
    default_timeout: float | None = None,
    peer_timeout: float | None = None,
    order: str | None = None,
    agent: Agent | None = None,
) -> Peer:
    """Connects to a worker, ``tcp://127.0.0.1:7700``.

    `device_map` says where arrays go (``{"cuda:0": "cuda:1", "cpu": "cpu"}``; without one: the peer's only device, else
    the same index), `devices` which of ours may be used, `arrays` the kind of array that comes back (else that of the
    call's first array), `service` what the peer may call here.  `timeout` bounds the connection in seconds,
    `default_timeout` each call; a peer that has stopped is lost after `peer_timeout` seconds.  `order` says how arrays
    of devices are ordered that go by shared memory: "host" sends them when they are there; "stream" sends at once and
    lets streams wait for the peer's; "auto" does the latter where it pays.  What either end asks for is done: "host"
    first, else "stream", if streams of both can wait, else "auto".  Where neither asks, here or by ``STREAMRT_ORDER``,
    it is host order.

    Where nobody listens yet, or the worker is still being set up or ends, it tries again until the time is over.
    Blocks the host until the handshake is done.  Raises `AuthError`, `DeviceMapError`, `VersionError`, `PeerLostError`,
    `DeadlineError`, `LocalProtocolError`, `UnavailableError` where the library of `arrays` is not installed.
    """
    check_seconds("timeout", timeout, "")
    if peer_timeout is not None:
        check_seconds("peer_timeout", peer_timeout, FOREVER)
    order = ordering.asked(order)
    devices = None if devices is None else list_devices(devices)  # each attempt reads them
    _checked(device_map, devices, arrays, default_timeout, service)
    name = name or address
    started, pause = time.monotonic(), FIRST_PAUSE_SECONDS
    left, before = timeout, None
    while True:
        try:
            peer = open_peer(
                _reach(address, name, started),
                name=name,
                address=address,
                device_map=device_map,
                devices=devices,
                arrays=arrays,
                service=service,
                timeout=timeout,
                default_timeout=default_timeout,
                peer_timeout=peer_timeout,
                order=order,
                agent=agent,
                started=started,
            )
            return _owned(peer)
        except _NotYet as error:
            before, left = error, started + timeout - time.monotonic()
            if left <= 0.0:
                raise before.as_told(started) from error.__cause__
        except DeadlineError:
            if before is None or left >= LAST_SECONDS:
                raise
            raise before.as_told(started) from before.__cause__
        with blocking(_never):
            time.sleep(min(pause, left))
        left = started + timeout - time.monotonic()
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


class _NotYet(PeerLostError):
    """The peer was not there, or not ready, and may be soon.

    `where` and `reason` are those of `_no_answer`; without `where` its text says all.
    """

    def __init__(self, text: str, where: str = "", reason: str = "") -> None:
        super().__init__(text)
        self.where, self.reason = where, reason

    def as_told(self, started: float) -> PeerLostError:
        """What the user is told when the time is over."""
        return PeerLostError(_no_answer(self.where, started, self.reason) if self.where else str(self))


def _reach(address: str, name: str, started: float) -> Link:
    try:
        return schemes.connect(address)
    except LinkBroken as broken:
        where, reason = _where(name, address), str(broken)
        text = _no_answer(where, started, reason)
        raise (_NotYet(text, where, reason) if isinstance(broken, Unreached) else PeerLostError(text)) from broken


def _never() -> bool:
    """Of what is waited for: whether it is there.  Time alone brings it."""
    return False


def open_peer(
    link: Link,
    *,
    name: str,
    address: str = "",
    device_map: MapSpec | None = None,
    devices: Iterable[Device | str | int] | None = None,
    arrays: str | None = None,
    service: Service | None = None,
    timeout: float = CONNECT_SECONDS,
    default_timeout: float | None = None,
    peer_timeout: float | None = None,
    order: str | None = None,
    agent: Agent | None = None,
    wait: bool = True,
    started: float | None = None,
) -> Peer:
    """Makes a peer of a link as its initiator, and waits for the handshake unless told otherwise.

    `timeout` is counted from `started`, or from now.  Blocks the host until the handshake is done, when `wait`.
    """
    try:
        entries, allowed = _checked(device_map, devices, arrays, default_timeout, service)
        used = default_agent() if agent is None else agent
        limits = Limits(same_host=link.same_host, handshake_timeout=timeout + HANDSHAKE_GRACE)
        if peer_timeout is not None:
            limits = replace(limits, peer_timeout=peer_timeout)
        driver = used.add(
            link,
            initiator=True,
            limits=limits,
            name=name,
            device_map=entries,
            allowed=allowed,
            arrays=arrays,
            service=service,
            order=order,
        )
    except BaseException:
        link.close()
        raise
    if wait:
        try:
            await_ready(driver, timeout, address, started)
        except BaseException:
            driver.abort("the connection was not completed")  # also after Ctrl-C
            raise
    return Peer(driver, default_timeout=default_timeout)


def _checked(
    device_map: MapSpec | None,
    devices: Iterable[Device | str | int] | None,
    arrays: str | None,
    default_timeout: float | None,
    service: Service | None,
) -> tuple[dict[Device, Device] | None, tuple[Device, ...] | None]:
    """The map and the devices that are meant.  Raises what `connect` raises for its arguments."""
    check_kind(arrays)
    if arrays is not None:
        check_installed(arrays)
    check_service(service)
    if default_timeout is not None:
        check_seconds("default_timeout", default_timeout, NO_DEADLINE)
    kind = default_device_kind()
    entries = None if device_map is None else parse_map(device_map, local_kind=kind, remote_kind=kind)
    return entries, None if devices is None else tuple(map(_allowed, list_devices(devices)))


def list_devices(devices: Iterable[Device | str | int]) -> list[Device | str | int]:
    """The devices of `devices=`.  Raises `DeviceMapError` for what is no list of them.  Does not touch the device."""
    try:
        return listed_devices(devices)
    except PlacementError as error:
        raise DeviceMapError(str(error)) from error


def _allowed(device: Device | str | int) -> Device:
    try:
        return parse_device(device)
    except PlacementError as error:
        raise DeviceMapError(f"devices=: {error}") from error


def await_ready(driver: Driver, timeout: float, address: str = "", started: float | None = None) -> None:
    """Blocks the host until the handshake is done, `timeout` seconds from `started` (now) at most.  Raises what ended
    it instead.

    `address` is where the user said that the peer is, for the message.
    """
    now = time.monotonic()
    started = now if started is None else started
    where = _where(driver.name, address)
    with blocking(driver.ready.is_set):
        arrived = driver.ready.wait(waitable(max(0.0, started + timeout - now)))
    if not arrived:
        driver.abort("the handshake took too long")
        remedy = NOT_THERE if address else "give it more time with timeout="
        raise DeadlineError(f"{where} did not answer within {timeout:g} s; {remedy}")
    if driver.refusal is not None:
        raise driver.refusal
    closed, elapsed = driver.closed, time.monotonic() - started
    if closed is None:
        return
    if driver.peer_info is None and not (closed.graceful or closed.version_mismatch):  # there was no connection yet
        kind = _NotYet if closed.not_yet else PeerLostError
        if driver.protocol.statistics().messages_received:
            raise kind(f"{where}: {closed.reason}")  # the peer itself has said why
        if not address:
            raise kind(f"{where} did not answer: {closed.reason}")
        text = _no_answer(where, started, closed.reason)
        raise _NotYet(text, where, closed.reason) if closed.not_yet else PeerLostError(text)
    error = driver.closed_error()
    if isinstance(error, ClosedError):
        raise PeerLostError(f"{driver.name!r} closed the connection after {elapsed:.1f} s")
    raise error


def _where(name: str, address: str) -> str:
    if not address:
        return repr(name)
    return address if name == address else f"{address} ({name!r})"


def _no_answer(where: str, started: float, reason: str) -> str:
    seconds = max(time.monotonic() - started, 0.01)
    return f"no worker answered at {where} within {seconds:.2g} s: {reason}; {NOT_THERE}"


def loopback(
    service: Service,
    *,
    device_map: MapSpec | None = None,
    devices: Iterable[Device | str | int] | None = None,
    arrays: str | None = None,
    threads: int = 1,
    default_timeout: float | None = None,
    serving: Agent | None = None,
) -> Peer:
    """A peer that is this process itself: the same protocol and the same isolation of arguments, with no other process.

    `serving` is the agent that serves the calls (one of its own with `threads` by default).  Blocks the host until the
    handshake is done.  Raises `DeviceMapError`.
    """
    if service is None:
        raise LocalProtocolError("a loopback needs a service, whose functions it calls")
    check_service(service)
    own = serving is None
    if serving is None:
        serving = Agent(name="loopback", service=service, threads=threads)
    limits = Limits(same_host=True)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        served = serving.add(unix_link.UnixLink(theirs), initiator=False, limits=limits, service=service)
    except BaseException:
        ours.close()
        theirs.close()
        if own:
            serving.close(0.0)
        raise
    try:
        peer = open_peer(
            unix_link.UnixLink(ours),
            name="loopback",
            device_map=device_map,
            devices=devices,
            arrays=arrays,
            default_timeout=default_timeout,
        )
        with blocking(served.ready.is_set):
            served.ready.wait(CONNECT_SECONDS)  # the answer goes before that end has taken note of this one
    except BaseException:
        if own:
            serving.close(0.0)
        raise
    if own:
        peer._on_close = serving.close
    return _owned(peer)
