"""The daemon: its ready line, its drain, its exit codes and what it says; heartbeats to peers of other hosts."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from rpc_processes import HERE, WATCHDOG, Worker, run_worker, state_of, until

import streamrt
import transport
from transport import worker as worker_module
from transport.information import version_of_streamrt
from transport.launch.environment import child_environment
from transport.limits import Limits
from transport.links import Link, schemes, zmq_link
from transport.peer import await_ready

SERVICE = "rpc_service:service"


# The ready line -------------------------------------------------------------------------------------------------------


def test_ready_line() -> None:
    name = f"named-{uuid.uuid4().hex[:8]}"
    with Worker(SERVICE, "--name", name, "--device", "host:1", "--listen", "tcp://127.0.0.1:0") as worker:
        line = worker.ready_line
        assert line.startswith("streamrt-worker ready ")
        assert f"name='{name}'" in line
        assert re.search(r"listen=tcp://127\.0\.0\.1:[1-9]\d*", line)
        assert "device=host:1" in line
        assert f"pid={worker.pid}" in line
        with transport.connect(worker.address) as peer:
            assert peer.call("add", 1) == 2
            assert set(peer.device_map.values()) == {"cpu", "host:1"}
        assert worker.stop()[0] == worker_module.OK


@pytest.mark.parametrize("listen", ["tcp://[::1]:0", "ipc", "unix"])
def test_other_addresses(listen: str, tmp_path: Path) -> None:
    if listen == "tcp://[::1]:0" and not _has_ipv6():
        pytest.skip("this host has no ::1")
    address = listen if "://" in listen else f"{listen}://{tmp_path}/worker.sock"
    with Worker(SERVICE, "--listen", address) as worker, transport.connect(worker.address) as peer:
        x = np.arange(100_000)
        assert (peer.call("echo", x) == x).all()


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_localhost_is_loopback() -> None:
    with Worker(SERVICE, "--listen", "tcp://localhost:0") as worker:
        with transport.connect(f"tcp://localhost:{worker.port}") as peer:
            assert peer.call("add", 1) == 2


# The drain ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_running_call_may_finish(number: signal.Signals, tmp_path: Path) -> None:
    """The signal comes while a function runs; its reply arrives, new connections are refused, the exit code is 0."""
    with Worker(SERVICE) as worker, transport.connect(worker.address) as peer:
        flag = tmp_path / "go"
        future = peer.submit("ones_when", str(flag), 1 << 20)
        until(lambda: peer.statistics().messages_out >= 2 and peer.call("count", str(flag)), "the function to run")
        worker.process.send_signal(number)
        until(lambda: _refused(worker.address), "new connections to be refused")
        assert worker.process.poll() is None
        flag.touch()
        assert future.result(WATCHDOG).sum() == 1 << 20
        assert worker.wait()[0] == worker_module.OK
        until(lambda: peer.closed, "the peer to hear of it")


def _refused(address: str) -> bool:
    try:
        transport.connect(address, timeout=0.3).abort()
    except (transport.PeerLostError, transport.DeadlineError):
        return True
    return False


@pytest.mark.parametrize("scheme", ["tcp", "ipc", "unix"])
def test_who_connects_during_the_drain_waits_for_the_next_worker(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One attempt after the other finds a worker that takes nobody, then nobody, then the next worker."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}" if scheme == "tcp" else f"{scheme}://{tmp_path}/worker.sock"
    attempts: list[str] = []
    reach = schemes.connect

    def counted(where: str) -> Link:
        attempts.append(where)
        return reach(where)

    with Worker(SERVICE, "--listen", address) as first, transport.connect(first.address) as peer:
        flag = tmp_path / "go"
        future = peer.submit("ones_when", str(flag), 100)
        until(lambda: peer.statistics().messages_out >= 2 and peer.call("count", str(flag)), "the function to run")
        first.process.send_signal(signal.SIGTERM)
        until(lambda: _refused(first.address), "new connections to be refused")
        monkeypatch.setattr(schemes, "connect", counted)
        with pytest.raises(transport.PeerLostError, match="no worker answered at"):
            transport.connect(address, timeout=1.0)
        assert len(attempts) > 1, "it has given up at once"
        attempts.clear()
        with ThreadPoolExecutor(1) as pool:
            next_peer = pool.submit(transport.connect, address, timeout=WATCHDOG)
            until(lambda: len(attempts) > 1, "a second attempt")
            flag.touch()
            assert future.result(WATCHDOG).sum() == 100
            assert first.wait()[0] == worker_module.OK
            with Worker(SERVICE, "--listen", address) as second, next_peer.result(WATCHDOG) as peer_of_second:
                assert peer_of_second.pid == second.pid
                assert peer_of_second.call("add", 1) == 2


def test_drain_has_a_time_limit() -> None:
    with Worker(SERVICE, "--drain", "0.3", keep_errors=True) as worker, transport.connect(worker.address) as peer:
        future = peer.submit("bump_behind", "running", "never")
        until(lambda: peer.call("count", "running") == 1, "the function to run")
        code, errors = worker.stop()
        assert code == worker_module.DRAIN_INCOMPLETE
        assert "draining: 1 call, at most 0.3 s; send the signal (Ctrl-C) again to cut it off" in errors
        assert "not all calls ended within 0.3 s; they were cut off" in errors
        assert isinstance(future.exception(WATCHDOG), transport.PeerLostError)


def test_a_function_that_fails_a_virtual_device_is_told_as_its_own_error() -> None:
    """To the caller and in the worker's last words: which device, whose exception, and nothing of a GPU."""
    with (
        Worker(SERVICE, "--device", "host:1", keep_errors=True) as worker,
        transport.connect(worker.address) as peer,
    ):
        x = streamrt.array(np.ones(4), device="host:0")
        with pytest.raises(streamrt.DeviceError) as caught:
            peer.call("misuse_a_virtual_device", x)
        code, errors = worker.wait()
        assert code == worker_module.DEVICE_FAILED
        whose = r"the function 'engine', launched on the virtual device host:1 \(stream host:1#\d+\), raised KeyError: "
        for said in (str(caught.value), errors):
            assert re.search(whose + "'no such layer'; mend that, and ", said)
        remote = "\n".join(caught.value.__notes__)
        for said in (remote, errors):
            assert 'raise KeyError("no such layer")' in said
        assert "since its device has failed" in errors
        assert "GPU" not in str(caught.value) + remote + errors


