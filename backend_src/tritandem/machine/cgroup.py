"""The control group that this process runs in: its CPU quota, and how long it was held back.

Version 2 and version 1 alike; a quota of a parent holds for the group as well. Below `root` lies the file system of the
machine, or a test's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path("/")


def quota_cores(root: Path = ROOT) -> float | None:
    """The tightest CPU quota of this process's group and its parents, in cores; None without one."""
    quotas: list[float] = []
    for mount, group in _groups(root):
        read = _v2_quota if mount.name == "cgroup" else _v1_quota
        quotas += _quotas(mount, group, read)
    return min(quotas, default=None)


def pressure_s(root: Path = ROOT) -> float | None:
    """Seconds in which some task of the group waited for a core; None where the kernel does not count them."""
    return next((s for _, group in _groups(root) if (s := some_total_s(group / "cpu.pressure")) is not None), None)


def throttled_s(root: Path = ROOT) -> float | None:
    """Seconds for which the quota stopped the group; None where the kernel does not tell."""
    for _, group in _groups(root):
        stat = _stat(group / "cpu.stat")
        for name, per_second in (("throttled_usec", 1e6), ("throttled_time", 1e9)):
            if name in stat:
                return stat[name] / per_second
    return None


def some_total_s(path: Path) -> float | None:
    """Of a file of pressure stall information; None where there is none."""
    try:
        line = next(line for line in path.read_text().splitlines() if line.startswith("some"))
        return int(line.rsplit("total=", 1)[1]) / 1e6
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _groups(root: Path) -> Iterator[tuple[Path, Path]]:
    """(mount, group) of the unified hierarchy and of version 1's hierarchy for the CPU, as far as there are any."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        mount = root / "sys/fs/cgroup" if not controllers else root / "sys/fs/cgroup/cpu"
        if not controllers or "cpu" in controllers.split(","):
            yield mount, mount / path.lstrip("/")


def _quotas(mount: Path, group: Path, read: Callable[[Path], float | None]) -> Iterator[float]:
    """Of the group and every parent up to the mount. Inside a container the group's own path may not exist."""
    for folder in (group, *group.parents):
        if folder != mount and mount not in folder.parents:
            return
        try:
            quota = read(folder)
        except (OSError, ValueError):
            continue
        if quota is not None:
            yield quota


def _v2_quota(folder: Path) -> float | None:
    """cpu.max holds `quota period` in microseconds, or `max period`."""
    quota, period = (folder / "cpu.max").read_text().split()
    return None if quota == "max" else int(quota) / int(period)


def _v1_quota(folder: Path) -> float | None:
    """-1: no limit."""
    quota = int((folder / "cpu.cfs_quota_us").read_text())
    return None if quota < 0 else quota / int((folder / "cpu.cfs_period_us").read_text())


def _stat(path: Path) -> dict[str, int]:
    try:
        return {key: int(value) for key, value in (line.split() for line in path.read_text().splitlines())}
    except (OSError, ValueError):
        return {}
