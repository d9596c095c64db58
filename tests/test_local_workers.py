"""Children: any function may be sent to them, and they end with their parent, whatever ends it."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rpc_service
from rpc_processes import HERE, WATCHDOG, Worker, freeze, open_descriptors, state_of, until

import streamrt
import transport
from streamrt.testing import Latch
from transport import ending
from transport.channels.staging import DeviceReceiver
from transport.ending import Ending
from transport.launch.environment import child_environment
from transport.process import DEVICE_FAILED


@pytest.fixture(scope="module")
def workers() -> Any:
    with transport.local_workers(2) as started:
        yield started


# Functions ------------------------------------------------------------------------------------------------------------


def twice(x: Any) -> Any:
    return x + x


class Scaled:
    """A value with no codec: pickled, which only children are sent."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def times(self, x: Any) -> Any:
        return self.factor * x

    @staticmethod
    def halved(x: Any) -> Any:
        return x / 2


def test_functions_by_reference(workers: transport.LocalWorkers) -> None:
    x = np.arange(5000.0)
    np.testing.assert_array_equal(workers[0].call(twice, x), 2 * x)
    np.testing.assert_array_equal(workers[1].call(rpc_service.add, x, y=2, scale=3), (x + 2) * 3)
    np.testing.assert_array_equal(workers[0].call(Scaled.halved, x), x / 2)
    np.testing.assert_array_equal(workers[0].call(np.square, x), x * x)


def test_functions_by_value(workers: transport.LocalWorkers) -> None:
    x, offset = np.arange(5000.0), 7
    np.testing.assert_array_equal(workers[0].call(lambda y: y + offset, x), x + 7)

    def local(y: Any, *, power: int) -> Any:
        return y**power + offset

    np.testing.assert_array_equal(workers[1].call(local, x, power=2), x**2 + 7)
    np.testing.assert_array_equal(workers[0].call(functools.partial(local, power=3), x), x**3 + 7)
    np.testing.assert_array_equal(workers[0].call(Scaled(5).times, x), 5 * x)


def test_arguments_of_a_function_by_value_are_counted_as_the_caller_does(workers: transport.LocalWorkers) -> None:
    with pytest.raises(transport.CodecError, match=r"cannot send args\[0\], of type _thread\.lock"):
        workers[0].call(lambda x: x, threading.Lock())
    with pytest.raises(transport.CodecError, match=r"cannot send args\[1\]\['w'\], of type _thread\.lock"):
        workers[0].call(lambda x, y: x, 1, {"w": threading.Lock()})
    with pytest.raises(transport.CodecError, match=r"cannot send kwargs\['x'\], of type _thread\.lock"):
        workers[0].call(lambda x: x, x=threading.Lock())
    lock = threading.Lock()
    with pytest.raises(transport.CodecError, match=r"cannot send function, of type builtins\.function"):
        workers[0].call(lambda: lock)
    with pytest.raises(TypeError, match=r"<lambda>\(x\): too many positional arguments"):
        workers[0].call(lambda x: x, 1, 2)


def limit_memory(more: int) -> None:
    """Lets this process have so many bytes more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


@pytest.mark.parametrize("device", ["cpu", "host:0"])
def test_what_finds_no_room_at_a_worker_ends_its_call_alone(device: str) -> None:
    with transport.local_workers(1) as (worker,):
        worker.call(limit_memory, 32 << 20)
        much = streamrt.array(np.ones(160 << 20, np.uint8), device=device)
        running = worker.submit(rpc_service.total, much[:1000])
        with pytest.raises(MemoryError, match=f"MemoryError: {device} has no {160 << 20} bytes left: "):
            worker.call(rpc_service.total, much)
        assert running.result() == 1000
        assert worker.call(rpc_service.total, much[: 1 << 20]) == 1 << 20
        assert not worker.closed


def test_values_by_pickle(workers: transport.LocalWorkers) -> None:
    back = workers[0].call(rpc_service.echo, {"scaled": Scaled(4), "when": Scaled})
    assert back["scaled"].factor == 4
    assert back["when"] is Scaled


MAIN = """
import sys, transport
factor = 3
def triple(x):
    return factor * x
