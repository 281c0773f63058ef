"""Free memory: the machine's, or the container's where that is less."""

from __future__ import annotations

import pytest

from coterie.models import memory


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of our own, by its files."""
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)

    def make(available=None, limit=None, anonymous=None):
        if available is not None:
            (tmp_path / "meminfo").write_text(f"MemTotal: 999 kB\nMemFree: 1 kB\nMemAvailable:  {available} kB\n")
        if limit is not None:
            (tmp_path / "memory.max").write_text(f"{limit}\n")
        if anonymous is not None:
            (tmp_path / "memory.stat").write_text(f"anon {anonymous}\nfile 7\nanon_thp 0\n")
        return memory.available_bytes()

    return make


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"available": 50}, 51_200),
        ({"available": 50, "limit": "max", "anonymous": 10}, 51_200),
        ({"available": 50, "limit": 30_000, "anonymous": 10_000}, 20_000),
        ({"available": 50, "limit": 30_000}, 30_000),
        ({"available": 50, "limit": 30_000, "anonymous": 40_000}, 0),
    ],
)
def test_the_lesser_counts(files, expected, machine):
    assert machine(**files) == expected


def test_without_the_kernel_s_table_it_is_all_memory(machine):
    assert machine() > 2**27


def test_this_machine_has_some():
    assert 0 < memory.available_bytes() < 2**50
