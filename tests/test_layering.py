"""The import rules: layers from low to high, the sans-io core, and the one place of each optional library.

A new file falls under its folder's pattern, or under the `*` of its package; only a new layer or a new library is an
entry here.  A pattern is of the dotted module name.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import graphlib
import re
import sys
from pathlib import Path

import pytest
from imports import PACKAGES, Import, all_imports, imports_of, sources

ROOT = Path(__file__).resolve().parent.parent

# Lower layers first.  A module imports its own layer and those below; the first pattern that matches decides.
LAYERS: dict[str, list[tuple[str, tuple[str, ...]]]] = {
    "streamrt": [
        ("leaves", ("errors", "hooks", "forks", "moves", "log", "seconds")),
        ("device", ("segment", "captures", "device")),
        ("backends", ("host", "host.*", "cuda", "cuda.*")),
        ("streams", ("stream", "event", "timeline")),
        ("libraries", ("libraries", "libraries.*")),
        ("sharded", ("torch_*", "bucket", "collective", "nccl", "overlap", "sharded_*")),
        ("observers", ("sanitizer", "trace", "testing")),
        ("public", ("",)),
        ("runtime", ("*",)),
    ],
    "transport": [
        ("leaves", ("errors", "events", "limits")),
        ("values", ("codec", "codec_*", "address", "device_map", "pinned")),
        (
            "paths",
            (
                "security",
                "payload",
                "inlined",
                "held",
                "packs",
                "lend",
                "transfer",
                "links",
                "links.*",
                "channels",
                "channels.*",
            ),
        ),
        ("driver", ("launch.functions",)),
        ("holders", ("peer", "group", "launch", "launch.*")),
        ("chains", ("pipeline", "pipeline_*")),
        ("public", ("",)),
        ("commands", ("worker", "cli", "demo", "demo.*")),
        ("driver", ("*",)),
    ],
}
ORDER = {
    "streamrt": (("leaves", "device", "backends", "streams", "libraries", "runtime", "sharded", "observers", "public")),
    "transport": (("leaves", "sans-io", "values", "paths", "driver", "holders", "chains", "public", "commands")),
}

# Where each library that is not a core dependency may be imported at all; outside, the packages work without it.
PLACES: dict[str, tuple[str, ...]] = {
    "cupy": ("streamrt.cuda", "streamrt.cuda.*", "streamrt.nccl", "streamrt.libraries.cupy*"),
    "cupyx": ("streamrt.cuda", "streamrt.cuda.*", "streamrt.nccl", "streamrt.libraries.cupy*"),
    "cupy_backends": ("streamrt.cuda", "streamrt.cuda.*"),
    "cuda": ("streamrt.cuda", "streamrt.cuda.*"),
    "torch": ("streamrt.libraries.torch*", "streamrt.torch_*", "streamrt.sharded_torch", "transport.demo.torch*"),
    "jax": ("streamrt.libraries.jax*", "transport.demo.jax*"),
    "jaxlib": ("streamrt.libraries.jax*",),
    "ml_dtypes": ("streamrt.libraries.*", "streamrt.arrays", "transport.codec*"),
    "numba": ("streamrt.libraries.numba*",),
    "ucxx": ("transport.channels.ucx*",),
    "dask": ("transport.launch.dask*",),
    "distributed": ("transport.launch.dask*",),
    "skimage": ("transport.demo", "transport.demo.*"),
    "PIL": ("transport.demo", "transport.demo.*"),
    "typer": ("transport.cli", "transport.worker"),
    "rich": ("transport.cli", "transport.worker", "transport.demo", "transport.demo.*"),
    # core dependencies with one place each
    "zmq": ("transport.links.zmq_*",),
    "msgpack": ("transport.wire", "transport.payload", "transport.codec"),
    "cloudpickle": ("transport.*",),
    "numpy": ("*",),
}
# Too heavy, or not always there: these may be imported inside a function.  Everything else is imported at the top.
LAZY = {"cupy", "cupyx", "cupy_backends", "cuda", "torch", "jax", "jaxlib", "ml_dtypes", "numba", "ucxx", "dask"}
LAZY |= {"distributed", "skimage", "PIL", "typer", "rich", "asyncio"}
# (importer, imported): our own modules that a function may import, each for the reason given.
LAZY_OWN: dict[tuple[str, str], str] = {
    ("streamrt.cuda", "streamrt.cuda.*"): "what needs CuPy is imported once CuPy is known to work",
    ("transport.cli", "transport.*"): "a command imports what it runs, so that --help is quick",
    ("transport.demo", "transport.demo.*"): "only the stages that --stages names",
    ("transport.demo.*", "transport.demo.*"): "only the stages that --stages names",
    ("transport.worker", "transport.*"): "the environment is set before anything reads it",
    ("transport.links.schemes", "transport.links.zmq_link"): "ZeroMQ is for addresses over TCP",
}

# The core is these three and whatever parts they are cut into: all that they import, but for the leaves.
SANS_IO = ("transport.wire", "transport.lease", "transport.protocol")
SANS_IO_LEAVES = ("transport.errors", "transport.events", "streamrt.errors")
TOO_BARE = ("RuntimeError", "Exception", "BaseException", "AssertionError")
CLOCKS_AND_IO = {
    "asyncio",
    "os",
    "random",
    "select",
    "selectors",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "time",
}


@functools.cache
def sans_io_core() -> frozenset[str]:
    """The modules of the sans-io core, by following imports from its three roots."""
    core: set[str] = set()
    open_ends = [module for module in SANS_IO if module in sources()]
    while open_ends:
        module = open_ends.pop()
        core.add(module)
        targets = {found.target for found in all_imports() if found.importer == module and found.top == "transport"}
        open_ends += targets - core - set(SANS_IO_LEAVES)
    return frozenset(core)


def layer(module: str) -> int:
    """The module's height in its package."""
    package, _, rest = module.partition(".")
    if module in sans_io_core():
        return ORDER[package].index("sans-io")
    for name, patterns in LAYERS[package]:
        if any(fnmatch.fnmatchcase(rest, pattern) for pattern in patterns):
            return ORDER[package].index(name)
    raise AssertionError(f"{module} is in no layer")


