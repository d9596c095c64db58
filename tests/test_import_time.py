"""Importing both packages is light: no optional library comes with it.  The time is printed, never asserted."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys, time
begin = time.perf_counter()
import streamrt, transport
elapsed = time.perf_counter() - begin
print(json.dumps({"seconds": elapsed, "modules": sorted(sys.modules)}))
"""
FORBIDDEN = ("cupy", "cupyx", "cuda", "torch", "jax", "numba", "ucxx", "typer", "rich", "skimage", "PIL", "dask")


def run(program: str) -> dict[str, object]:
    """Runs a program in a fresh interpreter and returns the JSON that it prints."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout)
    return result


def test_importing_both_packages_imports_nothing_heavy(capsys: pytest.CaptureFixture[str]) -> None:
    results = [run(PROGRAM) for _ in range(3)]
    modules = results[0]["modules"]
    assert isinstance(modules, list)
    assert {"streamrt", "transport"} <= set(modules)
    heavy = sorted({module.partition(".")[0] for module in modules} & set(FORBIDDEN))
    assert heavy == []
    seconds = statistics.median(float(str(result["seconds"])) for result in results)
    with capsys.disabled():
        print(f" [import streamrt, transport: {seconds:.3f} s]", end="")


def test_the_check_sees_a_heavy_import() -> None:
    modules = run(PROGRAM.replace("import streamrt, transport", "import typer"))["modules"]
    assert isinstance(modules, list)
    assert "typer" in modules
