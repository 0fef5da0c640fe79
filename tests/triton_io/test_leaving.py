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


BREAKING = """
import threading, time
from tritandem.triton_io.stub_2_51 import leaving

asked = []
def taken():
    asked.append(1)
    return len(asked) > 3

leaving.SENDING_S = 0.0
leaving.leave_broken(taken)
print("goes on", flush=True)
threading.Event().wait(60)
"""


def test_the_process_of_a_broken_engine_ends_by_itself_once_its_last_messages_are_taken() -> None:
    done = subprocess.run([sys.executable, "-c", BREAKING], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (1, ["goes on"], "")