class Box:
    def __init__(self, content): self.content = content
def unbox(box):
    return box.content
if __name__ == "__main__":
    with transport.local_workers(1) as workers:
        print(workers[0].call(triple, 14), workers[0].call(unbox, Box("inside")))
"""


def test_functions_of_the_main_program() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MAIN], capture_output=True, text=True, env=child_environment(), timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "42 inside\n", "")


def test_a_function_that_the_child_cannot_import(workers: transport.LocalWorkers) -> None:
    with pytest.raises(transport.UnknownFunctionError, match="no_such_module"):
        workers[0].call("@no_such_module:f", 1)
    with pytest.raises(transport.UnknownFunctionError, match=r"no function 'plain' here.*pass the function itself"):
        workers[0].call("plain", 1)
    assert workers[0].call(twice, 1) == 2


def test_wrong_arguments_name_the_signature(workers: transport.LocalWorkers) -> None:
    with pytest.raises(TypeError, match=r"rpc_service:add\(x.*missing a required argument"):
        workers[0].call(rpc_service.add)
    with pytest.raises(TypeError, match="too many positional arguments"):
        workers[0].call(lambda x: x, 1, 2)
    assert workers[0].call(twice, 1) == 2


def fail_to_unpickle() -> Any:
    return Stubborn()


class Stubborn:
    """Comes apart, and cannot be put together again."""

    def __reduce__(self) -> Any:
        return rpc_service.fail, ("value", "will not be rebuilt")


def test_a_value_that_cannot_be_rebuilt_is_an_error_of_that_call(workers: transport.LocalWorkers) -> None:
    with pytest.raises(Exception, match="will not be rebuilt"):
        workers[0].submit(fail_to_unpickle).result(WATCHDOG)
    with pytest.raises(Exception, match="will not be rebuilt"):
        workers[0].submit(rpc_service.echo, Stubborn()).result(WATCHDOG)
    assert workers[0].call(twice, 1) == 2


def test_a_callback_to_the_parent(workers: transport.LocalWorkers) -> None:
    """A child may call its parent, but only what the parent's service has: pickles go down, not up to be run."""

    def call_back() -> str:
        try:
            transport.caller().call(twice, 21)
        except transport.UnknownFunctionError as error:
            return str(error)
        return "the parent ran it"

    assert "no function" in workers[0].call(call_back)


@pytest.mark.parametrize("by", ["name", "function"])
def test_a_callback_to_the_parents_service(by: str) -> None:
    """The child's function calls the parent's, which calls the child's; also in a worker that was started again."""
    service = transport.Service()
    service.function(halved)
    with transport.local_workers(1, service=service) as workers:
        for _ in range(2):
            x = np.arange(100_000.0)
            np.testing.assert_array_equal(workers[0].call(through_the_parent, x, by), x / 2 * 2)
            workers.restart(0)


def halved(x: Any) -> Any:
    return transport.caller().call(twice, x / 4)


def through_the_parent(x: Any, by: str) -> Any:
    return transport.caller().call("halved" if by == "name" else halved, x) * 2


# Placement ------------------------------------------------------------------------------------------------------------


def where(x: Any) -> str:
    return str(streamrt.device_of(x))


def test_each_child_has_its_device() -> None:
    with transport.local_workers(devices=["host:0", "host:1"]) as workers:
        assert [str(worker.device) for worker in workers] == ["host:0", "host:1"]
        x = streamrt.array(np.ones(5000), device="host:0")
        assert [worker.call(where, x) for worker in workers] == ["host:0", "host:1"]
        back = workers[1].call(rpc_service.echo, x)
        assert where(back) == "host:0"
        assert len({worker.pid for worker in workers} | {os.getpid()}) == 3


def test_arrays_of_the_wanted_kind() -> None:
    torch = pytest.importorskip("torch")
    with transport.local_workers(1, arrays="torch") as workers:
        found = workers[0].call(lambda x: (type(x).__module__, x.sum()), np.ones(5000))
        assert found[0] == "torch"
        assert isinstance(workers[0].call(rpc_service.echo, torch.ones(3000)), torch.Tensor)


