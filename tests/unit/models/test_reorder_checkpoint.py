"""Reordered checkpoints: the tensors Transformers loads from them, what is copied, what is refused, what is left."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import coterie
from coterie.checkpoint import reorder as files
from coterie.cli.main import main
from coterie.errors import CheckpointError, ConfigError
from coterie.families import FAMILIES
from coterie.models.identity import ORDER_KEY, identity_of, order_digest
from coterie.profile.model_profile import ModelProfile
from coterie.pruning.importance_order import neuron_order

pytestmark = pytest.mark.needs("transformers")


@pytest.fixture(scope="module")
def load(tiny_checkpoint: Any) -> Any:
    """Loads each family's tiny model once; every test leaves it as it was."""
    from coterie.models.load import load_model

    made: dict[str, Any] = {}

    def get(family: str) -> Any:
        if family not in made:
            made[family] = load_model(tiny_checkpoint(family)).requires_grad_(False)
        return made[family]

    return get


def profile_of(model: Any, **changes: Any) -> ModelProfile:
    """A profile with importances by chance."""
    from coterie.models.layers import find_moe_layers, spec_of
    from coterie.ops.gated_ffn import ExpertWeights

    spec, width = spec_of(model), ExpertWeights.of(find_moe_layers(model)[0].experts).width
    shape, rng = (spec.num_layers, spec.num_experts), np.random.default_rng(8)
    pairs = np.zeros((*shape, spec.num_experts), np.int64)
    values = {name: rng.random((*shape, width), np.float32) for name in ("mean_abs_down", "rms")}
    fields = {"identity": identity_of(model), "importance": values, **changes}
    return ModelProfile(
        spec=spec, width=width, num_tokens=1, load_LE=pairs[..., 0], pairs_LEE=pairs, dominance={},
        sample_ids_LSK=np.zeros((spec.num_layers, 1, spec.top_k), np.int64),
        sample_weights_LSK=np.zeros((spec.num_layers, 1, spec.top_k), np.float32), **fields,
    )  # fmt: skip


def logits(model: Any) -> Any:
    import torch

    ids = torch.from_numpy(np.random.default_rng(3).integers(3, 260, (2, 9)))
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_loaded_is_the_model_reordered_in_memory(
    family: str, load: Any, tiny_checkpoint: Any, tmp_path: Path
) -> None:
    import torch

    from coterie.models.load import load_model
    from coterie.models.reorder import reordered

    model = load(family)
    profile = profile_of(model)
    written = coterie.reorder(tiny_checkpoint(family), profile, tmp_path / "out")
    copy = load_model(tmp_path / "out")
    order = neuron_order(profile).order_LEI
    with reordered(model, order):
        expected = model.state_dict()
        assert copy.state_dict().keys() == expected.keys()
        assert [name for name, tensor in copy.state_dict().items() if not tensor.equal(expected[name])] == []
    assert written.digest == getattr(copy.config, ORDER_KEY) == order_digest(order)
    assert identity_of(copy) == profile.identity
    plain = logits(model)
    torch.testing.assert_close(logits(copy), plain, rtol=1e-5, atol=1e-5 * float(plain.abs().max()))


def test_shards_and_all_other_files_are_copied_but_for_other_weights(load: Any, tmp_path: Path) -> None:
    from coterie.models.load import load_model
    from coterie.models.reorder import reordered

    model, source, out = load("qwen2_moe"), tmp_path / "source", tmp_path / "out"
    model.save_pretrained(source, max_shard_size="60KB")
    shards = sorted(file.name for file in source.glob("model-*.safetensors"))
    assert len(shards) > 3
    (source / "tokenizer.json").write_text("{}")
    (source / "templates").mkdir()
    (source / "templates" / "chat.jinja").write_text("hello")
    (source / ".cache").mkdir()
    (source / ".cache" / "lock").write_text("")
    (source / "original").mkdir()
    (source / "original" / "consolidated.safetensors").write_bytes(b"other weights")
    (source / "pytorch_model.bin").write_bytes(b"other weights")
    profile, told = profile_of(model), []
    written = coterie.reorder(source, profile, out, variant="rms", progress=lambda *step: told.append(step))
    assert set(written.left_out) == {"original/consolidated.safetensors", "pytorch_model.bin"}
    names = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    assert names == {
        *shards, "model.safetensors.index.json", "config.json", "generation_config.json", "tokenizer.json",
        "templates/chat.jinja", "coterie_reorder.json",
    }  # fmt: skip
    assert told[-1] == ("reordering", sum((source / name).stat().st_size for name in shards), told[-1][2])
    assert told[-1][1] == told[-1][2]
    assert (out / "templates" / "chat.jinja").read_text() == "hello"
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, out))
    assert after == {**before, ORDER_KEY: written.digest}
    assert json.loads((out / "coterie_reorder.json").read_text())["variant"] == "rms"
    copy = load_model(out)
    with reordered(model, neuron_order(profile, "rms").order_LEI):
        assert all(tensor.equal(model.state_dict()[name]) for name, tensor in copy.state_dict().items())


