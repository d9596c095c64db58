"""Functions under a guard: plain ones as a whole, coroutines and generators step by step.

Between two steps the thread has what it had: a coroutine that is suspended leaves nothing of its guard to those that
run meanwhile.  What the body itself had made current when it was suspended is current again in its next step.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar, cast

from streamrt.entries import open_entries, set_aside, take_up
from streamrt.errors import LifetimeError

F = TypeVar("F", bound=Callable[..., Any])


class Guard(Protocol):
    """What is entered before a step and left behind it, on one thread, as often as there are steps."""

    def __enter__(self) -> Any:
        """Enters, on the calling thread."""

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        """Leaves, on the thread that entered."""

    def suspend(self) -> Any:
        """What the body has current beyond the guard, taken before a step's exit.  Enqueues nothing."""

    def resume(self, suspended: Any) -> None:
        """Makes that current again, inside the guard.  Enqueues nothing."""

    def gives(self, value: object) -> None:
        """Called inside the guard with what the function returns or yields."""


def guarded(function: F, guard_of: Callable[[tuple[Any, ...], dict[str, Any]], Guard]) -> F:
    """The function, each call of it under the guard that `guard_of(args, kwargs)` gives, of the same kind (plain,
    coroutine, generator, async generator), which an object that can be called says by its ``__call__``.

    Does not touch the device.
    """
    kind = function
    if not isinstance(function, type) and not inspect.isroutine(inspect.unwrap(function)):
        kind = getattr(type(function), "__call__", function)  # noqa: B004 - the method itself is wanted
        kind = function if isinstance(function, functools.partial) else kind
    if inspect.isasyncgenfunction(kind):
        wrapper: Any = _guarded_async_generator(function, guard_of)
    elif inspect.iscoroutinefunction(kind):

        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            return await _Steps(guard_of(args, kwargs), function(*args, **kwargs), yields=False)

    elif inspect.isgeneratorfunction(kind):

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return (yield from _Steps(guard_of(args, kwargs), function(*args, **kwargs), yields=True))

    else:

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            guard = guard_of(args, kwargs)
            with guard:
                value = function(*args, **kwargs)
                if isinstance(value, types.CoroutineType):
                    value.close()
                    raise LifetimeError(
                        f"{function!r} is no coroutine function and returns a coroutine, which would run outside of "
                        "its guard; decorate the coroutine function"
                    )
                guard.gives(value)
                return value

    named = cast("Any", function)
    return cast("F", functools.wraps(named)(wrapper))


class _Steps:
    """Runs a coroutine or a generator, one step at a time, each under the guard.

    `inner` is what the guard keeps of the body between steps; `yields`: what it yields is a value and no awaitable.
    """

    __slots__ = ("guard", "inner", "steps", "yields")

    def __init__(self, guard: Guard, steps: Any, *, yields: bool, inner: list[Any] | None = None) -> None:
        self.guard = guard
        self.steps = steps
        self.yields = yields
        self.inner = [] if inner is None else inner

    def _step(self, function: Callable[..., Any], *args: Any) -> Any:
        with self.guard:
            stack = open_entries()
            depth = len(stack)
            if self.inner:
                suspended, there, entries = self.inner.pop()
                if there is stack:  # an entry belongs to its thread
                    take_up(entries)
                    stack += entries
                self.guard.resume(suspended)
            try:
                value = function(*args)
                if self.yields:
                    self.guard.gives(value)
                return value
            except StopIteration as end:
                self.guard.gives(end.value)
                raise
            finally:
                entries = stack[depth:]  # of the body's own guards, which are open until a later step
                del stack[depth:]
                self.inner[:] = [(self.guard.suspend(), stack, entries)]
                set_aside(entries)

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._step(self.steps.send, None)

    def send(self, value: Any) -> Any:
        return self._step(self.steps.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self.steps.throw, error[1] if len(error) > 1 and error[1] is not None else error[0])

    def close(self) -> None:
        self._step(self.steps.close)


def _guarded_async_generator(
    function: Callable[..., Any], guard_of: Callable[[tuple[Any, ...], dict[str, Any]], Guard]
) -> Callable[..., Any]:
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        guard, generator = guard_of(args, kwargs), function(*args, **kwargs)
        inner: list[Any] = []
        step = generator.__anext__()
        while True:
            try:
                value = await _Steps(guard, step, yields=False, inner=inner)
            except StopAsyncIteration:
                return
            try:
                sent = yield value
            except GeneratorExit:
                await _Steps(guard, generator.aclose(), yields=False, inner=inner)
                raise
            except BaseException as error:  # noqa: BLE001 - thrown into the guarded generator
                step = generator.athrow(error)
            else:
                step = generator.asend(sent)

    return wrapper
