"""What `coterie bench` prints for people."""

from __future__ import annotations

from typing import Any

from coterie.cli.common import say, table

_HEAD = (
    "system", "tokens/s", "x moe-offload", "x full", "bytes read", "bound", "belady", "own", "overlap", "perplexity",
)  # fmt: skip


def show_bench(result: dict[str, Any]) -> None:
    """Every table of a result."""
    from coterie.units import format_bytes

    bench, rate = result["bench_model"], result["emulated_bandwidth"]
    weights = "random weights, decisions replayed" if bench["random_weights"] else "your own"
    say(
        f"{bench['layers']} MoE layers of {bench['experts']} experts of {format_bytes(bench['expert_bytes'])} "
        f"({format_bytes(bench['all_expert_bytes'])} in all), top-{bench['top_k']}; {weights}"
    )
    if rate is not None:
        say(f"link: an emulation of {rate / 1e9:g} GB/s; speeds are an emulation's, compare them with each other only")
    rates = sorted(row["link_bytes_per_s"] for row in result["rows"] if row["link_bytes_per_s"])
    if rates:
        say(f"reads came at {rates[0] / 1e9:.2f} to {rates[-1] / 1e9:.2f} GB/s")
    if "parameters" in result["routing"]:
        say(f"loss and routing: {result['routing']['model']}, {result['routing']['parameters'] / 1e6:.1f} million "
            "parameters, on held-out text: a small model's")  # fmt: skip
    for budget in dict.fromkeys(row["budget"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["budget"] == budget]
        table(_HEAD, [_cells(row) for row in rows], f"{budget} of the experts in memory")
    say(
        "bytes read: share of full offload, over all recorded tokens (what is read ahead: as on the timed ones). "
        "Speed as a share of what cannot be beaten, "
        "computing included: bound: full width, Belady's misses; with widths, bytes beyond the budget; belady: the "
        "fewest bytes of any cache of blocks; own: the bytes this system read. Overlap: share of the loading that "
        "computing hid, and as a share of the attainable (asked 90%)."
    )
    for name, show in (("schedules", _schedules), ("lengths", _speeds), ("batches", _speeds), ("scheduling", _costs)):
        if name in result:
            show(result[name], result["studies"].get(name, {}))


def _cells(row: dict[str, Any]) -> list[str]:
    asked = row["asked"]
    return [
        row["system"], f"{row['tokens_per_s']:.2f}", _ratio(row, "over_moe_offload", asked),
        _ratio(row, "over_full", asked), _beside(f"{row['bytes_share']:.3f}", asked.get("bytes_share")),
        _beside(f"{row['share_of_bound']:.0%}", asked.get("share_of_bound")), f"{row['share_of_belady']:.0%}",
        f"{row['share_of_own_bound']:.0%}", f"{row['overlap']:.0%}, {row['share_of_attainable']:.0%}",
        f"{row['perplexity_increase']:+.2%}",
    ]  # fmt: skip


def _ratio(row: dict[str, Any], name: str, asked: dict[str, float]) -> str:
    found = row[name]
    return "-" if found is None else _beside(f"{found['ratio']:.2f}x", asked.get(name))


def _beside(figure: str, asked: float | None) -> str:
    return figure if asked is None else f"{figure} (asked {asked:g})"


def _schedules(rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    cells = [
        [row["schedule"], f"{row['overlap']:.1%}", "-" if row["within_a_layer"] is None else
         f"{row['within_a_layer']:.1%}", f"{row['attainable_overlap']:.1%}", f"{row['tokens_per_s']:.2f}"]
        for row in rows
    ]  # fmt: skip
    head = ("schedule", f"overlap (asked {about['asked_overlap']:.0%})", "within a layer", "attainable", "prompts/s")
    say(about["about"])
    table(head, cells)


def _speeds(rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    key = about["by"]
    systems = list(dict.fromkeys(row["system"] for row in rows))
    speeds = {(row[key], row["system"]): row["tokens_per_s"] for row in rows}
    cells = [[str(value), *(f"{speeds[value, system]:.2f}" for system in systems)]
             for value in dict.fromkeys(row[key] for row in rows)]  # fmt: skip
    say(about["about"])
    table((key, *systems), cells)


def _costs(found: dict[str, Any], _: dict[str, Any]) -> None:
    say(found["about"])
    cells = [[part, f"{value:.1f}"] for part, value in found["microseconds"].items()]
    table(("part", "microseconds a token and layer"), cells)
