"""Synthetic traces: deterministic, labelled, refused when impossible, and skewed and sociable beyond chance."""

from dataclasses import replace

import numpy as np
import pytest

import coterie
from coterie.errors import ConfigError
from coterie.profile.coactivation import coactivation_counts, jaccard
from coterie.profile.combinations import combination_counts, top_share
from coterie.profile.load import expert_load, imbalance
from coterie.trace import synthetic
from coterie.trace.routing_trace import RoutingTrace
from coterie.trace.synthetic import DEEPSEEK_LIKE, GPTOSS_LIKE, MODELS, Recipe, synthesize
from coterie.trace.synthetic_router import TopicStream

CHANCE = replace(DEEPSEEK_LIKE, name="chance", popularity=0.0, company=0.0)


def test_shape_and_provenance():
    trace = synthesize(2, 300, 3, 50, seed=5)
    assert trace.expert_ids.shape == (2, 50, 3)
    assert trace.expert_ids.dtype == np.uint16
    assert synthesize(1, 256, 3, 5).expert_ids.dtype == np.uint8
    assert trace.weight_ordered
    assert trace.provenance["synthetic"] is True
    assert trace.provenance["seed"] == 5
    assert trace.provenance["coterie"] == coterie.__version__
    assert trace.provenance["model"]["company"] == DEEPSEEK_LIKE.company
    assert "deepseek-like" in trace.spec.model


def test_saved_and_drawn_are_the_same_and_pieces_change_nothing(tmp_path, monkeypatch):
    recipe = Recipe(2, 16, 4, 300, seed=1, sequence_tokens=40)
    drawn = recipe.draw()
    monkeypatch.setattr(synthetic, "_TOKENS_AT_ONCE", 77)
    heard = []
    recipe.save(tmp_path / "t.safetensors", lambda what, done, total: heard.append((done, total)))
    saved = RoutingTrace.load(tmp_path / "t.safetensors")
    for name in ("expert_ids", "weights", "sequence_ids", "positions"):
        assert np.array_equal(getattr(saved, name), getattr(drawn, name)), name
    assert saved.spec == drawn.spec
    assert saved.provenance == drawn.provenance
    assert heard == [(77, 300), (154, 300), (231, 300), (300, 300)]


