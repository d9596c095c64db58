"""Workers of a pipeline that are lost and started again: which frames are lost, which are not, and how it ends."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pipeline_stages import Deadly, Gated, fail_in_one, plus_one
from rpc_processes import WATCHDOG, open_descriptors, state_of, until

import streamrt
from streamrt.errors import ClosedError, DeviceError
from streamrt.testing import live_resources
from transport.channels import retired
from transport.errors import PeerLostError
from transport.pipeline import Pipeline, StageError, StageLostError, pipeline, stage

pytestmark = pytest.mark.workers
SHAPE = (300, 400)  # large enough for shared memory


def frames(count: int) -> Iterator[Any]:
    return (np.full(SHAPE, number, np.float32) for number in range(count))


def kill(chain: Pipeline, position: int) -> int:
    """Kills the stage's worker; its pid."""
    pid = chain.peers[position].pid
    os.kill(pid, signal.SIGKILL)
    return pid


def open_calls(chain: Pipeline, position: int) -> int:
    peer: Any = chain.peers[position]
    return int(peer.statistics().open_calls)


def lost(outputs: Sequence[Any]) -> list[int]:
    """The frames that ended with the loss of their worker; fails at any other error."""
    errors = [each for each in outputs if isinstance(each, StageError)]
    assert all(type(error.__cause__) is PeerLostError for error in errors), errors
    return [error.frame for error in errors]


