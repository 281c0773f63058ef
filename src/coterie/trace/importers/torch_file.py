"""Tensors and plain values from a .pt file; no code in it is ever run."""

from __future__ import annotations

import importlib
import pickle
import zipfile
from pathlib import Path
from typing import Any

from coterie.errors import BackendUnavailable, TraceError

ZIP_MAGIC = b"PK\x03\x04"


def is_torch_file(path: Path) -> bool:
    """Whether it is what `torch.save` writes, or begins or calls itself so."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("data.pkl") for name in archive.namelist())
    except (OSError, ValueError, zipfile.BadZipFile):
        return path.is_file() and path.suffix in (".pt", ".pth")


def load_torch_file(path: Path) -> Any:
    """What `torch.save` wrote, tensors memory-mapped.

    Raises:
        BackendUnavailable: without torch.
        TraceError: when the file is damaged, compressed, or holds more than tensors and plain values.
    """
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        raise BackendUnavailable(
            f"reading {path.name} needs PyTorch, which is not installed; run: pip install 'coterie[torch]'"
        ) from error
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [info.filename for info in archive.infolist() if info.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise TraceError(f"{path.name} is compressed ({packed[0]}), which torch.save never does; record it again")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise TraceError(
            f"{path.name} holds more than tensors and plain values: refused, since loading it could run code; "
            "use a recording straight from SGLang"
        ) from error
    except (OSError, EOFError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile) as error:
        reason = str(error).partition("\n")[0]
        raise TraceError(f"{path.name} is truncated or no .pt file ({reason}); copy or record it again") from error