@pytest.mark.parametrize("count", [0, -1])
def test_a_count_must_be_positive(count: int) -> None:
    with pytest.raises(transport.LocalProtocolError, match="at least one"):
        transport.local_workers(count)


def test_a_device_that_does_not_exist() -> None:
    with pytest.raises(streamrt.PlacementError, match="host:999"):
        transport.local_workers(devices=["host:0", "host:999"])


def test_a_child_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is noticed before the time is up, and its exit code is told."""
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(transport.PeerLostError, match="exit code is 1"):
        transport.local_workers(1)


# The end --------------------------------------------------------------------------------------------------------------


def test_leaving_the_with_ends_the_children() -> None:
    transport.local_workers(1).close()
    descriptors = open_descriptors()
    with transport.local_workers(2) as workers:
        pids = [worker.pid for worker in workers]
        assert all(state_of(pid) for pid in pids)
    assert not any(state_of(pid) for pid in pids)
    assert [worker.process.returncode for worker in workers] == [0, 0]
    until(lambda: open_descriptors() <= descriptors, "descriptors to be closed")
    workers.close()


def test_a_child_that_is_killed() -> None:
    with transport.local_workers(2) as workers:
        futures = [workers[0].submit(rpc_service.gate, "never") for _ in range(20)]
        workers[0].kill()
        for future in futures:
            error = future.exception(WATCHDOG)
            assert isinstance(error, transport.PeerLostError)
            assert str(error).endswith(
                "was killed by SIGKILL; start it again with LocalWorkers.restart, or pipeline(restarts=)"
            )
        with pytest.raises(transport.PeerLostError, match=r"is gone: .*; the worker was killed by SIGKILL; start"):
            workers[0].call(twice, 1)
        assert workers[1].call(twice, 1) == 2


def close_descriptors() -> None:
    os.closerange(3, 1000)
    threading.Event().wait()


def test_a_child_that_is_started_again() -> None:
    with transport.local_workers(devices=["host:0", "host:1"]) as workers:
        old, other = workers
        future = old.submit(rpc_service.gate, "never")
        new = workers.restart(0)
        assert workers[0] is new
        assert workers[1] is other
        assert isinstance(future.exception(WATCHDOG), transport.PeerLostError)
        assert old.process.returncode == -signal.SIGKILL
        assert (new.name, str(new.device)) == (old.name, "host:0")
        assert len({old.pid, new.pid, other.pid}) == 3
        assert new.call(twice, 1) == other.call(twice, 1) == 2
    assert not any(state_of(worker.pid) for worker in (old, new, other))
    with pytest.raises(streamrt.ClosedError, match="none is started again; start others with local_workers"):
        workers.restart(0)


def test_a_child_that_does_not_start_again_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with transport.local_workers(1) as workers, monkeypatch.context() as broken:
        broken.setattr(sys, "executable", shutil.which("false"))
        with pytest.raises(transport.PeerLostError, match="exit code is 1"):
            workers.restart(0)
        with pytest.raises(transport.PeerLostError, match="is gone"):
            workers[0].call(twice, 1)
        broken.undo()
        assert workers.restart(0).call(twice, 1) == workers[0].call(twice, 1) == 2


def test_a_child_that_leaves_and_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls end although nobody knows how it will; one that this side ends says nothing of its process."""
    monkeypatch.setattr(ending, "WAIT_SECONDS", 0.2)
    with transport.local_workers(2) as workers:
        error = workers[0].submit(close_descriptors).exception(WATCHDOG)
        assert isinstance(error, transport.PeerLostError)
        assert "the worker" not in str(error)
        workers[0].kill()
        future = workers[1].submit(rpc_service.gate, "never")
        workers[1].abort()
        error = future.exception(WATCHDOG)
        assert isinstance(error, transport.PeerLostError)
        assert "the worker" not in str(error)


