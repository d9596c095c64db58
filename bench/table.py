"""Writes the tables of `results/*.json` into README.md, between its two markers: ``python -m bench.table``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.report import HERE, Row, cells

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def section(name: str, result: dict[str, Any]) -> str:
    """One result file as Markdown: where and with what it was measured, then its rows."""
    machine = result["hardware"]
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    packages = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    lines = [
        f"### {name}",
        "",
        f"{machine['cpu']}, {machine['cores']} cores; {gpus}. Commit {result['commit']}; {packages}.",
        "",
        "| row | unit | streamrt | peer | ratio | goal | holds |",
        "|---|---|---:|---:|---:|---|---|",
    ]
    lines += ["| " + " | ".join(cells(Row(**row))) + " |" for row in result["rows"]]
    return "\n".join(lines)


def main(folder: Path = HERE) -> int:
    """Rewrites the README of `folder`; returns 1 when the markers are missing."""
    readme = folder / "README.md"
    text = readme.read_text()
    if BEGIN not in text or END not in text:
        print(f"{readme} lacks the markers {BEGIN} and {END}", file=sys.stderr)
        return 1
    results = sorted((folder / "results").glob("*.json"))
    sections = [section(path.stem, json.loads(path.read_text())) for path in results]
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    readme.write_text(before + BEGIN + "\n\n" + "\n\n".join(sections) + "\n\n" + END + after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
