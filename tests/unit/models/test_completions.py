"""Continuing prompts: batches change nothing but speed, seeds repeat, and texts end where the model ends them."""

from __future__ import annotations

from typing import Any

import pytest

import coterie
from coterie.errors import ConfigError

pytestmark = pytest.mark.needs("transformers")

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [40], [90, 91, 92], [100, 101]]


@pytest.fixture(scope="module", params=["mixtral", "gpt_oss", "deepseek_v3"])
def running(request: pytest.FixtureRequest, tiny_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An offloaded model and its tokenizer."""
    from coterie.models.load import load_tokenizer

    store = tmp_path_factory.mktemp("completions") / "store"
    coterie.pack(tiny_checkpoint(request.param), store)
    model = coterie.offload(store, "20%", check=True)
    yield model, load_tokenizer(store / "model")
    model.close()


def completed(running: Any, batch: int, prompts: Any = PROMPTS, **options: Any) -> list[Any]:
    from coterie.models.completions import Sampling, complete

    sampling = Sampling(**{"tokens": 6, **options})
    return [each for batch in complete(*running, prompts, sampling, batch) for each in batch]


def test_batches_padded_on_the_left_continue_as_single_prompts(running: Any) -> None:
    import torch

    single = completed(running, 1)
    assert completed(running, 4) == completed(running, 3) == single
    model, tokenizer = running
    for prompt, found in zip(PROMPTS, single, strict=True):
        with torch.inference_mode():
            out = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        expected = out[0, len(prompt) :].tolist()
        assert found.ids == expected
        assert found.text == tokenizer.decode(expected, skip_special_tokens=True)


def test_seeds_repeat_and_differ(running: Any) -> None:
    import torch

    before = torch.random.get_rng_state()
    first, again = (completed(running, 2, temperature=1.5, seed=3) for _ in range(2))
    assert first == again
    assert torch.equal(torch.random.get_rng_state(), before), "the caller's chance is left alone"
    assert completed(running, 2, temperature=1.5, seed=4) != first
    assert completed(running, 1, prompts=[PROMPTS[0]] * 2, temperature=1.5)[0] != first[0]
    assert completed(running, 2, temperature=5.0, top_p=1e-6) == completed(running, 2), "the likeliest alone"


def test_a_text_ends_with_its_end_token(running: Any) -> None:
    model, _ = running
    whole = completed(running, 4)
    end, before = whole[0].ids[2], model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [2, end]
    try:
        cut = completed(running, 4)
    finally:
        model.generation_config.eos_token_id = before
    assert cut[0].ids == whole[0].ids[: whole[0].ids.index(end) + 1]
    assert cut[0].finish == "stop"
    assert all(end not in each.ids[:-1] for each in cut)
    assert whole[0].finish == ("stop" if whole[0].ids[-1] == 2 else "length")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "0 tokens to generate"),
        ({"temperature": -1}, "a temperature of -1; give 0"),
        ({"temperature": float("nan")}, "a temperature of nan"),
        ({"temperature": 1, "top_p": 0}, "top-p = 0; it must be above 0 and at most 1"),
        ({"top_p": 0.5}, "top-p = 0.5 without a temperature changes nothing"),
    ],
)
def test_sampling_that_cannot_be(options: Any, message: str) -> None:
    from coterie.models.completions import Sampling

    with pytest.raises(ConfigError, match=message):
        Sampling(**options)


def test_batches_that_cannot_be(running: Any) -> None:
    with pytest.raises(ConfigError, match="batches of 0; give 1 or more"):
        completed(running, 0)
