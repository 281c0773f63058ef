"""What `coterie generate` continues, and the line that comes of each prompt."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from coterie.errors import ConfigError

if TYPE_CHECKING:
    from coterie.models.completions import Completion, Sampling
    from coterie.models.prompts import Prompt


def asked_for(prompt: str | None, prompts: Path | None, out: Path | None, as_json: bool) -> list[Prompt]:
    """What to continue: one prompt, or a file of them.

    Raises:
        ConfigError: when the options do not go together, or the file cannot be read as prompts.
    """
    from coterie.models.prompts import Prompt, read_prompts

    if (prompt is None) == (prompts is None):
        given = "neither --prompt nor" if prompt is None else "both --prompt and"
        raise ConfigError(f"{given} --prompts are given; give one")
    if prompts is None:
        if out is not None:
            raise ConfigError("--out takes the results of --prompts; with --prompt the text goes to stdout")
        return [Prompt(0, "--prompt", prompt)]
    if as_json and out is None:
        raise ConfigError(
            "--json prints one object, and the results of --prompts are one each; send them to --out FILE"
        )
    return read_prompts(prompts)


def tokens_of(store: Path, asked: Sequence[Prompt], sampling: Sampling) -> tuple[Any, list[list[int]]]:
    """The store's tokenizer, and every prompt's tokens: all of them are checked before the work.

    Raises:
        ConfigError: naming the prompt that is too long, or empty.
    """
    from coterie.checkpoint.expert_store import open_store
    from coterie.models.completions import require_positions
    from coterie.models.load import load_config, load_tokenizer

    folder = open_store(store).skeleton
    tokenizer, config = load_tokenizer(folder), load_config(folder)
    ids = [each.tokens(tokenizer) for each in asked]
    for each, tokens in zip(asked, ids, strict=True):
        require_positions(config.get_text_config(), len(tokens), sampling, each.source)
    return tokenizer, ids


def require_skips(store: Path, factor: float | None) -> None:
    """Refuse an F of `--skip-misses` that would skip every expert: a token's normalised weights are at most 1.

    Raises:
        ConfigError: when F / K is 1 or more.
    """
    from coterie.checkpoint.expert_store import open_store

    if factor is None:
        return
    top_k = open_store(store).header.spec.top_k
    if factor >= top_k:
        raise ConfigError(
            f"--skip-misses {factor:g} skips every expert that misses, since none weighs more than 1 and F/K is "
            f"{factor / top_k:g}; choose F below K = {top_k}, e.g. 0.75"
        )


def sink_of(files: ExitStack, prompts: Path | None, out: Path | None) -> TextIO | None:
    """Where result lines go, None for a single prompt; a file appears when `files` ends well.

    Raises:
        ConfigError: when the file cannot be written.
    """
    from coterie.files import replacing

    if prompts is None:
        return None
    if out is None:
        return sys.stdout
    return files.enter_context(files.enter_context(replacing(out)).open("w", encoding="utf-8"))


def continue_all(
    model: Any, tokenizer: Any, asked: Sequence[Prompt], ids: list[list[int]], sampling: Sampling, batch: int,
    sink: TextIO | None,
) -> tuple[str, dict[str, Any]]:  # fmt: skip
    """The last prompt with its continuation, and figures of all; a line for each goes to the sink."""
    from coterie.models.completions import complete

    started, done, counted, text = time.perf_counter(), 0, 0, ""
    for completions in complete(model, tokenizer, ids, sampling, batch):
        for each in completions:
            own = ids[done]
            text = tokenizer.decode([*own, *each.ids], skip_special_tokens=True)
            if sink is not None:
                sink.write(_line(asked[done], own, each))
            done, counted = done + 1, counted + len(each.ids)
        if sink is not None:
            sink.flush()
    seconds = time.perf_counter() - started
    return text, {
        "prompts": done, "prompt_tokens": sum(map(len, ids)), "tokens": counted, "seconds": seconds,
        "tokens_per_s": counted / seconds, **model.stats().to_json(),
    }  # fmt: skip


def _line(source: Prompt, own: Sequence[int], each: Completion) -> str:
    line = {
        "id": source.id, "text": each.text, "prompt_tokens": len(own), "tokens": len(each.ids), "finish": each.finish,
    }  # fmt: skip
    return json.dumps(line) + "\n"
