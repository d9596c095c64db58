"""The litmus of the product's own calls: no array arrives stale, and without the wait that it is about each does."""

from __future__ import annotations

from typing import Any

import pytest

from bench.litmus import product
from bench.litmus.__main__ import rows_of
from bench.litmus.machine import PRODUCERS

LATE = 3  # rounds of a calibration, each held up until its message is here


def cells(rounds: int, *, sent: str | None = None) -> list[dict[str, Any]]:
    return [cell for cell in product.plan(rounds, LATE) if sent in (None, cell["sent"])]


def run(kind: str, devices: tuple[int, int], chosen: list[dict[str, Any]], **options: bool) -> dict[str, Any]:
    """Runs the cells; what was found, of which each must hold."""
    table: dict[str, Any] = {}
    product.run(kind, devices, chosen, table, lambda: None, **options)
    assert [cell.get("error") for cell in table["cells"]] == [None] * len(chosen)
    for cell in table["cells"]:
        if cell["late"]:
            assert cell["stale_rounds"] == LATE, f"the litmus is blind: {cell}"
        else:
            assert (cell["stale_rounds"], cell["stale_words"]) == (0, 0), cell
    rows = rows_of({"product": table}, "pair")
    assert len(rows) >= len(chosen)
    assert all(row.holds for row in rows)
    return table


def test_the_plan_has_each_way_that_an_array_goes() -> None:
    planned = product.plan(5, LATE)
    ways = {(cell["direction"], cell["sent"], cell["reader"]) for cell in planned}
    assert ways == {
        ("argument", "snapshot", "pull"),
        ("argument", "snapshot", "in place"),
        ("argument", "lent", "pull"),
        ("argument", "lent", "in place"),
        ("reply", "kept", "pull"),
        ("reply", "fresh", "pull"),
    }
    for way in ways:
        of = [cell for cell in planned if (cell["direction"], cell["sent"], cell["reader"]) == way]
        assert {cell["producer"] for cell in of if not cell["late"]} == set(PRODUCERS)
        assert {cell["producer"] for cell in of if cell["late"]} == set(PRODUCERS)


def test_a_stale_round_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    (cell,) = [cell for cell in product.plan(5, LATE) if not cell["late"]][:1]
    (row,) = rows_of({"product": {"cells": [{**cell, "stale_rounds": 1}]}}, "0->0")
    assert (row.holds, row.streamrt, row.goal) == (False, 1, "0")
    (late,) = [cell for cell in product.plan(5, LATE) if cell["late"]][:1]
    (row,) = rows_of({"product": {"cells": [{**late, "stale_rounds": 0}]}}, "0->0")
    assert row.holds is False, "a calibration that finds nothing"
    (row,) = rows_of({"product": {"cells": [{**cell, "error": "no end"}]}}, "0->0")
    assert row.holds is None


@pytest.mark.workers
@pytest.mark.parametrize("sent", list(product.EDGES))
def test_virtual_devices_of_two_processes(sent: str) -> None:
    run("host", (0, 1), cells(2 * product.WINDOW, sent=sent))


@pytest.mark.workers
def test_a_third_process_may_load_the_reader() -> None:
    run("host", (0, 0), [cell for cell in cells(product.WINDOW) if cell["producer"] == PRODUCERS[0]], load=True)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("sent", list(product.EDGES))
def test_two_processes_on_one_gpu(sent: str) -> None:
    run("cuda", (0, 0), cells(300, sent=sent))


@pytest.mark.gpu2
@pytest.mark.slow
@pytest.mark.parametrize("sent", list(product.EDGES))
def test_two_gpus(sent: str) -> None:
    run("cuda", (0, 1), cells(300, sent=sent))


@pytest.mark.gpu
@pytest.mark.slow
def test_beside_a_loaded_gpu_and_graph_captures() -> None:
    table = run("cuda", (0, 0), [cell for cell in cells(100) if not cell["late"]], load=True, capture=True)
    assert sum(cell["captures"] for cell in table["cells"]) > 100
    assert [cell["why"] for cell in table["cells"] if cell["captures_broken"]] == []
