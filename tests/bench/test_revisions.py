"""The benchmark that compares source trees: which tree's sources run, and what its table says."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tritandem_bench.revisions import environment_of, table


def test_an_environment_has_its_trees_sources_first_and_this_ones_libraries(tmp_path: Path) -> None:
    package = tmp_path / "tree" / "backend_src" / "tritandem"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    python = environment_of(tmp_path / "tree", tmp_path / "environment")
    code = "import numpy, tritandem; print(tritandem.__file__)"
    found = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout
    assert Path(found.strip()) == package / "__init__.py"


def test_medians_stand_beside_their_ratios_to_the_first_tree() -> None:
    old = [{"ms": 2.0, "old_only": 1.0}, {"ms": 4.0, "old_only": 1.0}, {"ms": 90.0, "old_only": 1.0}]
    new = [{"ms": 3.0}, {"ms": 1.0}, {"ms": 2.0}]
    [row] = table(["a", "b"], 64, {("a", 64): old, ("b", 64): new})
    assert row == {"streams": 64, "figure": "ms", "medians": [4.0, 2.0], "ratios": [1.0, 0.5]}
