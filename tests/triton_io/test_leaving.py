"""A stub ends after its exit handlers, with its interpreter as it was; any other process ends as it would have."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from pathlib import Path
from tritandem.triton_io.stub_2_51 import leaving

if sys.argv[1] == "stub":
    leaving.STUB_NAME = Path("/proc/self/exe").readlink().name
leaving.leave_without_teardown()

import atexit

class TakenApart:
    def __del__(self, say=print):
        say("teardown")

kept = TakenApart()
atexit.register(print, "exit handler")
print("work", end=" ")
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("where", "code", "said"), [("stub", 0, ["work exit handler"]), ("elsewhere", 3, ["work exit handler", "teardown"])]
)
def test_only_a_stub_leaves_its_interpreter_standing(where: str, code: int, said: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, where], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (code, said, "")
