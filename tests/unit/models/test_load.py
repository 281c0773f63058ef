"""Every family is loaded, saved and loaded again; what cannot work is refused in one line, before weights are read."""

from __future__ import annotations

import json
import shutil

import pytest

from coterie.errors import BackendUnavailable, CheckpointError, ConfigError
from coterie.families import FAMILIES

pytestmark = pytest.mark.needs("transformers")


def logits(model):
    import torch

    with torch.no_grad():
        return model(torch.arange(3, 43).reshape(2, 20)).logits


@pytest.fixture
def copy(tiny_checkpoint, tmp_path):
    """A copy of a tiny model that a test may damage."""

    def make(family="mixtral", **config):
        folder = tmp_path / family
        shutil.copytree(tiny_checkpoint(family), folder)
        written = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps({key: value for key, value in written.items() if value != ...}))
        return folder

    return make


def shard(folder):
    """Save the model again, in several files."""
    from coterie.models.backend import quiet
    from coterie.models.load import load_model

    model = load_model(folder)
    (folder / "model.safetensors").unlink()
    with quiet():
        model.save_pretrained(folder, max_shard_size="200KB")
    return sorted(folder.glob("model-*.safetensors"))


@pytest.mark.parametrize("family", FAMILIES)
def test_loads_saves_and_loads_the_same(family, tiny_checkpoint, tmp_path):
    from coterie.models.backend import quiet
    from coterie.models.layers import find_moe_layers, spec_of
    from coterie.models.load import load_model

    model = load_model(tiny_checkpoint(family))
    assert not model.training
    spec = spec_of(model)
    assert (spec.num_experts, spec.num_model_layers, spec.hidden_size) == (8, 3, 32)
    assert spec.top_k == (2 if family in ("mixtral", "phimoe") else 3)
    assert [layer.model_layer for layer in find_moe_layers(model)] == list(spec.layer_ids)
    first = logits(model)
    assert first.isfinite().all()
    with quiet():
        model.save_pretrained(tmp_path)
    assert (logits(load_model(tmp_path)) == first).all()


def test_a_sharded_checkpoint_loads_the_same(copy):
    from coterie.models.load import load_model

    folder = copy()
    whole = logits(load_model(folder))
    assert len(shard(folder)) > 2
    assert (logits(load_model(folder)) == whole).all()


def test_dtype_is_the_checkpoint_s_unless_asked(tiny_checkpoint):
    import torch

    from coterie.models.load import load_model

    folder = tiny_checkpoint("mixtral", "bfloat16")
    assert load_model(folder).dtype == torch.bfloat16
    assert load_model(folder, "float32").dtype == load_model(folder, torch.float32).dtype == torch.float32
    for wrong in ("int8", "half-ish", 7):
        with pytest.raises(ConfigError, match="choose float32, bfloat16 or float16"):
            load_model(folder, wrong)


def test_the_tokenizer_is_the_folder_s(tiny_checkpoint):
    from coterie.models.load import load_tokenizer

    tokenizer = load_tokenizer(tiny_checkpoint("mixtral"))
    assert tokenizer.decode(tokenizer("A café\n").input_ids) == "A café\n"


# ---- refusals --------------------------------------------------------------------------------------------------------


def refused(folder, match, capfd, loader="load_model"):
    from coterie.models import load

    with pytest.raises(CheckpointError, match=match) as caught:
        getattr(load, loader)(folder)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")  # no report of Transformers besides


def test_a_dense_model_is_refused(copy, capfd):
    refused(copy(model_type="llama", architectures=["LlamaForCausalLM"], num_local_experts=...), "no MoE layers", capfd)


def test_a_config_that_is_not_the_weights_is_refused(copy, capfd):
    refused(copy(num_local_experts=7), "in another shape than its config says", capfd)


def test_missing_tensors_are_refused_not_made_up(copy, capfd):
    refused(copy(num_hidden_layers=4), "holds .* tensors not at all, model.layers.3", capfd)


def test_a_missing_expert_is_refused(copy, capfd):
    from safetensors.torch import load_file, save_file

    folder = copy()
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.5.w2.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    refused(folder, "cannot load the model|in another shape|not at all", capfd)


def test_missing_shards_are_refused(copy, capfd):
    folder = copy()
    shards = shard(folder)
    shards[1].unlink()
    capfd.readouterr()
    refused(folder, f"lacks 1 of its {len(shards)} weight files, {shards[1].name}", capfd)


def test_a_truncated_file_is_refused_with_its_bytes(copy, capfd):
    folder = copy()
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1000])
    refused(folder, f"truncated: {len(whole) - 1000:,} of its {len(whole):,} bytes", capfd)


