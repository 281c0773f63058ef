"""`coterie check-engine`: whether the engine that is installed here is supported, and by which path."""

from __future__ import annotations

from typing import Annotated

import typer

from coterie.cli.common import JsonOption, emit_json, say


def check_engine(
    engine: Annotated[
        str, typer.Argument(metavar="ENGINE", help="vllm, sglang or tensorrt-llm (not vllm-ascend: export only).")
    ],
    as_json: JsonOption = False,
) -> None:
    """Say whether the installed version of a serving engine is supported, and how it takes a placement."""
    from coterie.engines.check import check_engine as check

    found = check(engine)
    about = found.engine
    if as_json:
        emit_json(
            {
                "engine": about.name, "package": found.package, "version": found.version,
                "supported": about.supported, "newer": found.newer, "path": about.path, "limits": list(about.limits),
                "plugin": found.plugin, "plugin_versions": found.plugin_versions,
            }
        )  # fmt: skip
        return
    say(f"{found.package} {found.version} is supported ({about.supported})")
    say(f"it takes {about.path}")
    if found.plugin:
        say(f"plugin: knows this version ({found.plugin_versions}); COTERIE_CONFIG=file.yaml makes it prune and record")
    elif found.plugin is not None:
        say(f"plugin: knows {found.plugin_versions}, not this version, and refuses to start")
    for line in (*about.limits, *([found.newer] if found.newer else [])):
        say(f"note: {line}")
