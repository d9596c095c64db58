"""``python -m bench.litmus``: runs the parts, prints and saves the table.  See `bench.litmus`."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.litmus import cells, drive, product
from bench.report import Row, commit, hardware, show, versions
from bench.rpc import device_count
from streamrt.errors import UnavailableError

PARTS = ("words", "cells", "streams", "death")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.litmus", description="Does order hold between processes?")
    parser.add_argument("--json", metavar="FILE", help="where the result goes; written as it grows")
    parser.add_argument("--devices", help="producer and consumer, by default '0,1'; one number: both on it")
    parser.add_argument("--rounds", type=int, help="rounds a cell (default 100000, on one GPU 20000)")
    parser.add_argument("--quick", action="store_true", help="a shake-down: few rounds of everything")
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--product", action="store_true", help="the calls of the product itself, in place of the parts")
    parser.add_argument("--backend", choices=("host", "cuda"), default="cuda", help="with --product: which devices")
    parser.add_argument("--load", action="store_true", help="with --product: a third process loads the reader's device")
    parser.add_argument("--capture", action="store_true", help="with --product: a thread of the caller captures graphs")
    args = parser.parse_args()
    if not args.product and (args.backend == "host" or args.load or args.capture):
        parser.error("--backend, --load and --capture are options of --product")
    if args.capture and args.backend == "host":
        parser.error("--capture needs --backend cuda: virtual devices have no graphs")
    if args.devices is None:
        try:
            alone = args.product and args.backend == "cuda" and device_count() < 2
        except UnavailableError as error:
            parser.error(f"{error}; or give --backend host")
        args.devices = "0,0" if alone else "0,1"
    return args


def rows_of(table: dict[str, Any], pair: str) -> list[Row]:
    """One row for each statement; 0 is the goal of all but the calibrations, which must fail."""
    rows: list[Row] = []

    def count(name: str, found: float | None, wanted: bool = False) -> None:
        goal, holds = ("> 0", bool(found)) if wanted else ("0", found == 0)
        rows.append(Row(f"{pair} {name}", "count", found, goal=goal, holds=None if found is None else holds))

    for part in ("cells", "words"):
        for cell in table.get(part, {}).get("cells", []):
            how = f"{cell['producer']}, {cell['reader']}, {cell['order']} order"
            if part == "words":
                how = f"{cell['bits']}-bit word from {cell['start']:#x}: {how}"
            name = "signal first (calibration)" if cell["late"] else f"x {cell['rounds']}"
            count(f"{how}, {name}: stale rounds", cell.get("stale_rounds"), bool(cell["late"]))
    for cell in table.get("product", {}).get("cells", []):
        how = f"{cell['direction']}, {cell['producer']}, {cell['sent']}, {cell['reader']}, {cell['size']}"
        name = "without its wait (calibration)" if cell["late"] else f"x {cell['rounds']}"
        count(f"{how}, {name}: stale rounds", cell.get("stale_rounds"), bool(cell["late"]))
    captures = [cell for cell in table.get("product", {}).get("cells", []) if "captures" in cell]
    if captures:
        done = sum(cell["captures"] for cell in captures)
        count(f"{done} graphs captured meanwhile: broken captures", sum(cell["captures_broken"] for cell in captures))
    for row in table.get("streams", {}).get("streams", []):
        name = f"64 streams both ways, CUDA_DEVICE_MAX_CONNECTIONS={row['connections']}"
        count(f"{name}: hangs", None if "hang" not in row else int(bool(row["hang"])))
        count(f"{name}: stale rounds", sum(s["stale_rounds"] for s in row["sides"]) if "sides" in row else None)
        for blocked in row.get("wait_before_signal", []):
            stuck = int(blocked["blocked_s"] > 1.5)  # until the store, two seconds later
            count(f"{name}, wait before signal, {blocked['call']} (calibration): blocked", stuck, True)
    deaths = table.get("death", {}).get("deaths", [])
    for gate, inside in sorted({(row["gate"], row["inside"]) for row in deaths}):
        of = [row for row in deaths if (row["gate"], row["inside"]) == (gate, inside)]
        bad = sum(not row.get("holds") for row in of)
        count(f"producer killed behind a {gate}, survivor in {inside}, {len(of)} runs: failures", bad)
    if "stop" in table.get("death", {}):
        count("producer stopped 10 s, then continued: failures", int(not table["death"]["stop"].get("holds")))
    return rows


def main() -> int:
    """Runs what was asked for; 0 if every row holds."""
    args = arguments()
    chosen = [int(part) for part in args.devices.split(",")]
    devices = (chosen[0], chosen[-1])
    same = devices[0] == devices[1]
    usual = 300 if args.product and args.backend == "host" else 2000 if args.product else 20_000 if same else 100_000
    rounds = args.rounds or (min(usual, 20 if args.product else 200) if args.quick else usual)
    pair = f"{devices[0]}->{devices[1]}"
    table: dict[str, Any] = {"pair": pair, "same_gpu": same}
    rows: list[Row] = []

    def save() -> None:
        rows[:] = rows_of(table, pair)
        if args.json:
            head = {"hardware": hardware_once, "versions": versions_once, "commit": commit_once}
            content = {**head, "rows": [asdict(row) for row in rows], "cells": table}
            Path(args.json).parent.mkdir(parents=True, exist_ok=True)
            Path(args.json).write_text(json.dumps(content, indent=1) + "\n")

    hardware_once, versions_once, commit_once = hardware(), versions(), commit()
    actions = {
        "words": lambda of: drive.run_cells(
            devices, of, save, lambda wide: cells.wraps(100 if args.quick else 400, wide)
        ),
        "cells": lambda of: drive.run_cells(
            devices, of, save, lambda _: cells.plan(rounds, 20 if args.quick else 50, same)
        ),
        "streams": lambda of: drive.run_streams(devices, (10 if args.quick else 100) * (1 if same else 3), of, save),
        "death": lambda of: drive.run_deaths(devices, 4 if args.quick else 16, of, save),
        "product": lambda of: product.run(
            args.backend,
            devices,
            product.plan(rounds, 3 if args.quick else 20),
            of,
            save,
            load=args.load,
            capture=args.capture,
        ),
    }
    chosen_parts = ("product",) if args.product else PARTS if args.part == "all" else (args.part,)
    for part in chosen_parts:
        start = time.monotonic()
        of = table.setdefault(part, {})
        try:
            actions[part](of)
        except Exception:  # the other parts are still worth their run; the traceback goes into the result
            of["error"] = traceback.format_exc()
            print(of["error"], file=sys.stderr, flush=True)
        of["seconds"] = round(time.monotonic() - start, 1)
        print(f"{part}: {of['seconds']} s", flush=True)
        save()
    show(f"litmus {pair}", rows)
    errors = [part for part in chosen_parts if "error" in table.get(part, {})]
    for cell in table.get("product", {}).get("cells", []):
        if "error" in cell:
            print(cell["error"], file=sys.stderr)
    return 0 if rows and all(row.holds for row in rows) and not errors else 1


if __name__ == "__main__":
    sys.exit(main())
