"""What this machine's devices and links take, fitted from short runs of the real exchange and of real experts.

Links are timed with dispatch and combine themselves, so the fixed time holds everything that an exchange costs however
little it carries. Within nodes every rank sends to all others of its node, across nodes to all of the other nodes: all
at once, as in a step.

Source: algorithms §6; the alpha-beta model of links.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import coterie
from coterie.parallel.comms import Comms, share
from coterie.parallel.dispatch import Received, combine, dispatch
from coterie.parallel.layer_placement import LayerPlacement
from coterie.parallel.measured import Point, with_measured
from coterie.parallel.timing import Experts, ExpertShape, Stage, random_experts, require_ranks
from coterie.progress import Progress, silent
from coterie.topology import Topology

COMPUTE_PAIRS = (8, 32, 128, 512)
REPEATS = 5
_TIMES_THE_FIRST = 8  # a largest exchange that takes so many times as long as the smallest tells the rate
_MOST_BYTES = 64 * 2**20
_GROWTH = 4


def calibrate(
    comms: Comms,
    topology: Topology,
    shape: ExpertShape,
    experts_per_device: int,
    *,
    experts: Experts | None = None,
    link_tokens: Sequence[int] | None = None,
    compute_pairs: Sequence[int] = COMPUTE_PAIRS,
    repeats: int = REPEATS,
    progress: Progress = silent,
) -> Topology:
    """The topology with its measured fields filled in; every rank gets the same.

    Args:
        comms: the group, one rank for each device.
        topology: nodes and devices.
        shape: of the model's experts.
        experts_per_device: that a device holds in one layer.
        experts: what to time as computation; None: real experts with random weights.
        link_tokens: tokens that each rank sends to each other, one size after another; None: from one on, four times
            as many each time, until an exchange takes much longer than the first.
        compute_pairs: token-expert pairs of a device, one size after another.
        repeats: of each size; the best counts.
        progress: told of the sizes measured.

    Raises:
        ConfigError: when there is not one rank for each device.
        RankError: when a rank ended or did not answer in time.
    """
    require_ranks(comms, topology.num_devices, "a topology")
    stage = Stage(comms, shape.hidden_size, shape.dtype)
    made = random_experts(shape, experts_per_device, comms.rank, comms.device) if experts is None else experts
    compute = _measure(
        comms, compute_pairs, repeats, lambda pairs: _time_experts(stage, made, int(pairs), experts_per_device),
        "timing experts", progress,
    )  # fmt: skip
    found: dict[str, Any] = {"compute": compute}
    if topology.num_devices > 1:
        found |= measure_links(stage, topology, link_tokens, repeats, progress)
    told = {
        "hidden_size": shape.hidden_size, "expert_width": shape.width, "dtype": str(shape.dtype).removeprefix("torch."),
        "experts_per_device": experts_per_device, "ranks": comms.size, "device": str(comms.device),
        "coterie": coterie.__version__, "torch": str(torch.__version__),
    }  # fmt: skip
    return with_measured(topology, found, told)


def measure_links(
    stage: Stage, topology: Topology, link_tokens: Sequence[int] | None = None, repeats: int = REPEATS,
    progress: Progress = silent,
) -> dict[str, list[Point]]:  # fmt: skip
    """Times of exchanges of several sizes: "intra" within nodes and "inter" across, as far as there are any."""
    node_G = topology.node_of_device()
    here_G = node_G == node_G[stage.comms.rank]
    found = {}
    for name, peers_G in (("intra", here_G), ("inter", ~here_G)):
        peers = np.flatnonzero(peers_G & (np.arange(node_G.size) != stage.comms.rank))
        senders = topology.devices_per_node if name == "inter" else 1
        if (name == "intra" and topology.devices_per_node == 1) or (name == "inter" and topology.num_nodes == 1):
            continue
        row_bytes = 2 * stage.states(1).nbytes + peers.size * 8

        def one(tokens: float, peers: NDArray[np.int64] = peers) -> float:
            return _time_exchange(stage, topology, int(tokens), peers)

        what, token_bytes = f"timing links ({name})", peers.size * row_bytes
        if link_tokens is None:
            points = _measure_growing(stage.comms, _MOST_BYTES // token_bytes, repeats, one, what, progress)
        else:
            points = _measure(stage.comms, link_tokens, repeats, one, what, progress)
        found[name] = [Point(point.units * senders * token_bytes, point.seconds) for point in points]
    return found


def _measure_growing(
    comms: Comms, most: int, repeats: int, one: Callable[[float], float], what: str, progress: Progress
) -> list[Point]:
    """`_measure` of sizes that grow until one takes much longer than the first, or is the largest allowed."""
    points, size = list[Point](), 1
    while len(points) < 2 or (size <= most and points[-1].seconds < _TIMES_THE_FIRST * points[0].seconds):
        points += _measure(comms, [size], repeats, one, what, progress)
        size *= _GROWTH
    return points


def _measure(
    comms: Comms, sizes: Sequence[int], repeats: int, one: Callable[[float], float], what: str, progress: Progress
) -> list[Point]:
    """The slowest rank's time of each size, in the best repeat; one unmeasured repeat comes first."""
    points = []
    for done, size in enumerate(sizes):
        seconds = [one(size) for _ in range(repeats + 1)][1:]
        slowest = np.max(share(comms, seconds), axis=0)
        points.append(Point(float(size), float(np.min(slowest))))
        progress(what, done + 1, len(sizes))
    return points


def _time_experts(stage: Stage, run: Experts, pairs: int, count: int) -> float:
    """Seconds of so many pairs, spread evenly over a device's experts; all ranks compute at once."""
    device = stage.comms.device
    ids_R1 = (torch.arange(pairs, device=device) % count)[:, None]
    received = Received(stage.states(pairs), ids_R1, torch.ones((pairs, 1), device=device))
    share(stage.comms, None)
    started = stage.now()
    run(received)
    return stage.now() - started


def _time_exchange(stage: Stage, topology: Topology, tokens: int, peers: NDArray[np.int64]) -> float:
    """Seconds of a dispatch of so many tokens to each of these ranks, and of the way back; no computation."""
    num_devices, device = topology.num_devices, stage.comms.device
    device_E = torch.arange(num_devices, device=device)
    layer = LayerPlacement(0, device_E, device_E, torch.zeros_like(device_E), topology)
    ids_TK = torch.tensor(peers, device=device).repeat(tokens, 1)
    hidden_TH, weights_TK = stage.states(tokens), torch.ones(ids_TK.shape, device=device)
    share(stage.comms, None)
    started = stage.now()
    received, handle = dispatch(hidden_TH, ids_TK, weights_TK, layer, stage.comms)
    combine(received.hidden_RH, handle)
    return stage.now() - started
