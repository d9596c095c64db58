"""The benchmarks' bookkeeping: ratios, goals, files and the table.  No figure is asserted."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from bench import agent, raw, table
from bench.report import HERE, Pace, Row, figure, judged, load_goals, ratio_of, save
from bench.rpc import cuda_lines, host_lines, quick, with_better_mode


def test_a_ratio_over_one_means_that_ours_is_better() -> None:
    assert ratio_of("us", 50.0, 100.0) == 2.0
    assert ratio_of("GB/s", 50.0, 100.0) == 0.5
    assert ratio_of("us", None, 100.0) is None


def test_goals_are_judged_by_unit_and_peer() -> None:
    goals = {
        "echo": {"max": 60, "ratio": {"torch": 16}, "later": {"ratio": {"torch": 20}}},
        "flow": {"of": "ceiling", "factor": 0.9},
        "tail": {"of": "echo", "factor": 2},
    }
    rows = [
        Row("echo", "us", 50.0, 1000.0),
        Row("flow", "GB/s", 80.0),
        Row("ceiling", "GB/s", None, 100.0),
        Row("tail", "us", 99.0),
        Row("free", "us", 1.0),
    ]
    held = {row.name: row for row in judged(rows, goals, "torch")}
    assert held["echo"].holds is True
    assert held["echo"].ratio == 20.0
    assert held["echo"].goal == "<= 60 us and >= 16x torch (later >= 20x torch)"
    assert held["flow"].holds is False
    assert held["tail"].holds is True
    assert (held["free"].goal, held["free"].holds) == (None, None)


def test_a_row_without_a_figure_holds_nothing() -> None:
    (row,) = judged([Row("echo", "us", None, 10.0)], {"echo": {"max": 60}}, "torch")
    assert row.holds is None


def test_every_goal_of_the_rpc_benchmark_has_its_row() -> None:
    lines = host_lines() + cuda_lines(0, 1) + cuda_lines(0, 0)
    rows = with_better_mode([Row(line.name, line.unit, 1.0, 1.0) for line in lines])
    names = {row.name for row in rows} | {"CPU call"}
    goals = load_goals("rpc")
    assert set(goals) <= names
    assert {goal["of"] for goal in goals.values() if "of" in goal} <= names


def test_every_goal_against_a_raw_transport_has_its_row() -> None:
    names = {line.name for line in raw.lines("cuda", 0, 1)}
    goals = load_goals("rpc")
    assert {name for name, goal in goals.items() if goal.get("ratio", {}).keys() & {"nccl", "ucxx"}} <= names
    asked = ("4 B device echo", "1 MiB echo", "16 MiB echo", "256 MiB echo", "16 MiB pipelined", "256 MiB pipelined")
    assert all(any(name.startswith(wanted) for name in names) for wanted in asked)


@pytest.mark.slow
def test_every_goal_of_the_guards_has_its_row(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from bench import guards

    figures = tmp_path / "guards.json"
    assert guards.main(["--device", "host", "--rounds", "1", "--json", str(figures)]) == 0
    rows = {row["name"]: row for row in json.loads(figures.read_text())["rows"]}
    assert set(load_goals("guards")) <= set(rows)
    assert all(row["streamrt"] and row["peer"] for row in rows.values())
    assert rows["pairs of fences"]["streamrt"] == 1


@pytest.mark.slow
@pytest.mark.workers
def test_a_raw_transport_that_is_not_there_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ucxx.py").write_text("raise ImportError('no UCXX here')")
    monkeypatch.syspath_prepend(str(tmp_path))
    figures = tmp_path / "raw.json"
    command = ["--device", "host", "--quick", "--only", "1 MiB", "--json", str(figures)]
    assert raw.main([*command, "--peer", "ucxx", "--peer", "nccl"]) == 0
    said = capsys.readouterr().out
    assert "ucxx: left out: no UCXX here" in said
    assert "nccl: left out: it needs two GPUs" in said
    assert json.loads(figures.read_text())["rows"] == []


@pytest.mark.slow
@pytest.mark.workers
def test_ucxx_alone_carries_arrays_there_and_back(tmp_path: Path) -> None:
    pytest.importorskip("ucxx")
    figures = tmp_path / "raw.json"
    assert raw.main(["--device", "host", "--quick", "--peer", "ucxx", "--json", str(figures)]) == 0
    rows = json.loads(figures.read_text())["rows"]
    assert {"1 MiB, beside ucxx", "64 MiB pipelined, snapshot, beside ucxx"} <= {row["name"] for row in rows}
    assert all(row["streamrt"] and row["peer"] for row in rows)


@pytest.mark.slow
@pytest.mark.workers
def test_one_agent_is_measured_with_many_peers_and_from_its_first_call(tmp_path: Path) -> None:
    figures = tmp_path / "agent.json"
    command = ["--quick", "--peers", "10", "--peer", "none", "--json", str(figures)]
    assert agent.main(command) == 0
    rows = {row["name"]: row for row in json.loads(figures.read_text())["rows"]}
    known = {name.replace("100 peers", "10 peers") for name in load_goals("agent")}
    assert known <= set(rows)
    assert {goal["of"] for goal in load_goals("agent").values() if "of" in goal} <= set(rows)
    assert {*agent.STEPS.values()} - {"first array on the GPU"} <= set(rows)
    assert rows["a worker's memory (RSS)"]["streamrt"] >= rows["a worker's memory (PSS)"]["streamrt"] > 1
    assert all(row["streamrt"] is not None for row in rows.values())


def test_a_worker_is_for_each_core_that_the_caller_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for cores in (1, 2, 4, 64):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        found.append(agent.workers())
    assert found == [1, 1, 3, agent.MOST_WORKERS]


def test_quick_jobs_are_small() -> None:
    assert all(quick(line.job).count <= 100 for line in host_lines() + cuda_lines(0, 1))


def test_saved_rows_become_the_table(tmp_path: Path) -> None:
    save(
        tmp_path / "results" / "rpc-host.json",
        judged([Row("small call", "us", 100.0, 400.0)], load_goals("rpc"), "torch"),
    )
    content = json.loads((tmp_path / "results" / "rpc-host.json").read_text())
    assert set(content) == {"hardware", "versions", "commit", "pace", "rows"}
    assert set(content["rows"][0]) == {"name", "unit", "streamrt", "peer", "ratio", "goal", "holds"}
    shutil.copy(HERE / "README.md", tmp_path)
    assert table.main(tmp_path) == 0
    assert table.main(tmp_path) == 0, "writing twice leaves one table"
    text = (tmp_path / "README.md").read_text()
    assert text.count("| small call | us | 100 | 400 | 4.00x |") == 1
    assert text.startswith("# Benchmarks")


def test_the_results_that_are_kept_are_in_the_readme() -> None:
    text = (HERE / "README.md").read_text()
    for path in sorted((HERE / "results").glob("*.json")):
        assert table.section(path.stem, json.loads(path.read_text())) in text, f"run python -m bench.table: {path.name}"
    inside = text.split(table.BEGIN)[1].split(table.END)[0]
    titles = {table.TITLES.get(path.stem, path.stem) for path in (HERE / "results").glob("*.json")}
    assert set(re.findall(r"^### (.*)$", inside, re.MULTILINE)) == titles, "a table without its file"


def test_a_long_table_is_folded_and_a_gpu_that_was_hidden_is_told() -> None:
    gpus = {"cpu": "c", "cores": 2, "gpus": ["G", "G"], "visible": "0"}
    content = {"hardware": gpus, "versions": {}, "commit": "x", "rows": [asdict(Row(f"r{n}", "us")) for n in range(31)]}
    text = table.section("rpc-cuda", content)
    assert "<details>" in text
    assert "2 x G (CUDA_VISIBLE_DEVICES=0)" in text
    assert text.startswith("### Calls between two processes, two GPUs")


def test_the_pace_of_the_machine_is_told_where_it_is_known() -> None:
    pace = Pace()
    assert pace.summary() is None
    pace.samples += [3.0, 7.0, 3.5]
    content = {"hardware": {"cpu": "c", "cores": 2, "gpus": []}, "versions": {}, "commit": "x", "rows": []}
    assert "loop" not in table.section("rpc-host", content)
    assert "Python's loop 3.5 ms (3.0 to 7.0)" in table.section("rpc-host", content | {"pace": pace.summary()})


def test_a_readme_without_markers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text("nothing")
    assert table.main(tmp_path) == 1
    assert "lacks the markers" in capsys.readouterr().err


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (0.0, "0"), (12345.6, "12 346"), (1.2345, "1.23")])
def test_figures_have_three_digits(value: float | None, text: str) -> None:
    assert figure(value) == text
