"""``streamrt-worker MODULE:SERVICE``: the daemon that serves a service until it is told to stop.

It prints one ready line on standard output, and everything else on standard error.  SIGTERM or SIGINT begins a clean
drain: no new connections, calls that run may finish and their replies are sent, at most ``--drain`` seconds.  Where
that takes a while it says so; a second signal cuts it off.

`EXIT_CODES` says what the exit codes mean.  After `DEVICE_FAILED` every later CUDA call of the process would fail too;
start a new one."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import logging
import os
import select
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

import transport
from streamrt.device import listed_devices, open_device
from streamrt.errors import DeviceError, StreamrtError
from transport import ordering
from transport.agent import DEFAULT_THREADS, Agent, set_default_agent
from transport.channels import asked
from transport.driver import Driver
from transport.errors import LocalProtocolError, TransportError
from transport.information import version_of_streamrt
from transport.launch.environment import set_up_process
from transport.limits import Limits
from transport.links import Link, Listener, schemes
from transport.process import DEVICE_FAILED
from transport.security import check_listen
from transport.service import Service

OK = 0
USAGE = 2
SETUP_FAILED = 3
DRAIN_INCOMPLETE = 4
EXIT_CODES = {
    OK: "a clean end",
    USAGE: "a wrong command line: module, service, address, device, name, option",
    SETUP_FAILED: "the service's set-up raised",
    DRAIN_INCOMPLETE: "calls were cut off, by --drain or by a second signal",
    DEVICE_FAILED: "a device has failed for good: a GPU, or a stream of a virtual device on which a function raised",
}
QUIET_SECONDS = 0.2  # a drain that ends sooner is not announced
LEADING = (f"{Path(__file__).parent}{os.sep}", str(importlib.__file__), "<frozen importlib")
LOG_LEVELS = ("debug", "info", "warning", "error")

log = logging.getLogger("transport.worker")


class WorkerError(Exception):
    """What ends the worker before it is ready: a message for the user, and the exit code."""

    def __init__(self, message: str, code: int = USAGE) -> None:
        super().__init__(message)
        self.code = code


def load_service(spec: str) -> Service:
    """Imports ``module:service``.  Raises `WorkerError` saying what is wrong with it."""
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise WorkerError(f"{spec!r} does not name a service; write MODULE:SERVICE, for example my_stage:service")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (missing == module_name or module_name.startswith(f"{missing}.")):
            hint = ""
            if module_name.endswith(".py"):
                file = Path(module_name)
                where = "" if file.name == module_name else f", in the folder {file.parent}"
                hint = f"; name the module as an import does, without .py{where}: {file.stem}:{attribute}"
            raise WorkerError(f"there is no module {module_name!r} in {here} or on the path{hint}") from error
        _print_users_part(error)
        raise WorkerError(f"{module_name} could not be imported: {type(error).__name__}: {error}") from error
    found: Any = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, Service):
        names = sorted(name for name, value in vars(module).items() if isinstance(value, Service))
        known = ", ".join(names) or "none"
        raise WorkerError(f"{module_name} has no transport.Service named {attribute!r}; services there: {known}")
    return found


def _print_users_part(error: Exception) -> None:
    """Prints the traceback of what the user's module raised, without the frames that led there."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(LEADING):
        frames = frames.tb_next
    traceback.print_exception(error.with_traceback(frames))


def foreign_transport() -> Path | None:
    """Another distribution's module `transport` on the path, which would be imported instead of ours somewhere."""
    ours = Path(transport.__file__).resolve().parent
    for entry in sys.path:
        spec = importlib.machinery.PathFinder.find_spec("transport", [entry or os.getcwd()])
        if spec is not None and spec.origin is not None and Path(spec.origin).resolve().parent != ours:
            return Path(spec.origin)
    return None


