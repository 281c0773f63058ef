"""The vLLM environment's lock holds packages by version alone."""

from __future__ import annotations

import re
from pathlib import Path

LOCK = Path(__file__).with_name("constraints-vllm.txt")


def test_the_lock_names_nothing_of_a_machine() -> None:
    lines = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) > 100
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._+]+( ;.*)?", line)] == []
