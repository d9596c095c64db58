"""The agent: one per process, what polls links, devices, processes and the clock.

It owns the selector and nothing else: what arrives is handled by the connection's `Driver`, under the driver's lock,
and calling threads use the same driver without going through the agent.  With nothing to do it sleeps in the kernel.

Rules:

- Only the leading thread adds and removes what is polled; other threads leave a request and wake it.
- The thread that reads a call can run it, with no hop; another goes on reading (`lead`), so nested calls stay safe.
- Done-callbacks of futures run on the leading thread, which refuses to wait in them (`context`).
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import functools
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable

from streamrt import memory
from streamrt.callbacks import CallbackPool, blocking
from streamrt.device import Device, default_device_kind, listed_devices, open_device, opened_devices, parse_device
from streamrt.errors import ClosedError, DeviceError, StreamrtError, UnavailableError
from streamrt.log import Log
from streamrt.seconds import waitable
from transport import context, lend, ordering, process
from transport.calling import OpenCall
from transport.channels import CHANNELS_VARIABLE, SAME_PROCESS, SERVED, UCX, asked, ends, ucx
from transport.channels.ucx_worker import progressing
from transport.deadlines import earlier
from transport.device_map import DeviceMap
from transport.driver import Driver
from transport.errors import RemoteError
from transport.events import Frozen, PeerGone, Watched
from transport.hello import PeerInfo
from transport.lead import Lead
from transport.limits import Limits, check_count
from transport.links import GLANCES, LOOK_AGAIN_SECONDS, DescriptorLink, Link, Listener, RingLink
from transport.patience import Patience
from transport.poller import Poller
from transport.protocol import Connection
from transport.service import Service, check_service
from transport.untended import Untended

RINGS = "STREAMRT_RINGS"
"""Set to 1 for both ends, small messages pass through a ring in shared memory while their reader is awake.

