"""Guards that are left out of order: what is current is what was, on every device, and whoever may be wrong is told."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, cast

import pytest

from streamrt import arrays, sides
from streamrt import guard as guard_module
from streamrt.compute import compute_stream, on_side_stream
from streamrt.device import Device, backend_of
from streamrt.entries import open_entries
from streamrt.errors import LifetimeError
from streamrt.guard import current_stream, device_guard, using
from streamrt.host.backend import HostBackend
from streamrt.sides import thread
from streamrt.stream import Stream
from streamrt.testing import Latch

HOST = cast("HostBackend", backend_of("host"))
REMEDY = "decorate coroutines and generators"
Maker = Callable[[], AbstractContextManager[Any]]


def array(device: str = "host:0") -> Any:
    x = arrays.empty((4,), "float32", device)
    x[:] = 1
    return x


GUARDS: dict[str, Maker] = {
    "using": lambda: using(Stream("host:0")),
    "using another device": lambda: using(Stream("host:1")),
    "using two devices": lambda: using(Stream("host:2"), Stream("host:0")),
    "compute_stream": lambda: compute_stream(array()),
    "compute_stream of two devices": lambda: compute_stream(array("host:1"), array()),
    "compute_stream there": lambda: compute_stream(array("host:1")),
    "device_guard": lambda: device_guard("host:1"),
}


def shared(first: str, second: str) -> bool:
    """Whether the second guard finds the first one's streams under all its inputs, and changes nothing."""
    all_of_it = first == "compute_stream of two devices" and second.startswith("compute_stream")
    return all_of_it or first == second in ("compute_stream", "compute_stream there")


def what_is_current() -> tuple[int, list[Stream]]:
    return HOST.current_device, [current_stream(f"host:{index}") for index in range(3)]


