"""The entry point that vLLM calls in each of its processes (`vllm.general_plugins`)."""

from __future__ import annotations

import importlib
import os


def register() -> None:
    """Hook into vLLM, if `COTERIE_CONFIG` is set; else return at once, with nothing imported.

    May be called more than once in a process.

    Raises:
        BackendUnavailable: for a version of vLLM that the plugin does not know.
        ConfigError: for a file that cannot be used.
        InfeasiblePlacement: for a placement that cannot be used.
    """
    if not os.environ.get("COTERIE_CONFIG"):
        return
    from coterie.vllm_plugin.config import configured
    from coterie.vllm_plugin.versions import adapter_name

    name = adapter_name(importlib.import_module("vllm").__version__)
    configured()  # what cannot be used is refused before a model is loaded
    importlib.import_module(name).install()