def test_a_second_signal_cuts_the_drain_off() -> None:
    with Worker(SERVICE, "--drain", "600", keep_errors=True) as worker, transport.connect(worker.address) as peer:
        futures = [peer.submit("bump_behind", "running", "never") for _ in range(2)]
        until(lambda: peer.call("count", "running") == 2, "the functions to run")
        worker.process.send_signal(signal.SIGINT)
        assert worker.process.stderr is not None
        said = worker.process.stderr.readline()
        assert "draining: 2 calls, at most 600 s; send the signal (Ctrl-C) again to cut it off" in said
        worker.process.send_signal(signal.SIGINT)
        code, errors = worker.wait()
        assert code == worker_module.DRAIN_INCOMPLETE
        assert "not all calls ended before the second signal; they were cut off" in errors
        assert all(isinstance(future.exception(WATCHDOG), transport.PeerLostError) for future in futures)


def test_idle_connections_do_not_hold_the_worker() -> None:
    with Worker(SERVICE) as worker:
        peers = [transport.connect(worker.address) for _ in range(3)]
        assert worker.stop()[0] == worker_module.OK
        until(lambda: all(peer.closed for peer in peers), "the peers to hear of it")
        for peer in peers:
            with pytest.raises((transport.PeerLostError, RuntimeError)):
                peer.call("add", 1)
            peer.close()