def matches(module: str, patterns: tuple[str, ...]) -> bool:
    """Whether one of the patterns matches."""
    return any(fnmatch.fnmatchcase(module, pattern) for pattern in patterns)


def layering_faults(found: Import) -> list[str]:
    """What is wrong with one import; empty for an import that the rules allow."""
    where = f"{found.importer}:{found.line} imports {found.target}"
    faults = []
    if found.top in PACKAGES:
        if found.importer.startswith("streamrt") and found.top == "transport":
            faults.append(f"{where}: streamrt never imports transport")
        elif found.importer.partition(".")[0] == found.top and found.level != "typing":
            own = {found.importer, found.importer.rpartition(".")[0]}
            lazily_allowed = any(matches(found.importer, (a,)) and matches(found.target, (b,)) for a, b in LAZY_OWN)
            if found.level == "function" and not lazily_allowed:
                faults.append(f"{where} inside a function; move it to the top")
            if layer(found.target) > layer(found.importer) and not (found.level == "function" and lazily_allowed):
                faults.append(f"{where}, which is in a higher layer")
            backends = {module.split(".")[1] for module in (found.importer, found.target) if module.count(".")}
            if backends == {"host", "cuda"} and found.target not in own:
                faults.append(f"{where}: a backend never imports the other")
    elif found.top not in sys.stdlib_module_names:
        places = PLACES.get(found.top)
        if places is None:
            faults.append(f"{where}, which is no dependency of the project")
        elif not matches(found.importer, places):
            faults.append(f"{where}, which only {', '.join(places)} may")
        elif found.level == "function" and found.top not in LAZY:
            faults.append(f"{where} inside a function; move it to the top")
    elif found.level == "function" and found.top not in LAZY:
        faults.append(f"{where} inside a function; move it to the top")
    if found.importer in sans_io_core() or found.importer in SANS_IO:
        faults += sans_io_faults(found, where)
    return faults


