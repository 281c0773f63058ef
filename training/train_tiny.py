"""Train the small models that ship with Coterie, from the texts in training/text; run it from the repository's root.

    python -m training.train_tiny train tiny-mixtral --minutes 60
    python -m training.train_tiny train tiny-mixtral-dense --like tiny-mixtral   # as many tokens
    python -m training.train_tiny publish tiny-mixtral                           # evaluate both, write the model card
    python -m training.train_tiny all --minutes 60                               # the three of them for both MoEs

A training that was interrupted resumes when it is started again. Trainings of different models may run side by side,
one a core: set OMP_NUM_THREADS=1. MALLOC_MMAP_MAX_=0 and MALLOC_TRIM_THRESHOLD_=8589934592 keep glibc from
returning memory after every step, which costs a tenth of the time.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from training.models import MOE_NAMES, NAMES, build
from training.schedule import Budget
from training.settings import Settings

ROOT = Path(__file__).parents[1]
WORK = ROOT / "training/work"
MODELS = ROOT / "src/coterie/data/models"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=WORK, help="checkpoints and logs (default: training/work)")
    verbs = parser.add_subparsers(dest="verb", required=True)

    verb = verbs.add_parser("train", help="train one model, or resume")
    verb.add_argument("name", choices=NAMES)
    length = verb.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float)
    length.add_argument("--tokens", type=int)
    length.add_argument("--like", choices=NAMES, help="as many tokens as this one was trained on")
    for setting in fields(Settings):
        if isinstance(setting.default, int | float):
            verb.add_argument(f"--{setting.name.replace('_', '-')}", type=type(setting.default))
    verb.set_defaults(run=lambda given: train_one(given.work, given.name, budget(given), settings(given)))

    verb = verbs.add_parser("evaluate", help="measure one model on the held-out texts: WORK/NAME/evaluation.json")
    verb.add_argument("name", choices=NAMES)
    verb.set_defaults(run=lambda given: evaluate_one(given.work, given.name))

    verb = verbs.add_parser("publish", help="evaluate a MoE and its dense model, write its folder and model card")
    verb.add_argument("name", choices=MOE_NAMES)
    verb.add_argument("--into", type=Path, default=MODELS, help="default: src/coterie/data/models")
    verb.set_defaults(run=lambda given: publish_one(given.work, given.name, given.into))

    verb = verbs.add_parser("all", help="train and publish both MoEs, one after the other")
    verb.add_argument("--minutes", type=float, required=True, help="for each MoE; the dense models come on top")
    verb.add_argument("--into", type=Path, default=MODELS, help="default: src/coterie/data/models")
    verb.set_defaults(run=train_all)

    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    given.run(given)


def train_all(given: argparse.Namespace) -> None:
    """Every model that is needed to publish both MoEs."""
    for name in MOE_NAMES:
        train_one(given.work, name, Budget(minutes=given.minutes), Settings.of(name))
        dense = f"{name}-dense"
        train_one(given.work, dense, Budget(tokens=trained_tokens(given.work, name)), Settings.of(dense))
        publish_one(given.work, name, given.into)


def train_one(work: Path, name: str, length: Budget, settings: Settings) -> None:
    """Train a model within its budget and save it as a Transformers checkpoint in work/name."""
    import torch

    from training import fast_attention, fast_experts
    from training.loop import train
    from training.vocabulary import tokenizer, training_tokens

    fast_attention.register()
    fast_experts.register()
    tok = tokenizer(work / "tokenizer")
    tokens_by_domain = training_tokens(tok, work / "tokens.npz")
    folder = work / name
    folder.mkdir(exist_ok=True)
    torch.manual_seed(settings.seed)
    special_ids = {"bos_token_id": tok.bos_token_id, "eos_token_id": tok.eos_token_id, "pad_token_id": tok.pad_token_id}
    model: Any = build(name, len(tok), special_ids)
    model.set_attn_implementation(fast_attention.NAME)
    if name in MOE_NAMES:
        model.set_experts_implementation(fast_experts.NAME)
        model.config.router_aux_loss_coef = settings.balance
    position = train(model, tokens_by_domain, length, settings, folder)
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    facts = {
        "position": asdict(position),
        "settings": asdict(settings),
        "corpus_tokens": sum(map(len, tokens_by_domain.values())),
    }
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n")


def evaluate_one(work: Path, name: str) -> None:
    """Measure a trained model on the held-out texts."""
    from training.publish import evaluated

    evaluated(work / name)


def publish_one(work: Path, name: str, into: Path) -> None:
    """Evaluate work/name and its dense model, and put the MoE with its card into `into`/name."""
    from training.publish import publish

    publish(work / name, work / f"{name}-dense", into / name)


def settings(given: argparse.Namespace) -> Settings:
    """The model's settings, changed by what the command line names."""
    named = {field.name: getattr(given, field.name, None) for field in fields(Settings)}
    return replace(Settings.of(given.name), **{key: value for key, value in named.items() if value is not None})


def budget(given: argparse.Namespace) -> Budget:
    """Minutes, tokens, or the tokens of another training."""
    tokens = given.tokens if given.like is None else trained_tokens(given.work, given.like)
    return Budget(given.minutes, tokens)


def trained_tokens(work: Path, name: str) -> int:
    """Tokens that a finished training saw."""
    return int(json.loads((work / name / "training.json").read_text())["position"]["tokens"])


if __name__ == "__main__":
    main()