def meanwhile(action: Any) -> threading.Thread:
    """Runs something beside the consumer, which is this thread."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def settle(before: Any) -> None:
    """Waits until nothing more is alive than before; threads of a pool that have nothing to do stay a while."""

    def grown() -> dict[str, int]:
        streamrt.memory.drain(everything=True)
        changes = live_resources() - before
        return {name: change for name, change in changes.items() if change > 0 and name != "threads"}

    until(lambda: retired.kept() == 0, "what was exported to the dead to be dropped")
    until(lambda: not grown(), lambda: f"these to be given back: {grown()}")


def test_the_frames_in_a_killed_worker_are_lost_and_no_others(tmp_path: Path) -> None:
    middle = Gated(tmp_path, "middle", 1, 2, 3)  # whichever of them is the first
    with pipeline(plus_one, middle, plus_one, in_flight=3, restarts=1) as chain:
        assert [each[0, 0] for each in chain.map(itertools.islice(frames(9), 5, 9))] == [7, 8, 9, 10]
        earlier = len(middle.notes())
        before, pids = live_resources(), [peer.pid for peer in chain.peers]

        def act() -> None:
            until(lambda: len(middle.notes()) > earlier and open_calls(chain, 1) == 3, "three frames in the middle")
            kill(chain, 1)

        killer = meanwhile(act)
        outputs = list(chain.map(frames(8), return_errors=True))
        killer.join(WATCHDOG)
        assert lost(outputs) == [0, 1, 2]
        assert "killed by SIGKILL" in str(outputs[0])
        assert str(outputs[0]).startswith(
            "stage 'Gated' failed on frame 0: PeerLostError: Gated (by value) on 'worker1'"
        )
        for number in range(3, 8):
            np.testing.assert_array_equal(outputs[number], np.full(SHAPE, number + 2, np.float32))
        (restart,) = chain.restarts
        assert (restart.stage, restart.old_pid, restart.pid) == ("Gated", pids[1], chain.peers[1].pid)
        assert restart.lost <= restart.back
        assert [peer.pid for peer in chain.peers] == [pids[0], restart.pid, pids[2]]
        assert len({*pids, restart.pid}) == 4
        assert not state_of(pids[1])
        (begun, where), *others = middle.notes()[earlier:]
        assert begun in (1, 2, 3)
        assert where == pids[1]
        assert sorted(others) == [(number + 1, restart.pid) for number in range(3, 8)]  # none was run again
        statistics = chain.statistics()
        assert (statistics.frames, statistics.failed) == (5, 3)
        del outputs
        settle(before)


def test_a_pipeline_that_is_over_keeps_none_of_its_functions() -> None:
    held = np.zeros(10)
    gone = weakref.ref(held)
    with pipeline(functools.partial(np.add, held)) as chain:
        assert next(chain.map([np.ones(10)])).sum() == 10
    del held, chain
    gc.collect()
    assert gone() is None


def test_the_neighbours_of_a_killed_worker_keep_their_frames(tmp_path: Path) -> None:
    first, middle, last = Gated(tmp_path, "first", 1, 2), Gated(tmp_path, "middle", 1), Gated(tmp_path, "last", 0)
    with pipeline(first, middle, last, in_flight=3, restarts=1) as chain:

        def act() -> None:
            until(last.holds(0), "frame 0 in the last stage")
            first.open(1)
            until(middle.holds(1), "frame 1 in the middle")
            until(first.holds(2), "frame 2 in the first stage")
            kill(chain, 1)
            until(lambda: chain.peers[1].closed or chain.restarts, "the loss to be seen")
            first.open(2)  # comes to a stage that has no worker, or a new one
            until(lambda: chain.restarts, "the next worker")
            last.open(0)

        killer = meanwhile(act)
        outputs = list(chain.map(frames(5), return_errors=True))
        killer.join(WATCHDOG)
        assert lost(outputs) == [1]
        assert [each[0, 0] for each in outputs if not isinstance(each, StageError)] == [0, 2, 3, 4]
        assert sorted(number for number, _ in middle.notes()) == [0, 1, 2, 3, 4]  # none was run again


def test_next_goes_on_after_the_frame_that_was_lost(tmp_path: Path) -> None:
    gated = Gated(tmp_path, "gated", 1)
    with pipeline(gated, in_flight=1, restarts=1) as chain:
        run = chain.map(frames(4))
        assert next(run)[0, 0] == 0
        killer = meanwhile(lambda: (until(gated.holds(1), "frame 1"), kill(chain, 0)))
        with pytest.raises(StageError, match=r"stage 'Gated' failed on frame 1: PeerLostError: .*SIGKILL") as caught:
            next(run)
        killer.join(WATCHDOG)
        assert type(caught.value.__cause__) is PeerLostError
        assert [each[0, 0] for each in run] == [2, 3]


def test_a_frame_that_meets_a_dead_worker_is_not_lost() -> None:
    """Nothing of it was sent.  The source has one buffer, which it may write to again once it is asked for more."""

    def source() -> Iterator[Any]:
        buffer = np.zeros(SHAPE, np.float32)
        for number in range(4):
            buffer[:] = number
            yield buffer

    with pipeline(plus_one, plus_one, in_flight=2, restarts=1) as chain:
        for position in (0, 1):
            kill(chain, position)
            until(lambda position=position: chain.peers[position].closed, "the loss to be seen")
        assert [each[0, 0] for each in chain.map(source())] == [2, 3, 4, 5]
        assert [restart.stage for restart in chain.restarts] == ["plus_one"] * 2


def test_a_worker_that_dies_in_every_frame_is_not_started_for_ever() -> None:
    pulled = []
    source = (pulled.append(number) or number for number in itertools.count())
    with pipeline(stage(Deadly(), name="deadly"), in_flight=1, restarts=2) as chain:
        run = chain.map(source, return_errors=True)
        assert lost([next(run) for _ in range(3)]) == [0, 1, 2]
        with pytest.raises(StageLostError, match=r"stage 'deadly' is not started again: it was, 2 times") as caught:
            next(run)
        error = caught.value
        assert isinstance(error, PeerLostError)
        assert isinstance(error, StageError)
        assert (error.stage, error.frame, error.lost) == ("deadly", 3, (0, 1, 2))
        assert type(error.__cause__) is PeerLostError
        said = str(error)
        assert said.startswith("stage 'deadly' has no worker any more: ")
        assert "raise restarts=2" in said
        assert "exit code" in said  # why the last one was lost
        assert "frames that ended with it: 0, 1, 2; frame 3 and what follows was not pulled from the source" in said
        assert list(run) == []
        assert pulled == [0, 1, 2]
        assert len(chain.restarts) == 2
        with pytest.raises(StageLostError, match="no frame ended with it; frame 0 and what follows was not") as caught:
            next(chain.map([1]))
        assert caught.value.lost == ()


def test_a_frame_whose_function_has_lost_a_peer_of_its_own_is_not_lost_with_the_worker() -> None:
    """It ended with the function's error, and its worker lived on."""

    def deadly(value: int) -> None:
        if value == 0:
            raise PeerLostError("another one")
        os._exit(7)

    with pipeline(stage(deadly), in_flight=1, restarts=1) as chain:
        run = chain.map(range(9), return_errors=True)
        outputs: list[Any] = []
        with pytest.raises(StageLostError) as caught:
            for output in run:
                outputs.append(output)
    assert isinstance(outputs[0].__cause__, PeerLostError)
    assert caught.value.lost == tuple(range(1, len(outputs)))
    assert len(outputs) > 1


