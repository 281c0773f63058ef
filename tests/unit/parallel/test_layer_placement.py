"""Where one layer's experts are: slots may be unequal, experts may have copies."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.placement.copies import Copies
from coterie.placement.placement import Placement
from coterie.spec import MoESpec
from coterie.topology import Topology

pytestmark = pytest.mark.needs("torch")


def test_copies_are_numbered_by_expert_then_by_device() -> None:
    from coterie.parallel.layer_placement import LayerPlacement, experts_of_device

    topology = Topology(1, 3, slots_per_device=(2, 3, 1))
    copied = Placement(np.array([[2, 0, 1, 2, 0, 0]]), topology, MoESpec("toy", 1, 3, 2))
    layer = LayerPlacement.of(copied, 0)
    assert layer.expert_P.tolist() == [0, 0, 0, 1, 2, 2]
    assert layer.device_P.tolist() == [0, 1, 2, 1, 0, 1]
    assert layer.local_P.tolist() == [1, 2, 0, 0, 0, 1]
    assert experts_of_device(copied, 0, 1) == [1, 2, 0]
    copies = Copies.of(copied.hosts()[0])
    assert layer.expert_P.tolist() == copies.expert_P.tolist()
    assert layer.device_P.tolist() == copies.device_P.tolist()


def test_unequal_slots() -> None:
    from coterie.parallel.layer_placement import LayerPlacement, experts_of_device

    topology = Topology(1, 2, slots_per_device=(1, 3))
    placed = Placement(np.array([[2, 0, 3, 1]]), topology, MoESpec("toy", 1, 4, 2))
    layer = LayerPlacement.of(placed, 0)
    assert layer.expert_P.tolist() == [0, 1, 2, 3]
    assert layer.device_P.tolist() == [1, 1, 0, 1]
    assert layer.local_P.tolist() == [0, 2, 0, 1]
    assert experts_of_device(placed, 0, 1) == [0, 3, 1]
