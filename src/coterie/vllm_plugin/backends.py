"""vLLM's all-to-all backends, by the names of `--all2all-backend`, and what each does with tokens. Imports nothing.

Checked against vLLM 0.32, vllm/config/parallel.py (All2AllBackend, and what replaces the removed ones), by
tests/contract/test_engine_code.py.
"""

from __future__ import annotations

DROPS = ("deepep_high_throughput", "deepep_low_latency", "deepep_v2")
"""Send nothing for id -1: DeepEP's kernels treat it as "no expert"."""

REMOVED = ("naive", "pplx")
"""Still accepted, but vLLM takes allgather_reducescatter instead, with a warning."""

GATHERS = ("allgather_reducescatter", *REMOVED)
"""Bring every token to every rank, wherever its experts are."""

INTERNAL = ("passthrough",)
"""Bound by vLLM itself; the command line does not take them."""

BACKENDS = (
    *DROPS, "mori_high_throughput", "mori_low_latency", "moonep", "nixl_ep", "flashinfer_all2allv",
    "flashinfer_nvlink_two_sided", "flashinfer_nvlink_one_sided", *GATHERS,
)  # fmt: skip
"""All that the command line takes."""