def test_last_words_to_a_stopped_child_hold_up_nobody() -> None:
    """What an ended connection could not write is waited for beside the others' calls, not before them."""
    with transport.local_workers(2) as workers:
        freeze(workers[0].pid)
        future = workers[0].submit(rpc_service.total, [np.ones(60_000, np.uint8) for _ in range(600)])
        until(lambda: workers[0].statistics().bytes_out["staging"] > 1 << 20, "the transfer to begin")
        workers[0].abort()
        assert isinstance(future.exception(WATCHDOG), transport.PeerLostError)
        agent, turned = transport.default_agent(), threading.Event()
        agent.call_soon(turned.set)
        assert turned.wait(WATCHDOG)
        assert workers[0]._driver.link.fileno() >= 0, "the agent's thread waited for the end of the link"
        assert workers[1].call(twice, 1) == 2
        os.kill(workers[0].pid, signal.SIGCONT)


def touch_a_failed_device() -> None:
    raise streamrt.DeviceError("an illegal memory access was encountered")


def test_a_child_whose_device_has_failed_says_so_and_ends_with_its_code() -> None:
    """Every later call of a failed device fails too: the process has to be a new one."""
    with transport.local_workers(1) as workers:
        error = workers[0].submit(touch_a_failed_device).exception(WATCHDOG)
        assert isinstance(error, streamrt.DeviceError)
        assert "illegal memory access" in str(error)
        assert workers[0].process.wait(WATCHDOG) == DEVICE_FAILED
        until(workers[0]._driver.ended.is_set, "the connection to end")
        how = "ended with exit code 70, because its device has failed"
        with pytest.raises(streamrt.ClosedError, match=rf"'worker0' is closed; the worker {how}; start it again with"):
            workers[0].call(twice, 1)
        assert f"dead, it {how}" in repr(workers[0])
        assert workers.restart(0).call(twice, 1) == 2
    with pytest.raises(streamrt.ClosedError, match="'worker0' is closed; open a new one"):
        workers[0].call(twice, 1)
    assert repr(workers[0]).endswith(": closed>")


def refuse_pulls() -> None:
    """From now on this process's devices refuse every copy of what has come, as a driver refuses a bad handle."""

    def refused(self: DeviceReceiver, offset: int, payload: memoryview | bytes) -> None:
        raise streamrt.DeviceError("a copy was refused: invalid resource handle", code=400)

    DeviceReceiver.pull = refused  # type: ignore[method-assign]


def doubled(*arrays: Any) -> list[Any]:
    return [array + array for array in arrays]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("side", ["request", "reply"])