def test_an_interrupted_save_leaves_nothing(tmp_path):
    def interrupt(what, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Recipe(1, 8, 2, 20).save(tmp_path / "t.safetensors", interrupt)
    assert list(tmp_path.iterdir()) == []


def test_seeds_layers_and_models_differ():
    one = synthesize(2, 16, 4, 100, seed=1).expert_ids
    assert not np.array_equal(one, synthesize(2, 16, 4, 100, seed=2).expert_ids)
    assert not np.array_equal(one, synthesize(2, 16, 4, 100, seed=1, like="gpt-oss").expert_ids)
    assert not np.array_equal(one[0], one[1])


def test_sequences_count_positions_from_zero():
    trace = synthesize(1, 8, 2, 5000, sequence_tokens=50)
    starts = np.flatnonzero(trace.positions == 0)
    assert starts[0] == 0
    assert np.array_equal(np.diff(trace.sequence_ids, prepend=-1) > 0, trace.positions == 0)
    assert np.array_equal(trace.positions, np.arange(5000) - starts[trace.sequence_ids])
    assert 60 < trace.num_sequences < 150  # 100 expected, standard deviation 10


def test_weights_are_as_the_model_gives_them():
    raw, normalized = synthesize(1, 64, 6, 500), synthesize(1, 32, 4, 500, like="gpt-oss")
    assert (np.diff(raw.weights.astype(float), axis=2) <= 0).all()
    assert (raw.weights.astype(float).sum(axis=2) < 1).all()
    assert normalized.weights.astype(float).sum(axis=2) == pytest.approx(1, abs=2e-3)
    assert GPTOSS_LIKE.normalized
    assert not DEEPSEEK_LIKE.normalized


def test_every_expert_chosen_is_allowed():
    trace = synthesize(1, 4, 4, 30)
    assert np.array_equal(np.sort(trace.expert_ids[0], axis=1), np.tile(np.arange(4), (30, 1)))
    assert synthesize(1, 1, 1, 3).expert_ids.tolist() == [[[0]] * 3]


def test_without_popularity_or_company_choices_are_uniform():
    ids = synthesize(1, 16, 4, 8000, like=CHANCE).layer(0).expert_ids_TK
    counts = coactivation_counts(ids, None, 16)
    load = np.diagonal(counts)
    expected, deviation = 8000 * 4 / 16, (8000 * (1 / 4) * (3 / 4)) ** 0.5
    assert (np.abs(load - expected) < 5 * deviation).all()
    both = counts[np.triu_indices(16, 1)]
    chance = 4 * 3 / (16 * 15)
    assert (np.abs(both - 8000 * chance) < 5 * (8000 * chance * (1 - chance)) ** 0.5).all()


@pytest.mark.parametrize("like", sorted(MODELS))
def test_skewed_and_sociable_beyond_chance(like):
    trace = synthesize(4, 64, 6, 3000, seed=11, like=like)
    shuffled_rng = np.random.default_rng(0)
    for layer in range(4):
        ids = trace.layer(layer).expert_ids_TK
        load = expert_load(ids, None, 64)
        assert imbalance(load) > 1.5
        assert top_share(combination_counts(trace, layer)) > 0.6  # chance gives some 0.3
        p = np.sort(jaccard(coactivation_counts(ids, None, 64))[np.triu_indices(64, 1)])[::-1]
        # the same loads without company: each slot's experts dealt to other tokens
        alone = np.stack([shuffled_rng.permutation(ids[:, k]) for k in range(6)], axis=1)
        q = np.sort(jaccard(coactivation_counts(alone, None, 64))[np.triu_indices(64, 1)])[::-1]
        assert p[:20].mean() > 1.5 * q[:20].mean()


def test_linear_placement_is_no_better_than_chance():
    trace = synthesize(12, 64, 6, 1500, seed=2)
    neighbours = []
    for layer in range(12):
        p = jaccard(coactivation_counts(trace.layer(layer).expert_ids_TK, None, 64))
        same_device = np.kron(np.eye(8, dtype=bool), np.ones((8, 8), dtype=bool)) & ~np.eye(64, dtype=bool)
        neighbours.append(p[same_device].mean() / p[~np.eye(64, dtype=bool)].mean())
    assert 0.85 < np.mean(neighbours) < 1.15


def test_neighbours_share_more_than_strangers():
    trace = synthesize(1, 64, 6, 4000, seed=3, sequence_tokens=400)
    chosen = np.zeros((4000, 64), dtype=bool)
    np.put_along_axis(chosen, trace.layer(0).expert_ids_TK.astype(int), True, axis=1)
    near = (chosen[1:] & chosen[:-1])[np.diff(trace.sequence_ids) == 0].sum(axis=1).mean()
    far = (chosen.mean(axis=0) ** 2).sum()  # two independent tokens share this many
    assert near > 1.3 * far


def test_topics_have_the_shares_and_the_correlation_the_model_says():
    model = replace(DEEPSEEK_LIKE, company=1.0, num_topics=200, decay=0.0)
    sequence_ids, positions = np.repeat([0, 1], 500), np.tile(np.arange(500), 2)
    topics = TopicStream(model, 4).next(sequence_ids, positions)
    assert (topics**2).sum(axis=1).mean() == pytest.approx(1, rel=0.1)
    same, other = (
        (topics[:500] * np.roll(topics[:500], 1, axis=0)).sum(axis=1),
        (topics[:500] * topics[500:]).sum(axis=1),
    )
    expected = model.sequence_share + model.drift_share * model.drift_correlation
    assert same.mean() == pytest.approx(expected, abs=0.05)
    assert abs(other.mean()) < 0.06


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_layers": 0}, "num_layers = 0"),
        ({"num_tokens": 0}, "num_tokens = 0"),
        ({"num_experts": -3}, "num_experts = -3"),
        ({"num_experts": 65_537}, "65536"),
        ({"top_k": 9}, "top_k = 9 is more than num_experts = 8"),
        ({"sequence_tokens": 0}, "sequence_tokens = 0"),
        ({"seed": -1}, "seed = -1"),
        ({"like": "gptoss"}, "did you mean 'gpt-oss'"),
    ],
)
def test_impossible_recipes_are_refused(changed, message):
    with pytest.raises(ConfigError, match=message):
        Recipe(**{"num_layers": 1, "num_experts": 8, "top_k": 2, "num_tokens": 10, **changed})


@pytest.mark.parametrize(
    "changed", [{"sequence_share": 0.7, "drift_share": 0.5}, {"drift_correlation": 1.0}, {"num_topics": 0}]
)
def test_impossible_models_are_refused(changed):
    with pytest.raises(ConfigError, match=next(iter(changed))):
        replace(DEEPSEEK_LIKE, **changed)
