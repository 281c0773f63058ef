"""The options with which `coterie widths` measures perplexity, and the model and texts that a profile is of."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from coterie.profile.model_profile import ModelProfile
    from coterie.progress import Progress
    from coterie.pruning.width_plan import WidthPlan

_TOKENS = 8192
_SHIPPED = " (shipped)"


@dataclass(frozen=True)
class AllowanceOptions:
    """The options of a perplexity allowance, as they were written."""

    max_increase: str | None
    model: str | None
    text: list[Path]
    domain: list[str]
    tokens: int | None

    @property
    def wanted(self) -> bool:
        """Whether an allowance was asked for."""
        return self.max_increase is not None

    def check(self, other_strength: bool) -> None:
        """Refuse what would be ignored."""
        if self.wanted and other_strength:
            raise ConfigError("--max-ppl-increase finds the strength itself; leave --threshold and --bytes out")
        if not self.wanted:
            given = {"model": self.model, "text": self.text, "domain": self.domain, "tokens": self.tokens}
            for option, value in given.items():
                if value:
                    raise ConfigError(f"--{option} belongs to --max-ppl-increase; give e.g. --max-ppl-increase 1%")

    def plan(self, profile: ModelProfile, plan_of: Callable[[float], WidthPlan], listen: Progress) -> WidthPlan:
        """The plan with the fewest bytes within the allowance."""
        from coterie.evaluate.text import encode_text
        from coterie.evaluate.width_allowance import plan_within
        from coterie.evaluate.windows import choose_window
        from coterie.models.identity import identity_of
        from coterie.models.load import load_model, load_tokenizer
        from coterie.units import parse_fraction

        assert self.max_increase is not None
        allowed = parse_fraction(self.max_increase)
        texts = profiled_texts(profile, self.text, self.domain)
        name = profiled_model(profile, self.model)
        tokenizer, model = load_tokenizer(name), load_model(name)
        if identity_of(model) != profile.identity:
            raise ConfigError(
                f"the profile is of the model {profile.spec.model} with identity {profile.identity}, {name} has "
                f"{identity_of(model)}; profile this model"
            )
        each = max(1, (self.tokens or _TOKENS) // len(texts))
        encoded = [encode_text(tokenizer, title, text, each) for title, text in texts.items()]
        shortest = min(len(text.ids) for text in encoded)
        longest_window, _ = choose_window(model.config, None, None)
        window, stride = choose_window(model.config, min(longest_window, shortest), None)
        return plan_within(model, encoded, plan_of, allowed, window, stride, progress=listen)


def profiled_model(profile: ModelProfile, given: str | None) -> str:
    """The model as it was given, or the one that the profile names."""
    from coterie.models.load import resolve

    if given is not None:
        return given
    try:
        resolve(profile.spec.model)
    except CheckpointError:
        raise ConfigError(
            f"the profile names its model {profile.spec.model!r}, which is no folder here and no shipped model; "
            "say where it is with --model"
        ) from None
    return profile.spec.model


def profiled_texts(profile: ModelProfile, files: list[Path], domains: list[str]) -> dict[str, str]:
    """The texts asked for, or those that were profiled, by name."""
    from coterie import data
    from coterie.evaluate.text import read_text_file

    if files or domains:
        return {**{name: data.text(name) for name in domains}, **{str(file): read_text_file(file) for file in files}}
    sources = profile.provenance.get("texts")
    if not sources:
        raise ConfigError("the profile does not say on which text it was made; give --text FILE or --domain NAME")
    return {source["name"]: _profiled(source) for source in sources}


def _profiled(source: dict[str, Any]) -> str:
    """A text that was profiled, unchanged."""
    from coterie import data
    from coterie.evaluate.text import read_text_file

    name = str(source["name"])
    shipped = name.removesuffix(_SHIPPED)
    text = data.text(shipped) if name.endswith(_SHIPPED) else read_text_file(Path(name))
    if hashlib.sha256(text.encode()).hexdigest()[:16] != source.get("sha256"):
        raise ConfigError(f"text {name} is not the one that was profiled; give --text FILE or --domain NAME")
    return text