def test_fused_tensors_on_disk_are_reordered_too(load: Any, tmp_path: Path) -> None:
    from coterie.models.load import load_model
    from coterie.models.reorder import reordered

    model = load("qwen3_moe")
    model.save_pretrained(tmp_path / "source", save_original_format=False)
    profile = profile_of(model)
    coterie.reorder(tmp_path / "source", profile, tmp_path / "out")
    copy = load_model(tmp_path / "out")
    with reordered(model, neuron_order(profile).order_LEI):
        assert all(tensor.equal(model.state_dict()[name]) for name, tensor in copy.state_dict().items())


def test_an_interrupted_run_leaves_what_was_there(
    load: Any, tiny_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, profile, calls, real = tiny_checkpoint("qwen3_moe"), profile_of(load("qwen3_moe")), [], files.along_axis

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) % 30 == 0:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(files, "along_axis", interrupted)
        with pytest.raises(KeyboardInterrupt):
            coterie.reorder(source, profile, tmp_path / "out")
        assert list(tmp_path.iterdir()) == []
    first = coterie.reorder(source, profile, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(files, "along_axis", interrupted)
        with pytest.raises(KeyboardInterrupt):
            coterie.reorder(source, profile, tmp_path / "out", variant="rms")
    assert len(calls) == 60
    assert json.loads((tmp_path / "out" / "config.json").read_text())[ORDER_KEY] == first.digest
    second = coterie.reorder(source, profile, tmp_path / "out", variant="rms")  # replaces what it wrote itself
    assert json.loads((tmp_path / "out" / "config.json").read_text())[ORDER_KEY] == second.digest != first.digest
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

    def failing(source: Path, folder: Path) -> None:
        raise CheckpointError("they differ")

    with pytest.raises(CheckpointError, match="they differ"):
        coterie.reorder(source, profile, tmp_path / "new", check=failing)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_cannot_be_reordered_is_refused(
    load: Any, tiny_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, profile, out = tiny_checkpoint("qwen3_moe"), profile_of(load("qwen3_moe")), tmp_path / "out"
    written = coterie.reorder(source, profile, tmp_path / "already")
    with pytest.raises(ConfigError, match=f"in the order {written.digest}, the profile is of the model in the order"):
        coterie.reorder(tmp_path / "already", profile, out)
    with pytest.raises(ConfigError, match="the model's own folder"):
        coterie.reorder(source, profile, source)
    with pytest.raises(ConfigError, match="the model's own folder"):
        coterie.reorder(source, profile, source / "inside")
    with pytest.raises(ConfigError, match="was not written by this command"):
        coterie.reorder(source, profile, tiny_checkpoint("mixtral"))
    with pytest.raises(ConfigError, match="identity 0123"):
        coterie.reorder(source, profile_of(load("qwen3_moe"), identity="0123"), out)
    with pytest.raises(ConfigError, match="did you mean 'mean_abs_down'"):
        coterie.reorder(source, profile, out, variant="mean_abs")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match=r"takes [\d,]+ bytes .*1,000 .* are free"):
        coterie.reorder(source, profile, out)
    assert not out.exists()


def test_a_profile_of_the_reordered_copy_reorders_that(load: Any, tiny_checkpoint: Any, tmp_path: Path) -> None:
    from coterie.models.load import load_model

    first = coterie.reorder(tiny_checkpoint("qwen3_moe"), profile_of(load("qwen3_moe")), tmp_path / "one")
    profile = profile_of(load_model(tmp_path / "one"), provenance={"neuron_order": first.digest})
    coterie.reorder(tmp_path / "one", profile, tmp_path / "two")
    with pytest.raises(ConfigError, match="in the order of the original, the profile is of the model in the order"):
        coterie.reorder(tiny_checkpoint("qwen3_moe"), profile, tmp_path / "three")


def run(monkeypatch: Any, capsys: Any, *arguments: Any) -> tuple[Any, str, str]:
    monkeypatch.setattr(sys, "argv", ["coterie", "reorder", *map(str, arguments)])
    with pytest.raises(SystemExit) as exited:
        main()
    captured = capsys.readouterr()
    return exited.value.code, captured.out, captured.err


def test_the_command(load: Any, tiny_checkpoint: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    from coterie.models.load import load_model

    source = tiny_checkpoint("qwen3_moe", "bfloat16")
    profile = profile_of(load_model(source))
    module = SimpleNamespace(load_profile=lambda path: profile)
    monkeypatch.setitem(sys.modules, "coterie.profile.profile_file", module)
    options = (source, "--profile", "p.safetensors", "--out", tmp_path / "out")
    code, out, err = run(monkeypatch, capsys, *options, "--verify", "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["order"] == order_digest(neuron_order(profile).order_LEI)
    assert 0 < result["verified"]["relative"] <= 1e-5
    assert result["verified"]["dtype"] == "bfloat16"
    assert 0 <= result["verified"]["kl"] <= result["verified"]["kl_max"] < 0.01
    code, out, err = run(monkeypatch, capsys, *options, "--variant", "rms", "--verify")
    assert (code, err) == (0, "")
    assert "neurons by rms" in out
    assert "float32: logits within" in out
    assert "bfloat16: KL from the original" in out
    code, out, err = run(monkeypatch, capsys, *options, "--variant", "nothing")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "unknown variant of importance" in err


def test_verification_sees_a_wrong_checkpoint(load: Any, tiny_checkpoint: Any, tmp_path: Path) -> None:
    from coterie.evaluate.reordering import verify_reordering

    source, broken = tiny_checkpoint("qwen3_moe"), tmp_path / "broken"
    shutil.copytree(source, broken)
    model = load("qwen3_moe")
    weight = model.model.layers[0].mlp.experts.down_proj
    kept = weight.clone()
    weight[0] = weight[0].flip(1)
    model.save_pretrained(broken)
    weight.copy_(kept)
    with pytest.raises(CheckpointError, match=r"differ by .* nothing was written"):
        verify_reordering(source, broken)
    assert verify_reordering(source, source).relative == 0


def test_baking_can_reorder_too_and_undoing_leads_to_the_reordered_checkpoint(
    load: Any, tiny_checkpoint: Any, tmp_path: Path
) -> None:
    from coterie.models.layers import spec_of
    from coterie.models.load import load_model
    from coterie.placement.numbering import EXPERT_ORDER_KEY
    from coterie.placement.placement import Placement
    from coterie.topology import Topology

    model, source = load("qwen3_moe"), tiny_checkpoint("qwen3_moe")
    profile, spec = profile_of(model), spec_of(model)
    rng = np.random.default_rng(2)
    slots = np.stack([rng.permutation(spec.num_experts) for _ in range(spec.num_layers)])
    coterie.bake(source, Placement(slots, Topology.parse("4"), spec), tmp_path / "out", profile=profile)
    first = coterie.reorder(source, profile, tmp_path / "reordered")
    coterie.unbake(tmp_path / "out", tmp_path / "back")
    for file in (tmp_path / "reordered").iterdir():
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()
    copy = load_model(tmp_path / "out")
    assert getattr(copy.config, ORDER_KEY) == first.digest
    assert getattr(copy.config, EXPERT_ORDER_KEY)
    plain, got = logits(model), logits(copy)
    assert float((got - plain).abs().max()) <= 1e-5 * float(plain.abs().max())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "out", "reordered"]
