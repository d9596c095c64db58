"""Workers on this host, as this process's own children: they die with it, and any function may be sent to them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self, overload

from streamrt.device import Device, default_device_kind, listed_devices, parse_device
from streamrt.errors import ClosedError, PlacementError, UnavailableError
from streamrt.seconds import waitable
from transport import ordering
from transport.agent import DEFAULT_THREADS, Agent
from transport.device_map import MapSpec, parse_map
from transport.ending import Ending
from transport.errors import LocalProtocolError, PeerLostError
from transport.launch.environment import child_environment
from transport.limits import NO_DEADLINE, check_count, check_seconds
from transport.links import unix_link
from transport.peer import Peer, await_ready, open_peer
from transport.process import open_pidfd
from transport.service import Service, check_given, check_kind, check_service

START_SECONDS = 60.0  # a first import of a large array library from a cold disk
LEAST_SECONDS = 0.1  # for a process to end by itself, also where no time is left
EXIT_SECONDS = 2.0  # between the end of a child's connection and that of its process
ENDED = "these workers have been ended, and none is started again; start others with local_workers or pipeline"


class LocalWorker(Peer):
    """A child process and the connection to it.  `process` is the child; see `Peer` for calls."""

    def __init__(self, peer: Peer, process: subprocess.Popen[bytes], device: Device) -> None:
        """Use `local_workers`.  Does not touch the device."""
        super().__init__(peer._driver, default_timeout=peer._default_timeout)
        self.process = process
        peer._driver.ending = Ending(process)
        self.device = device
        self._owns = True

    def __repr__(self) -> str:
        return f"<LocalWorker {self.name!r} on {self.device}, pid {self.process.pid}: {self._death() or self._state()}>"

    def _death(self) -> str:
        """How it died, if nobody has ended it in peace."""
        ending, closed = self._driver.ending, self._driver.closed
        words = "" if ending is None else ending.words(graceful=closed is not None and closed.graceful)
        return f"dead, it {words}" if words else ""

    def close(self, timeout: float = 5.0) -> None:
        """Ends the connection and the process: calls may finish within `timeout` seconds, then it is killed.

        Blocks the host that long at most.  Idempotent.
        """
        deadline = time.monotonic() + waitable(timeout)
        super().close(timeout)
        self._reap(max(LEAST_SECONDS, deadline - time.monotonic()))

    def kill(self) -> None:
        """Kills the process at once; open calls fail with `PeerLostError`.  Does not block the host."""
        self._owns = False  # its connection ends by itself
        self.process.kill()

    def _reap(self, timeout: float) -> None:
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True, slots=True)
class Options:
    """What `local_workers` was told of each of its workers."""

    arrays: str | None
    device_map: MapSpec | None
    threads: int
    default_timeout: float | None
    timeout: float
    order: str
    service: Service | None
    agent: Agent | None


class LocalWorkers(Sequence[LocalWorker]):
    """The workers of one `local_workers` call; leaving the ``with`` ends them all.

    By its end, that is `close`: it waits up to 5 s for calls that are open.  By an exception, that is `kill`, which
    waits for no call.
    """

    def __init__(self, workers: list[LocalWorker], options: Options) -> None:
        """Use `local_workers`.  Does not touch the device."""
        self._workers = workers
        self._options = options
        self._lock = threading.Lock()
        self._ended = threading.Event()

    @overload
    def __getitem__(self, index: int) -> LocalWorker: ...
    @overload
    def __getitem__(self, index: slice) -> list[LocalWorker]: ...
    def __getitem__(self, index: int | slice) -> LocalWorker | list[LocalWorker]:
        return self._workers[index]

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[LocalWorker]:
        return iter(self._workers)

    def __repr__(self) -> str:
        closed = all(worker.closed for worker in self._workers)
        each = []
        for worker in self._workers:
            state = worker._death() or ("closed" if worker.closed and not closed else "")
            each.append(f"{worker.name} on {worker.device}" + (f" ({state})" if state else ""))
        return f"<LocalWorkers{' closed' if closed else ''} {', '.join(each)}>"

    def restart(self, index: int) -> LocalWorker:
        """Ends the worker at `index` at once, if it still lives, and starts another in its place; returns that one.

        It serves the same device, and is told the same.  Open calls of the old one fail with `PeerLostError`; none is
        run again.  Blocks the host until the new one is ready, as long as the `timeout` of `local_workers` at most.
        Raises `ClosedError` once the workers are being ended, `LocalProtocolError` where another thread restarts the
        same one, and what kept the new one from starting: `PeerLostError`, `DeadlineError`, `OSError`.
        """
        old = self._workers[index]
        _kill([old])
        with self._lock:
            if self._ended.is_set():
                raise ClosedError(ENDED)
            if self._workers[index] is not old:
                raise LocalProtocolError(f"{old.name} is being restarted already; use the worker that is there then")
            new = _start(old.name, old.device, self._options)
            self._workers[index] = new
        try:
            _await(new, self._options.timeout)
        except BaseException as error:
            _kill([new])
            if self._ended.is_set() and isinstance(error, PeerLostError):
                raise ClosedError(ENDED) from error
            raise
        return new

    def close(self, timeout: float = 5.0) -> None:
        """Ends all workers at the same time: open calls may finish within `timeout` seconds, then they are killed.

        What is still open then fails with `PeerLostError`.  Blocks the host that long at most.  Idempotent.
        """
        deadline = time.monotonic() + waitable(timeout)
        for worker in self._no_more():
            if worker._driver.ready.is_set():
                worker._driver.goodbye()
            else:
                worker.kill()  # it is being started, and nobody can have called it
        for worker in self._workers:
            worker.close(max(LEAST_SECONDS, deadline - time.monotonic()))

    def kill(self) -> None:
        """Kills all workers at once; open calls fail with `PeerLostError`.  Blocks the host until they are gone."""
        _kill(self._no_more())

    def _no_more(self) -> list[LocalWorker]:
        """Lets none be started again; the workers, which are then all that there are."""
        with self._lock:
            self._ended.set()
            return self._workers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()


def local_workers(
    count: int | None = None,
    *,
    devices: Sequence[str | Device] | None = None,
    arrays: str | None = None,
    device_map: MapSpec | None = None,
    threads: int = DEFAULT_THREADS,
    default_timeout: float | None = None,
    timeout: float = START_SECONDS,
    order: str | None = None,
    service: Service | None = None,
    agent: Agent | None = None,
) -> LocalWorkers:
    """Starts `count` worker processes on this host (default: one for each of `devices`, else one).

    Worker ``i`` serves ``devices[i % len(devices)]``; without `devices` the GPUs in turn, or host devices.  `arrays` is
    the kind of array that functions receive ("torch", "jax", ...); without it that is NumPy for what is in memory of
    the host and CuPy for what is on a GPU, whatever kind the caller sends.  Functions and pickled values may be sent to
    them, since they are this process's own children on an inherited socket; what these may call here is in `service`
    (`transport.caller().call(...)`).  `order` is that of `connect`.

    Blocks the host until all are ready, `timeout` seconds at most.  Raises `PlacementError`, `PeerLostError`,
    `LocalProtocolError` for more devices than workers, `UnavailableError` where the library of `arrays` is not
    installed.
    """
    chosen = _devices(count, devices)
    check_kind(arrays)
    for device in chosen:
        check_given(arrays, device, f"arrays={arrays!r} for functions")
    check_service(service)
    if device_map is not None:
        parse_map(device_map, local_kind=default_device_kind(), remote_kind=default_device_kind())
    check_count("threads", threads)
    check_seconds("timeout", timeout, "")
    if default_timeout is not None:
        check_seconds("default_timeout", default_timeout, NO_DEADLINE)
    options = Options(arrays, device_map, threads, default_timeout, timeout, ordering.asked(order), service, agent)
    started: list[LocalWorker] = []
    try:
        for index, device in enumerate(chosen):
            started.append(_start(f"worker{index}", device, options))
        deadline = time.monotonic() + timeout
        for worker in started:
            _await(worker, max(0.1, deadline - time.monotonic()))
    except BaseException:
        _kill(started)
        raise
    return LocalWorkers(started, options)


def _devices(count: int | None, devices: Sequence[str | Device] | None) -> list[Device]:
    if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
        raise LocalProtocolError(f"{count!r} workers: give a number; devices go by name, devices=['host:0', 'host:1']")
    if devices is not None:
        devices = listed_devices(devices)
        if not devices:
            raise LocalProtocolError("devices=[] names none; leave it out for the devices that there are")
    if devices:
        offered = [parse_device(device) for device in devices]
        for device in offered:
            if device.has_streams and device.index >= device.backend.device_count():
                raise PlacementError(
                    f"there is no {device}: {device.backend.device_count()} of its kind are visible here"
                )
    else:
        kind = default_device_kind()
        first = Device(kind, 0)
        offered = [Device(kind, index) for index in range(first.backend.device_count())]
    number = count if count is not None else (len(offered) if devices else 1)
    if number < 1:
        raise LocalProtocolError(f"{number} workers: start at least one")
    if devices and number < len(offered):
        raise LocalProtocolError(
            f"{len(offered)} devices for {number} worker{'s' if number > 1 else ''}, and a worker serves one: leave "
            f"out the number, for a worker on each device, or name {number}"
        )
    return [offered[index % len(offered)] for index in range(number)]


def _kill(workers: Sequence[LocalWorker]) -> None:
    for worker in workers:
        worker.kill()  # first: one that sees its link end would leave by itself
    for worker in workers:
        worker.abort()
        worker._reap(EXIT_SECONDS)


def _start(name: str, device: Device, options: Options) -> LocalWorker:
    link, theirs = unix_link.pair()
    told = {
        "descriptor": theirs.fileno(),
        "parent": os.getpid(),
        "name": name,
        "device": str(device),
        "arrays": options.arrays,
        "threads": options.threads,
        "path": sys.path,
    }
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "transport.launch.child", json.dumps(told)],
            pass_fds=[theirs.fileno()],
            env=child_environment(),
            stdin=subprocess.DEVNULL,
        )
    except BaseException:
        link.close()
        raise
    finally:
        theirs.close()
    try:
        peer = open_peer(
            link,
            name=name,
            device_map=options.device_map,
            timeout=options.timeout,
            default_timeout=options.default_timeout,
            order=options.order,
            service=options.service,
            agent=options.agent,
            wait=False,
        )
    except BaseException:
        process.kill()
        process.wait()
        raise
    return LocalWorker(peer, process, device)


def _await(worker: LocalWorker, timeout: float) -> None:
    over = os.eventfd(0, os.EFD_CLOEXEC)
    watcher = threading.Thread(target=_watch, args=(worker, over), name="streamrt-start", daemon=True)
    watcher.start()
    try:
        await_ready(worker._driver, timeout)
    except PeerLostError as error:
        raise PeerLostError(f"{error}; {_exit_of(worker.process)}") from error
    finally:
        os.eventfd_write(over, 1)
        watcher.join()
        os.close(over)


def _exit_of(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        return "the worker still runs"
    return f"the worker's exit code is {code}, and its errors are above"


def _watch(worker: LocalWorker, over: int) -> None:
    """A child that dies before it has said hello has no pidfd at the agent yet: its end is what ends the handshake.

    Ends with the handshake, when `over` becomes readable.
    """
    try:
        child = open_pidfd(worker.process.pid, 0)
    except UnavailableError:
        return  # the end of its socket tells it as well
    if child is not None:
        waiting = select.poll()
        waiting.register(child, select.POLLIN)
        waiting.register(over, select.POLLIN)
        waiting.poll()
        os.close(child)
    if not worker._driver.ready.is_set():
        worker._driver.abort("the worker ended before it was ready")
