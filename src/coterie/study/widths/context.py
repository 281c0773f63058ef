"""What every width study shares: the model, its profile, and two benches: one to choose on, one to measure on."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.calibration.learning import DEFAULT_STEPS, learn_values
from coterie.calibration.profile import profile_model
from coterie.errors import ConfigError
from coterie.evaluate.changes import widths
from coterie.models.load import load_model, load_tokenizer, resolve
from coterie.models.reorder import reordered
from coterie.profile.model_profile import ModelProfile
from coterie.progress import Progress, silent
from coterie.pruning.width_planning import plan_widths
from coterie.study.measure import Bench, Measured, window_ids
from coterie.study.widths.uses import Uses, record_uses

if TYPE_CHECKING:
    from coterie.pruning.width_plan import WidthPlan

_SEEDS = 5  # where chance enters
_MOST_CHARACTERS = 60_000  # of a half are cut into windows: tokenizing more takes longer than measuring
_CARD_TOKENS = re.compile(r"\|\s*tokens seen\s*\|\s*([\d.]+) M")


@dataclass(frozen=True)
class StudySize:
    """How much text a study reads.

    Attributes:
        window: tokens of a window.
        profile_characters: at most so many of each text's first half are profiled.
        windows: windows of the second halves to measure on, as evenly over the texts as their lengths allow.
        calibration_windows: windows of the first halves to choose on.
        learning_characters: at most so many of each text's first half are learnt from.
        learning_steps: most steps of learning.
        learning_share: share of each first half that learning may read; where it is less than 1, windows to choose on
            come from the rest, so that a strength is chosen on text that nothing was learnt from.
    """

    window: int
    profile_characters: int
    windows: int
    calibration_windows: int
    learning_characters: int = 60_000
    learning_steps: int = DEFAULT_STEPS
    learning_share: float = 1.0


FULL = StudySize(256, 12_000, 60, 36)
QUICK = StudySize(128, 2_500, 18, 9, 8_000, 40)


@dataclass(frozen=True, eq=False)
class Point:
    """A width plan, measured.

    Attributes:
        bytes: share of full expert bytes per token that was run, over the bench's windows.
        measured: its quality.
    """

    bytes: float
    measured: Measured

    def to_json(self) -> dict[str, Any]:
        """Figures, ready for JSON."""
        return {"bytes": self.bytes, **self.measured.to_json()}


@dataclass(frozen=True, eq=False)
class StudyContext:
    """A model, ready to be studied. What is chosen is chosen on `first`; what is reported is measured on `second`.

    Attributes:
        name: the model's.
        model: in the order of neurons of its checkpoint.
        tokenizer: its tokenizer.
        first: for each text its first half.
        second: for each text its second half, which nothing is chosen on.
        profile: of the first halves, with gradients.
        calibration: a bench on windows of the first halves.
        bench: on windows of the second halves: where everything is measured.
        names: for each window of `bench` its text.
        seeds: for what chance enters.
        size: how much text.
        quick: less of everything.
        facts: about the model, ready for JSON.
        progress: told of every batch.
        learning: where learning is put aside, and taken up again by the next run; None: nowhere.
    """

    name: str
    model: Any
    tokenizer: Any
    first: Mapping[str, str]
    second: Mapping[str, str]
    profile: ModelProfile
    calibration: Bench
    bench: Bench
    names: Sequence[str]
    seeds: tuple[int, ...]
    size: StudySize
    quick: bool
    facts: Mapping[str, Any] = field(default_factory=dict)
    progress: Progress = silent
    learning: Path | None = None

    def evaluate(self, plan: WidthPlan, bench: Bench | None = None, label: str | None = None) -> Point:
        """A plan's bytes and quality.

        Args:
            plan: a plan for the model.
            bench: where; None: on the second halves.
            label: what to call it in progress; None: the plan's policy.
        """
        change = widths(self.model, plan)
        with reordered(self.model, plan.order_LEI):
            measured = (bench or self.bench).measure([change], label or plan.policy)
        return Point(float(change.to_json()["measured"]["share"]), measured)

    @property
    def seed(self) -> int:
        """The first seed, for what needs one only, such as intervals."""
        return self.seeds[0]

    @cached_property
    def dominance_on_calibration(self) -> dict[str, Measured]:
        """The paper's policy on the first halves, by what tells who dominates, the best first."""
        found = {
            name: self.evaluate(plan_widths(self.profile, "crisp", dominance=name), self.calibration, name).measured
            for name in self.profile.dominance
        }
        return dict(sorted(found.items(), key=lambda item: item[1].increase))

    @property
    def dominance(self) -> str:
        """What tells who dominates a combination: the way that serves the paper's policy best on the first halves."""
        return next(iter(self.dominance_on_calibration))

    @cached_property
    def learnt(self) -> ModelProfile:
        """The profile with what was learnt on the first halves."""
        read, _ = _cut(self.first, self.size.learning_share)
        joined, tokens = _joined(self.tokenizer, read, self.size.learning_characters, self.size.window)
        return learn_values(
            self.model, self.tokenizer, joined, self.profile, tokens=tokens, window=self.size.window,
            steps=self.size.learning_steps, seed=self.seed, resume_from=self.learning, progress=self.progress,
        )  # fmt: skip

    @cached_property
    def uses(self) -> Uses:
        """Which combinations the unchanged model uses on the windows of `bench`."""
        return record_uses(self.model, self.bench.ids_WN, progress=self.progress)

    @property
    def subject(self) -> str:
        """A few words that stand beside every figure: which model, and how small."""
        trained = self.facts.get("tokens_trained")
        text = f", trained on {trained / 1e6:.1f} million tokens" if trained else ""
        return f"{self.name}: {_sized(self.facts['parameters'])} parameters{text}"


