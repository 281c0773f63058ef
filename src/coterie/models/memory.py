"""How much memory a process may still take."""

from __future__ import annotations

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Bytes of main memory that can be taken without swapping, within the container's limit where there is one."""
    kilobytes = _field(_MEMINFO, "MemAvailable:")
    # without the kernel's table (macOS): all memory, which still refuses what can never fit
    all_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = all_bytes if kilobytes is None else kilobytes * 1024
    try:
        limit = int((_CGROUP / "memory.max").read_text())  # the word "max" where there is none
    except (OSError, ValueError):
        return free
    return max(0, min(free, limit - (_field(_CGROUP / "memory.stat", "anon") or 0)))


def _field(file: Path, name: str) -> int | None:
    """The number in the line of a kernel table that begins with `name`; None without such a line."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    values = [line.split()[1] for line in lines if line.split()[:1] == [name]]
    return int(values[0]) if values else None
