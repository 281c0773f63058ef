"""One rank of the tests' groups, no test itself: `one_rank.py generate JOBS`, `stay PLACEMENT` or `chain SECONDS`."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"

import numpy as np

from coterie.errors import CoterieError
from coterie.models.load import load_tokenizer
from coterie.parallel.expert_parallel import expert_parallel
from coterie.parallel.generation import generate
from coterie.parallel.processes import Launch, ProcessComms, joined
from coterie.placement.placement import Placement
from coterie.spec import MoESpec
from coterie.topology import Topology

# of groups by size: topology, tokens of each rank, copies of experts
EXCHANGES: dict[int, list[tuple[str, tuple[int, ...], int]]] = {
    3: [("3", (9, 0, 200), 1), ("3x1", (3, 40, 1), 4), ("3", (0, 0, 0), 4)],
    4: [("4", (9, 0, 1, 200), 0), ("2x2", (0, 0, 0, 0), 0), ("2x2", (3, 40, 0, 7), 0)],
}


class Scaling:
    """Experts whose rows depend on nothing else, to the last bit; stands for `ExpertWeights`."""

    width, num_experts = 1, 0

    def __init__(self, scales: list[float]) -> None:
        self._scales, self.num_experts = scales, len(scales)

    def run(self, expert: int, width: int, x_NH: Any, width_N: Any = None) -> Any:
        return x_NH * self._scales[expert]


def check_exchanges(comms: ProcessComms) -> None:
    """Layers with uneven, few and no tokens, over real sockets: outputs and bytes as the plain reference has them."""
    import torch

    from coterie.parallel.copy_choice import copy_choices
    from coterie.parallel.experts import route
    from coterie.parallel.layer_placement import LayerPlacement, experts_of_device
    from coterie.parallel.reference import reference, visits_between

    rng = np.random.default_rng(0)
    spec, hidden, scales = MoESpec("toy", 1, 11, 3), 5, [0.5 + expert for expert in range(11)]
    for topology, counts, copies in EXCHANGES[comms.size]:
        order = rng.permutation(11)
        placement = Placement(np.append(order, order[:copies])[None], Topology.parse(topology), spec)
        layer = LayerPlacement.of(placement, 0)
        ids = [torch.tensor(np.argsort(rng.random((count, 11)), axis=1)[:, :3]) for count in counts]
        ids = [copy_choices(placement, [0], rank)[0](each) for rank, each in enumerate(ids)]
        states = [torch.tensor(rng.normal(size=(count, hidden)), dtype=torch.float32) for count in counts]
        weights = [torch.tensor(rng.random((count, 3)), dtype=torch.float32) for count in counts]
        expected = reference(states, ids, weights, layer, lambda expert, x_NH: x_NH * scales[expert])[comms.rank]
        own: Any = Scaling([scales[expert] for expert in experts_of_device(placement, 0, comms.rank)])
        visits = visits_between(ids, layer)[comms.rank]
        for two_hop in (False, True):
            before = list(comms.sent_bytes_G)
            given = (states[comms.rank], ids[comms.rank], weights[comms.rank])
            output, handle = route(*given, layer, own, comms, two_hop=two_hop)
            assert torch.equal(output, expected), "as the reference"
            kinds = (handle.dispatch_bytes(), handle.combine_bytes(), handle.metadata_bytes())
            counted = [sum(parts) for parts in zip(*kinds, strict=True)]
            assert [after - b for after, b in zip(comms.sent_bytes_G, before, strict=True)] == counted, "as counted"
            if not two_hop:
                away = [count * (rank != comms.rank) * 4 * hidden for rank, count in enumerate(visits)]
                assert handle.dispatch_bytes() == away, "a copy for each visit"


def generate_all(comms: ProcessComms, jobs: str) -> None:
    """Every job's text, printed by rank 0: [model, placement file, prompts, tokens, two_hop]."""
    import torch

    check_exchanges(comms)
    results = []
    for model, file, prompts, tokens, two_hop in json.loads(jobs):
        placement = Placement.load(file)
        parallel = expert_parallel(model, placement, comms, dtype=torch.float32, two_hop=two_hop)
        done = generate(parallel, load_tokenizer(model), prompts, tokens)
        gathered = parallel.traffic.gather(comms)
        sent = sum(int(kind.sum()) for kind in gathered.values())
        results.append({"ids": [each.ids for each in done.prompts], "sent": sent})
    if comms.rank == 0:
        print(json.dumps(results))


def stay(comms: ProcessComms, file: str) -> None:
    """Generate until something happens."""
    parallel = expert_parallel("tiny-mixtral", Placement.load(file), comms)
    print("ready", flush=True)
    parallel.model.generation_config.eos_token_id = None
    generate(parallel, load_tokenizer("tiny-mixtral"), ["Once upon a time"], 100_000)


def chain(comms: ProcessComms, seconds: str) -> None:
    """Rank 2 waits for rank 0 alone, which waits for rank 1 so many seconds after that one has died."""
    import torch

    to, back = {0: ([0, 0, 1], [0, 1, 0]), 1: ([0, 0, 0], [0, 0, 0]), 2: ([0, 0, 0], [1, 0, 0])}[comms.rank]
    print("ready", flush=True)
    if comms.rank == 1:
        os._exit(9)
    time.sleep(float(seconds) if comms.rank == 0 else 0)
    for _ in range(2):  # rank 0 may send its first row before it notices
        comms.exchange(torch.ones(sum(to), 1), to, torch.zeros(sum(back), 1), back)


def main() -> int:
    try:
        with joined(Launch.of_environment(), float(os.environ["TIMEOUT"])) as comms:
            {"generate": generate_all, "stay": stay, "chain": chain}[sys.argv[1]](comms, sys.argv[2])
    except CoterieError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