def test_frames_that_wait_for_a_worker_that_never_comes_are_numbered_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were in the worker and those that came to its empty place; not one that another stage failed on."""

    def first(value: Any) -> Any:
        if value[0, 0] == 1:
            raise ValueError("not this one")
        return value

    gated = Gated(tmp_path, "gated", *range(9))  # none gets through, however late the kill
    with pipeline(first, gated, in_flight=4, restarts=1) as chain:

        def act() -> None:
            until(gated.holds(0), "frame 0")
            executable(tmp_path / "python", "exit 3", monkeypatch)
            kill(chain, 1)

        killer = meanwhile(act)
        run = chain.map(frames(9), return_errors=True)
        outputs: list[Any] = []
        with pytest.raises(StageLostError) as caught:
            for output in run:
                outputs.append(output)
        killer.join(WATCHDOG)
        assert isinstance(outputs[1].__cause__, ValueError)
        assert lost([*outputs[:1], *outputs[2:]]) == [0, *range(2, len(outputs))]
        assert caught.value.stage == "Gated"
        assert caught.value.frame == len(outputs)
        assert caught.value.lost == (0, *range(2, len(outputs)))


def test_a_frame_that_gets_through_begins_a_new_count() -> None:
    with pipeline(Deadly(1, 3), in_flight=1, restarts=1) as chain:
        outputs = list(chain.map(range(5), return_errors=True))
        assert lost(outputs) == [1, 3]
        assert [each for each in outputs if not isinstance(each, StageError)] == [0, 2, 4]
        assert len(chain.restarts) == 2


def test_a_worker_whose_device_has_failed_is_followed_by_another() -> None:
    with pipeline(fail_in_one, in_flight=1, restarts=1) as chain:
        run, failed = chain.map(range(4)), chain.peers[0]
        assert next(run) == 0
        with pytest.raises(StageError, match="an illegal memory access") as caught:
            next(run)
        assert isinstance(caught.value.__cause__, DeviceError)
        until(lambda: failed.closed, "the worker to end, as it does when its device has failed")
        assert list(run) == [2, 3]
        assert len(chain.restarts) == 1


def executable(path: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What new workers are started with, from now on."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_a_worker_that_does_not_start_is_tried_as_often_as_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = tmp_path / "tried"
    with pipeline(plus_one, plus_one, in_flight=1, restarts=2) as chain:
        executable(tmp_path / "python", f"echo once >> {tried}; exit 3", monkeypatch)
        kill(chain, 1)
        until(lambda: chain.peers[1].closed, "the loss to be seen")
        run = chain.map(range(5))
        with pytest.raises(StageError, match="frame 0: PeerLostError: the worker of stage 'plus_one' is not started"):
            next(run)
        with pytest.raises(PeerLostError, match=r"2 times in a row.*exit code is 3"):
            next(run)
        assert tried.read_text().split() == ["once"] * 2
        assert chain.restarts == []


def never_ready(pids: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start from now on and are never ready; the pid of one is then found in the file."""
    executable(pids.with_name("python"), f"echo $$ > {pids}.new; mv {pids}.new {pids}; exec sleep 100", monkeypatch)


@contextmanager
def pressing_ctrl_c(when: Callable[[], bool]) -> Iterator[None]:
    """Interrupts this thread, once, when the condition holds."""
    interrupted = threading.Event()

    def interrupt(*_: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def press() -> None:
        while not interrupted.wait(0.02):  # CPython overlooks one that comes right before a wait for a lock
            if when():
                os.kill(os.getpid(), signal.SIGINT)

    previous = signal.signal(signal.SIGINT, interrupt)
    presser = meanwhile(press)
    try:
        yield
    finally:
        interrupted.set()
        presser.join(WATCHDOG)
        signal.signal(signal.SIGINT, previous)


def test_close_wakes_who_waits_for_the_next_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors, pids = open_descriptors(), tmp_path / "pids"
    with pipeline(plus_one, restarts=1) as chain:
        never_ready(pids, monkeypatch)
        kill(chain, 0)
        until(lambda: chain.peers[0].closed, "the loss to be seen")
        run = chain.map(frames(3))
        closer = meanwhile(lambda: (until(pids.exists, "the next worker to be started"), run.close()))
        assert list(run) == []
        closer.join(WATCHDOG)
    assert not state_of(int(pids.read_text()))
    until(lambda: open_descriptors() <= descriptors, "descriptors to be closed")


@pytest.mark.parametrize("position", [0, 1])
def test_ctrl_c_while_the_next_worker_is_started(
    position: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first stage it is the consumer who waits, behind that one a frame does."""
    pids, chain = tmp_path / "pids", pipeline(plus_one, plus_one, restarts=1)
    with pressing_ctrl_c(pids.exists), pytest.raises(KeyboardInterrupt), chain:
        never_ready(pids, monkeypatch)
        children = [peer.pid for peer in chain.peers]
        kill(chain, position)
        until(lambda: chain.peers[position].closed, "the loss to be seen")
        list(chain.map(frames(3)))
    assert not any(state_of(pid) for pid in (*children, int(pids.read_text())))
    assert not any(thread.name == "streamrt-restart" for thread in threading.enumerate())


def test_without_restarts_the_place_stays_empty() -> None:
    with pipeline(Deadly(1), in_flight=1) as chain:
        outputs = list(chain.map(range(4), return_errors=True))
        assert outputs[0] == 0
        assert lost(outputs) == [1, 2, 3]
        assert chain.restarts == []


def test_peers_of_others_and_wrong_numbers() -> None:
    with pytest.raises(ValueError, match="restarts is -1"):
        pipeline(plus_one, restarts=-1)
    with pipeline(plus_one, restarts=1) as chain, pipeline(stage(plus_one, peer=chain.peers[0]), restarts=1) as other:
        kill(chain, 0)
        until(lambda: chain.peers[0].closed, "the loss to be seen")
        assert lost(list(other.map([1, 2], return_errors=True))) == [0, 1]
        assert other.restarts == []
    with pytest.raises(ClosedError, match="not running"):
        chain.map([1])
