"""A link that leads nowhere fails the build of the documentation; links of the repository become links of the site."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
ROOT = Path(__file__).resolve().parents[2]


def build(folder: Path, page: str) -> subprocess.CompletedProcess[str]:
    """With the project's own settings and hook, a README and `page` as docs/page.md."""
    settings = (ROOT / "mkdocs.yml").read_text()
    (folder / "mkdocs.yml").write_text(settings[: settings.index("nav:")] + "nav: [index.md, page.md]\n")
    (folder / "tools" / "pages").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "pages" / "site.py", folder / "tools" / "pages")
    (folder / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "tables.css", folder / "docs")
    (folder / "README.md").write_text("# Start\n\n[the\npage](docs/page.md#part)\n")
    (folder / "docs" / "page.md").write_text(f"# Page\n\n## Part\n\n{page}\n")
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build"], cwd=folder, capture_output=True, text=True, timeout=120
    )


def test_pages_are_linked_and_source_files_are_named(tmp_path: Path) -> None:
    page = "[`home`](../README.md#start) [code](../tools/pages/site.py) `[no](link.md)`\n\n```\n[no](link.md)\n```"
    done = build(tmp_path, page)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "build" / "docs" / "page.html").read_text()
    article = text[text.index("<article") : text.index("</article")]
    assert '<a href="index.html#start"><code>home</code></a> code <code>[no](link.md)</code>' in article
    assert '<a href="page.html#part">' in (tmp_path / "build" / "docs" / "index.html").read_text()
    fetched = re.findall(r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="(https?:[^"]*)', text)
    assert fetched == []


def test_links_that_lead_nowhere_fail_the_build(tmp_path: Path) -> None:
    done = build(tmp_path, "[a](nothing.md) [b](../tools/nothing.py) [c](../README.md#nothing) [d](#nowhere)")
    assert done.returncode != 0
    assert "docs/page.md: the link to nothing.md leads nowhere" in done.stderr
    assert "docs/page.md: the link to ../tools/nothing.py leads nowhere" in done.stderr
    assert "'index.md#nothing', but the doc 'index.md' does not contain an anchor" in done.stderr
    assert "'#nowhere', but there is no such anchor" in done.stderr