def test_a_name_is_free_again_after_the_worker() -> None:
    name = f"named-{uuid.uuid4().hex[:8]}"
    for _ in range(2):
        with Worker(SERVICE, "--name", name) as worker:
            assert worker.stop()[0] == worker_module.OK


# Exit codes and messages ----------------------------------------------------------------------------------------------

USAGE_ERRORS = {
    "no module": (["no_such_module_here:service"], "there is no module 'no_such_module_here'"),
    "module that raises": (["rpc_service_broken:service"], "could not be imported: ZeroDivisionError"),
    "module that imports what is not there": (["rpc_service_missing:service"], "No module named 'not_installed_here'"),
    "a file": (["rpc_service.py:service"], "without .py: rpc_service:service"),
    "a file elsewhere": (["tests/rpc_service.py:service"], "without .py, in the folder tests: rpc_service:service"),
    "no service": (
        ["rpc_service:nothing"],
        "services there: broken_service, cupy_service, empty_service, jax_service, service, torch_service",
    ),
    "no service in the module": (["json:service"], "services there: none"),
    "no colon": (["rpc_service"], "write MODULE:SERVICE"),
    "no function": (["rpc_service:empty_service"], "the service has no function; register one"),
    "no such arrays": (["rpc_service:cupy_service", "--device", "host:0"], "cupy has no arrays on host:0"),
    "no such device": ([SERVICE, "--device", "host:999"], "host:999"),
    "no device": ([SERVICE, "--device", "banana"], "banana"),
    "every interface": ([SERVICE, "--listen", "tcp://0.0.0.0:0"], "every interface"),
    "another host": ([SERVICE, "--listen", "tcp://192.0.2.1:7700"], "only loopback"),
    "no scheme": ([SERVICE, "--listen", "127.0.0.1:7700"], "tcp://127.0.0.1:7700"),
    "no port": ([SERVICE, "--listen", "tcp://127.0.0.1"], "no valid host and port"),
    "log level": ([SERVICE, "--log-level", "loud"], "loud"),
    "order": ([SERVICE, "--order", "both"], "auto, host, stream"),
    "threads": ([SERVICE, "--threads", "0"], "threads"),
}
RAISED_BY_THE_MODULE = {"module that raises", "module that imports what is not there"}


@pytest.fixture
def broken_modules(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "rpc_service_broken.py").write_text("1 / 0\n")
    (tmp_path / "rpc_service_missing.py").write_text("import not_installed_here\n")
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), child_environment()["PYTHONPATH"]])}


@pytest.mark.parametrize("case", sorted(USAGE_ERRORS))
def test_usage_errors(case: str, broken_modules: dict[str, str]) -> None:
    arguments, message = USAGE_ERRORS[case]
    code, output, errors = run_worker(*arguments, environment={**broken_modules, "COLUMNS": "200"})
    assert code == worker_module.USAGE
    assert output == ""
    assert message in errors
    assert ("Traceback" in errors) == (case in RAISED_BY_THE_MODULE)
    assert errors.count("File ") == (case in RAISED_BY_THE_MODULE), "a frame that is not the user's"


def test_the_exit_codes_are_listed() -> None:
    """As a table in the README, and by --help."""
    code, output, _ = run_worker("--help", environment={"COLUMNS": "120"})
    assert code == worker_module.OK
    readme = (HERE.parent / "README.md").read_text()
    for number, means in worker_module.EXIT_CODES.items():
        assert f"{number}  {means}" in output
        assert f"| {number} | {means} |" in readme


def test_the_version() -> None:
    code, output, _ = run_worker("--version")
    assert (code, output) == (worker_module.OK, f"streamrt-worker {version_of_streamrt()}\n")


