"""A process that takes its place: all of its threads, the one that launches steps apart, library threads bounded.

In processes of their own, because a mask that was set stays.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

needs_two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU leaves nothing to choose")
ENGINE = """
    import threading
    from tritandem.engine.service import CORE_THREAD
    from tritandem.placement import Plan, Share, COMPONENTS
    from tritandem.triton_io.plugs.placing import place_engine

    first, second = sorted(os.sched_getaffinity(0))[:2]
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait, name=name) for name in (CORE_THREAD, "engine-stream")]
    for thread in threads:
        thread.start()
    shares = dict.fromkeys(COMPONENTS, Share(frozenset({first}), 1))
    shares["engine_host"] = Share(frozenset({second}), 1)
    place_engine(Plan(shares, frozenset({first, second}), "test"), CORE_THREAD)
    late = threading.Thread(target=stop.wait, name="late")
    late.start()
    masks = {thread.name: sorted(os.sched_getaffinity(thread.native_id)) for thread in threading.enumerate()}
    stop.set()
    print(json.dumps([first, second, masks]))
"""
HELPER = """
    os.environ["RAYON_NUM_THREADS"] = "5"
    from tritandem.config import Config, placement_from_words
    from tritandem.triton_io.plugs.placing import place_process

    cpu = max(os.sched_getaffinity(0))
    place_process("tokenizer", Config(placement=placement_from_words(f"tokenizer={cpu}")))
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
    print(json.dumps([cpu, sorted(os.sched_getaffinity(0)), [os.environ[name] for name in names]]))
"""
FORBIDDEN = """
    from tritandem.placement import affinity

    def refuse(thread, cpus):
        raise PermissionError(1, "Operation not permitted")

    affinity.os.sched_setaffinity = refuse
    print(json.dumps(affinity.settle({max(os.sched_getaffinity(0)) + 1})))
"""


def run(code: str) -> Any:
    """What `code` printed as JSON."""
    words = [sys.executable, "-c", "import json, os\n" + textwrap.dedent(code)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_two_cpus
def test_the_launching_thread_gets_a_place_of_its_own() -> None:
    first, second, masks = run(ENGINE)
    assert masks == {"MainThread": [first], "engine-stream": [first], "engine-core": [second], "late": [first]}


def test_a_process_settles_with_its_library_threads_before_they_are_loaded() -> None:
    cpu, mask, variables = run(HELPER)
    assert mask == [cpu]
    assert variables == ["1", "1", "5"]  # what the operator had set stays


def test_a_sandbox_that_forbids_pinning_is_told_and_survived() -> None:
    assert "cannot be pinned to CPUs" in run(FORBIDDEN)