def sans_io_faults(found: Import, where: str) -> list[str]:
    """The protocol core imports the standard library (without clocks and I/O), itself and its errors."""
    if found.top in PACKAGES:
        inside = found.target in sans_io_core() or found.target in SANS_IO_LEAVES
        return [] if inside else [f"{where}: outside of the sans-io core"]
    if found.top in sys.stdlib_module_names:
        return [f"{where}: time and I/O come in as arguments"] if found.top in CLOCKS_AND_IO else []
    allowed = found.importer == "transport.wire" and found.top == "msgpack"
    return [] if allowed else [f"{where}: the sans-io core needs the standard library only"]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_import_is_allowed(package: str) -> None:
    faults = [
        fault for found in all_imports() if found.importer.startswith(package) for fault in layering_faults(found)
    ]
    assert not faults, "\n".join(faults)


@functools.cache
def rows_of_the_map(package: str) -> dict[str, int]:
    """In which row of docs/architecture.md a file or folder of the package stands."""
    text = (ROOT / "docs" / "architecture.md").read_text().split(f"\n`{package}`\n", 1)[1].split("\n\n", 1)[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name.rstrip("/"): row for row, line in enumerate(rows) for name in re.findall(r"`([^`]+)`", line)}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_map_of_the_architecture_is_complete_and_true(package: str) -> None:
    rows = rows_of_the_map(package)
    files = {name.split(".")[1] for name in sources() if name.startswith(f"{package}.")}
    assert files - set(rows) == set(), "give it its place in docs/architecture.md"
    assert set(rows) - files == set(), "docs/architecture.md names a file that is not there"
    for found in all_imports():
        if found.level == "module" and found.importer.startswith(f"{package}.") and found.top == package:
            importer, target = found.importer.split(".")[1], (found.target.split(".") + [""])[1]
            assert rows.get(target, 0) <= rows[importer], f"{found.importer} imports {found.target}, further down"


def test_no_cycles_among_module_level_imports() -> None:
    graph: dict[str, set[str]] = {name: set() for name in sources()}
    for found in all_imports():
        if found.level == "module" and found.target in graph and found.target != found.importer:
            graph[found.importer].add(found.target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("import cycle: " + " -> ".join(error.args[1]))


@pytest.mark.parametrize(
    ("importer", "statement", "complaint"),
    [
        ("streamrt.hooks", "import streamrt.device", "higher layer"),
        ("streamrt.stream", "import transport.errors", "never imports transport"),
        ("streamrt.host.memory", "import streamrt.cuda", "never imports the other"),
        ("streamrt.stream", "import cupy", "only streamrt.cuda"),
        ("streamrt.stream", "def f():\n    import torch", "only streamrt.libraries.torch"),
        ("streamrt.stream", "def f():\n    import json", "inside a function"),
        ("streamrt.stream", "import requests", "no dependency"),
        ("transport.protocol", "import time", "come in as arguments"),
        ("transport.protocol", "import msgpack", "only transport.wire"),
        ("transport.lease", "import numpy", "standard library only"),
        ("transport.lease", "import streamrt.device", "outside of the sans-io core"),
        ("transport.wire", "from transport import codec", "higher layer"),
        ("transport.agent", "import zmq", "only transport.links.zmq_"),
    ],
)
def test_the_rules_can_fail(importer: str, statement: str, complaint: str) -> None:
    known = dict.fromkeys(
        ["streamrt.device", "streamrt.cuda", "transport.codec", "transport.errors"], sources()["streamrt.errors"]
    )
    faults = [fault for found in imports_of(importer, ast.parse(statement), known) for fault in layering_faults(found)]
    assert any(complaint in fault for fault in faults), faults


def test_errors_are_of_our_own_classes() -> None:
    bare = []
    for name, path in sources().items():
        if name == "streamrt.testing":
            continue  # what fails there is the test that called it
        for node in ast.walk(ast.parse(path.read_text(), path)):
            match node:
                case ast.Raise(exc=ast.Call(func=ast.Name(id=raised)) | ast.Name(id=raised)) if raised in TOO_BARE:
                    bare.append(f"{name}:{node.lineno} raises {raised}; use a class of the error tree")
    assert not bare, "\n".join(bare)
