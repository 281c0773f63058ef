"""One rank of the tests' groups, no test itself: `one_rank.py generate JOBS` or `one_rank.py stay PLACEMENT`."""

from __future__ import annotations

import json
import os
import sys

os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"

from coterie.errors import CoterieError
from coterie.models.load import load_tokenizer
from coterie.parallel.generation import generate
from coterie.parallel.model import expert_parallel
from coterie.parallel.processes import Launch, ProcessComms, joined
from coterie.placement.placement import Placement


def generate_all(comms: ProcessComms, jobs: str) -> None:
    """Every job's text, printed by rank 0: [model, placement file, prompts, tokens, two_hop]."""
    import torch

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


def main() -> int:
    try:
        with joined(Launch.of_environment(), float(os.environ["TIMEOUT"])) as comms:
            {"generate": generate_all, "stay": stay}[sys.argv[1]](comms, sys.argv[2])
    except CoterieError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
