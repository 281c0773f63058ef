"""The shipped traces: there, small, real, and attributed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from coterie import data
from coterie.errors import ConfigError
from coterie.trace.open import open_trace

EXPECTED = {
    "dsv2lite-intent": ("DeepSeek-V2-Lite", 26, 64, 6, 8_222, 127, 0),
    "dsv2lite-law": ("DeepSeek-V2-Lite", 26, 64, 6, 8_327, 33, 0),
    "gptoss20b-decode": ("gpt-oss-20b", 24, 32, 4, 8_176, 16, 1),
}


@pytest.mark.parametrize("name", data.NAMES)
def test_each_is_the_trace_it_says(name):
    model, layers, experts, top_k, tokens, sequences, phase = EXPECTED[name]
    trace = open_trace(name)
    assert (trace.spec.model, trace.num_layers, trace.spec.num_experts, trace.spec.top_k) == (
        model,
        layers,
        experts,
        top_k,
    )
    assert (trace.num_tokens, trace.num_sequences) == (tokens, sequences)
    assert len(trace.spec.layer_ids) == layers
    assert set(np.unique(trace.phase)) == {phase}
    assert trace.weights is not None
    sums = np.asarray(trace.weights, dtype=np.float64).sum(axis=2)
    if model == "gpt-oss-20b":  # over the four chosen experts
        assert np.allclose(sums, 1, atol=4e-3)
    else:  # over all experts, of which six are chosen
        assert 0 < sums.min() < sums.max() <= 1.002
    assert trace.provenance["license"] in ("MIT", "Apache-2.0")
    assert trace.provenance["inferred"] == {}


@pytest.mark.parametrize("name", data.NAMES)
def test_plain_arrays_that_numpy_reads_without_pickle(name):
    with np.load(data.path(name), allow_pickle=False) as archive:
        assert archive["expert_ids"].dtype == np.uint8
        assert json.loads(str(archive["provenance"]))["origin"].startswith("https://github.com/")


def test_all_fit_in_eight_megabytes_and_are_attributed():
    assert sum(data.path(name).stat().st_size for name in data.NAMES) <= 8_000_000
    readme = data.path(data.NAMES[0]).with_name("README.md").read_text()
    for name in data.NAMES:
        assert f"`{name}`" in readme
        assert open_trace(name).provenance["license"] in readme


def test_unknown_names_get_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'gptoss20b-decode'"):
        data.path("gptoss-decode")
