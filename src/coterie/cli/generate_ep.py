"""`coterie generate-ep`: text from a model whose experts are spread over processes, under torchrun."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.common import JsonOption, emit_json, note, say, table, warnings_as_notes
from coterie.cli.pruning_options import AUTO, FLOOR_HELP, parse_floor

if TYPE_CHECKING:
    from coterie.parallel.comms import Comms
    from coterie.parallel.generation import Generation
    from coterie.placement.placement import Placement
    from coterie.pruning.destinations import PruningRule

_QUIET, _LINGER_SECONDS = 2, 1.0


def generate_ep(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a shipped model's name, or a hub id.")],
    placement: Annotated[Path, typer.Option("--placement", help="Where its experts live (coterie place).")],
    prompt: Annotated[list[str] | None, typer.Option("--prompt", help="A text to continue; give as many.")] = None,
    prompts: Annotated[Path | None, typer.Option("--prompts", help="A file of them, one a line.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to generate for each, at most.")] = 64,
    prune: Annotated[
        str | None, typer.Option("--prune", help="Share of a token's weight that may be dropped, e.g. 0.2.")
    ] = None,
    rule: Annotated[str, typer.Option(help="What is dropped: cap, naive, or priced (fitted on --fit).")] = "cap",
    fit: Annotated[Path | None, typer.Option("--fit", help="A trace of this model, to fit priced on.")] = None,
    floor: Annotated[str, typer.Option("--floor", help=FLOOR_HELP)] = AUTO,
    dtype: Annotated[str | None, typer.Option(help="Element type, e.g. float32; default: the checkpoint's.")] = None,
    two_hop: Annotated[
        bool, typer.Option("--two-hop", help="Cross to each other node once, then go on within it.")
    ] = False,
    dispatch: Annotated[
        str | None,
        typer.Option("--dispatch", help="How tokens choose copies; default: the rule that they were placed for."),
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds to wait for another process.")] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Continue prompts, greedily, on as many processes as the placement has devices; start it with torchrun.

    The texts are those of one process in float32; in other types sums are rounded in another order.

    When it stops, the first line, "coterie: error: ...", says why; the traceback that follows is torchrun's own.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # an error is one line; torch reads this when imported
    asked = _Asked(
        model, placement, tuple(prompt or ()), prompts, tokens, prune, rule, fit, floor, dtype, two_hop, dispatch
    )
    from coterie.models.backend import import_transformers

    import_transformers()
    from coterie.parallel.processes import Launch, ToldByRankZero, joined

    try:
        launch = Launch.of_environment()
        with _remarks(launch.rank), joined(launch, timeout) as comms:
            result, generation = asked.run(comms)
    except ToldByRankZero:
        time.sleep(_LINGER_SECONDS)  # torchrun ends all ranks when one ends, and rank 0 has a line to print
        raise typer.Exit(_QUIET) from None
    if comms.rank:
        return
    if as_json:
        emit_json(result)
    else:
        _show(result, generation)


@contextmanager
def _remarks(rank: int) -> Iterator[None]:
    """Warnings as rank 0's remarks; the other ranks would say the same."""
    if rank == 0:
        with warnings_as_notes():
            yield
        return
    with warnings.catch_warnings(action="ignore"):
        yield