class Worker:
    """One service, listening.  `start` raises what is wrong; `run` blocks the host until a signal, and drains."""

    def __init__(
        self,
        service: Service,
        *,
        listen: str = "tcp://127.0.0.1:0",
        devices: list[str] | None = None,
        threads: int = DEFAULT_THREADS,
        name: str = "",
        order: str | None = None,
    ) -> None:
        """Does not touch the device."""
        self.service = service
        self.listen = listen
        self.name = name
        self.address = ""
        self.failed: DeviceError | None = None
        self._threads = threads
        self._order = order
        self._devices = devices
        self._claim: socket.socket | None = None
        self._set_up = threading.Event()
        self._stop = threading.Event()
        self._draining = False
        self._cut = threading.Event()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._listener: Listener | None = None
        self._agent: Agent | None = None

    def start(self) -> None:
        """Opens devices, listens, runs the service's set-up.  Blocks the host that long.  Raises `WorkerError`.

        Who connects before the set-up is done is told so and turned away.
        """
        try:
            check_listen(self.listen)
            asked()  # a wrong name would otherwise show at each connection
            ordering.asked(self._order)
            devices = [open_device(device) for device in listed_devices(self._devices or ["auto"])]
            for device in devices:
                self.service.check_served(str(device))
        except (TransportError, StreamrtError) as error:
            raise WorkerError(str(error)) from error
        self._claim = _claim(self.name)
        try:
            self._agent = Agent(
                name=self.name or f"worker {os.getpid()}",
                service=self.service,
                threads=self._threads,
                devices=devices,
                order=self._order,
            )
        except LocalProtocolError as error:
            raise WorkerError(str(error)) from error
        set_default_agent(self._agent)
        try:
            self._listener = schemes.listen(self.listen)  # before the set-up: a taken address is said at once
        except TransportError as error:
            raise WorkerError(str(error)) from error
        except OSError as error:
            raise WorkerError(f"cannot listen on {self.listen}: {error.strerror}") from error
        self.address = self._listener.address
        self._agent.on_device_error = self._fail
        self._agent.listen(self._listener, self._accept)
        try:
            for device in devices:
                self.service.prepare(str(device))
        except Exception as error:
            _print_users_part(error)
            raise WorkerError(f"the service's setup raised {type(error).__name__}: {error}", SETUP_FAILED) from error
        self._set_up.set()

    def _accept(self, link: Link) -> Driver:
        if self._agent is None:
            raise WorkerError("the worker was not started")
        driver = self._agent.add(link, initiator=False, limits=Limits(same_host=link.same_host))
        if not self._set_up.is_set():
            driver.abort("the worker is still being set up; connect again when its ready line has come", not_yet=True)
        return driver

    @property
    def ready_line(self) -> str:
        """What is printed when the worker can be called."""
        devices = ",".join(str(device) for device in (self._agent.devices or ())) if self._agent else ""
        name = self._agent.name if self._agent else self.name
        return f"streamrt-worker ready name={name!r} listen={self.address} device={devices} pid={os.getpid()}"

    def _fail(self, error: DeviceError) -> None:
        self.failed = error
        self.stop()

    def stop(self) -> None:
        """Makes `run` begin the drain.  Does not block the host."""
        self._stop.set()
        self._wake()

    def signalled(self) -> None:
        """What a signal does: it begins the drain, or cuts off the one that goes on.  Does not block the host."""
        if self._draining:
            self._cut.set()
        self.stop()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"!")

    def run(self, drain: float) -> int:
        """Blocks the host until `stop`, then drains for `drain` seconds at most; the exit code."""
        # The kernel may give a signal to any thread: what wakes this one is the interpreter's write to the pipe.
        previous = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        while not self._stop.is_set():
            select.select([self._wake_read], [], [])
            os.read(self._wake_read, 4096)
        if self._agent is None or self._listener is None:
            raise WorkerError("the worker was not started")
        self._agent.stop_listening(self._listener)
        complete = self._drain(self._agent, drain)
        signal.set_wakeup_fd(previous)
        self._agent.close(timeout=1.0 if complete else 0.0)
        if self._claim is not None:
            self._claim.close()
        if self.failed is not None:
            log.error("the worker ends, since its device has failed: %s", self.failed, exc_info=self.failed.__cause__)
            return DEVICE_FAILED
        if complete:
            return OK
        why = "before the second signal" if self._cut.is_set() else f"within {drain:g} s"
        log.error("not all calls ended %s; they were cut off", why)
        return DRAIN_INCOMPLETE

    def _drain(self, agent: Agent, seconds: float) -> bool:
        """Whether all calls end in time, and before a second signal, for which this thread listens meanwhile."""
        ended: list[bool] = []

        def drain() -> None:
            ended.append(agent.drain(seconds))
            self._wake()

        self._draining = True
        threading.Thread(target=drain, name="streamrt-drain", daemon=True).start()
        quiet: float | None = QUIET_SECONDS
        while not ended and not self._cut.is_set():
            if select.select([self._wake_read], [], [], quiet)[0]:
                os.read(self._wake_read, 4096)
            else:
                quiet = None
                calls = sum(len(driver.served.calls) for driver in agent.drivers)
                sys.stderr.write(
                    f"streamrt-worker: draining: {calls} call{'' if calls == 1 else 's'}, at most {seconds:g} s; send "
                    "the signal (Ctrl-C) again to cut it off\n"
                )
                sys.stderr.flush()
        return bool(ended) and ended[0]


