"""Packing models: what is refused by name, and the order of neurons that a profile gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import coterie
from coterie.checkpoint.expert_store import open_store
from coterie.cli.main import main
from coterie.errors import CheckpointError, ConfigError
from coterie.models.identity import ORDER_KEY, order_digest
from coterie.pruning.importance_order import neuron_order

pytestmark = pytest.mark.needs("transformers")


@pytest.fixture
def profile(tiny_checkpoint: Any, make_profile: Any) -> Any:
    """Of the tiny Mixtral, with importances by chance."""
    from coterie.models.checkpoint_identity import identity_of_checkpoint
    from coterie.models.layers import spec_of

    identity, skeleton = identity_of_checkpoint(tiny_checkpoint("mixtral"))
    return make_profile(3, 8, 2, 48, spec=spec_of(skeleton), identity=identity)


def test_a_profile_puts_neurons_in_order_and_the_store_tells_it(
    profile: Any, tiny_checkpoint: Any, tmp_path: Path
) -> None:
    order = neuron_order(profile).order_LEI
    packed = coterie.pack(tiny_checkpoint("mixtral"), tmp_path / "store", profile=profile)
    plain = coterie.pack(tiny_checkpoint("mixtral"), tmp_path / "plain")
    coterie.reorder(tiny_checkpoint("mixtral"), profile, tmp_path / "reordered")
    again = coterie.pack(tmp_path / "reordered", tmp_path / "again")
    assert (packed.order, again.order, plain.order) == (order_digest(order), order_digest(order), None)
    assert packed.variant == "mean_abs_down"
    stores = [open_store(tmp_path / name) for name in ("store", "again", "plain")]
    assert stores[0].experts_file.read_bytes() == stores[1].experts_file.read_bytes()
    assert stores[0].header.identity == stores[2].header.identity == profile.identity
    layout = packed.layout
    records = [np.fromfile(store.experts_file, np.float32).reshape(3, 8, -1) for store in stores]
    size = layout.width * 3 * layout.hidden_size
    first, unordered = (each[1, 2, :size].reshape(layout.width, 3, -1) for each in (records[0], records[2]))
    assert np.array_equal(first, unordered[order[1, 2]])
    assert json.loads((tmp_path / "store" / "model" / "config.json").read_text())[ORDER_KEY] == packed.order


def test_what_cannot_be_packed_is_named(profile: Any, tiny_checkpoint: Any, make_profile: Any, tmp_path: Path) -> None:
    out = tmp_path / "store"
    with pytest.raises(ConfigError, match="identity 0123456789abcdef"):
        coterie.pack(tiny_checkpoint("mixtral"), out, profile=make_profile())
    with pytest.raises(ConfigError, match="is the model's own folder"):
        coterie.pack(tiny_checkpoint("mixtral"), tiny_checkpoint("mixtral") / "store")
    coterie.reorder(tiny_checkpoint("mixtral"), profile, tmp_path / "reordered")
    with pytest.raises(ConfigError, match="pack the folder that was profiled"):
        coterie.pack(tmp_path / "reordered", out, profile=profile)
    for changes, message in (
        ({"quantization_config": {"quant_method": "awq"}}, r"is quantised \(awq\); quantised weights cannot be packed"),
        ({"dtype": "bfloat16"}, "stores its experts as F32, and its config has the model run as BF16"),
    ):
        copy = tmp_path / next(iter(changes))
        shutil.copytree(tiny_checkpoint("mixtral"), copy)
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(CheckpointError, match=message):
            coterie.pack(copy, out)
    assert not out.exists()


def test_commands_pack_and_generate(
    tiny_checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from coterie.models.load import load_model, load_tokenizer

    def run(*words: Any) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["coterie", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        streams = capsys.readouterr()
        return int(ended.value.code or 0), streams.out, streams.err

    model, store, trace = tiny_checkpoint("mixtral"), tmp_path / "store", tmp_path / "t.json"
    code, out, err = run("pack", model, "--out", store)
    assert code == 0
    assert "24 experts of" in out
    assert "original order" in err
    command = ("generate", store, "--budget", "30%", "--prompt", "abc", "--tokens", 5)
    code, out, _ = run(*command, "--policy", "reuse", "--ahead", "--timeline", trace, "--json")
    assert code == 0
    result = json.loads(out)
    tokenizer = load_tokenizer(model)
    ids = tokenizer("abc", return_tensors="pt", return_token_type_ids=False)
    with torch.inference_mode():
        expected = load_model(model).generate(**ids, max_new_tokens=5, do_sample=False)
    assert result["text"] == tokenizer.decode(expected[0], skip_special_tokens=True)
    assert result["policy"] == "reuse"
    assert result["peak_expert_bytes"] <= result["budget_bytes"]
    assert json.loads(trace.read_text())["traceEvents"]
    code, out, err = run(*command, "--bandwidth", "50MB/s")
    assert code == 0
    assert "an emulated disk of 0.05 GB/s" in err
    assert "policy company, schedule johnson" in out
    code, out, err = run(*command, "--skip-misses", "0.9")
    assert code == 0
    assert "which neurons run depends on what is resident" in err
    for words, message in (
        ((*command, "--skip-misses", "-1"), "skip_misses = -1.0; it is F of weight < F/K"),
        ((*command, "--use-cached"), "whole experts have no wider ones; give widths"),
        (("generate", store, "--budget", "1%", "--prompt", "a"), "the smallest workable one holds one expert"),
        (("generate", model, "--budget", "20%", "--prompt", "a"), "is no expert store; make one with coterie pack"),
        (("generate", store, "--budget", "20%", "--prompt", ""), "--prompt has no tokens"),
        (("pack", model, "--out", store), "holds a finished store already"),
        (("pack", trace.parent / "nothing", "--out", store), "is no folder, no shipped model"),
    ):
        code, out, err = run(*words)
        assert (code, out) == (2, "")
        assert message in err
        assert len(err.strip().splitlines()) == 1
