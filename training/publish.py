"""From a trained checkpoint to the folder that ships: evaluated, with a model card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from training.card import model_card
from training.quality import evaluate

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def publish(moe: Path, dense: Path, into: Path) -> None:
    """Evaluate both checkpoints as they are on disk and write `into`; `evaluation.json` stays beside each."""
    figures = {folder: evaluated(folder) for folder in (moe, dense)}
    config = json.loads((moe / "config.json").read_text())
    training = json.loads((moe / "training.json").read_text())
    card = model_card(config, figures[moe], figures[dense], training)
    into.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(moe / name, into / name)
    forget_origin(into / "tokenizer_config.json")
    (into / "README.md").write_text(card)


def forget_origin(path: Path) -> None:
    """Drop from a tokenizer's configuration how it was loaded before it was saved."""
    config = json.loads(path.read_text())
    kept = {key: value for key, value in config.items() if key not in ("is_local", "local_files_only")}
    path.write_text(json.dumps(kept, indent=2) + "\n")


def evaluated(folder: Path) -> dict[str, Any]:
    """What `quality.evaluate` says of a checkpoint, and its sizes; from `evaluation.json` if that is newer."""
    known = folder / "evaluation.json"
    if known.exists() and known.stat().st_mtime > (folder / "model.safetensors").stat().st_mtime:
        return dict(json.loads(known.read_text()))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    figures = evaluate(model, AutoTokenizer.from_pretrained(folder), folder.name)
    figures |= parameter_counts(model)
    known.write_text(json.dumps(figures, indent=1) + "\n")
    return figures


def parameter_counts(model: Any) -> dict[str, int]:
    """All parameters, and those that one token uses; tied embeddings count once."""
    everything = sum(parameter.numel() for parameter in model.parameters())
    blocks = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    experts = sum(parameter.numel() for block in blocks for parameter in block.experts.parameters())
    unused = 1 - model.config.num_experts_per_tok / blocks[0].gate.num_experts if blocks else 0.0
    return {"parameters": everything, "active_parameters": everything - round(unused * experts)}
