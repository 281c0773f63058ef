"""Where one layer's experts are: unequal slots are taken, placements with copies refused."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.errors import InfeasiblePlacement
from coterie.placement.placement import Placement
from coterie.spec import MoESpec
from coterie.topology import Topology

pytestmark = pytest.mark.needs("torch")


def test_copies_are_refused() -> None:
    from coterie.parallel.layer_placement import LayerPlacement, experts_of_device

    copied = Placement(np.array([[0, 1, 2, 0]]), Topology(1, 2), MoESpec("toy", 1, 3, 2))
    for use in (lambda: LayerPlacement.of(copied, 0), lambda: experts_of_device(copied, 0, 0)):
        with pytest.raises(InfeasiblePlacement, match="place without --redundant"):
            use()


def test_unequal_slots() -> None:
    from coterie.parallel.layer_placement import LayerPlacement, experts_of_device

    topology = Topology(1, 2, slots_per_device=(1, 3))
    placed = Placement(np.array([[2, 0, 3, 1]]), topology, MoESpec("toy", 1, 4, 2))
    layer = LayerPlacement.of(placed, 0)
    assert layer.device_P.tolist() == [1, 1, 0, 1]
    assert layer.local_P.tolist() == [0, 2, 0, 1]
    assert experts_of_device(placed, 0, 1) == [0, 3, 1]
