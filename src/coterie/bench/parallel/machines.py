"""The emulated machines: how fast their links are, and how much of a step the linear placement spends on them.

CAP's nodes differ in what share of a step is communication (its §VIII-A, Fig. 12). Here a class sets the rate of the
links, and the modelled time of experts is scaled so that linear spends the share that the class stands for.
"""

from __future__ import annotations

from dataclasses import dataclass

from coterie.bench.parallel.network import Rates
from coterie.topology import Topology

MB = 1e6


@dataclass(frozen=True)
class Machine:
    """One emulated machine.

    Attributes:
        name: its class in the table.
        stands_for: what of the paper it stands for, for people.
        topology: nodes and devices; its cost c is what placement and pruning use.
        rates: of links.
        share: of a step that linear spends communicating; None: the experts of `like` instead.
        like: the name of another machine with the same devices.
    """

    name: str
    stands_for: str
    topology: Topology
    rates: Rates
    share: float | None
    like: str | None = None


_NODE, _CLUSTER = Topology(1, 8), Topology(2, 4, inter_cost=5.0)
MACHINES = (
    Machine("A", "CAP's node A: constrained by its links", _NODE, Rates(6.25 * MB), 0.8),
    Machine("B", "CAP's node B: balanced", _NODE, Rates(12.5 * MB), 0.5),
    Machine("C", "CAP's node C: rich in bandwidth", _NODE, Rates(25 * MB), 0.2),
    Machine("cluster A", "CAP's cluster A: two nodes, a fast link between", _CLUSTER, Rates(12.5 * MB, 50 * MB), 0.5),
    Machine(
        "cluster B", "CAP's cluster B: two nodes, a slow link between", _CLUSTER, Rates(12.5 * MB, 50 / 6 * MB), None,
        like="cluster A",
    ),
)  # fmt: skip
