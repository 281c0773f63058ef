"""`coterie pack` ended by Ctrl-C and by a disk that is really full: what it says, and that it goes on from there."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie.checkpoint.expert_store import open_store
from coterie.cli.main import main

pytestmark = pytest.mark.needs("transformers")

_INTERRUPTED = """
import os, signal, sys
from contextlib import contextmanager
import coterie.cli.main, coterie.cli.pack
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
@contextmanager
def progress():
    def listen(what, done, total):
        if done >= 5 * total // 24:
            os.kill(os.getpid(), signal.SIGINT)
    yield listen
coterie.cli.pack.progress = progress
coterie.cli.main.main()
"""
_FULL = """
import resource, sys
import coterie.cli.main
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
coterie.cli.main.main()
"""


def _run(script: str, *words: Any) -> tuple[int, str]:
    path = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", script, *map(str, words)]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert ended.stdout == ""
    return ended.returncode, ended.stderr


def test_ctrl_c_says_what_to_type_and_that_goes_on(tiny_checkpoint: Any, tmp_path: Path) -> None:
    model, out = tiny_checkpoint("mixtral"), tmp_path / "my store"
    code, err = _run(_INTERRUPTED, "pack", model, "--out", out)
    command = shlex.join(["coterie", "pack", str(model), "--out", str(out)])
    assert (code, err) == (
        130, f"coterie: error: interrupted; {out} holds 5 of 24 experts; to go on from there: {command}\n"
    )  # fmt: skip
    assert coterie.pack(model, out).resumed == 5
    open_store(out)


def test_ctrl_c_before_anything_is_written(
    tiny_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("coterie.models.pack.read_headers", interrupt)
    monkeypatch.setattr("sys.argv", ["coterie", "pack", str(tiny_checkpoint("mixtral")), "--out", str(tmp_path / "s")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "coterie: error: interrupted; nothing was written\n"
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_ends_in_one_line_and_is_taken_up_again(tiny_checkpoint: Any, tmp_path: Path) -> None:
    """The kernel lets no file of the process grow beyond 200,000 bytes: nine experts fit."""
    folder, out = tiny_checkpoint("mixtral"), tmp_path / "store"
    code, err = _run(_FULL, "pack", folder, "--out", out)
    assert code == 2
    assert len(err.splitlines()) == 1
    assert f"cannot write {out}: File too large;" in err
    packed = int(err.split("File too large; ")[1].split(" of 24 experts are packed")[0])
    assert packed * 20_480 <= 200_000 < (packed + 1) * 20_480
    assert "free some space and run the same command again to continue" in err
    assert coterie.pack(folder, out).resumed == packed
    open_store(out)


def test_eight_bits_are_asked_for_by_name(
    tiny_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(bits: int) -> tuple[Any, str, str]:
        words = ["coterie", "pack", str(tiny_checkpoint("mixtral")), "--out", str(tmp_path / f"{bits}"), "--json"]
        monkeypatch.setattr(sys, "argv", [*words, "--bits", str(bits)])
        with pytest.raises(SystemExit) as stopped:
            main()
        return stopped.value.code, *capsys.readouterr()

    code, out, _ = run(8)
    assert code == 0
    assert '"dtype": "I8"' in out
    code, out, err = run(3)
    assert (code, out) == (2, "")
    assert "experts in 3 bits are not supported" in err
    assert not (tmp_path / "3").exists()
