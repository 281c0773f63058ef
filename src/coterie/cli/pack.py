"""`coterie pack`: a model as an expert store, from which it runs in less memory than it has weights."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.common import Interrupted, JsonOption, emit_json, note, progress, say


@contextmanager
def _saying_what_stays(out: Path) -> Iterator[None]:
    from coterie.checkpoint.pack_store import experts_packed

    try:
        yield
    except KeyboardInterrupt as stopped:
        there = experts_packed(out)
        if there is None:
            raise
        done, total = there
        command = shlex.join(["coterie", *sys.argv[1:]])
        raise Interrupted(f"{out} holds {done} of {total} experts; to go on from there: {command}") from stopped


def pack(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model's folder, a shipped model or a hub id.")],
    out: Annotated[Path, typer.Option("--out", help="The store's folder; what was interrupted is taken up again.")],
    profile: Annotated[
        Path | None, typer.Option("--profile", help="The model's profile (coterie profile): neurons by importance.")
    ] = None,
    variant: Annotated[
        str | None, typer.Option("--variant", help="The importance to go by, one that the profile holds.")
    ] = None,
    bits: Annotated[
        int | None, typer.Option(help="8: round experts' weights to 8 bits, a scale a row: half the bytes of bfloat16.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a store of experts, each readable at any width in one read, and everything else beside it."""
    from coterie.models.pack import pack as write
    from coterie.profile.profile_file import load_profile
    from coterie.units import format_bytes

    with progress() as listen, _saying_what_stays(out):
        loaded = None if profile is None else load_profile(profile)
        packed = write(model, out, profile=loaded, variant=variant, bits=bits, progress=listen)
    layout = packed.layout
    if as_json:
        emit_json(
            {
                "out": str(packed.out), "model": model, "order": packed.order, "variant": packed.variant,
                "experts": layout.num_records, "expert_bytes": layout.record_bytes, "blocks": layout.blocks,
                "block_neurons": layout.block_neurons, "dtype": layout.dtype, "total_bytes": layout.total_bytes,
                "resumed": packed.resumed,
            }
        )  # fmt: skip
        return
    say(
        f"{packed.out}: {layout.num_records} experts of {format_bytes(layout.record_bytes)} ({layout.dtype}), "
        f"{layout.blocks} blocks of {layout.block_neurons} neurons each"
    )
    if packed.resumed:
        say(f"  {packed.resumed} of them were packed by an earlier call")
    if packed.order is None:
        note("neurons are in their original order: widths need a store that was packed with --profile")
