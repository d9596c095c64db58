"""The examples of the README and of the pages behind it run on the host backend and use names that exist; commands that
they name are targets of the Makefile, and links lead somewhere."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from public import public_modules
from rpc_processes import WATCHDOG, Worker

from transport.launch.environment import child_environment

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()
PAGES = ("README.md", "docs/calls.md", "docs/streams.md")
FOUND = [
    (f"{Path(page).stem}-{number}", block)
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))
]
BLOCKS = [pytest.param(block, id=name) for name, block in FOUND]


@pytest.mark.parametrize("block", BLOCKS)
def test_example_parses_and_uses_public_names(block: str) -> None:
    modules = public_modules()
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            assert node.attr in modules[node.value.id].__all__, f"{node.value.id}.{node.attr} is not exported"


ADDRESS = "tcp://127.0.0.1:7700"
MODULES = [block for _, block in FOUND if "# my_stage.py" in block]
CALLERS = [block for _, block in FOUND if ADDRESS in block]
SCRIPTS = [pytest.param(block, id=name) for name, block in FOUND if block not in MODULES + CALLERS]


def run_script(block: str, folder: Path) -> None:
    """Runs a block as a program, on the host backend."""
    script = folder / "example.py"
    script.write_text(block.replace("cuda:", "host:"))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        env=child_environment(),
        timeout=3 * WATCHDOG,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.workers
@pytest.mark.parametrize("block", SCRIPTS)
def test_an_example_runs(block: str, tmp_path: Path) -> None:
    for name in ("torch", "jax"):
        if f"import {name}" in block:
            pytest.importorskip(name)
    run_script(block, tmp_path)


@pytest.mark.workers
def test_the_worker_that_others_call_runs(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (module,), (caller,) = MODULES, CALLERS
    assert f"streamrt-worker my_stage:service --listen {ADDRESS} --device" in TEXT
    (tmp_path / "my_stage.py").write_text(module)
    path = f"{tmp_path}:{child_environment()['PYTHONPATH']}"
    environment = {"PYTHONPATH": path, "STREAMRT_DEVICE": "host"}
    with Worker("my_stage:service", "--listen", "tcp://127.0.0.1:0", environment=environment) as worker:
        run_script(caller.replace(ADDRESS, worker.address), tmp_path)


def test_the_commands_are_targets() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^make ([a-z-]+)", TEXT, re.MULTILINE))
    assert named
    assert named <= targets


@pytest.mark.parametrize("page", [*PAGES, "docs/architecture.md", "docs/ordering.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(page: str) -> None:
    file = ROOT / page
    linked = re.findall(r"\]\(([^)#:]*)(#[^)]*)?\)", file.read_text())
    assert linked or page == "CONTRIBUTING.md"
    for name, anchor in linked:
        target = file.parent / name if name else file
        assert target.exists(), name
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor[1:] in {heading.lower().replace(" ", "-") for heading in headings}, f"{name}{anchor}"