def test_a_pull_that_fails_ends_its_call_with_the_devices_error(
    side: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is the last one, whose call has all its bytes; a refusal is no failure, and the worker goes on."""
    monkeypatch.setenv("STREAMRT_CHANNELS", "staging")
    with transport.local_workers(1, device_map={"host:0": "host:0", "cpu": "cpu"}, devices=["host:0"]) as workers:
        arrays = [streamrt.array(np.ones(10_000), device="host:0") for _ in range(count)]
        assert workers[0].call(doubled, *arrays)[-1][0] == 2
        if side == "request":
            workers[0].call(refuse_pulls)
        else:
            monkeypatch.setattr(DeviceReceiver, "pull", DeviceReceiver.pull)
            refuse_pulls()
        error = workers[0].submit(doubled, *arrays).exception(WATCHDOG)
        assert isinstance(error, streamrt.DeviceError), repr(error)
        assert "invalid resource handle" in str(error)
        monkeypatch.undo()
        assert workers[0].call(twice, 2) == 4
        assert workers[0].process.poll() is None


def exit_now(code: int) -> None:
    os._exit(code)


def test_a_child_that_ends_itself() -> None:
    with transport.local_workers(1) as workers:
        with pytest.raises(transport.PeerLostError, match=r"the worker ended with exit code 3; start it again"):
            workers[0].call(exit_now, 3)
        with pytest.raises(transport.PeerLostError, match=r"is gone: .*; the worker ended with exit code 3; start"):
            workers[0].submit(exit_now, 3)
        assert workers[0].process.wait(WATCHDOG) == 3


def test_a_child_that_never_returns_is_killed_in_time() -> None:
    with transport.local_workers(1) as workers:
        future = workers[0].submit(rpc_service.gate, "never")
        pid = workers[0].pid
        started = time.monotonic()
        workers.close(timeout=0.5)
        assert time.monotonic() - started < WATCHDOG / 2
    assert isinstance(future.exception(WATCHDOG), transport.PeerLostError)
    assert not state_of(pid)


PARENT = """
import sys, transport, rpc_service
workers = transport.local_workers(2)
futures = [worker.submit(rpc_service.gate, "never") for worker in workers]
print(*(worker.pid for worker in workers), flush=True)
futures[0].result()
"""


UNWATCHED = """
import errno, os
def refuse(pid, flags=0):
    raise OSError(errno.ENOSYS, "Function not implemented")
os.pidfd_open = refuse
"""


@pytest.fixture
def unwatched(tmp_path: Path) -> dict[str, str]:
    """The environment of processes whose system watches no process."""
    (tmp_path / "sitecustomize.py").write_text(UNWATCHED)
    environment = child_environment()
    return environment | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"}


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_children_die_with_their_parent(number: signal.Signals, watched: bool, unwatched: dict[str, str]) -> None:
    """Whatever ends the parent, with functions running in the children; SIGINT is Ctrl-C in a terminal."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=HERE, env=child_environment() if watched else unwatched, start_new_session=True,
    )  # fmt: skip
    assert parent.stdout is not None
    children = [int(word) for word in parent.stdout.readline().split()]
    assert len(children) == 2
    try:
        if number is signal.SIGINT:
            os.killpg(parent.pid, number)  # a terminal sends it to the whole group
        else:
            os.kill(parent.pid, number)
        _, errors = parent.communicate(timeout=WATCHDOG)
        until(lambda: not any(state_of(pid) for pid in children), "the children to end")
        assert parent.returncode == -number or (number is signal.SIGINT and "KeyboardInterrupt" in errors)
    finally:
        for pid in (parent.pid, *children):
            if state_of(pid):
                os.kill(pid, signal.SIGKILL)


def test_children_outlive_the_thread_that_started_them() -> None:
    started: list[transport.LocalWorkers] = []
    thread = threading.Thread(target=lambda: started.append(transport.local_workers(1)))
    thread.start()
    thread.join(WATCHDOG)
    with started[0] as (worker,):
        # The kernel ends a thread a moment after `join` has returned, and would kill the child in that moment.
        until(lambda: all(int(task) != thread.native_id for task in os.listdir("/proc/self/task")), "its end")
        assert worker.call(twice, 21, timeout=WATCHDOG) == 42
        assert worker.process.poll() is None


def test_no_thread_is_left_that_waits_for_a_child_that_is_ready() -> None:
    before = set(threading.enumerate())
    with transport.local_workers(2):
        left = {thread.name for thread in set(threading.enumerate()) - before}
        assert not any("agent" not in name for name in left), left


def test_a_bad_device_map_leaves_no_child_behind() -> None:
    def children() -> set[str]:
        found = set()
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{task}/children") as file:
                found |= set(file.read().split())  # but for a thread that has just ended
        return found

    before = children()
    with pytest.raises(transport.DeviceMapError):
        transport.local_workers(1, device_map={"host:0": "nowhere"})
    assert children() == before


def test_the_environment_of_a_child(workers: transport.LocalWorkers) -> None:
    """What libraries must not set and a process of its own may; the user's own setting wins."""
    names = ["CUDA_DEVICE_MAX_CONNECTIONS", "XLA_PYTHON_CLIENT_PREALLOCATE"]
    found = workers[0].call(lambda: ([os.environ.get(name) for name in names], sys.getswitchinterval()))
    assert found[0] == [os.environ.get(name, default) for name, default in zip(names, ["32", "false"], strict=True)]
    assert found[1] <= 1e-4 < 0.005


@pytest.mark.parametrize("leaving", [ValueError, KeyboardInterrupt])
def test_an_exception_ends_the_children_at_once(leaving: type[BaseException]) -> None:
    """Killed: one that was closed, and its calls waited for, ends with exit code 0."""
    with pytest.raises(leaving), transport.local_workers(2) as started:
        futures = [worker.submit(rpc_service.bump_behind, "running", "never") for worker in started]
        for worker in started:
            until(lambda worker=worker: worker.call(rpc_service.count, "running") == 1, "the function to run")
        raise leaving
    assert [worker.process.returncode for worker in started] == [-signal.SIGKILL] * 2
    for future in futures:
        assert isinstance(future.exception(WATCHDOG), transport.PeerLostError)


