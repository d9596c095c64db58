"""Every public callable says what it does to streams and to the host."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import pytest
from public import public_objects

# One of these sentences, in any of their natural forms ("never blocks the host", "Enqueues a copy on `stream`").
SAYS = re.compile(r"\benqueues\b[^.]*\bon\b|does not touch the device|\bblocks? the host\b", re.IGNORECASE | re.DOTALL)


def callables() -> Iterator[tuple[str, object]]:
    """Public functions and the public methods that our classes define themselves; errors have none to speak of."""
    for dotted, value in sorted(public_objects().items()):
        if inspect.isclass(value):
            if issubclass(value, BaseException):
                continue
            for name, member in sorted(vars(value).items()):
                plain = member.__func__ if isinstance(member, classmethod | staticmethod) else member
                if not name.startswith("_") and inspect.isfunction(plain):
                    yield f"{dotted}.{name}", plain
        elif inspect.isroutine(value):
            yield dotted, value


@pytest.mark.parametrize(("name", "value"), [pytest.param(n, v, id=n) for n, v in callables()])
def test_docstring_says_what_streams_and_host_do(name: str, value: object) -> None:
    text = inspect.getdoc(value)
    assert text, f"{name} has no docstring"
    assert SAYS.search(" ".join(text.split())), (
        f'{name}: say "Enqueues ... on ...", "Does not touch the device.", "Blocks the host ..." '
        'or "Does not block the host."'
    )


@pytest.mark.parametrize(("name", "value"), [pytest.param(n, v, id=n) for n, v in sorted(public_objects().items())])
def test_every_public_class_and_module_has_a_docstring(name: str, value: object) -> None:
    if inspect.isclass(value) or inspect.ismodule(value):
        assert (value.__doc__ or "").strip(), f"{name} has no docstring"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Enqueues on this stream a record.", True),
        ("Enqueues a copy on `stream`.", True),
        ("Does not block the host.", True),
        ("Blocks the host until it is done.", True),
        ("Copies the array.", False),
        ("Enqueues a copy. It depends on others.", False),
    ],
)
def test_the_rule_can_fail(text: str, says: bool) -> None:
    assert bool(SAYS.search(text)) is says