def test_one_device_where_the_worker_wants_a_list() -> None:
    worker = worker_module.Worker(transport.Service(), devices="host:0")  # type: ignore[arg-type]
    with pytest.raises(worker_module.WorkerError, match=r"devices='host:0' is no list of devices"):
        worker.start()


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, output, errors = run_worker(SERVICE, "--listen", f"tcp://127.0.0.1:{port}")
    assert (code, output) == (worker_module.USAGE, "")
    assert "in use; choose another port" in errors
    assert errors.count("cannot listen on") == errors.count(str(port)) == 1


SLOW = """
import pathlib, threading, transport
service = transport.Service()
@service.setup
def load(device):
    here = pathlib.Path(__file__).parent
    (here / "loading").touch()
    while not (here / "go").exists():
        threading.Event().wait(0.01)
@service.function
def twice(state, x): return 2 * x
"""


def test_a_port_in_use_is_told_before_the_set_up(tmp_path: Path) -> None:
    (tmp_path / "slow_stage.py").write_text(SLOW)
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), child_environment()["PYTHONPATH"]])}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        code, _, errors = run_worker("slow_stage:service", "--listen", address, environment=path)
    assert code == worker_module.USAGE
    assert "in use" in errors
    assert not (tmp_path / "loading").exists()


@pytest.mark.parametrize("scheme", ["tcp", "ipc", "unix"])
def test_who_connects_during_the_set_up_waits_or_is_told_so(scheme: str, tmp_path: Path) -> None:
    (tmp_path / "slow_stage.py").write_text(SLOW)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}" if scheme == "tcp" else f"{scheme}://{tmp_path}/worker.sock"
    process = subprocess.Popen(
        [sys.executable, "-m", "transport.worker", "slow_stage:service", "--listen", address],
        stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=child_environment(),
    )  # fmt: skip
    try:
        until(lambda: (tmp_path / "loading").exists(), "the set-up to begin")
        with pytest.raises(transport.PeerLostError, match=r"still being set up; connect again when its ready line"):
            transport.connect(address, timeout=1.0)
        with ThreadPoolExecutor(1) as pool:
            early = pool.submit(transport.connect, address, timeout=WATCHDOG)
            (tmp_path / "go").touch()
            with early.result() as peer:
                assert peer.call("twice", 4) == 8
        assert process.stdout is not None
        assert "streamrt-worker ready" in process.stdout.readline()
        with transport.connect(address) as peer:
            assert peer.call("twice", 21) == 42
        process.terminate()
        assert process.wait(WATCHDOG) == worker_module.OK
    finally:
        process.kill()
        process.communicate()


def test_a_name_in_use() -> None:
    name = f"named-{uuid.uuid4().hex[:8]}"
    with Worker(SERVICE, "--name", name):
        code, _, errors = run_worker(SERVICE, "--name", name)
    assert code == worker_module.USAGE
    assert f"the name '{name}' is in use" in errors


def test_a_setup_that_raises() -> None:
    code, output, errors = run_worker("rpc_service:broken_service", "--device", "host:0")
    assert (code, output) == (worker_module.SETUP_FAILED, "")
    assert "LookupError: no weights for host:0" in errors
    assert "in explode" in errors, "where it was raised is missing"


def test_another_module_transport_on_the_path(tmp_path: Path) -> None:
    """A warning that names it: programs that import it first will not find ours."""
    (tmp_path / "transport.py").write_text("raise ImportError('not ours')\n")
    path = os.pathsep.join([child_environment()["PYTHONPATH"], str(HERE.parent), str(tmp_path)])
    with Worker(SERVICE, environment={"PYTHONPATH": path}, keep_errors=True) as worker:
        code, errors = worker.stop()
    assert code == worker_module.OK
    assert f"another module 'transport' is on the path ({tmp_path}/transport.py)" in errors


def test_no_warning_without_one() -> None:
    with Worker(SERVICE, keep_errors=True) as worker:
        assert worker.stop() == (worker_module.OK, "")