def test_what_workers_look_like() -> None:
    with transport.local_workers(devices=["host:0", "host:1"]) as started:
        assert repr(started) == "<LocalWorkers worker0 on host:0, worker1 on host:1>"
    assert repr(started) == "<LocalWorkers closed worker0 on host:0, worker1 on host:1>"


@pytest.mark.parametrize("how", ["one dies", "one ends", "one is closed"])
def test_a_worker_that_is_dead_looks_dead(how: str) -> None:
    with transport.local_workers(2) as started:
        first, second = started
        assert repr(first) == f"<LocalWorker 'worker0' on host:0, pid {first.pid}: 0 calls open>"
        if how == "one dies":
            os.kill(first.pid, signal.SIGKILL)
        elif how == "one ends":
            with pytest.raises(transport.PeerLostError):
                first.call(os._exit, 3)
        else:
            first.close()
        until(lambda: first.process.poll() is not None and first.closed, "the worker to be gone")
        state = {"one dies": "dead, it was killed by SIGKILL", "one ends": "dead, it ended with exit code 3"}.get(how)
        assert repr(first) == f"<LocalWorker 'worker0' on host:0, pid {first.pid}: {state or 'closed'}>"
        assert repr(started) == f"<LocalWorkers worker0 on host:0 ({state or 'closed'}), worker1 on host:1>"
        assert "0 calls open" in repr(second)


def test_a_peer_that_is_lost_looks_lost() -> None:
    with Worker("rpc_service:service") as worker, transport.connect(worker.address) as peer:
        assert "0 calls open" in repr(peer)
        worker.process.kill()
        until(lambda: peer.closed, "the loss")
        assert re.fullmatch(r"<Peer '\S+' lost: .+>", repr(peer))


def test_more_devices_than_workers_are_refused() -> None:
    with pytest.raises(transport.LocalProtocolError, match=r"3 devices for 2 workers.*leave out the number.*name 2"):
        transport.local_workers(2, devices=["host:0", "host:1", "host:2"])


def test_an_array_of_another_kind_is_told_of(workers: transport.LocalWorkers) -> None:
    """A function that was written for torch gets NumPy arrays, and fails in torch's words."""
    with pytest.raises(AttributeError) as caught:
        workers[0].call(lambda x: x.requires_grad, np.ones(3))
    assert any("unless arrays= names another library" in note for note in caught.value.__notes__)
    with pytest.raises(AttributeError) as caught:
        workers[0].call(lambda x: x.requires_grad, 3)
    assert not any("arrays=" in note for note in caught.value.__notes__)


def test_a_call_is_ordered_like_any_other(workers: transport.LocalWorkers) -> None:
    """Chained over two children, with nothing waited for in between."""
    x = np.ones(1 << 18)
    halfway = [workers[0].submit(twice, x * number) for number in range(8)]
    ends = [workers[1].submit(twice, future.result()) for future in halfway]
    for number, future in enumerate(ends):
        assert (future.result(WATCHDOG) == 4 * number).all()


def test_an_unknown_kind_of_array_starts_no_child() -> None:
    with pytest.raises(transport.LocalProtocolError, match="no kind of array; use one of numpy, cupy"):
        transport.local_workers(1, arrays="tensorflow")


