"""`coterie reorder`: a checkpoint that computes the same, with the most important neurons of every expert first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.common import JsonOption, emit_json, note, progress, say

if TYPE_CHECKING:
    from coterie.evaluate.reordering import Agreement
    from coterie.models.reorder_checkpoint import Reordered


def reorder(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model's folder, a shipped model or a hub id.")],
    profile: Annotated[Path, typer.Option("--profile", help="The model's profile (coterie profile).")],
    out: Annotated[Path, typer.Option("--out", help="The folder to write.")],
    variant: Annotated[
        str | None,
        typer.Option("--variant", help="The importance to go by, one that the profile holds; the default one."),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Run both on a little text first; on a difference nothing is written.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a standard checkpoint with the neurons of every expert in order of importance.

    Its outputs are the original's; shared experts, routers and everything else are copied as they are.
    """
    from coterie.evaluate.reordering import verify_reordering
    from coterie.models.reorder_checkpoint import reorder as write
    from coterie.profile.profile_file import load_profile

    with progress() as listen:
        check = verify_reordering if verify else None
        written = write(model, load_profile(profile), out, variant=variant, check=check, progress=listen)
    if as_json:
        emit_json(_result(model, written))
    else:
        _show(written)


def _result(model: str, written: Reordered) -> dict[str, Any]:
    agreement: Agreement | None = written.check
    return {
        "out": str(written.out), "model": model, "order": written.digest, "variant": written.variant,
        "left_out": list(written.left_out), "verified": None if agreement is None else agreement.to_json(),
    }  # fmt: skip


def _show(written: Reordered) -> None:
    say(f"{written.out}: neurons by {written.variant}, order {written.digest}")
    agreement: Agreement | None = written.check
    if agreement is not None:
        say(
            f"  float32: logits within {agreement.relative:.1e} of the largest, on {agreement.tokens} predictions of "
            "shipped text"
        )
    if agreement is not None and agreement.kl is not None:
        say(
            f"  {agreement.dtype}: KL from the original {agreement.kl:.1e} nats on average, "
            f"at most {agreement.kl_max:.1e}"
        )
    if written.left_out:
        note(f"not copied, since they hold the weights in another form: {', '.join(written.left_out)}")
