"""`streamrt demo --kill` from end to end, small, and what it reports of both sides."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from streamrt.errors import ExhaustedError, UnavailableError
from transport.cli import app
from transport.demo import kill_report, rival
from transport.demo.alive import alive
from transport.demo.check import Check
from transport.demo.kill import Killed
from transport.demo.kill_report import Results
from transport.demo.plan import Plan, make_plan
from transport.demo.rival import Rival
from transport.pipeline import Restart, StageError

pytestmark = pytest.mark.workers
ROOT = Path(__file__).parent.parent
RESTART = Restart("filter bank", 11, 12, 100.0, 100.5)


@pytest.mark.parametrize("device", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_worker_is_killed_and_the_frames_go_on(tmp_path: Path, device: str) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['torch'] = None")  # as if not installed
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "STREAMRT_DEVICE": device, "COLUMNS": "140"}
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "transport.cli", "demo", "--kill", "--megapixels", "0.02", "--frames", "12"]
    command += ["--in-flight", "3", "--json", str(figures)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(figures.read_text())
    lost, delivered = found["frames"]["lost"], found["frames"]["delivered"]
    assert lost
    assert len(lost) + delivered == 12
    assert 3 < min(lost) <= max(lost) < min(lost) + 3, "those in flight at one time, after frame 3 was delivered"
    numbers = ", ".join(map(str, lost))
    assert re.search(f"lost: frames? {numbers}; {delivered} of 12 frames delivered; none was run again", done.stdout)
    assert re.search(f"streamrt +frames? {numbers} .* {delivered} of {delivered} right", done.stdout)
    assert re.search(rf"a worker is killed .* 12/12 .* lost: {numbers}", done.stdout)
    killed = re.search(r"killed: process (\d+), stage 'filter bank'; in its place: process (\d+)", done.stdout)
    assert killed is not None
    assert [int(pid) for pid in killed.groups()] == [found["restart"]["old_pid"], found["restart"]["pid"]]
    assert killed[1] != killed[2]
    assert re.search(r"memory after: .* descriptors.*: back at its baseline", done.stdout)
    assert found["memory"]["grown"] == {}
    assert f"check passed: {delivered} of {delivered} outputs" in done.stdout
    assert "torch RPC: left out: torch is not installed: pip install 'streamrt[torch]'" in done.stdout
    stages = {"host": "numpy,numpy,numpy", "cuda": "cupy,cupy,cupy"}[device]
    assert f"again: streamrt demo --device {device} --frames 12 --stages {stages} --in-flight 3" in done.stdout
    assert done.stdout.rstrip().endswith("--kill")


@pytest.mark.slow
def test_torch_is_measured_in_the_same_act() -> None:
    pytest.importorskip("torch.distributed.rpc")
    found = rival.measure("cpu", 1 << 20, patience=0.5)
    assert found.error, "the callee never comes to the end of the call"
    assert found.known > 0
    assert found.back is None, "half a second is not enough to import torch"
    assert "started in its place had not joined after" in found.end


def test_a_rival_that_does_not_run_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no RPC in this build >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(UnavailableError, match=r"does not run here \(exit code 1\): no RPC in this build"):
        rival.measure("cpu", 8)


def plan(tmp_path: Path) -> Plan:
    return make_plan("host", 24, None, 8, None, tmp_path, kill=True)


def report(tmp_path: Path, killed: Killed, beside: Rival | None) -> str:
    now = alive()
    return shown(Results(plan(tmp_path), killed, now, now, beside, "nobody asked"))


def shown(results: Results) -> str:
    console = Console(width=160, file=io.StringIO())
    kill_report.show(console, results)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_report_says_what_happened_and_nothing_else(tmp_path: Path) -> None:
    good = Killed(Check({}), [3, 5], [], 22, 14, 11, 0.02, RESTART, 0.5)
    assert good.passed
    hung = Rival("9.9", 5.0, 4.99, True, "RuntimeError: RPC ran for more than 5 s", None, "it ended with exit code 1")
    text = report(tmp_path, good, hung)
    assert re.search(r"streamrt +frames 3, 5 +20 ms +500 ms +14 frames", text)
    assert re.search(r"torch RPC +the call +hung until its timeout of 5 s +not back", text)
    assert "torch RPC 9.9: 5.0 s after the kill: RuntimeError: RPC ran for more than 5 s" in text
    assert "torch RPC 9.9: it ended with exit code 1" in text
    quick = replace(hung, known=0.009, timed_out=False, error="RuntimeError: eof", back=2.5, end="")
    assert re.search(r"torch RPC +the call +9 ms +2.5 s", report(tmp_path, good, quick))
    assert "hung" not in report(tmp_path, good, quick)
    assert "torch RPC: left out: nobody asked" in report(tmp_path, good, None)


def test_a_kill_that_did_not_go_as_it_should_does_not_pass(tmp_path: Path) -> None:
    good = Killed(Check({}), [3], [], 23, 14, 11, 0.02, RESTART, 0.5)
    now = alive()
    assert Results(plan(tmp_path), good, now, now, None).passed
    leaking = Results(plan(tmp_path), good, now, replace(now, blocks=now.blocks + 2), None)
    assert not leaking.passed
    assert "NOT back: 2 blocks more" in shown(leaking)
    nobody = Killed(Check({}), delivered=24)
    assert not nobody.passed
    assert re.search(r"streamrt +no frame +never +never", report(tmp_path, nobody, None))
    assert not replace(good, check=Check({}, wrong=[7])).passed
    failing = replace(good, failed=[StageError("finish", 8, ValueError("eight"))])
    assert not failing.passed
    assert "failed, but not with its worker: stage 'finish' failed on frame 8" in report(tmp_path, failing, None)


def test_too_few_frames_for_a_kill_are_a_clear_error(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["demo", "--kill", "--device", "host", "--frames", "22"])
    assert shown.exit_code == 2
    text = " ".join(shown.output.split())
    assert "error: --kill with --frames 22 and --in-flight 8" in text
    assert "use --frames 23 or more, or a smaller --in-flight" in text
    with pytest.raises(ExhaustedError, match=r"use --frames 5 or more$"):
        make_plan("host", 3, None, 1, None, tmp_path, kill=True)
    assert make_plan("host", 23, None, 8, None, tmp_path, kill=True).kill_at == 5
    assert plan(tmp_path).command.endswith("--in-flight 8 --megapixels 4 --kill")
