"""Errors across processes, without pickle: type name, message and traceback text.

At the caller the error is a `RemoteError`; where the type is one of the built-in exceptions, or one of this project's,
it is of that class too, so that ``except ValueError`` works as if the function had run here.  Of the fields that such a
class has beside its message, an `OSError`'s `errno` and `strerror` are read from the message, and names of files where
they are plain.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import gc
import inspect
import os
import re
import traceback
from collections.abc import Collection
from concurrent.futures import Future
from types import CellType, FrameType
from typing import Any

from streamrt import errors as runtime_errors
from transport import errors as transport_errors
from transport.errors import RemoteError

_OWN = {
    **{name: value for name, value in vars(runtime_errors).items() if isinstance(value, type)},
    **{name: value for name, value in vars(transport_errors).items() if isinstance(value, type)},
}


def describe_error(error: BaseException) -> tuple[str, str]:
    """The error's type name (bare for built-in classes, else with its module) and its message."""
    if isinstance(error, RemoteError):  # one that came from a third process goes on as what it was
        return error.type_name, error.message
    kind = type(error)
    name = kind.__name__ if kind.__module__ in ("builtins", *_MODULES) else f"{kind.__module__}.{kind.__qualname__}"
    try:
        message = str(error.args[0]) if isinstance(error, KeyError) and len(error.args) == 1 else str(error)
    except Exception:  # noqa: BLE001 - an error that cannot say what it is still has to arrive
        message = "(its message could not be made)"
    return name, message


def clear_frames(error: BaseException) -> None:
    """Drops what the function had in hand that got its error from a future of its own: arguments go back at once.

    They would wait for the garbage collector: the future holds the error, whose traceback holds the function's frame,
    which holds the future.  Only frames that hold such a future or the error itself, and our own, lose their variables:
    an error that a function keeps elsewhere can still be looked at, as a debugger does.  Does not touch the device.
    """
    errors: dict[int, BaseException] = {}
    following: BaseException | None = error
    while following is not None and id(following) not in errors:
        errors[id(following)] = following
        following = following.__cause__ or following.__context__
    for each in errors.values():
        for frame, _ in traceback.walk_tb(each.__traceback__):
            if not frame.f_code.co_flags & _SUSPENDABLE and (_is_ours(frame) or _holds_one_of(frame, errors)):
                with contextlib.suppress(RuntimeError):  # it still runs
                    frame.clear()


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _PACKAGES


def _holds_one_of(frame: FrameType, errors: Collection[int]) -> bool:
    """Whether a variable is one of the errors (by id) or a future that ended so, or a container of such futures.

    Asks the collector: `f_locals` would make the frame hold them once more.
    """
    found: list[Any] = gc.get_referents(frame)
    if any(id(item) in errors for item in found):
        return True
    for _ in range(_DEPTH):
        if any(issubclass(type(item), Future) and id(item._exception) in errors for item in found):
            return True
        found = [inner for item in found if type(item) in _CONTAINERS for inner in gc.get_referents(item)[:_MOST_ITEMS]]
    return False


def traceback_of(error: BaseException) -> str:
    """The error's traceback as text; where it cannot be formatted (its own fields are the user's), what can."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - an error that cannot say what it is still has to arrive
        frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]  # looks up no source
        where = "".join(f'  File "{code.co_filename}", line {line}, in {code.co_name}\n' for code, line in frames)
        return f"Traceback (most recent call last):\n{where}{type(error).__name__}: (it could not be formatted)\n"


_PACKAGES = ("streamrt", "transport")
_CONTAINERS = (list, tuple, dict, set, CellType)
_DEPTH = 3  # a variable, what is in it, and in that: a variable of a closure counts for one
_MOST_ITEMS = 1000
_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR  # clearing may end what goes on
_MODULES = ("streamrt.errors", "transport.errors")
_SYSTEM = re.compile(r"\[Errno (\d{1,9})\] (.*)", re.DOTALL)
_FILES = re.compile(r"'([^'\\]*)'(?: -> '([^'\\]*)')?")
_ARRAY = re.compile(r"\b(numpy|cupy)[\w.]*\.ndarray\b|'ndarray' object")


def rebuild_error(type_name: str, message: str, traceback_text: str, where: str) -> RemoteError:
    """The caller's error for what the callee raised; the callee's traceback is attached as a note."""
    error = _class_for(type_name)(type_name, message, traceback_text)
    error.add_note(f"raised by {where}")
    if traceback_text:
        error.add_note(f"remote traceback:\n{traceback_text.rstrip()}")
    if type_name in ("TypeError", "AttributeError") and _ARRAY.search(message):
        error.add_note(
            "functions get NumPy arrays, and CuPy arrays of what is on a GPU, unless arrays= names another library: in "
            "local_workers(arrays=...), stage(arrays=...) or Service(arrays=...)"
        )
    return error


@functools.lru_cache(maxsize=256)
def _class_for(type_name: str) -> type[RemoteError]:
    found = _OWN.get(type_name) or getattr(builtins, type_name, None)
    if not isinstance(found, type) or not issubclass(found, Exception) or issubclass(RemoteError, found):
        return RemoteError
    if issubclass(found, UnicodeError):
        found = ValueError  # which it is, too; its own class needs more than a message
    if issubclass(found, (StopIteration, StopAsyncIteration, BaseExceptionGroup)):
        return RemoteError  # classes that mean something to the interpreter, or need more than a message

    def text(self: RemoteError) -> str:
        return f"{self.type_name}: {self.message}"

    def reduced(self: RemoteError) -> tuple[Any, ...]:
        return _again, (self.type_name, self.message, self.traceback_text), self.__dict__

    def made(self: Any, type_name: str, message: str, traceback_text: str = "") -> None:
        RemoteError.__init__(self, type_name, message, traceback_text)
        if (said := _SYSTEM.fullmatch(message)) is not None:
            self.errno, self.strerror = int(said[1]), said[2]
            usual = f"{os.strerror(self.errno)}: "
            if said[2].startswith(usual):  # names of files are behind it
                self.strerror = usual[:-2]
                if (names := _FILES.fullmatch(said[2].removeprefix(usual))) is not None:
                    self.filename, self.filename2 = names.groups()

    members: dict[str, Any] = {"__module__": __name__, "__str__": text, "__reduce__": reduced}
    if issubclass(found, OSError):
        members["__init__"] = made
    try:
        return type(f"Remote{found.__name__}", (RemoteError, found), members)
    except TypeError:
        return RemoteError  # two layouts that do not combine


def _again(type_name: str, message: str, traceback_text: str) -> RemoteError:
    """One that is unpickled: its class was made for it, and is made again here."""
    return _class_for(type_name)(type_name, message, traceback_text)
