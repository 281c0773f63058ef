"""Joining a group: what a launcher must say, and what a missing or alien group looks like."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from coterie.errors import ConfigError, RankError

pytest.importorskip("torch")
pytestmark = pytest.mark.needs("transformers")  # the extra that brings torch
VARIABLES = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def listening() -> Iterator[int]:
    """A port that something else listens on."""
    with socket.socket(socket.AF_INET6) as other:
        other.bind(("::", 0))
        other.listen()
        yield int(other.getsockname()[1])


def launch(rank: int, size: int, port: int) -> Any:
    from coterie.parallel.processes import Launch

    return Launch(rank, size, "127.0.0.1", port, hosted=False, attempt="0")


def test_a_group_of_one(port: int) -> None:
    from coterie.parallel.comms import share
    from coterie.parallel.processes import agreed, joined

    with joined(launch(0, 1, port), 10) as comms:
        assert share(comms, "alone") == ["alone"]
        assert agreed(comms, lambda: 7) == 7
        with pytest.raises(ConfigError, match="no"):
            agreed(comms, lambda: _raise(ConfigError("no")))


def _raise(error: Exception) -> None:
    raise error


def test_a_rank_that_does_not_come_is_named(port: int) -> None:
    from coterie.parallel.processes import joined

    with pytest.raises(RankError, match="ranks 1, 2 are missing after 1 s, of 3"), joined(launch(0, 3, port), 1):
        pass


def test_nobody_listens(port: int) -> None:
    from coterie.parallel.processes import joined

    said = f"rank 1 finds no group at 127.0.0.1:{port} within 1 s"
    with pytest.raises(RankError, match=said), joined(launch(1, 2, port), 1):
        pass


def test_the_port_is_taken(listening: int) -> None:
    from coterie.parallel.processes import joined

    with pytest.raises(ConfigError, match=f"port {listening} is taken"), joined(launch(0, 2, listening), 1):
        pass


def test_a_timeout_that_cannot_be(port: int) -> None:
    from coterie.parallel.processes import ToldByRankZero, joined

    with pytest.raises(ConfigError, match="timeout = 0"), joined(launch(0, 1, port), 0):
        pass
    with pytest.raises(ToldByRankZero, match="timeout = 0"), joined(launch(1, 2, port), 0):
        pass


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"RANK": None}, "RANK is not set: .* torchrun"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
        ({"RANK": "one"}, "invalid literal"),
        ({"RANK": "3"}, "RANK = 3 and WORLD_SIZE = 1"),
    ],
)
def test_what_the_launcher_says(change: dict[str, str | None], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from coterie.parallel.processes import Launch

    for name, value in {**VARIABLES, "MASTER_PORT": "29500", **change}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        Launch.of_environment()


def test_torchrun_keeps_the_meeting_place(monkeypatch: pytest.MonkeyPatch) -> None:
    from coterie.parallel.processes import Launch

    told = {
        **VARIABLES,
        "MASTER_PORT": "29500",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert Launch.of_environment() == Launch(0, 1, "127.0.0.1", 29500, True, "2")
