"""Guards on the host backend: what they make current, and that exactly what was comes back."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest

from streamrt import arrays, hooks
from streamrt.device import CPU, Device, backend_of
from streamrt.errors import LifetimeError, PlacementError, UnavailableError
from streamrt.guard import current_stream, current_streams, device_guard, run_on, using
from streamrt.host.backend import HostBackend
from streamrt.stream import Stream
from streamrt.testing import Latch, assert_no_host_sync, schedules, without

HOST = cast("HostBackend", backend_of("host"))
ZERO, ONE = Device("host", 0), Device("host", 1)


def make_current(stream: Stream) -> None:
    """Sets the current stream for good, as `.use()` and `set_stream` do."""
    HOST.set_current_stream(stream.device.index, stream.handle, stream)


def what_is_current() -> tuple[int, Stream, Stream]:
    return HOST.current_device, current_stream(ZERO), current_stream(ONE)


@pytest.fixture(autouse=True)
def _leave_things_as_they_were() -> Iterator[None]:
    before = what_is_current()
    yield
    make_current(before[1])
    make_current(before[2])
    HOST.set_current_device(before[0])


def test_b01_a_guard_brings_back_what_was_current_however_it_was_set() -> None:
    """cupy/cupy#8377, cupy/cupy#7866: leaving a guard went back to the default stream, not to the one set by hand."""
    first, second, third, fourth, fifth = (Stream("host:0") for _ in range(5))
    make_current(first)
    with pytest.raises(KeyError), using(second):
        raise KeyError("inside")
    assert current_stream(ZERO) == first
    with using(second):
        with using(third):
            make_current(fourth)
            with using(fifth):
                assert current_stream(ZERO) == fifth
            assert current_stream(ZERO) == fourth
        assert current_stream(ZERO) == second
    assert current_stream(ZERO) == first


@pytest.mark.parametrize("body", ["nothing", "device", "streams", "error"])
def test_b02_a_guard_of_another_device_brings_back_the_device_and_both_streams(body: str) -> None:
    """pytorch/pytorch#16019, pytorch/pytorch#17439: the target device kept the guard's stream after the exit."""
    here, there, guarded = Stream("host:0"), Stream("host:1"), Stream("host:1")
    make_current(here)
    make_current(there)
    HOST.set_current_device(0)
    try:
        with using(guarded):
            assert HOST.current_device == 1
            assert current_stream(ONE) == guarded
            if body == "device":
                HOST.set_current_device(0)
            if body == "streams":
                make_current(Stream("host:0"))
                make_current(Stream("host:1"))
            if body == "error":
                raise KeyError(body)
    except KeyError:
        pass
    assert what_is_current() == (0, here, there)


def test_b06_being_current_keeps_a_stream_alive() -> None:
    """cupy/cupy#5251: the destructor ran in one thread while the stream was still current in another."""
    stream: Stream | None = Stream("host:0")
    alive = weakref.ref(stream)
    x = arrays.empty((2,), "float32", "host:0")
    x[:] = 0
    ready = threading.Barrier(3, timeout=60)
    errors: list[BaseException] = []

    def work(place: int, taken: list[Stream]) -> None:
        try:
            make_current(taken.pop())
            ready.wait()
            ready.wait()  # the main thread has dropped its reference

            def add() -> None:
                x[place] += 1

            current_stream(ZERO).launch(add)
            current_stream(ZERO).synchronize(60)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(place, [stream])) for place in range(2)]
    for thread in threads:
        thread.start()
    ready.wait()
    del stream
    gc.collect()
    assert alive() is not None
    ready.wait()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert x.tolist() == [1, 1]
    del threads, thread
    gc.collect()
    assert alive() is None


def test_a_guard_keeps_the_displaced_stream_alive() -> None:
    """The stream that was current has no other owner: it must still be there at the exit."""
    make_current(Stream("host:0"))
    handle = HOST.current_stream(0)
    with using(Stream("host:0")):
        gc.collect()
    assert HOST.current_stream(0) == handle
    current_stream(ZERO).synchronize(60)


def test_several_devices_at_once() -> None:
    before = what_is_current()
    one, zero = Stream("host:1"), Stream("host:0")
    with using(one, zero):
        assert what_is_current() == (1, zero, one)
    with using(zero, one):
        assert what_is_current() == (0, zero, one)
    with using():
        assert what_is_current() == before
    assert what_is_current() == before


def test_two_streams_of_one_device_are_refused() -> None:
    with pytest.raises(PlacementError, match="only one can be current"):
        using(Stream("host:0"), Stream("host:0"))


def test_one_guard_entered_again_inside_itself_and_by_another_thread() -> None:
    guard = using(Stream("host:0"))
    inner = Stream("host:0")
    before = current_stream(ZERO)
    seen: list[Stream] = []

    def elsewhere() -> None:
        default = current_stream(ZERO)
        with guard:
            seen.append(current_stream(ZERO))
        assert current_stream(ZERO) == default
        seen.append(current_stream(ZERO))

    with guard:
        make_current(inner)
        with guard:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join(60)
            assert current_stream(ZERO) == guard.streams[0]
        assert current_stream(ZERO) == inner
    assert current_stream(ZERO) == before
    assert seen == [guard.streams[0], Stream.borrow(0, "host:0")]


