"""The model card says what was measured."""

from training.card import balance, model_card, quality_table, routing_table
from training.corpus import DOMAINS

TEXTS = (*DOMAINS, "wikitext2-test")
MOE = {
    "name": "tiny-mixtral",
    "domains": {text: {"perplexity": 50.0 + index, "bits_per_byte": 1.5} for index, text in enumerate(TEXTS)},
    "all": {"perplexity": 54.25, "bits_per_byte": 1.75},
    "routing": {"top_quarter": [0.5, 0.7], "max_mean": [1.5, 2.0], "min_mean": [0.5, 0.25]},
    "parameters": 12_000_000,
    "active_parameters": 4_000_000,
}
DENSE = MOE | {"all": {"perplexity": 60.0, "bits_per_byte": 1.875}, "parameters": 4_100_000}
CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "num_hidden_layers": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 384,
    "hidden_size": 192,
    "vocab_size": 4096,
}
TRAINING = {
    "position": {
        "step": 3000,
        "tokens": 6_144_000,
        "seconds": 3600.0,
        "cpu_seconds": 1800.0,
        "balance_history": [[0, 0.02], [360, 0.06]],
    },
    "settings": {"rows": 8, "peak": 3e-3, "decay": 0.05, "betas": [0.9, 0.95], "max_norm": 1.0, "seed": 0},
    "corpus_tokens": 3_200_000,
}


def test_the_card_holds_sizes_time_and_both_tables():
    card = model_card(CONFIG, MOE, DENSE, TRAINING)
    for fact in (
        "12.0 M, 4.0 M",
        "6.14 M: 3,000 steps",
        "60 minutes",
        "50% of a core",
        "(4.1 M parameters)",
        "8, 2, 384",
    ):
        assert fact in card, fact
    assert quality_table(MOE, DENSE) in card
    assert routing_table(MOE["routing"]) in card
    assert "weight 0.02, from step 360 on 0.06." in card


def test_every_text_has_a_row_with_both_models():
    table = quality_table(MOE, DENSE)
    assert "| all eight | 54.2 | 1.750 | 60.0 | 1.875 |" in table
    assert all(f"| {text} | {50.0 + index:.1f} |" in table for index, text in enumerate(TEXTS))


def test_routing_is_shown_by_layer_with_the_mean():
    assert routing_table(MOE["routing"]).splitlines()[2:] == [
        "| top 25% of pairs | 50% | 70% | 60% |",
        "| largest load / mean | 1.50 | 2.00 | 1.75 |",
        "| smallest load / mean | 0.50 | 0.25 | 0.38 |",
    ]


def test_a_constant_balance_is_one_number():
    assert balance([(0, 0.02)]) == "0.02"