def test_a_child_that_cannot_be_watched_serves_and_is_lost_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox that knows no pidfd: its socket tells of its end."""

    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with transport.local_workers(1) as (worker,):
        assert worker.call(twice, 2) == 4
        until(lambda: worker._driver.agent._unwatched, "the agent to have tried")
        assert worker.call(twice, 2) == 4
        future = worker.submit(rpc_service.gate, "never")
        worker.kill()
        assert isinstance(future.exception(WATCHDOG), transport.PeerLostError)


def one(*_: Any) -> int:
    return 1


def late_one() -> int:
    threading.Event().wait(1.0)
    return 1


def test_a_callback_that_runs_while_a_caller_looks_may_not_wait(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the caller's own thread nobody would read the answer: it is an error there, and the call goes on."""
    monkeypatch.setattr("transport.calling.LONG_SECONDS", WATCHDOG)
    peer, stream, got = workers[0], streamrt.Stream("host:0"), []
    x = streamrt.array(np.full(1000, 3.0), device="host:0")

    def call_again(_: object) -> None:
        try:
            got.append(peer.call(one))
        except streamrt.DeadlockError as error:
            got.append(type(error).__name__)

    with Latch(stream) as latch:
        with streamrt.using(stream):
            future = peer.submit(one, x)
        future.sent.add_done_callback(call_again)
        results: list[int] = []
        caller = threading.Thread(target=lambda: results.append(peer.call(late_one)), daemon=True)
        caller.start()
        until(lambda: peer._driver.calls.looking, "the caller to look")
        latch.open()
        caller.join(WATCHDOG)
    assert results == [1]
    assert len(got) == 1
    assert future.result(WATCHDOG) == 1


FEW = """
import os
import transport
from rpc_processes import use_up_descriptors
from test_local_workers import one

with transport.local_workers(1) as workers:
    assert workers[0].submit(one).result(30) == 1
    held = use_up_descriptors(128)
    assert workers[0].call(one, timeout=30) == 1
    for descriptor in held:
        os.close(descriptor)
    assert workers[0].submit(one).result(30) == 1
    assert workers[0].call(one, timeout=30) == 1
"""


def test_a_caller_without_a_descriptor_left_leaves_the_reading_to_the_agent() -> None:
    subprocess.run([sys.executable, "-c", FEW], cwd=HERE, env=child_environment(), check=True, timeout=2 * WATCHDOG)


def test_a_listener_that_raises_keeps_none_from_hearing_how_a_child_ended(caplog: pytest.LogCaptureFixture) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)"])
    ending, heard = Ending(process), threading.Event()

    def fail(_: str) -> None:
        sys.exit(1)

    ending.tell(fail)
    ending.tell(lambda how: heard.set() if "exit code 0" in how else None)
    assert heard.wait(WATCHDOG)
    assert "telling how a worker ended failed" in caplog.text


def test_replies_come_to_who_never_waits(workers: transport.LocalWorkers) -> None:
    """While many calls are started the agent's thread leaves the link alone, and it reads again by itself."""
    worker = workers[0]
    assert worker.call(rpc_service.echo, 1) == 1  # from now on callers read for themselves
    arrived: list[int] = []
    for count in (1, 20, 200):
        arrived.clear()
        for number in range(count):
            future = worker.submit(rpc_service.echo, number)
            future.add_done_callback(lambda done: arrived.append(done.value()))
        until(functools.partial(has, arrived, count), "the replies")
        assert sorted(arrived) == list(range(count))


def has(items: list[int], count: int) -> bool:
    return len(items) == count


def test_a_wait_for_one_reply_brings_the_others_too(workers: transport.LocalWorkers) -> None:
    worker = workers[0]
    futures = [worker.submit(rpc_service.echo, number) for number in range(100)]
    assert futures[-1].result(WATCHDOG) == 99
    assert [future.result(WATCHDOG) for future in futures] == list(range(100))
    name = uuid.uuid4().hex
    late = worker.submit(rpc_service.bump_behind, name, name)
    with pytest.raises(TimeoutError):
        late.result(0.05)
    worker.call(rpc_service.open_gate, name)
    assert late.result(WATCHDOG) == 1


def test_threads_that_wait_at_once(workers: transport.LocalWorkers) -> None:
    """One of them reads for all; who leaves hands the reading on."""
    worker = workers[0]

    def work(number: int) -> list[int]:
        return [worker.submit(rpc_service.echo, number * 1000 + turn).result(WATCHDOG) for turn in range(50)]

    with ThreadPoolExecutor(8) as pool:
        for number, got in enumerate(pool.map(work, range(8))):
            assert got == [number * 1000 + turn for turn in range(50)]