@pytest.fixture(autouse=True)
def _everything_is_as_it_was() -> Iterator[None]:
    before = what_is_current()
    yield
    after = what_is_current()
    for stream in before[1]:
        HOST.set_current_stream(stream.device.index, stream.handle, stream)
    HOST.set_current_device(before[0])
    left = open_entries()[:]
    open_entries().clear()
    thread.mine.innermost = None
    assert after == before
    assert not left


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged since it was asked the last time."""
    caplog.set_level(logging.WARNING)

    def texts() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    return texts


@pytest.mark.parametrize("second", GUARDS)
@pytest.mark.parametrize("first", GUARDS)
@pytest.mark.parametrize("here", ["on the default stream", "on a stream"])
def test_two_guards_left_in_the_order_of_their_entries(
    here: str, first: str, second: str, logged: Callable[[], list[str]]
) -> None:
    with using(*([Stream("host:0"), Stream("host:1")] if here == "on a stream" else [])):
        before = what_is_current()
        a, b = GUARDS[first](), GUARDS[second]()
        a.__enter__()
        b.__enter__()
        a.__exit__(None, None, None)
        assert what_is_current() == before
        if shared(first, second):  # it did nothing, so it has nothing to bring back
            b.__exit__(None, None, None)
            assert what_is_current() == before
            return
        (text,) = logged()
        assert REMEDY in text
        assert "is open" in text
        with pytest.raises(LifetimeError, match=REMEDY):
            b.__exit__(None, None, None)
        assert what_is_current() == before
        assert not logged()


def test_what_was_made_current_since_is_left_alone() -> None:
    a, b = using(Stream("host:0")), using(Stream("host:0"))
    a.__enter__()
    b.__enter__()
    a.__exit__()
    with using(Stream("host:0")) as third:
        with pytest.raises(LifetimeError, match=REMEDY):
            b.__exit__()
        assert current_stream("host:0") == third.streams[0]


@pytest.mark.parametrize("kind", ["using", "compute_stream", "device_guard"])
def test_an_exception_on_its_way_is_not_hidden(kind: str, logged: Callable[[], list[str]]) -> None:
    """The late exit tells it by a note; the early one, whose inner guard the exception may have ended, says nothing."""
    a, b = using(Stream("host:0")), GUARDS[kind]()

    def fail() -> None:
        with b:
            a.__exit__(KeyError, KeyError("on its way"), None)
            assert not logged()
            raise KeyError("mine")

    a.__enter__()
    with pytest.raises(KeyError, match="mine") as raised:
        fail()
    assert REMEDY in raised.value.__notes__[0]
    assert REMEDY in logged()[0]


def held(kind: str) -> Iterator[None]:
    """Holds a guard while its consumer runs."""
    with GUARDS[kind]():
        yield


@pytest.mark.parametrize("kind", GUARDS)
def test_a_generator_that_ends_inside_its_consumers_guard(kind: str, logged: Callable[[], list[str]]) -> None:
    generator = held(kind)
    next(generator)
    with pytest.raises(LifetimeError, match=REMEDY), using(Stream("host:0")):
        assert next(generator, "over") == "over"
        assert REMEDY in logged()[0]


@pytest.mark.parametrize("kind", GUARDS)
def test_a_generator_that_is_never_resumed(kind: str, logged: Callable[[], list[str]]) -> None:
    generator = held(kind)
    with using(Stream("host:0")):
        next(generator)
    assert REMEDY in logged()[0]
    after = what_is_current()
    del generator  # closed: its guard's exit comes with a GeneratorExit
    assert REMEDY in logged()[0]
    assert what_is_current() == after


def test_coroutines_that_take_turns(logged: Callable[[], list[str]]) -> None:
    async def work() -> None:
        with using(Stream("host:0")):
            await asyncio.sleep(0)

    async def main() -> list[Any]:
        results = await asyncio.gather(work(), work(), return_exceptions=True)
        return [results, what_is_current()]

    before = what_is_current()
    (first, second), inside = asyncio.run(main())
    assert first is None
    assert isinstance(second, LifetimeError)
    assert REMEDY in str(second)
    assert inside == before
    assert REMEDY in logged()[0]


def test_what_the_inner_guard_worked_on_is_ordered_when_the_outer_one_is_left() -> None:
    """The outer one's callers wait for the inner side stream too, and do again when the late exit has raised."""
    before = current_stream("host:0")
    outer, inner = using(Stream("host:0")), compute_stream(array(), device="host:1")
    with using(Stream.borrow(0, "host:1")):
        outer.__enter__()
        side = inner.__enter__()
        assert side is not None
        default = Stream.borrow(0, "host:1")
        with Latch(side):
            outer.__exit__()
            assert not default.query()
        default.synchronize(60)
        with Latch(side):
            with pytest.raises(LifetimeError, match="after a guard around it"):
                inner.__exit__()
            assert not default.query()
        default.synchronize(60)
    assert current_stream("host:0") == before


@pytest.mark.parametrize("kind", ["using", "on_side_stream"])
def test_guards_that_a_decorated_body_holds_between_steps(kind: str, logged: Callable[[], list[str]]) -> None:
    """They are the body's: no exit of a step takes them with it, and they are left in order in a later step."""
    own = Stream("host:0")
    decorate: Callable[[Any], Any] = on_side_stream if kind == "on_side_stream" else using(Stream("host:0"))

    @decorate
    def steps(value: Any) -> Iterator[Stream]:
        with using(own), compute_stream(array()), device_guard("host:1"):
            yield current_stream("host:0")
            yield current_stream("host:0")
        yield current_stream("host:0")

    first, second = steps(array()), steps(array())
    with using(Stream("host:0")):
        assert next(first) == own
    assert next(second) == own
    with using(Stream("host:0")):
        assert next(first) == own
        assert next(first) != own
        assert list(first) == []
    second.close()
    assert not logged()


def test_a_body_that_sets_the_current_stream_is_not_told(logged: Callable[[], list[str]]) -> None:
    """`torch.cuda.set_stream`, `cupy.cuda.Stream.use` and their like are no guards: it is brought back, and that is
    all."""
    other = Stream("host:0")
    for make in GUARDS.values():
        with make():
            HOST.set_current_stream(0, other.handle, other)
        assert current_stream("host:0") != other
    assert not logged()


# Libraries that keep a stack of streams


