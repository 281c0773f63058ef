"""JSON and YAML texts as plain data, with nothing trusted: no tags, no aliases, no repeated keys, no deep nesting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coterie.errors import InfeasiblePlacement
from coterie.files import parse_json

_MAX_DEPTH = 8  # the deepest map, vllm-ascend's, nests 6 levels


def is_json(text: str) -> bool:
    """Whether a text that should be JSON or YAML is read as JSON."""
    return text.lstrip()[:1] in ("{", "[")


def parse_document(text: str, source: str | Path) -> Any:
    """The JSON or YAML value in `text`; what begins with a brace or bracket is read as JSON.

    Raises:
        InfeasiblePlacement: when the text is neither, or uses what no map needs.
    """
    if is_json(text):
        return parse_json(text, source, InfeasiblePlacement, strict=True)
    return _parse_yaml(text, source)


def _parse_yaml(text: str, source: str | Path) -> Any:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_events(yaml.parse(text, Loader=loader))
        return yaml.load(text, Loader=loader)  # noqa: S506 - a safe loader, the C one where there is one
    except (yaml.YAMLError, ValueError, RecursionError) as reason:
        words = " ".join(str(reason).split())
        raise InfeasiblePlacement(f"{source} is truncated or no JSON or YAML ({words}); write it again") from reason


def _check_events(events: Any) -> None:
    """Raise ValueError for aliases and anchors, deep nesting, and keys written twice, before anything is built."""
    import yaml

    seen_keys: list[set[str] | None] = []  # for each open collection its keys so far; None for a list
    at_key: list[bool] = []
    for event in events:
        if getattr(event, "anchor", None) is not None:
            raise ValueError("it uses YAML anchors or aliases, which maps do without")
        if isinstance(event, yaml.CollectionEndEvent):
            seen_keys.pop()
            at_key.pop()
            continue
        if not isinstance(event, yaml.NodeEvent):
            continue
        keys = seen_keys[-1] if seen_keys else None
        if keys is not None:
            if at_key[-1] and isinstance(event, yaml.ScalarEvent):
                if event.value in keys:
                    raise ValueError(f"the key {event.value!r} is written twice")
                keys.add(event.value)
            at_key[-1] = not at_key[-1]
        if isinstance(event, yaml.CollectionStartEvent):
            seen_keys.append(set() if isinstance(event, yaml.MappingStartEvent) else None)
            at_key.append(True)
            if len(seen_keys) > _MAX_DEPTH:
                raise ValueError(f"it nests more than {_MAX_DEPTH} levels")
