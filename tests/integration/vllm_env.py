"""Makes the environment that the tests of the vLLM plugin run engines in: `vllm_env.py FOLDER`.

vLLM asks for another Transformers than Coterie's models do, so it has an environment of its own: about 2.5 GB. It is
made anew only when constraints-vllm.txt has changed; the plugin is installed from this checkout each time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOCK = HERE / "constraints-vllm.txt"
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")


def make(folder: Path) -> None:
    python, stamp = folder / "bin" / "python", folder / ".engine"
    wanted = hashlib.sha256(LOCK.read_bytes()).hexdigest()
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"installing vLLM's CPU build into {folder} (2.5 GB) ...", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        run(python, *PIP, "--no-compile", "-r", LOCK)
        stamp.write_text(wanted)
    run(python, *PIP, "--editable", HERE.parents[1])


def run(python: Path, *arguments: str | Path) -> None:
    subprocess.run([python, *arguments], check=True, env={**os.environ, "PYTHONPATH": ""})


if __name__ == "__main__":
    make(Path(sys.argv[1]).resolve())