Not by itself: a whole call is no faster for it, since looking there costs the interpreter what the system calls took.
"""
EAGER_POLLS = 20  # turns without a pause while a device may be ready any moment: a few hundred microseconds
DEVICE_POLL_SECONDS = 50e-6  # how often a device is asked after that, at first
MAX_POLL_SECONDS = 2e-3  # and after it has not been ready for a while
PROCESS_POLL_SECONDS = 1.0  # how often a peer of this host, with calls open, is looked at for being stopped
LINGER_SECONDS = 1.0  # for what a link has not written when its connection has ended
DEFAULT_THREADS = 8
AGENT_THREADS = 2  # one leads, the other stands by
QUICK_SECONDS = 0.002  # a function that takes no longer, its reply included, is run while leading
MAX_QUICK = 4096


OwnTask = tuple[Hashable, Callable[[], None]]


class _Entered(threading.local):
    """What a thread of the agent has entered: how many opened devices it has seen, and their kinds."""

    def __init__(self) -> None:
        self.count = 0
        self.kinds: set[str] = set()


class Agent:
    """Drives the connections of one process.  `devices` limits which devices peers may use (None: all)."""

    def __init__(
        self,
        *,
        name: str = "",
        service: Service | None = None,
        threads: int = DEFAULT_THREADS,
        devices: Iterable[Device | str] | None = None,
        order: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`order` is what it asks for on its connections (`transport.ordering`).  Raises `LocalProtocolError`."""
        check_count("threads", threads)
        check_service(service)
        self.order = ordering.asked(order)
        self.name = name or f"process {os.getpid()}"
        self.service = service if service is not None else Service()
        self.devices = (
            None if devices is None else tuple(open_device(parse_device(device)) for device in listed_devices(devices))
        )
        self.main_device = next((device for device in self.devices or () if device.has_streams), None)
        self.executor = CallbackPool(threads, f"streamrt-{self.name}")
        self.clock = clock
        self.log = Log("transport")
        self.on_device_error: Callable[[DeviceError], None] | None = None
        self._poller = Poller()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller.add(self._wake_read, self._drain_wake)
        self._requests: collections.deque[Callable[[], None]] = collections.deque()
        self._drivers: dict[Driver, None] = {}
        self.touched: dict[Driver, None] = {}
        """The connections in which something has been done since this has looked: any thread adds to them."""
        self.open_calls: dict[OpenCall, None] = {}
        """The calls to all its peers that have not ended."""
        self.ordered: dict[Driver, None] = {}
        """The connections for whose peers streams wait here, as far as was looked: any thread adds to them."""
        self._next_due: float | None = None  # no connection that is not touched has something to do before
        self._pollable: dict[Driver, int] = {}
        self._writing: set[Driver] = set()
        self._awake: dict[Driver, None] = {}  # into whose rings it looks by itself
        self._pidfds: dict[Driver, int] = {}
        self._unwatched: dict[Driver, None] = {}  # whose process is of this host, and cannot be watched all the same
        self._listeners: dict[Listener, list[Driver]] = {}
        self._leaving: dict[Listener, int] = {}  # those that accept nothing more, and their descriptors
        self._next_process_poll = 0.0
        self._sleeping_until: float | None = 0.0  # 0: it looks again by itself at once; None: perhaps never
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()  # all is closed
        self._idle: frozenset[int] = frozenset()  # the threads that had nothing else to do then
        self._lead = Lead()
        self.untended = Untended(self)
        self._own_tasks: collections.deque[OwnTask] = collections.deque()
        self._moves = self._barren = 0
        self._served = 0.0  # when a call was last begun or ended
        self._patience = Patience()
        self._quick: set[Hashable] = set()  # the functions that were quick the last time
        self._entered = _Entered()
        self._drain_failed = False
        self._stopped = False

    # adding and removing ----------------------------------------------------------------------------------------------

    def info(self) -> dict[str, object]:
        """What this process says of itself in a hello.  Does not touch the device."""
        return {
            "name": self.name,
            "pid": os.getpid(),
            "started": process.start_time(os.getpid()),
            "boot": process.boot_id(),
            "pid_namespace": process.pid_namespace(),
            "uid": os.getuid(),
            "process": process.identity(),
            "devices": [str(device) for device in self.visible_devices()],
            "device_count": self._main().backend.device_count(),
            "functions": list(self.service.functions)[:256],
        }

    def _main(self) -> Device:
        return self.main_device or Device(default_device_kind(), 0)

    def visible_devices(self) -> tuple[Device, ...]:
        """The devices that peers may use.  Does not touch the device."""
        if self.devices is not None:
            return tuple(device for device in self.devices if device.has_streams)
        main = self._main()
        return tuple(Device(main.kind, index) for index in range(main.backend.device_count()))

    def add(
        self,
        link: Link,
        *,
        initiator: bool,
        limits: Limits,
        name: str = "",
        device_map: dict[Device, Device] | None = None,
        allowed: tuple[Device, ...] | None = None,
        arrays: str | None = None,
        service: Service | None = None,
        listener: Listener | None = None,
        order: str | None = None,
    ) -> Driver:
        """Takes a link over; `order` stands for the agent's own.  Does not block the host: wait for `ready` of the
        driver.
        """
        self._start()
        info = self.info()
        info[ends.FIELD] = ends.register()
        channels = self._channels(info)
        info[ordering.FIELD] = ordering.describe(order or self.order, self.visible_devices())
        info["descriptors"] = isinstance(link, DescriptorLink)
        info["rings"] = os.environ.get(RINGS) == "1" and isinstance(link, RingLink) and link.takes_rings
        if initiator:
            info["map"] = None if device_map is None else [[str(a), str(b)] for a, b in device_map.items()]
            if allowed is not None:
                info["devices"] = [str(device) for device in allowed]
        limits = dataclasses.replace(
            limits, channels=channels, max_transfer=min(limits.max_transfer, process.memory_bytes())
        )
        protocol = Connection(
            initiator=initiator, hello=info, session=secrets.token_bytes(16), limits=limits, now=self.clock()
        )

        mine = self.visible_devices() if allowed is None or not initiator else allowed

        def make_map(remote: PeerInfo) -> DeviceMap:
            return _map_of(mine, remote, initiator=initiator, entries=device_map, peer=name, allowed=allowed)

        driver = Driver(
            self,
            link,
            protocol,
            name=name,
            service=service if service is not None else self.service,
            local_info=info,
            make_map=make_map,
            arrays=arrays,
        )
        driver.on_ready = self._watch_process if initiator else self._meet
        self.call_soon(lambda: self._register(driver, listener))
        return driver

    def _channels(self, info: dict[str, object]) -> tuple[str, ...]:
        """The channels that this process has, in the order in which they are tried after a decline; tells the peer."""
        named = asked()
        if named is not None:
            info["channels"] = list(named)
        order = SERVED if named is None else named
        if UCX in order and not ucx.available():
            if named is not None:
                self.log.warning("%s names ucx, and ucxx is not installed; other channels are used", CHANNELS_VARIABLE)
            order = tuple(name for name in order if name != UCX)
        info[UCX] = UCX in order
        return SAME_PROCESS, *order

    def listen(self, listener: Listener, accept: Callable[[Link], Driver]) -> None:
        """Accepts connections: `accept` makes a driver of each link.  Does not block the host."""
        self._start()
        self.call_soon(lambda: self._register_listener(listener, accept))

    def stop_listening(self, listener: Listener) -> None:
        """Takes no more connections from the listener; those that are open go on.  Does not block the host."""
        self.call_soon(lambda: self._unregister_listener(listener))

    def forget(self, driver: Driver) -> None:
        """A connection has ended.  Does not block the host."""
        self.call_soon(lambda: self._unregister(driver))

    @property
    def drivers(self) -> list[Driver]:
        """The connections that have not ended.  Does not touch the device."""
        return list(self._drivers)

    # the thread -------------------------------------------------------------------------------------------------------

    def call_soon(self, request: Callable[[], None]) -> None:
        """Runs a request on the agent's thread.  Does not block the host."""
        self._requests.append(request)
        self.wake()

    def wake(self) -> None:
        """Makes the agent's thread look at everything again.  Does not block the host."""
        with contextlib.suppress(OSError):  # a full pipe wakes it just as well, a closed agent has nothing to do
            os.write(self._wake_write, b"!")

    def attend(self, driver: Driver) -> None:
        """Wakes the agent's thread if the driver needs it before it wakes by itself.  Does not block the host."""
        self.touched[driver] = None
        if self._lead.mine:
            return
        link = driver.link
        if driver.polling or link.wants_write or link.readable:
            self.wake()
            return
        until = self._sleeping_until
        if until == 0.0:  # it looks again before it sleeps
            return
        due = driver.next_timeout()
        if due is not None and (until is None or due < until):
            self.wake()

    def pause_reading(self, driver: Driver) -> bool:
        """Leaves a link's arrivals to the calling thread, until `resume_reading`; False where that cannot be.

        Does not block the host.
        """
        descriptor = self._pollable.get(driver)
        if descriptor is None or not driver.link.level_triggered:
            return False
        self._poller.want(descriptor, read=False)
        driver.attended = True
        if driver.rings is not None:
            driver.rings.rouse()
        return True

    def resume_reading(self, driver: Driver) -> None:
        """The agent's thread reads the link again.  Does not block the host."""
        descriptor = self._pollable.get(driver)
        if descriptor is not None:
            driver.attended = False
            self._poller.want(descriptor, read=True)
            if not driver.doze():
                self.call_soon(driver.on_readable)

    def watch(self, descriptor: int, handler: Callable[[], None]) -> None:
        """Calls the handler on the agent's thread when a descriptor can be read.  Does not block the host."""
        self._poller.add(descriptor, lambda readable, writable: handler())

    def unwatch(self, descriptor: int) -> None:
        """Forgets a descriptor, before it is closed.  Idempotent.  Does not block the host."""
        self._poller.remove(descriptor)

    def run(self, key: Hashable, task: Callable[[], None]) -> None:
        """Runs a function for a peer: on the leading thread, if that is this one, or on one of the executor's.

        Not on this thread while it runs one, during which it may lose the lead and would not come back to another.

        `key` says which function it is, so that one that was quick the last time can be run at once.  Does not block
        the host.
        """
        self._served = self.clock()  # the next comes soon
        if self._lead.mine and not self._lead.busy:
            self._own_tasks.append((key, task))
        else:
            self.executor.submit(functools.partial(self._run_elsewhere, [task]))

    def _start(self) -> None:
        with self._lock:
            if self._stopped:
                raise ClosedError(f"the agent of {self.name} is closed; make a new one")
        if not self._threads:
            _running.add(self)
            self._add_thread()

    def _add_thread(self) -> None:
        with self._lock:
            if len(self._threads) < AGENT_THREADS:
                name = f"streamrt-agent-{self.name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
                self._threads[-1].start()

    def device_refused(self, error: DeviceError) -> None:
        """A device has refused: whoever made this agent hears of it if that is for good.  Does not block the host.

        Not so for a device of a peer, of which a `RemoteError` tells.
        """
        if isinstance(error, RemoteError):
            return
        if error.device_failed and self.on_device_error is not None:
            self.on_device_error(error)

    def _run(self) -> None:
        while self._lead.stand_by():
            long_task: OwnTask | None = None
            try:
                context.set_leading(self._lead)
                long_task = self._drive()
            except BaseException:
                self.log.exception("the thread of the agent of %s goes on after", self.name)
            finally:
                self._lead.leave()
                context.set_leading(None)
            if long_task is not None:
                self._run_task(*long_task)
                del long_task
                self.drain_memory()

    def _drive(self) -> OwnTask | None:
        """Polls and does what comes; a function that this thread is to run after it has left the lead, or None."""
        looked = False  # since the last event and the last task
        while True:
            if not self._own_tasks and not looked:
                self.turn()  # at first too: the leader before may have left something to do
                looked = True
            if self._own_tasks:
                looked = False  # quick ones that came together run one after the other, with no turn between
                task = self._own_tasks.popleft()
                if not self._lead.relieved:
                    self._add_thread()
                if not (self._lead.relieved and self.executor.try_turn()):
                    handed_over = self._hand_over(task[1])
                    del task
                    if not handed_over:
                        return None
                    continue
                if task[0] not in self._quick:
                    return task
                self._lead.begin_task()
                with context.running_while_leading(self._lead):
                    self._run_task(*task)
                del task  # and with it what the function was given: nobody may come here again for long
                if not self._lead.end_task():
                    return None
                continue
            if self._stopped:
                break
            self._enter_devices()
            timeout = self._look_around(self._timeout())
            spin = self._spin_seconds()
            found = self._poller.wait(timeout, spin)
            if spin > 0.0 and timeout != 0.0:
                self._patience.note(self.clock() - self._served)
            for handler, readable, writable in found:
                try:
                    handler(readable, writable)
                except Exception:
                    self.log.exception("handling an event of the agent of %s failed", self.name)
            looked = False
        self._close_all()
        self._idle = self._lead.end()
        self._over.set()
        return None

    def _hand_over(self, task: Callable[[], None]) -> bool:
        """To a thread of the executor's.  Where none can be had this one leaves the lead, runs it, and says False."""
        try:
            self.executor.submit(functools.partial(self._run_elsewhere, [task]))
        except StreamrtError:
            self.log.exception("a function of %s runs on the agent's own thread", self.name)
            self._lead.leave()
            context.set_leading(None)
            self._run_elsewhere([task])
            return False
        return True

    def _run_elsewhere(self, holder: list[Callable[[], None]]) -> None:
        """Runs the task that `holder` gives up, on a thread that does not lead, and gives back what it has dropped:
        nobody else may look."""
        task = holder.pop()
        try:
            task()
        finally:
            del task
            self.drain_memory()

    def _run_task(self, key: Hashable, task: Callable[[], None]) -> None:
        started = time.monotonic()
        try:
            task()
        except BaseException:
            self.log.exception("running a function of %s failed", self.name)
        finally:
            self.executor.end_turn()
        self._served = self.clock()  # the next comes soon
        if time.monotonic() - started > QUICK_SECONDS:
            self._quick.discard(key)
        elif len(self._quick) < MAX_QUICK:
            self._quick.add(key)

    def _enter_devices(self) -> None:
        """Once a thread and kind of device: from then on the thread cannot disturb a graph capture of the user's."""
        opened = opened_devices()
        if len(opened) == self._entered.count:
            return
        self._entered.count = len(opened)
        for device in opened:
            if device.kind not in self._entered.kinds:
                self._entered.kinds.add(device.kind)
                device.backend.agent_thread(device.index)

    def turn(self) -> None:
        """Does all that can be done now: what was asked for, what has come, what is due.  Does not block the host.

        The agent's thread takes its turns after each sleep; who drives an agent without one takes them in its place.
        """
        while self._requests:
            try:
                self._requests.popleft()()
            except Exception:
                self.log.exception("a request to the agent of %s failed", self.name)
        now = self.clock()
        for driver in self._to_look_at(now):
            try:
                self._look_at(driver, now)
            except Exception as error:
                self.log.exception("the connection to %s failed", driver.name)
                driver.abort(f"a fault of this side: {type(error).__name__}: {error}")
        if now >= self._next_process_poll:
            self._poll_processes(now)
        self.drain_memory()
        lend.drain()

    def _to_look_at(self, now: float) -> Iterable[Driver]:
        """The connections in which something has been done, or is due.

        Of many peers most are neither at most times, and all of them are gone through only when one is due.
        """
        if self._next_due is None or now < self._next_due:
            return list(self.touched)
        due = {driver: None for driver in self._drivers if driver.due is not None and driver.due <= now}
        later = [driver.due for driver in self._drivers if driver.due is not None and driver not in due]
        self._next_due = min(later, default=None)
        return list({**self.touched, **due})

    def _look_at(self, driver: Driver, now: float) -> None:
        """One of its connections, in which something may have to be done."""
        link = driver.link
        touched = self.touched.pop(driver, self) is None  # first: whoever touches it meanwhile says so again
        if driver not in self._drivers:
            return  # it has ended, or is not registered yet
        due = driver.due if driver.due != driver.look_again else None
        if link.readable or (due is not None and due <= now) or (driver.polling and driver.transfers.ready):
            if link.readable:
                driver.on_readable()
            driver.tick(now)
        self._update_writing(driver)
        driver.due = driver.next_timeout()
        if driver.rings is not None and not driver.attended:
            if touched:
                driver.look_again = now + LOOK_AGAIN_SECONDS
                driver.due = earlier(driver.due, driver.look_again)
            elif driver.rings.glance(1):
                driver.on_readable()
        if driver.due is not None:
            self._next_due = earlier(self._next_due, driver.due)
        if driver.transfers.polling or link.readable or link.wants_write or not link.level_triggered:
            self.touched[driver] = None

    def drain_memory(self) -> None:
        """Gives back what was dropped and is no longer used.  Enqueues records; does not block the host."""
        try:
            memory.drain()
        except Exception:
            told = self._drain_failed
            self._drain_failed = True  # before it is told: a caller may be here meanwhile, too
            if not told:  # once for each time that it begins: turns are many
                self.log.exception("giving back memory failed")
        else:
            self._drain_failed = False

    def _timeout(self) -> float | None:
        """How long to sleep, None: until something wakes it.

        While this looks at what is due, others cannot know whether it has seen theirs, so `attend` wakes for each.
        """
        self._sleeping_until = None
        now = self.clock()
        due = self._next_due
        for driver in list(self.touched):
            if driver.link.readable or self._requests:
                self._sleeping_until = 0.0
                return 0.0
            if driver.polling:
                self._sleeping_until = 0.0
                return self._poll_pause()
            due = earlier(due, driver.next_timeout())
        if (self.open_calls or self._awaiting()) and (self._pidfds or self._unwatched):
            due = earlier(due, self._next_process_poll)
        if self._requests or (self._awake and now < self._served + self._patience.seconds and not progressing()):
            self._sleeping_until = 0.0
            return 0.0
        self._sleeping_until = due
        return None if due is None else max(0.0, due - now)

    def _spin_seconds(self) -> float:
        """How long to look for what comes before this thread sleeps."""
        return 0.0 if progressing() else self._served + self._patience.seconds - self.clock()

    def _look_around(self, timeout: float | None) -> float | None:
        """Looks at what came by memory, before the descriptors are polled; the new timeout.

        Before it sleeps it says so to those peers.
        """
        for driver in list(self._awake):
            rings = driver.rings
            if rings is None or driver.attended or driver not in self._pollable:
                del self._awake[driver]
            elif rings.glance(GLANCES) if timeout == 0.0 else not driver.doze():
                timeout = 0.0
                self._link_event(driver, True, False)
            elif timeout != 0.0:
                del self._awake[driver]
        return timeout

    def _poll_pause(self) -> float:
        """How long to sleep before the devices are asked again: the longer, the longer nothing has moved."""
        moves = sum(driver.transfers.moves for driver in list(self.touched))
        self._barren = 0 if moves != self._moves else self._barren + 1
        self._moves = moves
        if self._barren < EAGER_POLLS:
            return 0.0
        pause = min(DEVICE_POLL_SECONDS * float(1 << min((self._barren - EAGER_POLLS) // 8, 16)), MAX_POLL_SECONDS)
        if pause == MAX_POLL_SECONDS:
            return pause
        time.sleep(pause)  # finer than what epoll can
        return 0.0

    def _drain_wake(self, readable: bool, writable: bool) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 4096):
                pass

    # on the agent's thread --------------------------------------------------------------------------------------------

    def _register(self, driver: Driver, listener: Listener | None) -> None:
        if driver.ended.is_set():
            return
        self._drivers[driver] = self.touched[driver] = None
        if listener is not None and listener in self._listeners:
            self._listeners[listener].append(driver)
        descriptor = driver.link.fileno()
        if descriptor >= 0:
            self._pollable[driver] = descriptor
            self._poller.add(descriptor, functools.partial(self._link_event, driver))
        driver.on_readable()
        driver.tick(self.clock())

    def _link_event(self, driver: Driver, readable: bool, writable: bool) -> None:
        try:
            if readable:
                driver.on_readable()
                if driver.rings is not None and not driver.attended and self._spin_seconds() > 0.0:
                    driver.rings.rouse()
                    self._awake[driver] = None
            if writable:
                driver.on_writable()
        except Exception as error:
            self.log.exception("the connection to %s failed", driver.name)
            driver.abort(f"a fault of this side: {type(error).__name__}: {error}")

    def _update_writing(self, driver: Driver) -> None:
        wants = driver.link.wants_write and driver in self._pollable
        if wants == (driver in self._writing):
            return
        self._poller.want(self._pollable[driver], write=wants)
        (self._writing.add if wants else self._writing.discard)(driver)

    def _unregister(self, driver: Driver) -> None:
        self._drivers.pop(driver, None)
        self.touched.pop(driver, None)
        self._awake.pop(driver, None)
        self.ordered.pop(driver, None)
        descriptor = self._pollable.pop(driver, None)
        self._writing.discard(driver)
        if descriptor is not None:
            self._poller.remove(descriptor)
        self._unwatched.pop(driver, None)
        pidfd = self._pidfds.pop(driver, None)
        if pidfd is not None:
            self._poller.remove(pidfd)
            os.close(pidfd)
        for listener, drivers in list(self._listeners.items()):
            if driver in drivers:
                drivers.remove(driver)
                if listener in self._leaving and not drivers:
                    self._poller.remove(self._leaving.pop(listener))  # the last link closes the socket
                    del self._listeners[listener]
        self.untended.tend(driver)
        driver.calls.close_descriptors()
        link = driver.link
        if self._stopped or not link.queued_bytes:
            link.close(linger=LINGER_SECONDS)
        else:  # the last words to one that does not read must not hold up the others
            threading.Thread(target=link.close, args=(LINGER_SECONDS,), name="streamrt-linger", daemon=True).start()

    def _register_listener(self, listener: Listener, accept: Callable[[Link], Driver]) -> None:
        self._listeners[listener] = []

        def on_event(readable: bool, writable: bool) -> None:
            self._pump(listener)
            for link in listener.accept():
                try:
                    self._listeners[listener].append(accept(link))
                except Exception:  # the others that came with it are not to blame
                    self.log.exception("a connection to %s could not be taken", self.name)
                    link.close()

        self._poller.add(listener.fileno(), on_event)
        on_event(True, False)

    def _unregister_listener(self, listener: Listener) -> None:
        """Accepts nothing more; a listener whose links share its socket is polled until the last of them has ended."""
        if listener not in self._listeners or listener in self._leaving:
            return
        self._poller.remove(listener.fileno())
        listener.close()
        descriptor = listener.fileno()
        if descriptor < 0 or not self._listeners[listener]:
            del self._listeners[listener]
            return
        self._leaving[listener] = descriptor
        self._poller.add(descriptor, lambda readable, writable: self._pump(listener))
        self._pump(listener)

    def _pump(self, listener: Listener) -> None:
        listener.pump()
        for driver in list(self._listeners[listener]):
            if driver.link.readable:
                driver.on_readable()

    def _meet(self, driver: Driver) -> None:
        driver.offer_rings()
        self._watch_process(driver)

    def _watch_process(self, driver: Driver) -> None:
        """A process that a pidfd can watch is of this host and this pid namespace; any other is lost by silence.

        So is one whose pidfd the system refuses.
        """
        remote = driver.peer_info
        if remote is None or not remote.pid:
            return
        if remote.process == driver.local_info["process"]:
            driver.fact(Watched())  # it is this process
            return
        if remote.boot == driver.local_info["boot"] and remote.pid_namespace == driver.local_info["pid_namespace"]:
            self.call_soon(lambda: self._register_pidfd(driver, remote.pid, remote.started))

    def _register_pidfd(self, driver: Driver, pid: int, started: int) -> None:
        if driver not in self._drivers:
            return
        try:
            descriptor = process.open_pidfd(pid, started)
        except UnavailableError as error:
            self.log.warning("%s: %s; it is lost when its link ends or by its silence", driver.name, error)
            self._unwatched[driver] = None
            return
        if descriptor is None:
            self._gone(driver, pid)
            return
        self._pidfds[driver] = descriptor
        driver.fact(Watched())
        self._poller.add(descriptor, lambda readable, writable: self._gone(driver, pid))

    def _gone(self, driver: Driver, pid: int) -> None:
        driver.doze()  # so that reading takes all there is, whichever way it came
        driver.on_readable()  # a blocking wait must not miss what the peer said before it died
        driver.fact(PeerGone(f"process {pid} has ended"))

    def _poll_processes(self, now: float) -> None:
        self._next_process_poll = now + PROCESS_POLL_SECONDS
        for driver in self.drivers:
            driver.calls.note_long(now)
        for driver in list(self.ordered):
            driver.transfers.ordered.release_given_up()
        for driver in (*self._pidfds, *self._unwatched):
            remote = driver.peer_info
            if self._looks_at_process(driver) and remote is not None and process.stopped(remote.pid):
                driver.fact(Frozen())

    def _awaiting(self) -> bool:
        """Whether a stream of this process waits for a peer's; forgets the connections where none does."""
        for driver in list(self.ordered):
            self.ordered.pop(driver, None)  # first: another thread may add it just now
            if driver.transfers.ordered.awaiting:
                self.ordered[driver] = None
                return True
        return False

    @staticmethod
    def _looks_at_process(driver: Driver) -> bool:
        """Whether somebody waits for the peer, so that it matters whether it stands still."""
        return bool(driver.calls.open) or driver.transfers.ordered.awaiting

    # the end ----------------------------------------------------------------------------------------------------------

    def drain(self, timeout: float) -> bool:
        """Says goodbye on every connection; blocks the host until all have ended, True, or the timeout, False."""
        deadline = time.monotonic() + timeout
        drivers = self.drivers
        for driver in drivers:
            driver.goodbye()
        with blocking():
            return all(driver.ended.wait(waitable(max(0.0, deadline - time.monotonic()))) for driver in drivers)

    def after_fork(self) -> None:
        """In a forked child: this agent is over here, and says nothing on the parent's links.

        Does not block the host.
        """
        self._stopped = True
        self._lock = threading.Lock()
        self.untended.after_fork()
        for driver in list(self._drivers):
            driver.after_fork()

    def close(self, timeout: float = 5.0) -> None:
        """Ends every connection, gracefully within the timeout (seconds), then at once; functions that still run are
        left to themselves.

        Blocks the host that long, and a second more at most for what is still to be written.  Idempotent.
        """
        timeout = waitable(timeout)
        with self._lock:
            if self._stopped:
                return
        if not self._threads or not self.drain(timeout):
            for driver in self.drivers:
                driver.abort("the process closed the connection")
        self.executor.close()
        with self._lock:
            self._stopped = True
        self.wake()
        if not self._threads:
            self._close_all()
            return
        last = waitable(timeout + LINGER_SECONDS)
        self._over.wait(last)
        for thread in self._threads:  # but not those that still run functions, for however long
            if thread.ident in self._idle and thread is not threading.current_thread():
                thread.join(last)

    def _close_all(self) -> None:
        if self._wake_write < 0:
            return  # the other thread has done it
        for driver in list(self._drivers):
            driver.abort("the process closed the connection")
            self._unregister(driver)
        for listener in list(self._listeners):
            self._unregister_listener(listener)
        self.untended.close()
        self._poller.close()
        os.close(self._wake_read)
        wake, self._wake_write = self._wake_write, -1  # late wakers must not write to whatever gets this number next
        os.close(wake)
        lend.drain()
        if lend.waiting():  # closed links may still write, and nobody here looks any more
            linger = threading.Thread(
                target=lend.drain_for, args=(2 * LINGER_SECONDS,), name="streamrt-linger", daemon=True
            )
            with contextlib.suppress(RuntimeError):  # the interpreter ends, and with it who would hear
                linger.start()


def _map_of(
    mine: tuple[Device, ...],
    remote: PeerInfo,
    *,
    initiator: bool,
    entries: dict[Device, Device] | None,
    peer: str,
    allowed: tuple[Device, ...] | None,
) -> DeviceMap:
    """The map as this side uses it: the initiator's own, or its reverse, so that both sides agree."""
    if not initiator:
        forward = DeviceMap(remote.entries, local=remote.devices, remote=mine, peer=remote.name)
        return forward.reversed(remote.name or "the caller")
    device_map = DeviceMap(
        entries, local=mine, remote=remote.devices, peer=peer, allowed=allowed, count=remote.device_count
    )
    device_map.check()
    return device_map


_running: weakref.WeakSet[Agent] = weakref.WeakSet()


@atexit.register
def _close_running() -> None:
    """Ends what the program left open before the interpreter takes itself apart under the agents' threads."""
    for agent in list(_running):
        agent.close(timeout=0.0)


_agent: Agent | None = None
_agent_lock = threading.Lock()


def _after_fork() -> None:
    """A forked child has the parent's sockets, but none of its threads: what is open stays the parent's alone."""
    global _agent, _agent_lock
    _agent, _agent_lock = None, threading.Lock()
    for agent in list(_running):
        agent.after_fork()
    _running.clear()


os.register_at_fork(after_in_child=_after_fork)


def default_agent() -> Agent:
    """The process's agent, made at first use.  Does not touch the device."""
    global _agent
    with _agent_lock:
        if _agent is None or _agent._stopped:
            _agent = Agent()
        return _agent


def set_default_agent(agent: Agent) -> None:
    """Makes an agent the process's own: a worker's connections to others go through it.  Does not touch the device."""
    global _agent
    with _agent_lock:
        _agent = agent