def test_more_than_the_free_memory_is_refused_with_the_bytes(copy, capfd, monkeypatch):
    from coterie.checkpoint.safetensors_io import read_headers
    from coterie.models import load

    folder = copy()
    monkeypatch.setattr(load, "available_bytes", lambda: 100_000)
    parameters = sum(tensor.nbytes for tensor in read_headers(folder).values())
    rotary = 2 * 4 * 4  # two buffers that are not saved
    refused(folder, rf"needs {parameters + rotary:,} bytes .* as torch.float32, 100,000 .* are free", capfd)
    monkeypatch.setattr(load, "available_bytes", lambda: parameters * 3 // 4)
    refused(folder, "are free; use a smaller model, a smaller dtype", capfd)
    assert load.load_model(folder, "bfloat16").num_parameters() * 4 == parameters


def test_a_model_far_too_large_is_refused_from_its_config(copy, capfd):
    folder = copy(hidden_size=2**16, intermediate_size=2**18, num_local_experts=512, vocab_size=2**17)
    refused(folder, "bytes .* of memory as torch.float32", capfd)


def test_an_unknown_architecture_is_refused_by_name(copy, capfd):
    refused(copy(model_type="mixtrall"), "model_type 'mixtrall', which transformers .* does not know", capfd)


def test_a_family_whose_experts_take_something_else_is_refused_by_name(tmp_path, capfd):
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    transformers.AutoConfig.for_model("llama4_text", head_dim=8, vocab_size=64, **sizes).save_pretrained(tmp_path)
    refused(tmp_path, "unsupported model_type 'llama4_text'.*known families: mixtral", capfd)


def test_a_folder_without_weights_or_with_pickles_is_refused(copy, capfd):
    folder = copy()
    (folder / "model.safetensors").unlink()
    refused(folder, "holds no weights", capfd)
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused(folder, "convert them to safetensors", capfd)


def test_no_tokenizer_and_a_broken_one_are_refused(copy, capfd):
    folder = copy()
    (folder / "tokenizer.json").write_text("{")
    refused(folder, "cannot load the tokenizer", capfd, "load_tokenizer")
    (folder / "tokenizer.json").unlink()
    refused(folder, "holds no tokenizer", capfd, "load_tokenizer")


@pytest.mark.parametrize("name", ["mixtral", "no/such/folder", "/tmp", "tiny-mixtrall", "a/b/../c", ""])
def test_a_name_of_nothing_is_refused(name, capfd, tmp_path):
    refused(name if name != "/tmp" else tmp_path / "absent", "it is no folder, no shipped model", capfd)


def test_a_hub_id_that_cannot_be_reached_is_refused(capfd, monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    refused("someone/some-model", "cannot get someone/some-model from the hub", capfd)


def test_a_model_in_the_hub_s_cache_needs_no_network_and_keeps_its_name(copy, monkeypatch, tmp_path):
    import huggingface_hub.constants

    from coterie.models.info import model_info
    from coterie.models.layers import spec_of
    from coterie.models.load import load_model

    cached = tmp_path / "hub" / "models--someone--some-model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0123abcd")
    shutil.copytree(copy("olmoe"), cached / "snapshots" / "0123abcd")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cached.parent))
    assert spec_of(load_model("someone/some-model")).model == "some-model"
    assert model_info("someone/some-model").spec.model == "some-model"


def test_published_mxfp4_weights_are_those_that_run(copy):
    """Blocks of 32 four-bit floats with a common power of two, two floats a byte, the lower half first."""
    import torch
    from safetensors.torch import load_file, save_file

    from coterie.models.layers import find_moe_layers
    from coterie.models.load import load_model

    folder = copy("gpt_oss", intermediate_size=64, quantization_config={"quant_method": "mxfp4"})
    tensors = load_file(folder / "model.safetensors")
    random, values = torch.Generator().manual_seed(0), torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    expected = {}
    for layer in range(3):
        at = f"model.layers.{layer}.mlp.experts."
        tensors[f"{at}gate_up_proj_bias"] = torch.zeros(8, 128)
        for name, rows, columns in (("gate_up_proj", 128, 32), ("down_proj", 32, 64)):
            del tensors[at + name]
            blocks = torch.randint(256, (8, rows, columns // 32, 16), generator=random)
            scales = torch.randint(120, 126, (8, rows, columns // 32), generator=random)
            tensors[f"{at}{name}_blocks"] = blocks.to(torch.uint8)
            tensors[f"{at}{name}_scales"] = scales.to(torch.uint8)
            halves = torch.stack([blocks % 16, blocks // 16], -1).flatten(-2)
            floats = values[halves % 8] * (1 - 2 * (halves // 8)) * 2.0 ** (scales[..., None] - 127)
            expected[layer, name] = floats.flatten(-2).transpose(1, 2)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for index, layer in enumerate(find_moe_layers(load_model(folder, "bfloat16"))):
        for name in ("gate_up_proj", "down_proj"):
            assert (getattr(layer.experts, name).float() == expected[index, name]).all()


def test_another_version_of_transformers_is_refused(monkeypatch):
    import transformers

    from coterie.models.load import load_model

    monkeypatch.setattr(transformers, "__version__", "4.57.1")
    with pytest.raises(BackendUnavailable, match=r"transformers 4\.57\.1 is installed.*5\.23"):
        load_model("anything")


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    import sys

    from coterie.models.load import load_model

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'coterie\[models\]'"):
        load_model("anything")