@dataclass(frozen=True)
class _Asked:
    """The options as they were written."""

    model: str
    placement: Path
    prompt: tuple[str, ...]
    prompts: Path | None
    tokens: int
    prune: str | None
    rule: str
    fit: Path | None
    floor: str
    dtype: str | None
    two_hop: bool
    dispatch: str | None

    def run(self, comms: Comms) -> tuple[dict[str, Any], Generation]:
        """Load, generate, and gather what it took; the result is rank 0's to print."""
        from coterie.models.load import load_tokenizer, parse_dtype
        from coterie.models.prune import prune_destinations
        from coterie.parallel.expert_parallel import expert_parallel, require_size
        from coterie.parallel.generation import encode, generate
        from coterie.parallel.processes import agreed
        from coterie.parallel.traffic import summary
        from coterie.placement.placement import Placement

        def check() -> tuple[Placement, list[str], Any, PruningRule | None, Any]:
            placed = Placement.load(self.placement)
            require_size(placed, comms.size)
            self._check_dispatch(placed)
            texts, tokenizer = self._texts(), load_tokenizer(self.model)
            encode(tokenizer, texts)
            return placed, texts, tokenizer, self._rule(placed), parse_dtype(self.dtype)

        placed, texts, tokenizer, pruning, wanted = agreed(comms, check)
        options: dict[str, Any] = {"dtype": wanted, "two_hop": self.two_hop, "dispatch": self.dispatch}
        parallel = agreed(comms, lambda: expert_parallel(self.model, placed, comms, **options))
        with ExitStack() as stack:
            pruner = None
            if pruning is not None:
                applied = prune_destinations(parallel.model, placed, rule=pruning, homes=comms.rank)
                pruner = stack.enter_context(applied)
            generation = generate(parallel, tokenizer, texts, self.tokens)
        traffic = parallel.traffic.gather(comms)
        figures = {**summary(traffic), **_held(comms, parallel.loaded), **_pruned(comms, pruner)}
        settings = self._settings(placed, comms, pruning, parallel.model.dtype)
        return {**settings, **_told(generation), **figures}, generation

    def _check_dispatch(self, placed: Placement) -> None:
        """Refuse an unknown rule, one for a placement without copies, and pruning with copies."""
        from coterie.errors import ConfigError
        from coterie.placement.copies import check_rule, rule_of

        check_rule(rule_of(placed.method) if self.dispatch is None else self.dispatch)
        if self.dispatch is not None and not placed.num_copies:
            raise ConfigError(
                f"--dispatch {self.dispatch}, but {self.placement} has no copies of experts to choose from; leave it "
                "out, or place with --redundant"
            )
        if self.prune is not None:
            placed.require_no_copies("pruning")

    def _texts(self) -> list[str]:
        from coterie.errors import ConfigError
        from coterie.files import read_text

        lines = [] if self.prompts is None else read_text(self.prompts, ConfigError).splitlines()
        return [*self.prompt, *(line for line in lines if line.strip())]

    def _rule(self, placed: Placement) -> PruningRule | None:
        """The pruning rule with its strength."""
        from coterie.errors import ConfigError
        from coterie.pruning.fitting import RuleChoice, fit_rule
        from coterie.pruning.routed import RoutedTrace
        from coterie.trace.open import open_trace
        from coterie.units import parse_fraction

        if self.prune is None:
            if (self.rule, self.fit, self.floor) != ("cap", None, AUTO):
                raise ConfigError("--rule, --fit and --floor belong to pruning; give --prune, e.g. --prune 0.2")
            return None
        floor = parse_floor(self.floor) if self.rule == "priced" else 0.0
        choice = RuleChoice(self.rule, parse_fraction(self.prune), None, floor)
        if self.rule != "priced":
            return _plain(choice.name, choice.p or 0.0)
        if self.fit is None:
            raise ConfigError("the rule priced is fitted on a trace of the model; record one (coterie record; --fit)")
        trace = open_trace(self.fit)
        placed.require_model(trace.spec, f"the trace {self.fit}")
        return fit_rule(choice, RoutedTrace(trace, placed.device_of_expert(), placed.topology))

    def _settings(self, placed: Placement, comms: Comms, rule: PruningRule | None, dtype: Any) -> dict[str, Any]:
        import torch
        import transformers

        import coterie

        modules = (coterie, torch, transformers)
        versions = {module.__name__: str(module.__version__) for module in modules}
        told = None if rule is None else {key: value for key, value in rule.describe().items() if key != "theta"}
        return {
            "model": self.model, "ranks": comms.size, "topology": placed.topology.to_json(),
            "device": str(comms.device), "placement": dict(placed.method), "prune": told, "two_hop": self.two_hop,
            "dtype": str(dtype).removeprefix("torch."), "versions": versions, **self._copies(placed),
        }  # fmt: skip

    def _copies(self, placed: Placement) -> dict[str, Any]:
        from coterie.placement.copies import rule_of

        if not placed.num_copies:
            return {}
        return {"redundant": placed.num_copies, "dispatch": self.dispatch or rule_of(placed.method)}


def _plain(name: str, p: float) -> PruningRule:
    from coterie.pruning.destinations import Cap, Naive

    return Cap(p) if name == "cap" else Naive(p)


def _held(comms: Comms, loaded: Any) -> dict[str, Any]:
    """Bytes of experts on each rank, and of all."""
    from coterie.parallel.comms import share

    return {"expert_bytes": share(comms, loaded.expert_bytes), "all_expert_bytes": loaded.all_expert_bytes}


def _pruned(comms: Comms, pruner: Any) -> dict[str, Any]:
    """What pruning kept, over all ranks' tokens (padding of a rank's own batch included)."""
    from coterie.parallel.comms import share

    if pruner is None:
        return {}
    stats = pruner.stats()
    said = share(comms, [stats.num_tokens, float(stats.kept_weight.mean()), float(stats.remote_dpt.mean())])
    tokens = max(1, sum(count for count, *_ in said))
    kept, remote = (sum(row[0] * row[column] for row in said) / tokens for column in (1, 2))
    return {"kept_weight": kept, "remote_dpt": remote}


def _told(generation: Generation) -> dict[str, Any]:
    count = sum(len(each.ids) for each in generation.prompts)
    rows = [vars(each) for each in generation.prompts]
    return {"prompts": rows, "tokens": count, "seconds": generation.seconds, "tokens_per_s": count / generation.seconds}


def _show(result: dict[str, Any], generation: Generation) -> None:
    from coterie.units import format_bytes

    for each in generation.prompts:
        say(f"[{each.prompt + 1}, rank {each.rank}] {each.text}")
    most = max(result["expert_bytes"])
    rows = [
        ["tokens; per second, prompts included", f"{result['tokens']}; {result['tokens_per_s']:.2f}"],
        ["experts of the fullest rank; of the model",
         f"{format_bytes(most)}; {format_bytes(result['all_expert_bytes'])}"],
        ["sent between ranks: tokens, sums returned, metadata",
         ", ".join(format_bytes(result[f"{kind}_bytes"]) for kind in ("dispatch", "combine", "metadata"))],
    ]  # fmt: skip
    if "kept_weight" in result:
        rows.append(["routing weight kept; remote devices per token",
                     f"{result['kept_weight']:.1%}; {result['remote_dpt']:.3f}"])  # fmt: skip
    table([f"{result['ranks']} ranks, {result['dtype']}", ""], rows)
    if result["device"] == "cpu":
        note("processes on CPUs, over gloo: how it works, not how fast a cluster would be")