def test_leaving_on_another_thread_is_an_error() -> None:
    guard = using(Stream("host:0"))
    caught: list[BaseException] = []

    def leave() -> None:
        try:
            guard.__exit__(None, None, None)
        except LifetimeError as error:
            caught.append(error)

    with guard:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join(60)
    assert len(caught) == 1
    assert "decorate coroutines and generators" in str(caught[0])


def test_a_decorated_function() -> None:
    stream = Stream("host:0")
    before = current_stream(ZERO)

    @using(stream)
    def work(value: int, *, extra: int) -> tuple[int, Stream]:
        """Documented."""
        return value + extra, current_stream(ZERO)

    assert work(1, extra=2) == (3, stream)
    assert (work.__name__, work.__doc__) == ("work", "Documented.")
    assert current_stream(ZERO) == before


def test_a_generator_is_guarded_step_by_step() -> None:
    stream, own = Stream("host:0"), Stream("host:0")
    closed: list[Stream] = []

    @using(stream)
    def steps() -> Iterator[Any]:
        try:
            yield current_stream(ZERO)
            with using(own):
                got = yield current_stream(ZERO)
                yield got, current_stream(ZERO)
            try:
                yield current_stream(ZERO)
            except KeyError:
                yield "caught", current_stream(ZERO)
        finally:
            closed.append(current_stream(ZERO))

    before = current_stream(ZERO)
    generator = cast("Any", steps())
    assert next(generator) == stream
    assert current_stream(ZERO) == before
    assert next(generator) == own
    assert current_stream(ZERO) == before
    with using(Stream("host:0")) as other:  # resumed under another guard: the body's own comes back, and goes again
        assert generator.send("sent") == ("sent", own)
        assert current_stream(ZERO) == other.streams[0]
    assert next(generator) == stream
    assert generator.throw(KeyError("thrown")) == ("caught", stream)
    generator.close()
    assert closed == [stream]
    assert current_stream(ZERO) == before


def test_coroutines_that_take_turns_keep_their_streams() -> None:
    first, second = Stream("host:0"), Stream("host:0")

    async def work(turns: list[int], name: int) -> list[Stream]:
        seen = []
        for _ in range(3):
            turns.append(name)
            seen.append(current_stream(ZERO))
            await asyncio.sleep(0)
        return seen

    async def main() -> tuple[list[Stream], list[Stream], list[int], list[Stream]]:
        turns: list[int] = []
        tasks = [asyncio.create_task(using(s)(work)(turns, n)) for n, s in enumerate((first, second))]
        between = []
        for _ in range(4):
            between.append(current_stream(ZERO))
            await asyncio.sleep(0)
        one, two = await asyncio.gather(*tasks)
        return one, two, turns, between

    before = current_stream(ZERO)
    one, two, turns, between = asyncio.run(main())
    assert turns == [0, 1, 0, 1, 0, 1]
    assert one == [first] * 3
    assert two == [second] * 3
    assert between == [before] * 4


def test_a_cancelled_coroutine_cleans_up_under_its_guard() -> None:
    stream = Stream("host:0")
    seen: list[Stream] = []

    @using(stream)
    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            seen.append(current_stream(ZERO))

    async def main() -> None:
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    before = current_stream(ZERO)
    asyncio.run(main())
    assert seen == [stream]
    assert current_stream(ZERO) == before


def test_an_async_generator_is_guarded_step_by_step() -> None:
    stream = Stream("host:0")
    seen: list[Any] = []

    @using(stream)
    async def steps() -> AsyncIterator[Any]:
        try:
            for number in range(5):
                await asyncio.sleep(0)
                seen.append((yield number, current_stream(ZERO)))
        except KeyError:
            yield "caught", current_stream(ZERO)
        finally:
            seen.append(current_stream(ZERO))

    async def main() -> None:
        generator = cast("Any", steps())
        before = current_stream(ZERO)
        assert await generator.__anext__() == (0, stream)
        assert current_stream(ZERO) == before
        assert await generator.asend("sent") == (1, stream)
        assert await generator.athrow(KeyError()) == ("caught", stream)
        await generator.aclose()
        assert current_stream(ZERO) == before
        assert [number async for number, _ in steps()] == [0, 1, 2, 3, 4]

    asyncio.run(main())
    assert seen == ["sent", stream, None, None, None, None, None, stream]


def test_a_failing_entry_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = what_is_current()
    guard = using(Stream("host:1"), Stream("host:0"))

    def refuse(index: int, stream: int, owner: object) -> None:
        if index == 1 and stream == guard.streams[0].handle:
            raise UnavailableError("refused")
        kept(index, stream, owner)

    kept: Callable[[int, int, object], None] = HOST.set_current_stream
    monkeypatch.setattr(HOST, "set_current_stream", refuse)
    with pytest.raises(UnavailableError, match="refused"), guard:
        pass
    assert what_is_current() == before


