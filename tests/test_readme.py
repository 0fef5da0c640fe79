"""README stays short, and what it says about names holds in the code. What all pages must keep: tests/pages."""

from __future__ import annotations

from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def test_it_has_at_most_120_lines_of_120_columns() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 120] == []


def test_every_page_of_the_documentation_can_be_reached_from_it() -> None:
    text = README.read_text()
    docs = README.parent / "docs"
    pages = {path.relative_to(README.parent).as_posix() for path in docs.rglob("*.md")}
    reached = {page for page in pages if f"({page})" in text}
    for index in sorted(page for page in reached if page.endswith("/index.md")):
        own = README.parent / index
        reached |= {
            page
            for page in pages
            if f"({Path(page).name})" in own.read_text() and Path(page).parent == Path(index).parent
        }
    assert pages - reached == set()
