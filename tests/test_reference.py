"""docs/reference.md is what `python docs/reference.py` writes, and its links lead to its headings."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"


def test_it_is_up_to_date() -> None:
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    assert (DOCS / "reference.md").read_text() == reference.text(), "write it again: python docs/reference.py"


def test_its_links_lead_to_headings() -> None:
    text = (DOCS / "reference.md").read_text()
    seen: dict[str, int] = {}
    anchors = []
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        low = heading.lower().replace(".", "")
        seen[low] = seen.get(low, 0) + 1
        anchors.append(low if seen[low] == 1 else f"{low}-{seen[low] - 1}")
    linked = re.findall(r"\]\(#([^)]+)\)", text)
    assert len(linked) == len(set(linked)) > 90
    assert set(linked) <= set(anchors)
