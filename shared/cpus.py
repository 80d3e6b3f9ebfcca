"""How many cores this process may really use: the affinity mask and the container's quota, not the machine's count."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cpus(cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores by affinity, cut to the cgroup's CPU quota (v2 `cpu.max`, v1 `cpu.cfs_*`); at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota_v2(cgroup_root / "cpu.max") or _quota_v1(cgroup_root / "cpu")
    return max(1, min(affinity, math.ceil(quota) if quota else affinity))


def _quota_v2(path: Path) -> float | None:
    try:
        quota, period = path.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _quota_v1(directory: Path) -> float | None:
    try:
        quota = int((directory / "cpu.cfs_quota_us").read_text())
        period = int((directory / "cpu.cfs_period_us").read_text())
        return quota / period if quota > 0 else None
    except (OSError, ValueError):
        return None
