"""An emulated network is there while the block runs and gone afterwards; needs root and iproute2."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from coterie.bench.parallel import network as module
from coterie.bench.parallel.network import PREFIX, Network, Rates, network, remove_leftovers, unavailable
from coterie.errors import BackendUnavailable, ConfigError
from coterie.topology import Topology

SEND = """
import socket, sys
rank, port, mine, other = int(sys.argv[1]), 29777, sys.argv[2], sys.argv[3]
if rank == 0:
    server = socket.create_server((mine, port))
    print("up", flush=True)
    peer, _ = server.accept()
    got = 0
    while data := peer.recv(65536):
        got += len(data)
    print(got, flush=True)
else:
    socket.create_connection((other, port)).sendall(bytes(200_000))
"""


def ours() -> list[str]:
    """What there is with our prefix."""
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    return [name for name in (*spaces, *os.listdir("/sys/class/net")) if name.startswith(PREFIX)]


@pytest.fixture
def namespaces() -> None:
    """Skip where they cannot be made, or a benchmark that runs would be disturbed."""
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    try:
        with network(Topology(1, 1)):
            pass
    except (BackendUnavailable, ConfigError) as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("namespaces")
def test_a_network_that_carries_counts_and_goes_away() -> None:
    """One test, since only one network can be at a time."""
    with network(Topology(2, 1)) as made, tempfile.TemporaryFile("w+") as errors:
        made.shape(Rates(5e6, 2e6))
        made.shape(Rates(50e6, None))  # again, otherwise
        sent, up = made.sent_bytes(), made.uplink_bytes()
        processes = []
        for rank in range(2):
            command = [sys.executable, "-c", SEND, f"{rank}", made.address(rank), made.address(1 - rank)]
            processes.append(made.start(rank, command, os.environ, errors))
            if rank == 0:
                assert processes[0].stdout is not None
                assert processes[0].stdout.readline() == "up\n"
        assert [process.communicate(timeout=60)[0] for process in processes] == ["200000\n", ""]
        assert 200_000 < made.sent_bytes()[1] - sent[1] < 230_000
        assert 200_000 < made.uplink_bytes()[1] - up[1] < 230_000
        assert made.sent_bytes()[0] - sent[0] < 30_000  # acknowledgements
        with pytest.raises(ConfigError, match="another parallel benchmark runs"), network(Topology(1, 2)):
            pass
    assert ours() == []
    with pytest.raises(KeyboardInterrupt), network(Topology(1, 2)):
        raise KeyboardInterrupt
    assert ours() == []
    with network(Topology(1, 2)):
        remove_leftovers()
        Network(Topology(1, 3)).build()  # more than this block made: as if an earlier run had been killed
        assert len(ours()) > 3
    assert ours() == []


def test_without_root_or_tools_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert unavailable() == "it makes network namespaces, which needs root"
    with pytest.raises(BackendUnavailable, match="needs root"), network(Topology(1, 2)):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(module.shutil, "which", lambda name: None if name == "tc" else f"/sbin/{name}")
    assert "needs tc (Debian: apt-get install iproute2)" in (unavailable() or "")


def test_more_nodes_than_two_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "unavailable", lambda: None)
    with pytest.raises(ConfigError, match="at most 2 nodes"), network(Topology(3, 2)):
        pass


def test_the_verb_says_why_it_was_skipped(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from coterie.cli.main import main

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for arguments, said in (([], "skipped: it makes"), (["--json"], '{"skipped": "it makes')):
        monkeypatch.setattr(sys, "argv", ["coterie", "bench", "parallel", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 0
        assert capsys.readouterr().out.startswith(said)
