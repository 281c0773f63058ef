"""Tensors and plain values from a .pt file; no code in it is ever run."""

from __future__ import annotations

import importlib
import pickle
import zipfile
from pathlib import Path
from typing import Any

from coterie.errors import BackendUnavailable, TraceError
from coterie.trace.importers.archives import DAMAGE, member_names

_CONFUSED = (AssertionError, LookupError, TypeError, AttributeError, OverflowError)
"""What torch raises when a damaged file still reads as a pickle, of nonsense."""


def is_torch_file(path: Path) -> bool:
    """Whether it is what `torch.save` writes, or begins or calls itself so."""
    if not path.is_file():
        return False
    names = member_names(path)
    return any(name.endswith("data.pkl") for name in names) or (not names and path.suffix in (".pt", ".pth"))


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
    except (*DAMAGE, *_CONFUSED) as error:
        reason = str(error).partition("\n")[0]
        raise TraceError(f"{path.name} is truncated or no .pt file ({reason}); copy or record it again") from error