def make_context(
    model: str,
    *,
    texts: Mapping[str, str],
    quick: bool = False,
    seed: int = 0,
    dtype: str | None = "float32",
    size: StudySize | None = None,
    progress: Progress = silent,
    learning: Path | None = None,
) -> StudyContext:
    """Load a model, profile it on the first half of every text, and run it unchanged on windows of both halves.

    Args:
        model: a folder, a shipped model's name or a hub id.
        texts: the texts by name.
        quick: less text, and one seed in place of five.
        seed: the first of the seeds.
        dtype: to hold the model in; None: the checkpoint's own, whose rounding then adds noise.
        size: how much text; None: `QUICK` or `FULL`.
        progress: told of every batch.
        learning: where learning is put aside; None: nowhere.

    Raises:
        CheckpointError: when there is no such model, or it is not one whose experts can run in part.
        ConfigError: when the texts are too short.
    """
    size = size or (QUICK if quick else FULL)
    tokenizer, loaded = load_tokenizer(model), load_model(model, dtype)
    first, second = _cut(texts, 0.5)
    profile = make_profile(loaded, tokenizer, first, size, seed=seed, progress=progress)
    apart = _cut(first, size.learning_share)[1] if size.learning_share < 1 else first
    calibration_ids, _ = spread_windows(tokenizer, apart, size.window, size.calibration_windows)
    ids, names = spread_windows(tokenizer, second, size.window, size.windows)
    return StudyContext(
        name=profile.spec.model, model=loaded, tokenizer=tokenizer, first=first, second=second, profile=profile,
        calibration=Bench(loaded, calibration_ids, progress=progress),
        bench=Bench(loaded, ids, progress=progress), names=names,
        seeds=tuple(range(seed, seed + (1 if quick else _SEEDS))), size=size, quick=quick,
        facts=_facts(model, loaded, profile), progress=progress, learning=learning,
    )  # fmt: skip