def _claim(name: str) -> socket.socket | None:
    """Holds a worker's name on this host as long as the process lives; an abstract socket leaves no file behind."""
    if not name:
        return None
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0streamrt-worker/{os.getuid()}/{name}")
    except OSError as error:
        claim.close()
        raise WorkerError(
            f"the name {name!r} is in use by another worker on this host; choose another --name"
        ) from error
    return claim


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"streamrt-worker {version_of_streamrt()}\n")
        raise typer.Exit


def serve(
    service: Annotated[str, typer.Argument(metavar="MODULE:SERVICE", help="The transport.Service to serve.")],
    listen: Annotated[str, typer.Option(help="Where to listen; port 0 takes a free one.")] = "tcp://127.0.0.1:0",
    device: Annotated[
        list[str] | None,
        typer.Option(
            help="A device to serve (may be repeated): cuda:0, cuda:1 and so on; host:0, host:1 and so on, which are "
            "virtual devices in ordinary memory; cpu, ordinary memory alone.",
            show_default="cuda:0 where there is a GPU, else host:0",
        ),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Functions that run at once.")] = DEFAULT_THREADS,
    name: Annotated[str, typer.Option(help="A name for messages, unique on this host.")] = "",
    order: Annotated[
        str | None,
        typer.Option(
            help="How arrays of devices are ordered that go by shared memory: host sends them when they are there, "
            "stream lets streams wait for the peer's, auto does that where it pays.",
            show_default="STREAMRT_ORDER, else host",
        ),
    ] = None,
    drain: Annotated[float, typer.Option(min=0.0, help="Seconds that calls may take to end after SIGTERM.")] = 30.0,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Serves a service's functions to peers until SIGTERM or Ctrl-C; then calls that run may end."""
    if log_level.lower() not in LOG_LEVELS:
        sys.stderr.write(f"streamrt-worker: --log-level {log_level!r}: use one of {', '.join(LOG_LEVELS)}\n")
        raise typer.Exit(USAGE)
    logging.basicConfig(stream=sys.stderr, level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    set_up_process()
    other = foreign_transport()
    if other is not None:
        log.warning(
            "another module 'transport' is on the path (%s); programs that import it first will not find ours", other
        )
    try:
        worker = Worker(load_service(service), listen=listen, devices=device, threads=threads, name=name, order=order)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: worker.signalled())
        worker.start()
    except WorkerError as error:
        sys.stderr.write(f"streamrt-worker: {error}\n")
        raise typer.Exit(error.code) from error
    sys.stdout.write(worker.ready_line + "\n")
    sys.stdout.flush()
    code = worker.run(drain)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a function that never returns must not keep the process


def main() -> None:
    """The console script.  Blocks the host until the worker ends."""
    app = typer.Typer(add_completion=False)
    codes = [f"{code:>2}  {means}" for code, means in EXIT_CODES.items()]
    app.command(epilog="\n\n".join(["Exit codes:", *codes]))(serve)
    app()


if __name__ == "__main__":
    main()
