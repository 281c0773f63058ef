"""The serving engines by name."""

from __future__ import annotations

from collections.abc import Mapping

from coterie.engines.base import Exporter
from coterie.engines.plain_json import PlainJsonExporter
from coterie.engines.sglang import SGLangExporter
from coterie.engines.tensorrt_llm import TensorRTLLMExporter
from coterie.engines.vllm_ascend import VllmAscendExporter
from coterie.errors import ConfigError, unknown_name

_ALL: tuple[Exporter, ...] = (SGLangExporter(), VllmAscendExporter(), TensorRTLLMExporter(), PlainJsonExporter())
EXPORTERS: Mapping[str, Exporter] = {exporter.name: exporter for exporter in _ALL}


def get_exporter(name: str) -> Exporter:
    """The exporter with this name.

    Raises:
        ConfigError: when there is none, with the nearest known name, or what to do instead of a file.
    """
    if name == "vllm":
        raise ConfigError(
            "vLLM takes no placement file; put the placement into the checkpoint: coterie bake MODEL --placement "
            "placement.json --out DIR (on Ascend, vLLM takes a file: vllm-ascend)"
        )
    if name not in EXPORTERS:
        raise unknown_name("serving engine", name, EXPORTERS)
    return EXPORTERS[name]