def test_an_agent_that_is_closed_under_a_waiting_caller(tmp_path: Path) -> None:
    before = open_descriptors()
    for _ in range(5):
        agent = transport.Agent(name="closed")
        with Worker("rpc_service:service", "--listen", f"unix://{tmp_path}/s{_}") as worker:
            peer = transport.connect(worker.address, agent=agent)
            assert peer.call("echo", 1) == 1
            name = uuid.uuid4().hex
            future = peer.submit("bump_behind", name, name)
            waiting = threading.Thread(target=future.exception, args=(WATCHDOG,))
            waiting.start()
            until(lambda peer=peer: peer._driver.calls._reader != 0, "the thread to read")  # type: ignore[misc]
            agent.close(0.0)
            waiting.join(WATCHDOG)
            assert isinstance(future.exception(0), transport.PeerLostError)
    until(lambda: open_descriptors() <= before, "the descriptors to be closed")


def test_a_long_timeout_is_no_error(workers: transport.LocalWorkers) -> None:
    assert workers[0].submit(rpc_service.echo, 3).result(1e9) == 3


def test_workers_that_are_dropped_say_so_and_end() -> None:
    workers = transport.local_workers(1)
    process, future = workers[0].process, workers[0].submit(twice, 3)
    with pytest.warns(ResourceWarning, match="dropped, but not closed: <LocalWorker 'worker0' on .*; use it in a with"):
        del workers
    assert future.result(WATCHDOG) == 6
    assert process.wait(WATCHDOG) == 0


def by_way_of_the_parent(x: Any) -> Any:
    return transport.caller().call("turn", x)


def test_the_calls_of_workers_that_are_dropped_may_call_back_and_forth() -> None:
    """The end waits for them, and refuses nothing that they need."""
    service, turned, dropped = transport.Service(), threading.Event(), threading.Event()

    @service.function(name="turn")
    def turn(x: Any) -> Any:
        turned.set()
        assert dropped.wait(WATCHDOG)
        return transport.caller().call(twice, x) + 1

    workers = transport.local_workers(1, service=service)
    driver, future = workers[0]._driver, workers[0].submit(by_way_of_the_parent, 2)
    assert turned.wait(WATCHDOG)
    with pytest.warns(ResourceWarning, match="dropped, but not closed"):
        del workers
    dropped.set()
    assert future.result(WATCHDOG) == 5
    until(driver.ended.is_set, "the connection to end")


def test_a_child_that_stands_still_when_it_is_dropped_is_killed() -> None:
    workers = transport.local_workers(1)
    process = workers[0].process
    freeze(process.pid)
    with pytest.warns(ResourceWarning, match="dropped, but not closed"):
        del workers
    assert process.wait(WATCHDOG) == -signal.SIGKILL


def test_a_child_that_ends_slowly_is_closed_and_not_called_dead() -> None:
    with transport.local_workers(1) as workers:
        workers[0].call(linger)
        workers.close(0.2)
        assert workers[0].process.wait(WATCHDOG) == -signal.SIGKILL
        with pytest.raises(streamrt.ClosedError, match="'worker0' is closed; open a new one"):
            workers[0].call(twice, 1)
        assert repr(workers[0]).endswith(": closed>")


def linger() -> None:
    """The process's end waits for a minute."""
    transport.default_agent().close = lambda timeout=0.0: threading.Event().wait(60)  # type: ignore[method-assign]


SPAWNED = """
import multiprocessing, transport

def add_three(x):
    return helper(x) + 1

def helper(x):
    return x + 2

def inside(results):
    with transport.local_workers(1) as (worker,):
        results.put(worker.call(add_three, 4))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=inside, args=(results,))
    process.start()
    assert results.get() == 7
    process.join()
"""


def test_functions_of_the_main_program_go_by_value_from_a_spawned_process_too(tmp_path: Path) -> None:
    """There the program's module has another name, which the worker cannot import either."""
    (tmp_path / "program.py").write_text(SPAWNED)
    command = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(
        command, env=child_environment(), capture_output=True, text=True, timeout=3 * WATCHDOG, check=False
    )
    assert done.returncode == 0, done.stderr
