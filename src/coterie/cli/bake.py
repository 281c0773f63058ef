"""`coterie bake`: a standard checkpoint that is placed by its experts' numbers alone, and the way back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.common import JsonOption, emit_json, note, progress, say
from coterie.errors import ConfigError

if TYPE_CHECKING:
    from coterie.checkpoint.compare_renumbered import SameTensors
    from coterie.evaluate.baking import BakedAgreement
    from coterie.models.bake import Baked, Check
    from coterie.progress import Progress


def bake(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model's folder, a shipped model or a hub id.")],
    out: Annotated[Path, typer.Option("--out", help="The folder to write.")],
    placement: Annotated[
        Path | None, typer.Option("--placement", help="A placement of this model (coterie place).")
    ] = None,
    reorder: Annotated[
        Path | None,
        typer.Option("--reorder", help="The model's profile: also put important neurons first (coterie reorder)."),
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="MODEL is baked: write what it was made from.")] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Compare both, tensor by tensor, first; on a difference nothing is written."),
    ] = False,
    verify_outputs: Annotated[
        bool,
        typer.Option("--verify-outputs", help="Run both on a little text first; on a difference nothing is written."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Renumber a checkpoint's experts so that every engine's default layout is the placement.

    Its outputs are the original's. Data is copied undecoded, so quantised experts are fine.
    """
    from coterie.models.bake import bake as write
    from coterie.models.bake import unbake
    from coterie.placement.placement import Placement
    from coterie.profile.profile_file import load_profile

    if undo and (placement is not None or reorder is not None):
        raise ConfigError("--undo takes the placement out of MODEL; leave --placement and --reorder out")
    if not undo and placement is None:
        raise ConfigError("baking needs a placement; give --placement (coterie place makes one), or --undo")
    with progress() as listen:
        check = _check(verify, verify_outputs, listen)
        if placement is None:
            written = unbake(model, out, check=check, progress=listen)
        else:
            profile = None if reorder is None else load_profile(reorder)
            written = write(model, Placement.load(placement), out, profile=profile, check=check, progress=listen)
    if as_json:
        emit_json(_result(model, written))
    else:
        _show(written)


def _check(verify: bool, verify_outputs: bool, listen: Progress) -> Check | None:
    """What to do with both folders before the new one appears."""

    def check(source: Path, out: Path, map_LE: Any, spec: Any) -> tuple[SameTensors | None, BakedAgreement | None]:
        from coterie.checkpoint.compare_renumbered import compare_renumbered

        same = compare_renumbered(source, out, map_LE, spec.layer_ids, listen) if verify else None
        if not verify_outputs:
            return same, None
        from coterie.evaluate.baking import compare_baked

        return same, compare_baked(source, out, map_LE)

    return check if verify or verify_outputs else None


def _result(model: str, written: Baked) -> dict[str, Any]:
    same, agreement = written.check or (None, None)
    return {
        "out": str(written.out), "model": model, "expert_order": written.expert_order, "devices": written.num_devices,
        "moved": written.moved, "left_out": list(written.left_out), "tensors": None if same is None else vars(same),
        "outputs": None if agreement is None else agreement.to_json(),
    }  # fmt: skip


def _show(written: Baked) -> None:
    spec, devices = written.spec, written.num_devices
    experts = spec.num_layers * spec.num_experts
    if written.expert_order is None:
        say(f"{written.out}: {spec.model} as it was before, {written.moved:,} of {experts:,} experts renumbered back")
    else:
        say(
            f"{written.out}: {spec.model} with {written.moved:,} of {experts:,} experts renumbered, order "
            f"{written.expert_order}"
        )
    same, agreement = written.check or (None, None)
    if same is not None:
        say(
            f"  verified: {same.tensors:,} tensors ({same.nbytes:,} bytes) equal, {same.renamed:,} under another name, "
            f"{same.moved:,} slice by slice"
        )
    if agreement is not None:
        _show_agreement(agreement)
    if written.expert_order is not None:
        each = spec.num_experts // devices
        say(f"serve with expert parallelism over {devices} ranks and the default (linear) layout, {each} experts each,")
        say(
            "load balancing by the engine (EPLB) off: vLLM --enable-expert-parallel; SGLang --ep-size; see docs/engines"
        )
    if written.left_out:
        note(f"not copied, since they hold the weights in another form: {', '.join(written.left_out)}")


def _show_agreement(agreement: BakedAgreement) -> None:
    say(f"  float32: logits within {agreement.relative:.1e} of the largest, on {agreement.tokens} predictions")
    for dtype, found in (("float32", agreement.decisions), (agreement.dtype, agreement.own)):
        if found is not None:
            say(
                f"  {dtype}: {found.compared:,} decisions, {found.tied:,} others by an exact tie, {found.different:,} "
                f"by rounding (scores up to {found.gap:.1e} apart)"
            )
    if agreement.kl is not None:
        say(
            f"  {agreement.dtype}: KL from the original {agreement.kl:.1e} nats on average, at most "
            f"{agreement.kl_max:.1e}"
        )
