"""Writes the tables of `results/*.json` into README.md, between its two markers: ``python -m bench.table``.

A figure stands in the README only if its file is there: nothing between the markers is written by hand.
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from typing import Any

from bench.report import HERE, Row, cells

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


# In the order of the README, with what the file itself does not say; other files follow by name.
TITLES = {
    "rpc-host": "Calls between two processes, host backend; the peer is torch.distributed.rpc",
    "rpc-cuda": "Calls between two processes, two GPUs (0 -> 1) and one (0 -> 0); the peer is torch.distributed.rpc",
    "rpc-cuda-1gpu": "Calls between two processes on one GPU (0 -> 0); the peer is torch.distributed.rpc",
    "ucx-host": "Calls over UCX, host backend; the peer is UCXX's low-level worker alone, polled",
    "ucx-cuda": "Calls over UCX between GPUs; the peer is UCXX's low-level worker alone, polled",
    "raw-cuda": "The same calls beside torch RPC and two floors, NCCL's send and receive and UCXX's worker, polled; "
    "the peer is in the row's name",
    "agent-host": "One agent: a hundred peers, idle time, the first call, a worker's memory, host backend; the peer is "
    "torch.distributed.rpc",
    "agent-cuda": "One agent: a hundred peers, idle time, the first call, a worker's memory, GPUs; the peer is "
    "torch.distributed.rpc",
    "agent-cuda-1gpu": "One agent: a hundred peers, idle time, the first call, a worker's memory, one GPU; the peer is "
    "torch.distributed.rpc; one round",
    "runtime-host": "Host time of the runtime's operations, host backend: there is no peer",
    "runtime-cuda": "Host time of the runtime's operations, a GPU; the peer is in the row's name",
    "guards-host": "Guards in a torch graph, host backend; the peer waits for each engine's stream",
    "guards-cuda": "Guards in a torch graph, a GPU; the peer waits for each engine's stream",
    "litmus-product": "Stale arrays in the product's own calls",
    "litmus-2gpu": "Data before word, the exporter's GPU is 0 and the importer's 1",
    "litmus-1gpu": "Data before word, both processes on one GPU: GPU 0 of a machine with two, the only one that "
    "CUDA_VISIBLE_DEVICES=0 showed",
}
FOLDED_ROWS = 30  # a longer table opens at a click


def section(name: str, result: dict[str, Any]) -> str:
    """One result file as Markdown: where and with what it was measured, then its rows."""
    machine = result["hardware"]
    gpus = ", ".join(f"{count} x {gpu}" for gpu, count in collections.Counter(machine["gpus"]).items()) or "no GPU"
    visible = machine.get("visible")
    shown = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    packages = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    rows = [Row(**row) for row in result["rows"]]
    judged = [row for row in rows if row.goal is not None]
    table = [
        "| row | unit | streamrt | peer | ratio | goal | holds |",
        "|---|---|---:|---:|---:|---|---|",
        *("| " + " | ".join(cells(row)) + " |" for row in rows),
    ]
    if len(rows) > FOLDED_ROWS:
        table = ["<details><summary>all rows</summary>", "", *table, "", "</details>"]
    pace = result.get("pace")
    loop = "" if pace is None else f"; Python's loop {pace['median']} ms ({pace['least']} to {pace['most']})"
    about = (
        f"{name}.json: {machine['cpu']}, {machine['cores']} cores{loop}; {gpus}{shown}. Commit {result['commit']}; "
        f"{packages}. {sum(row.holds is True for row in judged)} of {len(judged)} rows with a goal hold it."
    )
    return "\n".join([f"### {TITLES.get(name, name)}", "", about, "", *table])


def by_title(path: Path) -> tuple[int, str]:
    """The place of a result file in the README."""
    known = list(TITLES)
    return known.index(path.stem) if path.stem in TITLES else len(known), path.stem


def main(folder: Path = HERE) -> int:
    """Rewrites the README of `folder`; returns 1 when the markers are missing."""
    readme = folder / "README.md"
    text = readme.read_text()
    if BEGIN not in text or END not in text:
        print(f"{readme} lacks the markers {BEGIN} and {END}", file=sys.stderr)
        return 1
    results = sorted((folder / "results").glob("*.json"), key=by_title)
    sections = [section(path.stem, json.loads(path.read_text())) for path in results]
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    readme.write_text(before + BEGIN + "\n\n" + "\n\n".join(sections) + "\n\n" + END + after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