class LikeCupy(guard_module._HostKeeper):
    """The host backend's keeper with a stack of streams on each thread, as CuPy has one: who leaves pops the top."""

    def __init__(self) -> None:
        self.of = threading.local()

    @property
    def stack(self) -> list[Stream]:
        if not hasattr(self.of, "stack"):
            self.of.stack = []
        return cast("list[Stream]", self.of.stack)

    def save(self, device: Device) -> Any:
        return super().save(device), None

    def push_stream(self, device: Device, stream: Stream) -> Any:
        self.set_current_stream(device, stream)
        self.stack.append(stream)
        return None, stream

    def exchange(self, device: Device, stream: Stream) -> Any:
        saved = super().save(device)
        return saved, self.push_stream(device, stream)[1]

    def set_aside(self, token: Any) -> None:
        if token[1] is not None:
            assert self.stack.pop() is token[1]

    def take_up(self, token: Any) -> None:
        if token[1] is not None:
            self.stack.append(token[1])

    def restore(self, token: Any) -> None:
        saved, pushed = token
        if pushed is not None:
            assert self.stack.pop() is pushed
        if saved is not None:
            super().restore(saved)


@pytest.fixture
def like_cupy(monkeypatch: pytest.MonkeyPatch) -> LikeCupy:
    keeper = LikeCupy()
    monkeypatch.setattr(guard_module, "_HOST", (keeper,))
    monkeypatch.setattr(sides, "_plans", {})
    return keeper


@pytest.mark.parametrize("name", GUARDS)
@pytest.mark.parametrize("outer", ["using", "using two devices"])
def test_what_a_body_has_pushed_is_not_there_between_its_steps(like_cupy: LikeCupy, name: str, outer: str) -> None:
    """A ``with`` of the library's own, in code that runs meanwhile, would end on the stream of a suspended guard."""
    stack = like_cupy.stack
    inside: list[Stream] = []

    @cast("using", GUARDS[outer]())
    def steps() -> Iterator[None]:
        depth = len(stack)
        with GUARDS[name]():
            for _ in range(3):
                inside.append(stack[-1])
                yield
        assert len(stack) == depth

    generator = steps()
    next(generator)
    assert stack == []
    with GUARDS["using"]():
        next(generator)
        assert len(stack) == 1
    next(generator)
    assert stack == []
    with pytest.raises(StopIteration):
        next(generator)
    assert stack == []
    assert len(set(map(id, inside))) == 1, "in each step it is where a with of the library's own comes back to"


def test_what_a_body_has_pushed_stays_on_no_thread_where_it_ends_on_another(like_cupy: LikeCupy) -> None:
    @using(Stream("host:0"))
    def steps() -> Iterator[None]:
        with using(Stream("host:0")):
            yield

    generator = steps()
    next(generator)
    with ThreadPoolExecutor(1) as pool, pytest.raises(LifetimeError):
        pool.submit(next, generator).result()
    assert like_cupy.stack == []


@pytest.mark.parametrize("name", GUARDS)
@pytest.mark.parametrize("other", GUARDS)
@pytest.mark.parametrize("first_first", [True, False])
def test_pushes_and_pops_are_balanced_in_any_order(
    like_cupy: LikeCupy, name: str, other: str, first_first: bool
) -> None:
    first, second = GUARDS[name](), GUARDS[other]()
    first.__enter__()
    second.__enter__()
    for guard in (first, second) if first_first else (second, first):
        with contextlib.suppress(LifetimeError):
            guard.__exit__(None, None, None)
    assert like_cupy.stack == []


@pytest.mark.parametrize("name", ["using two devices", "compute_stream of two devices"])
def test_what_fails_half_way_leaves_nothing_pushed(
    like_cupy: LikeCupy, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard, usual = GUARDS[name](), HOST.set_current_stream
    refused = threading.Event()

    def refusing(index: int, handle: int, owner: object = None) -> None:
        if like_cupy.stack:
            refused.set()
            raise RuntimeError("refused")
        usual(index, handle, owner)

    monkeypatch.setattr(HOST, "set_current_stream", refusing)
    with pytest.raises(RuntimeError, match="refused"):
        guard.__enter__()
    assert refused.is_set()
    assert like_cupy.stack == []
