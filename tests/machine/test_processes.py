"""Claims about reading what the kernel knows of a process, its cgroup and the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tritandem.machine.pressure import read_machine
from tritandem.machine.processes import ProcessWatch, cores_of


def test_the_work_of_this_process_is_counted() -> None:
    watch = ProcessWatch()
    before = watch.read()
    begun = time.process_time()
    while time.process_time() - begun < 0.05:  # several of the kernel's clock ticks
        pass
    after = watch.read()
    assert before.cpu_s is not None
    assert after.cpu_s is not None
    assert after.cpu_s > before.cpu_s
    assert after.resident_bytes is not None
    assert after.resident_bytes > 1_000_000
    assert after.cores_allowed == len(os.sched_getaffinity(0))


def test_another_process_is_read_as_well_and_one_that_is_gone_tells_nothing() -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    watch = ProcessWatch(other.pid)
    assert watch.read().cores_allowed == len(os.sched_getaffinity(0))
    other.communicate(b"\n", timeout=60)
    gone = watch.read()
    assert (gone.cpu_s, gone.run_queue_wait_s, gone.resident_bytes, gone.cores_allowed) == (None, None, None, None)


def test_threads_that_were_given_different_cores_count_together() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    pinned, done = threading.Event(), threading.Event()

    def pin() -> None:
        os.sched_setaffinity(threading.get_native_id(), cores[:1])
        pinned.set()
        done.wait()

    thread = threading.Thread(target=pin)
    thread.start()
    pinned.wait()
    try:
        assert ProcessWatch().read().cores_allowed == len(cores)
    finally:
        done.set()
        thread.join()


def write_waits(proc: Path, **waits_ns: int) -> None:
    """/proc/7 with one thread a keyword."""
    shutil.rmtree(proc / "7", ignore_errors=True)
    for thread, wait_ns in waits_ns.items():
        task = proc / "7" / "task" / thread[1:]
        task.mkdir(parents=True)
        (task / "schedstat").write_text(f"123 {wait_ns} 9\n")


def test_what_a_thread_waited_is_kept_when_it_ends(tmp_path: Path) -> None:
    watch = ProcessWatch(7, proc=tmp_path)
    waited: list[float | None] = []
    for waits in ({"t7": 10**9, "t8": 2 * 10**9}, {"t7": 10**9}, {"t7": 10**9, "t8": 10**9}):
        write_waits(tmp_path, **waits)
        waited.append(watch.read().run_queue_wait_s)
    # The last thread has the id of one that ended, and its own wait.
    assert waited == [3.0, 3.0, 4.0]


def test_a_kernel_that_tells_nothing_reads_as_none(tmp_path: Path) -> None:
    assert ProcessWatch(proc=tmp_path).read().run_queue_wait_s is None
    machine = read_machine(tmp_path)
    assert (machine.pressure_s, machine.throttled_s) == (None, None)


def cgroup_of_this_process(tmp_path: Path, line: str) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(f"3:memory:/x\n{line}\n")


def test_pressure_and_throttling_come_from_the_processs_own_cgroup(tmp_path: Path) -> None:
    cgroup_of_this_process(tmp_path, "0::/pod/7")
    folder = tmp_path / "sys/fs/cgroup/pod/7"
    folder.mkdir(parents=True)
    (folder / "cpu.pressure").write_text("some avg10=1.00 avg60=0 avg300=0 total=2500000\nfull avg10=0 total=7\n")
    (folder / "cpu.stat").write_text("usage_usec 9\nnr_throttled 3\nthrottled_usec 1500000\n")
    machine = read_machine(tmp_path)
    assert (machine.pressure_s, machine.throttled_s) == (2.5, 1.5)


def test_throttling_is_found_in_a_cgroup_of_version_1_too(tmp_path: Path) -> None:
    cgroup_of_this_process(tmp_path, "4:cpu,cpuacct:/pod")
    folder = tmp_path / "sys/fs/cgroup/cpu/pod"
    folder.mkdir(parents=True)
    (folder / "cpu.stat").write_text("nr_periods 4\nnr_throttled 2\nthrottled_time 2500000000\n")
    assert read_machine(tmp_path).throttled_s == 2.5


def test_the_cores_of_a_server_are_those_of_its_process_and_its_children_together() -> None:
    cores = sorted(os.sched_getaffinity(0))
    pin = f"import os; os.sched_setaffinity(0, [{cores[0]}]); print(); input()"
    child = subprocess.Popen([sys.executable, "-c", pin], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        assert cores_of(child.pid) == 1.0
        assert cores_of(os.getpid()) == float(len(cores))
    finally:
        child.communicate(b"\n", timeout=60)
    assert cores_of(child.pid) is None


@pytest.mark.parametrize(("written", "cores"), [("50000 100000", 0.5), ("max 100000", None), ("6400000 100000", None)])
@pytest.mark.parametrize("group", ["pod/7", "pod"], ids=["own", "parent"])
def test_a_quota_below_the_cores_counts_instead(tmp_path: Path, group: str, written: str, cores: float | None) -> None:
    cgroup_of_this_process(tmp_path, "0::/pod/7")
    folder = tmp_path / "sys/fs/cgroup" / group
    folder.mkdir(parents=True)
    (folder / "cpu.max").write_text(written + "\n")
    allowed = float(len(os.sched_getaffinity(0)))
    assert cores_of(os.getpid(), tmp_path) == (allowed if cores is None else cores)


def test_a_quota_of_version_1_counts_too(tmp_path: Path) -> None:
    cgroup_of_this_process(tmp_path, "4:cpu,cpuacct:/pod")
    folder = tmp_path / "sys/fs/cgroup/cpu/pod"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("50000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert cores_of(os.getpid(), tmp_path) == 0.5
