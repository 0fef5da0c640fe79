"""A hook of mkdocs: the repository's own pages, wherever they lie, make one site.

Links are written as they work in the repository. A page outside of docs/ keeps its path in the site, README.md is its
first page. A link to a file that is no page becomes plain text; one to a file that does not exist fails the build.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = ("README.md", "*/README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
PICTURES = ("docker/grafana/dashboard.png", "bench/core_sweep.png")
# Code, in which nothing is a link, or a link within the repository.
_LINK = re.compile(
    r"^```.*?^```$|`[^`\n]+`|(?P<mark>!?)\[(?P<text>(?:[^]\n]|\n(?!\n))*)\]\((?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)",
    re.MULTILINE | re.DOTALL,
)
_log = logging.getLogger("mkdocs.links")


def in_site(path: str) -> str:
    """Where the file at `path` of the repository stands in the site."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def in_repository(uri: str) -> str:
    """Where the page `uri` of the site stands in the repository."""
    if (ROOT / "docs" / uri).exists():
        return f"docs/{uri}"
    return "README.md" if uri == "index.md" else uri


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what lies outside of docs/."""
    for pattern in (*OUTSIDE, *PICTURES):
        for path in sorted(ROOT.glob(pattern)):
            own = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, in_site(own), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links of the repository into links of the site."""
    own = page.file.src_uri
    folder = posixpath.dirname(in_repository(own))

    def link(found: re.Match[str]) -> str:
        if found["path"] is None:
            return found[0]
        target = posixpath.normpath(posixpath.join(folder, found["path"]))
        if not (ROOT / target).exists():
            _log.warning("%s: the link to %s leads nowhere", in_repository(own), found["path"])
        uri = in_site(target)
        if files.get_file_from_path(uri) is None:
            return found["text"]
        relative = posixpath.relpath(uri, posixpath.dirname(own) or ".")
        return f"{found['mark']}[{found['text']}]({relative}{found['anchor'] or ''})"

    return _LINK.sub(link, markdown)
