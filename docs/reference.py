"""Writes docs/reference.md: the public names, with their signatures and docstrings.  `python docs/reference.py`."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MODULES = {
    "transport": "Calls between processes.",
    "streamrt": "Streams, arrays, futures and guards in one process.",
    "streamrt.torch_graphs": "Engines in torch graphs; imported by name, since it imports torch.",
    "streamrt.torch_ops": "The guards as torch's operators; imported by name, too.",
    "streamrt.testing": "For tests of programs that work on streams; imported by name.",
}
WORDS = {
    "record, wait": "order on the device: neither blocks the host (but for a future's `wait`, which says so)",
    "synchronize, query": "the host blocks until the device is there; the host asks, and goes on",
    "current stream": "the one that an array library enqueues on, on this thread and device",
    "guard": "a `with` that makes a stream current for all libraries, and brings back what was current",
    "side stream": "where a guard puts work that must not run on the default stream",
    "lease": "a stream of a pool, or memory that a peer may read, until it is given back",
    "owned, borrowed": "whether a handle is destroyed with the object that holds it, or belongs to somebody else",
    "peer": "the other end of a connection: what is called, and may call back",
    "worker": "a process that serves a service's functions",
    "service": "the functions that a peer may call, and what they are given on each device",
    "agent": "what drives the connections of a process",
    "link, channel": "the path that a connection's messages take; the path that the bytes of its arrays take",
    "snapshot": "a copy of an argument as of the call, on the device",
    "lend": "to send an array with no snapshot (`copy=False`): not to be written to before `future.sent` is done",
    "borrow": "to read an argument where it lies, in the caller's memory (`borrow=True`)",
    "stage, staging": "a step of a pipeline; the channel through pinned memory of the host",
    "host order, stream order": "a call goes when its bytes are there; at once, and a peer's stream waits for ours",
    "loss": "a peer that is gone: its replies, and what waits for them, end with `PeerLostError`",
}  # fmt: skip


USED: dict[str, set[str]] = {
    "Agent": {"drain", "close"},
    "Service": {"function", "setup", "functions", "prepare"},
    "compute_stream": set(),
    "using": set(),
}
"""Of classes whose other methods are for the packages themselves: those that users call."""


class _Written:
    """An annotation as it stands in the source."""

    def __init__(self, text: object) -> None:
        self._text = text if isinstance(text, str) else inspect.formatannotation(text)

    def __repr__(self) -> str:
        return self._text


def signature(value: Any, *, bound: bool = False) -> str:
    """The parameters as they are written, `bound` without the first one, and the result, if it is one."""
    found = inspect.signature(value)
    empty, returned = inspect.Parameter.empty, found.return_annotation
    parameters = [
        one if one.annotation is empty else one.replace(annotation=_Written(one.annotation))
        for one in list(found.parameters.values())[bound:]
    ]
    nothing = returned is empty or value.__name__ == "__init__"
    return str(found.replace(parameters=parameters, return_annotation=empty if nothing else _Written(returned)))


def paragraphs(value: object) -> str:
    """The docstring as Markdown: what reStructuredText marks with two backticks has one here."""
    return (inspect.getdoc(value) or "").replace("``", "`")


def first_sentence(value: object) -> str:
    """What the docstring says first."""
    text = " ".join(paragraphs(value).split("\n\n")[0].split())
    return text.partition(".  ")[0].removesuffix(".")


def members(kind: type) -> Iterator[str]:
    """A line for each public method and property that a class of ours defines itself."""
    for name, member in vars(kind).items():
        plain = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if name.startswith("_") or name not in USED.get(kind.__name__, {name}):
            continue
        if isinstance(plain, property):
            yield f"- `.{name}`: {first_sentence(plain)}"
        elif inspect.isfunction(plain):
            yield f"- `.{name}{signature(plain, bound=not isinstance(member, staticmethod))}`: {first_sentence(plain)}"


def is_made(kind: Any) -> bool:
    """Whether users make one of a class themselves."""
    if issubclass(kind, BaseException) or getattr(kind, "_is_protocol", False):
        return False
    said = f"{kind.__doc__} {kind.__init__.__doc__}"
    return inspect.isfunction(kind.__init__) and not re.search(r"Use `|[Mm]ade by `", said)


def entry(name: str, value: Any) -> Iterator[str]:
    """A public name: its heading, its docstring and its members."""
    yield f"### {name}"
    if inspect.isclass(value):
        if is_made(value):
            yield f"```python\n{name}{signature(value.__init__, bound=True)}\n```"
        yield paragraphs(value)
        if not issubclass(value, BaseException) and (listed := list(members(value))):
            yield "\n".join(listed)
    elif callable(value):
        yield f"```python\n{name}{signature(value)}\n```"
        yield paragraphs(value)
    else:
        yield f"`{value!r}`, of `{type(value).__name__}`."


def text() -> str:
    """The page."""
    parts = [
        "# Reference",
        "Every public name, from its docstring (written by `python docs/reference.py`). All else may change.",
        "## Words",
        "| word | what it means here |\n|---|---|\n"
        + "\n".join(f"| {word} | {means} |" for word, means in WORDS.items()),
    ]
    seen: Counter[str] = Counter()

    def anchor(name: str) -> str:
        """Of headings that differ in case alone the second has a number, and so on."""
        low = name.lower()
        seen[low] += 1
        return low if seen[low] == 1 else f"{low}-{seen[low] - 1}"

    for module_name, says in MODULES.items():
        module = importlib.import_module(module_name)
        names = sorted(module.__all__, key=lambda name: (name[0].isupper(), name.lower()))
        parts += [f"## {module_name}", says, " ".join(f"[{name}](#{anchor(name)})" for name in names)]
        for name in names:
            parts += entry(name, getattr(module, name))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    (HERE / "reference.md").write_text(text())
