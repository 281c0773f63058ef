"""Eviction policies by name."""

from __future__ import annotations

from coterie.errors import unknown_name
from coterie.policies.company import Company
from coterie.policies.eviction import LFU, LRU, CacheShape, EvictionPolicy, LayerLRU, WholeLayerLRU, WholeLRU
from coterie.policies.reuse import Reuse

POLICIES: dict[str, type[EvictionPolicy]] = {
    policy.name: policy
    for policy in (
        LRU,
        LayerLRU,
        LFU,
        Reuse,
        Company,
        WholeLRU,
        WholeLayerLRU,
    )  # Belady needs the future: only a simulator has it
}
DEFAULT = Company.name


def make_policy(name: str, shape: CacheShape) -> EvictionPolicy:
    """A policy of this name that knows nothing yet.

    Raises:
        ConfigError: for an unknown name, with the nearest known one.
    """
    if name not in POLICIES:
        raise unknown_name("eviction policy", name, POLICIES)
    return POLICIES[name](shape)
