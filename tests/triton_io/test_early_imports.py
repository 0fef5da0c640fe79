"""What is imported beside torch is there afterwards, and what is missing costs nothing."""

from __future__ import annotations

import sys

from tritandem.triton_io.plugs.early_imports import import_beside

WAIT_S = 20.0


def test_packages_are_imported_on_a_thread_of_their_own_and_missing_ones_are_left() -> None:
    assert "tests.fakes.imported_early" not in sys.modules
    import_beside(["no_such_package", "tests.fakes.imported_early"]).join(WAIT_S)
    assert sys.modules.pop("tests.fakes.imported_early").BY == "early-imports"
