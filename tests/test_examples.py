"""Every file in examples/ runs.  Its first lines hold ``# requires: WORDS``, which decide where.

Words: ``core`` (no extra); the extras ``torch``, ``jax``, ``demo``, ``dask``; the devices ``gpu``, ``gpu2``.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
HEADER = "# requires:"
MODULES = {"core": (), "torch": ("torch",), "jax": ("jax",), "demo": ("skimage", "PIL"), "dask": ("distributed",)}
DEVICES = ("gpu", "gpu2")


def words(path: Path) -> list[str]:
    """The words of the header line; empty when there is none."""
    for line in path.read_text().splitlines()[:5]:
        if line.startswith(HEADER):
            return line.removeprefix(HEADER).replace(",", " ").split()
    return []


def parameters() -> list[object]:
    """One parameter an example, marked with the devices that it needs."""
    marks = {"gpu": pytest.mark.gpu, "gpu2": pytest.mark.gpu2}
    return [
        pytest.param(path, id=path.stem, marks=[marks[word] for word in words(path) if word in marks])
        for path in EXAMPLES
    ]


@pytest.mark.slow
@pytest.mark.parametrize("path", parameters())
def test_example_runs(path: Path, tmp_path: Path) -> None:
    needs = words(path)
    assert needs, f"{path.name} lacks its header line: {HEADER} core"
    unknown = set(needs) - set(MODULES) - set(DEVICES)
    assert not unknown, f"{path.name} requires {unknown}, which is none of {[*MODULES, *DEVICES]}"
    for module in (module for word in needs for module in MODULES.get(word, ())):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    if not set(needs) & set(DEVICES):
        environment["STREAMRT_DEVICE"] = "host"
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", str(path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, f"{path.name} failed:\n{done.stdout}\n{done.stderr}"


def test_the_examples_are_found() -> None:
    assert EXAMPLES, "examples/ is empty"
