"""What our own runtime sends with copies of experts, and without: counted at the exchange, not predicted.

Placements are fitted on the earlier half of the sequences. The later half is cut into a run of consecutive tokens for
each rank and goes through dispatch and combine in steps of `--batch` tokens a rank, all MoE layers of the trace, with
hidden states of the model's size in bfloat16; ranks are threads, which exchange what processes would. Experts hand back
what they get, since they do not change what is sent. A rank chooses copies by its own tokens so far.

    python benchmarks/replicas_sent.py [TRACE] [--topology 8] [--redundant 8] [--batch 64] [--seed 0]

Prints, for linear, EPLB and our default pick, without copies and with `--redundant` slots for them a layer, and for our
pick fitted for each of the other rules: bytes sent, devices other than its own that a token visits, the share of the
tokens that visit the busiest device from others (mean over layers), and B; beside the peak what metrics say, which
count loads once for all homes. Fails where a rank sent other bytes than predicted. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import coterie
from coterie.cli.common import warnings_as_notes
from coterie.parallel.comms import Comms, share
from coterie.parallel.copy_choice import copy_choices
from coterie.parallel.dispatch import combine, dispatch
from coterie.parallel.in_memory import run_ranks
from coterie.parallel.layer_placement import LayerPlacement
from coterie.parallel.replay import Replay
from coterie.parallel.traffic import Traffic, predicted_bytes
from coterie.placement.copies import RULES, rule_of
from coterie.placement.driver import place, prepare
from coterie.placement.metrics import measure
from coterie.placement.placement import Placement
from coterie.topology import Topology
from coterie.trace.open import open_trace
from coterie.trace.routing_trace import ALL_TOKENS, RoutingTrace
from coterie.trace.splits import split

HELDOUT = 0.5
ELEMENT_BYTES = 2  # bfloat16


def send(replay: Replay, placement: Placement, hidden_size: int) -> tuple[dict[str, Any], Any]:
    """Bytes by kind, [L, G, G], and token-expert pairs of each device, [L, G], over all steps."""

    def work(comms: Comms) -> tuple[dict[str, Any], Any]:
        layers = [LayerPlacement.of(placement, layer) for layer in replay.layers]
        choices = copy_choices(placement, replay.layers, comms.rank)
        traffic, load_L = Traffic(len(layers), comms.size), np.zeros(len(layers), dtype=np.int64)
        hidden_TH = torch.zeros((replay.batch, hidden_size), dtype=torch.bfloat16)
        for start in range(0, replay.ids_LGTK.shape[2], replay.batch):
            part = slice(start, start + replay.batch)
            for row, (layer, choose) in enumerate(zip(layers, choices, strict=True)):
                ids = np.where(replay.kept_LGTK[row, comms.rank, part], replay.ids_LGTK[row, comms.rank, part], -1)
                weights_TK = torch.from_numpy(replay.weights_LGTK[row, comms.rank, part])
                received, handle = dispatch(hidden_TH, choose(torch.from_numpy(ids)), weights_TK, layer, comms)
                combine(received.hidden_RH, handle)
                traffic.add(row, handle)
                load_L[row] += int((received.ids_RK >= 0).sum())
        handed = sum(comms.sent_bytes_G)
        counted = sum(int(kind.sum()) for kind in (traffic.dispatch_LG, traffic.combine_LG, traffic.metadata_LG))
        assert handed == counted, f"rank {comms.rank} handed over {handed} bytes and counted {counted}"
        return traffic.gather(comms), np.array(share(comms, load_L.tolist())).T

    return run_ranks(replay.num_devices, work)[0]


def as_trace(replay: Replay, trace: RoutingTrace) -> RoutingTrace:
    """The replayed tokens as a trace, each at home on its rank."""
    layers, ranks, tokens, top_k = replay.ids_LGTK.shape
    return RoutingTrace(
        replay.ids_LGTK.reshape(layers, ranks * tokens, top_k).astype(trace.expert_ids.dtype), trace.spec,
        kept=replay.kept_LGTK.reshape(layers, ranks * tokens, top_k),
        home_ids=np.repeat(np.arange(ranks, dtype=np.int32), tokens),
    )  # fmt: skip


def figures(replay: Replay, trace: RoutingTrace, placement: Placement) -> dict[str, Any]:
    """One line: what was sent, and what metrics say of it."""
    row_bytes, tokens = trace.spec.hidden_size * ELEMENT_BYTES, replay.num_devices * replay.ids_LGTK.shape[2]
    sent, load_LG = send(replay, placement, trace.spec.hidden_size)
    replayed = as_trace(replay, trace)
    predicted = predicted_bytes(replayed, placement, row_bytes)
    for kind, bytes_LGG in predicted.items():
        assert np.array_equal(bytes_LGG, sent[kind]), f"{kind}: sent {sent[kind].sum()}, predicted {bytes_LGG.sum()}"
    visits_LGG = sent["dispatch"] / row_bytes
    layers = measure(replayed, placement.where(), placement.topology, ALL_TOKENS, rule_of(placement.method))
    return {
        "bytes": int(sum(kind.sum() for kind in sent.values())),
        "remote_dpt": float(visits_LGG.sum() / tokens / len(visits_LGG)),
        "remote_peak": float(visits_LGG.sum(axis=1).max(axis=1).mean() / tokens),
        "remote_peak_one_counter": float(np.mean([layer.remote_peak_traffic for layer in layers])),
        "balance": float((load_LG.max(axis=1) / load_LG.mean(axis=1)).mean()),
        "slots_per_device": placement.slots_per_device.tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", nargs="?", default="dsv2lite-law")
    parser.add_argument("--topology", default="8")
    parser.add_argument("--redundant", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    trace, topology = open_trace(arguments.trace), Topology.parse(arguments.topology)
    replay = Replay.of(trace, topology.num_devices, arguments.batch, split(trace, HELDOUT).second)
    plain = prepare(trace, topology, seed=arguments.seed)
    copied = prepare(trace, topology, seed=arguments.seed, redundant=arguments.redundant)
    wanted = [(f"{method}{words}", setting, method) for method in ("linear", "eplb", "coterie")
              for words, setting in (("", plain), (", copies", copied))]  # fmt: skip
    wanted += [(f"coterie, copies, {rule}", replace(copied, dispatch=rule), "coterie") for rule in RULES[1:]]
    tokens = replay.num_devices * replay.ids_LGTK.shape[2]
    print(f"{arguments.trace}: {trace.num_layers} layers on {topology}, {arguments.redundant} slots for copies, "
          f"{tokens} held-out tokens in {replay.num_steps} steps")  # fmt: skip
    print(f"  {'':26}{'MB sent':>9}{'of linear':>11}{'devices':>9}{'peak':>8}{'metrics':>9}{'B':>8}   (remote visits)")
    rows: dict[str, Any] = {}
    with warnings_as_notes():
        for label, setting, method in wanted:
            row = rows[label] = figures(replay, trace, place(setting, method, heldout=HELDOUT))
            print(f"  {label:26}{row['bytes'] / 1e6:9.1f}{row['bytes'] / rows['linear']['bytes']:11.3f}"
                  f"{row['remote_dpt']:9.3f}{row['remote_peak']:8.3f}{row['remote_peak_one_counter']:9.3f}"
                  f"{row['balance']:8.3f}", flush=True)  # fmt: skip
    about = {name: getattr(arguments, name) for name in ("trace", "topology", "redundant", "batch", "seed")}
    print(json.dumps({"benchmark": "replicas_sent", **about, "tokens": tokens, "coterie": coterie.__version__,
                      "rows": rows}))  # fmt: skip


if __name__ == "__main__":
    main()