def make_profile(
    model: Any, tokenizer: Any, texts: Mapping[str, str], size: StudySize, *, seed: int = 0,
    update: ModelProfile | None = None, progress: Progress = silent,
) -> ModelProfile:  # fmt: skip
    """A profile of the beginnings of texts, with gradients, on as many whole windows as they fill.

    With `update` the text is added to an earlier profile. Warnings of uncertain tiers are left to the page, which tells
    the estimate.
    """
    joined, tokens = _joined(tokenizer, texts, size.profile_characters, size.window)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*are few for tiers", category=UserWarning)
        return profile_model(
            model, tokenizer, joined, tokens=tokens,
            window=size.window, seed=seed, update=update, progress=progress,
        )  # fmt: skip


def _cut(texts: Mapping[str, str], share: float) -> tuple[dict[str, str], dict[str, str]]:
    """Every text cut in two, at this share of its characters."""
    cuts = {name: int(len(text) * share) for name, text in texts.items()}
    return (
        {name: text[: cuts[name]] for name, text in texts.items()},
        {name: text[cuts[name] :] for name, text in texts.items()},
    )


def _joined(tokenizer: Any, texts: Mapping[str, str], characters: int, window: int) -> tuple[dict[str, str], int]:
    """The beginnings of texts as one, by name, and the tokens in its whole windows."""
    joined = "\n".join(text[:characters] for text in texts.values())
    tokens = len(tokenizer(joined, add_special_tokens=False, verbose=False)["input_ids"])
    whole = (tokens - 1) // window * window
    if whole < 1:
        raise ConfigError(f"the texts have {tokens} tokens, less than a window of {window}; give longer texts")
    return {"first halves of " + ", ".join(texts): joined}, whole


def spread_windows(tokenizer: Any, texts: Mapping[str, str], length: int, count: int) -> tuple[Any, list[str]]:
    """Windows of several texts, from each about the same number, evenly over it.

    Args:
        tokenizer: the model's tokenizer.
        texts: the texts by name; those shorter than a window give none.
        length: tokens of a window.
        count: windows in all; fewer where the texts are short.

    Returns:
        ids [W, length], and for each window its text's name.

    Raises:
        ConfigError: when no text is long enough.
    """
    import torch

    found: dict[str, Any] = {}
    for name, text in texts.items():
        try:
            found[name], _ = window_ids(tokenizer, {name: text[:_MOST_CHARACTERS]}, length, (0.0, 1.0), limit=count)
        except ConfigError:
            continue
    if not found:
        raise ConfigError(f"no text has {length} tokens in its half; give longer texts")
    left, parts, names = count, [], []
    for number, (name, ids_WN) in enumerate(sorted(found.items(), key=lambda item: len(item[1]))):
        share = min(len(ids_WN), -(-left // (len(found) - number)))
        left -= share
        picks = [round(pick) for pick in torch.linspace(0, len(ids_WN) - 1, share).tolist()] if share else []
        parts.append(ids_WN[picks])
        names += [name] * share
    return torch.cat(parts), names


def _facts(given: str, model: Any, profile: ModelProfile) -> dict[str, Any]:
    spec = profile.spec
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {
        "model": spec.model, "parameters": parameters, "tokens_trained": _tokens_trained(resolve(given)),
        "moe_layers": spec.num_layers, "experts": spec.num_experts, "top_k": spec.top_k,
        "neurons_of_an_expert": profile.width, "dtype": str(model.dtype).removeprefix("torch."),
        "identity": profile.identity,
    }  # fmt: skip


def _tokens_trained(folder: Path) -> int | None:
    """What the model's card or its record of training says of the tokens it saw; None where neither does."""
    card, record = folder / "README.md", folder / "training.json"
    if card.is_file() and (found := _CARD_TOKENS.search(card.read_text(encoding="utf-8", errors="replace"))):
        return round(float(found[1]) * 1e6)
    try:
        return int(json.loads(record.read_text(encoding="utf-8"))["position"]["tokens"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _sized(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} billion" if parameters >= 1e9 else f"{parameters / 1e6:.1f} million"
