"""Tables of docs/ are what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.pages import generated

PAGES = [path for path in sorted(generated.DOCS.rglob("*.md")) if "<!-- generated: " in path.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_generator_would_change_nothing(page: Path) -> None:
    assert generated.filled(page.read_text(), generated.blocks()) == page.read_text(), "run `python -m tools.pages`"


def test_every_block_is_shown_somewhere() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert [name for name in generated.BLOCKS if f"<!-- generated: {name} -->" not in text] == []


def test_a_bar_in_a_cell_does_not_break_the_row() -> None:
    assert generated.table(["a", "b"], [["x | y", ""]]).splitlines()[-1] == "| x \\| y | - |"