def test_device_guard() -> None:
    before = what_is_current()
    with pytest.raises(KeyError), device_guard("host:1") as device:
        assert device == ONE
        assert HOST.current_device == 1
        assert current_stream(ONE) == before[2]
        make_current(Stream("host:1"))
        raise KeyError
    assert what_is_current() == before
    with device_guard("cpu"):
        assert what_is_current() == before


def test_current_streams_of_the_host_are_one_and_of_cpu_none() -> None:
    stream = Stream("host:1")
    with using(stream):
        assert current_streams("host:1") == [stream]
        assert current_stream("host:1") is stream
    assert current_streams(CPU) == []
    with pytest.raises(PlacementError, match="cpu has no streams"):
        current_stream(CPU)


def test_something_that_tells_no_device_is_no_stream() -> None:
    with pytest.raises(UnavailableError, match="does not tell its device"):
        using(object())


# run_on


def engine(x: Any) -> Any:
    """Doubles in place on the current stream, as an engine with kernels does."""

    def double() -> None:
        x[:] *= 2

    current_stream(ZERO).launch(double)
    return x


def fill_then_run(caller: Stream, private: Stream) -> Any:
    x = arrays.empty((64,), "float32", "host:0")
    x[:] = 1

    def fill() -> None:
        x[:] = 3

    with using(caller):
        caller.launch(fill)
        with assert_no_host_sync():
            run_on(private, engine, x)
    return x


def b10(caller_latched: bool) -> list[float]:
    caller, private = Stream("host:0"), Stream("host:0")
    with Latch(caller if caller_latched else private) as latch:
        x = fill_then_run(caller, private)
        done = caller.record()
        if caller_latched:
            latch.open()
        elif done.query():  # the caller's stream did not wait for the engine
            seen = sorted(set(x.tolist()))
            latch.open()
            private.synchronize(60)
            return seen
        latch.open()
        done.synchronize(60)
        seen = sorted(set(x.tolist()))
        private.synchronize(60)
        return seen


@pytest.mark.parametrize("caller_latched", [True, False])
def test_b10_an_engine_on_a_private_stream_is_fenced_in_and_out(caller_latched: bool) -> None:
    """Stability-AI/stable-audio-3#80, pytorch/TensorRT#4232: the input side was not synchronised; silent wrong output.

    The call returns while the caller's stream is held up by a latch, so the host did not wait.
    """
    assert b10(caller_latched) == [6.0]


def test_b10_calibrated() -> None:
    """The same program without each of the two edges gives wrong bytes (Stability-AI/stable-audio-3#80)."""
    with without("guard.enter"):
        assert b10(caller_latched=True) == [3.0]
    with without("guard.exit"):
        assert b10(caller_latched=False) == [3.0]


@pytest.mark.parametrize("schedule", ["lazy", "random", "priority"])
def test_b10_under_schedules(schedule: str) -> None:
    """Stability-AI/stable-audio-3#80, whatever runs first; and with an edge missing some seed shows it."""

    def run(seed: int) -> list[float]:
        with schedules(schedule, seed):
            caller = Stream("host:0")
            private = Stream("host:0")
            x = fill_then_run(caller, private)
            caller.record().require()
            return sorted(set(x.tolist()))

    seeds = range(25)
    assert all(run(seed) == [6.0] for seed in seeds)
    with without("guard.exit"):
        assert any(run(seed) != [6.0] for seed in seeds)


def test_run_on_fences_out_after_an_error_too() -> None:
    caller, private = Stream("host:0"), Stream("host:0")
    seen: list[hooks.Record] = []

    def fail() -> None:
        raise KeyError("engine")

    remove = hooks.listen(seen.append)
    try:
        with Latch(private), using(caller):
            with pytest.raises(KeyError, match="engine"):
                run_on(private, fail)
            assert current_stream(ZERO) == caller
            assert not caller.query()
    finally:
        remove()
    assert [record.edge for record in seen if isinstance(record, hooks.Waited)] == ["guard.enter", "guard.exit"]
    caller.synchronize(60)


def test_run_on_joins_what_a_jax_argument_waits_on() -> None:
    jnp = pytest.importorskip("jax.numpy")
    private = Stream("host:0")
    x = arrays.convert(arrays.array(np.arange(4, dtype=np.float32), "host:0"), "jax")
    assert run_on(private, lambda value: value, (x, jnp.ones(2)))[0] is x
    private.synchronize(60)


@pytest.mark.parametrize("device", ["host:0", Device("host", 1)], ids=str)
def test_a_device_where_a_stream_is_wanted(device: object) -> None:
    with pytest.raises(PlacementError, match=rf"'{device}' names a device, .* Stream\('{device}'\) is a new one"):
        using(device)  # type: ignore[arg-type]
