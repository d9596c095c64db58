"""The command line and the demo from end to end, small, with real worker processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from streamrt.errors import ArrayError, PlacementError
from transport.cli import app
from transport.demo.plan import make_plan
from transport.demo.runs import Timed
from transport.information import version_of_streamrt

ROOT = Path(__file__).parent.parent


def streamrt(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own, on the host backend."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "STREAMRT_DEVICE": "host", "COLUMNS": "140"}
    command = [sys.executable, "-m", "transport.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


def small(tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    figures = tmp_path / "figures.json"
    done = streamrt(
        "demo", "--megapixels", "0.25", "--frames", "6", "--output", str(tmp_path), "--json", str(figures), *arguments
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done, json.loads(figures.read_text())


def test_demo_from_end_to_end(tmp_path: Path) -> None:
    done, figures = small(tmp_path, "--in-flight", "3")
    assert "check passed: 6 of 6 outputs" in done.stdout
    assert "--device host --frames 6 --stages numpy,numpy,numpy --in-flight 3 --megapixels 0.25" in done.stdout
    for name in ("contact-sheet.png", "frames-per-second.png"):
        assert str(tmp_path / name) in done.stdout
        with Image.open(tmp_path / name) as picture:
            assert picture.width > 1000
            assert len(picture.convert("RGB").getcolors(maxcolors=1 << 24)) > 50
    assert figures["check"]["outputs"] == 6
    assert figures["check"]["wrong"] == []
    assert set(figures["check"]["largest"]) == {"image", "edges", "corners"}
    assert all(rate > 0 for rate in figures["frames_per_second"].values())
    assert [each["frames"] for each in figures["stages"]] == [6, 6, 6]
    # at the least: three planes of float32 to each of the three workers, and the edges to the last one
    pixels = 432 * 576
    sent = sum(each["sent"] for each in figures["channels"])
    assert sent >= 6 * pixels * (12 + 12 + 13)


@pytest.mark.slow
def test_arrays_of_three_libraries_cross_process_borders(tmp_path: Path) -> None:
    done, figures = small(tmp_path, "--stages", "numpy,torch,jax")
    assert "check passed: 6 of 6 outputs" in done.stdout
    assert figures["check"]["wrong"] == []


def test_wrong_options_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match=r"use auto, host \(or cpu\) or cuda"):
        make_plan("tpu", 1, None, 1, None, tmp_path)
    with pytest.raises(ArrayError, match=r"name three libraries of numpy, cupy, torch, jax.*; these are 2"):
        make_plan("host", 1, "numpy,numpy", 1, None, tmp_path)
    with pytest.raises(ArrayError, match="'tf' is none of them"):
        make_plan("host", 1, "numpy,tf,jax", 1, None, tmp_path)
    with pytest.raises(ArrayError, match="cupy has no arrays on a host device"):
        make_plan("host", 1, "cupy,numpy,numpy", 1, None, tmp_path)
    shown = CliRunner().invoke(app, ["demo", "--device", "host", "--stages", "numpy,tensorflow,jax"])
    assert shown.exit_code == 2
    assert "error: --stages" in shown.stdout
    assert "ArrayError" not in shown.stdout


def test_the_help_says_the_defaults() -> None:
    shown = " ".join(streamrt("demo", "--help").stdout.replace("│", " ").split())
    for default in ("numpy,numpy,numpy on the host", "4 on the host, 24 on GPUs", "[default: 24]", "[default: auto]"):
        assert default in shown


def test_jax_leaves_memory_to_the_workers() -> None:
    """The demo's own process imports JAX too, which would take three quarters of a GPU."""
    program = (
        "import os, sys; from transport.cli import app; sys.argv = ['streamrt', 'demo', '--stages', 'wrong']\n"
        "try: app()\nexcept SystemExit: print(os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'], 'jax' in sys.modules)"
    )
    for given, wanted in ((None, "false"), ("true", "true")):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "STREAMRT_DEVICE": "host"}
        environment.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None)
        if given is not None:
            environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = given
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100, check=True
        )
        assert done.stdout.splitlines()[-1] == f"{wanted} False"


def test_the_version() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"streamrt {version_of_streamrt()}\n")
    assert "demo" in CliRunner().invoke(app, ["--help"]).output


@pytest.mark.parametrize(("missing", "extra"), [("torch", "torch"), ("skimage", "demo"), ("PIL", "demo")])
def test_a_package_that_is_missing_is_named_with_its_extra(missing: str, extra: str) -> None:
    """In a process where it cannot be imported: what imports it without a look would be found out here."""
    program = f"""
import importlib.util, sys
real = importlib.util.find_spec
sys.modules[{missing!r}] = None
importlib.util.find_spec = lambda name, *of: None if name.partition(".")[0] == {missing!r} else real(name, *of)
from transport.cli import app
app(["demo", "--device", "host", "--stages", "numpy,torch,numpy"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 2, done.stderr
    assert f"pip install 'streamrt[{extra}]'" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_folder_that_cannot_be_written_is_an_error_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shown = CliRunner().invoke(app, ["demo", "--device", "host", "--output", str(tmp_path / "file" / "pictures")])
    assert shown.exit_code == 2
    assert "name a folder that can be written" in shown.output


def test_cpu_is_another_name_of_the_host(tmp_path: Path) -> None:
    assert make_plan("cpu", 1, None, 1, None, tmp_path) == make_plan("host", 1, None, 1, None, tmp_path)


def test_plan_says_the_command_that_does_the_same_again(tmp_path: Path) -> None:
    plan = make_plan("host", 7, None, 2, None, tmp_path)
    assert [step.device for step in plan.steps] == ["host:0", "host:1", "host:2"]
    assert plan.command == (
        f"streamrt demo --device host --frames 7 --stages numpy,numpy,numpy --in-flight 2 --megapixels 4"
        f" --output {tmp_path}"
    )


def test_info_names_versions_and_devices() -> None:
    done = streamrt("info")
    assert done.returncode == 0, done.stderr
    for name in ("streamrt", "python", "numpy", "torch", "ucxx", "host:0"):
        assert name in done.stdout


def test_rates_and_percentiles_of_a_timed_run() -> None:
    timed = Timed(seconds=2.0, latencies=[0.4, 0.1, 0.2, 0.3])
    assert (timed.frames, timed.rate) == (4, 2.0)
    assert (timed.latency(50), timed.latency(99), timed.latency(25)) == (0.2, 0.4, 0.1)
    assert Timed().rate == Timed().latency(50) == 0.0