def test_the_console_script_serves_from_the_working_directory(tmp_path: Path) -> None:
    """As in the README: a module beside the user, with no PYTHONPATH."""
    (tmp_path / "my_stage.py").write_text(
        "import transport\nservice = transport.Service()\n"
        "@service.setup\ndef load(device): return {'device': device}\n"
        "@service.function\ndef where(state, x): return state['device'], float(x.sum())\n"
    )
    script = Path(sys.executable).parent / "streamrt-worker"
    process = subprocess.Popen(
        [str(script), "my_stage:service", "--device", "host:0"], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        assert process.stdout is not None
        address = re.search(r"listen=(\S+)", process.stdout.readline())
        assert address is not None
        with transport.connect(address[1]) as peer:
            assert peer.call("where", np.ones(5000)) == ("host:0", 5000.0)
            with pytest.raises(TypeError, match="where"):
                peer.call("where")
        process.terminate()
        assert process.wait(WATCHDOG) == worker_module.OK
    finally:
        process.kill()
        process.communicate()


# Peers of other hosts -------------------------------------------------------------------------------------------------


class FarLink:
    """A link that says that it goes to another host: there silence is what tells of a loss."""

    def __init__(self, link: zmq_link.DealerLink) -> None:
        self._link = link
        self.same_host = False
        self.inherited = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._link, name)


def _far_peer(agent: transport.Agent, address: str, limits: Limits) -> transport.Peer:
    driver = agent.add(FarLink(zmq_link.connect(address)), initiator=True, limits=limits, name="far")
    driver.on_ready = None  # the process of another host cannot be watched
    await_ready(driver, WATCHDOG)
    return transport.Peer.of(driver)


def test_a_silent_peer_of_another_host_is_lost() -> None:
    agent = transport.Agent(name="near")
    with Worker(SERVICE) as worker:
        peer = _far_peer(agent, worker.address, Limits(heartbeat=0.2, peer_timeout=1.0))
        future = peer.submit("bump_behind", "running", "never")
        until(lambda: peer.call("count", "running") == 1, "the function to run")
        worker.freeze()
        error = future.exception(WATCHDOG)
        assert isinstance(error, transport.PeerLostError)
        assert "silent" in str(error)
        assert "outcome is unknown" in str(error)
    agent.close()


def test_a_quiet_peer_of_another_host_is_not_lost() -> None:
    """Nothing to say is not silence: heartbeats go both ways, longer than the time limit."""
    agent = transport.Agent(name="near")
    with Worker(SERVICE) as worker:
        peer = _far_peer(agent, worker.address, Limits(heartbeat=0.1, peer_timeout=1.0))
        before = peer.statistics()
        until(lambda: peer.statistics().messages_in - before.messages_in > 15, "heartbeats for 1.5 s")
        assert peer.call("add", 1) == 2
        peer.close()
    agent.close()


def test_a_frozen_worker_of_this_host_is_not_lost_by_silence() -> None:
    """Stopped for longer than a far peer may be silent, within `peer_timeout`: it goes on as if nothing had been."""
    with Worker(SERVICE) as worker, transport.connect(worker.address) as peer:
        worker.freeze()
        future = peer.submit("add", 1)
        with pytest.raises(TimeoutError):
            future.result(2.5)
        assert state_of(worker.pid) == "T"
        worker.thaw()
        assert future.result(WATCHDOG) == 2


def test_info_shows_a_worker_and_how_arrays_go_to_it(tmp_path: Path) -> None:
    def info(address: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "transport.cli", "info", "--peer", address]
        environment = child_environment() | {"COLUMNS": "200", "STREAMRT_DEVICE": "host"}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)

    with Worker("rpc_service:service", "--device", "host:0", "--listen", f"unix://{tmp_path}/socket") as worker:
        shown = info(worker.address)
        assert shown.returncode == 0, shown.stderr
        for text in (str(worker.pid), "total", "host:0 -> host:0: shared_memory"):
            assert text in shown.stdout
    nobody = info(f"unix://{tmp_path}/nobody")
    assert nobody.returncode == 2
    assert "is the worker running" in nobody.stdout
