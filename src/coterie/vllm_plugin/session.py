"""The plugin at work in one worker: what happens at each layer, before and after each step, and at the end."""

from __future__ import annotations

import atexit
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import coterie
from coterie.errors import ConfigError, CoterieError
from coterie.files import write_text
from coterie.placement.numbering import EXPERT_ORDER_KEY
from coterie.vllm_plugin.config import PluginConfig
from coterie.vllm_plugin.engine import Engine
from coterie.vllm_plugin.pruning import RouterPruning
from coterie.vllm_plugin.recording import RequestRows, StepRecorder

KIND = "coterie.vllm_report"
_log = logging.getLogger("vllm.coterie")  # vLLM formats what its own loggers say


class Session:
    """Made when the model is loaded.

    Attributes:
        pruning: what prunes, or None.
        recorder: what records, or None: nothing is asked, another rank does, or recording has ended.
    """

    def __init__(self, config: PluginConfig, engine: Engine, device: torch.device | str = "cpu") -> None:
        self._config, self._engine = config, engine
        self.pruning = None if config.prune is None else RouterPruning(config, engine, device)
        self.recorder = self._make_recorder(device)
        self._path = None if config.report is None else ranked(config.report, engine.rank)
        self._due = 0.0  # when the counts are to be written again
        self._written = True  # whether the files hold all that was done
        self._running = False  # a step
        self._lock = threading.RLock()  # between steps and the thread that writes while there are none
        self._closed = threading.Event()
        self._ended = time.monotonic()  # when the last step did
        atexit.register(self.close)  # an engine in the caller's own process may end without a word
        if self._path is not None or self.recorder is not None:
            threading.Thread(target=self._write_when_idle, name="coterie", daemon=True).start()

    def route(self, layer: int, weight_TK: Tensor, ids_TK: Tensor) -> tuple[Tensor, Tensor]:
        """What goes on to the experts of a layer, for what its router chose; [T, K] each."""
        out_TK = ids_TK
        if self.pruning is not None:
            weight_TK, out_TK, _ = self.pruning.decide(layer, weight_TK, ids_TK)
        if self.recorder is not None:
            self.recorder.put(layer, weight_TK, ids_TK)
        return weight_TK, out_TK

    @contextmanager
    def step(self, num_tokens: int) -> Iterator[None]:
        """While the engine runs a step of so many tokens; `end_step` belongs into it, once the step was launched."""
        with self._lock:
            self._running = True
        if self.pruning is not None:
            self.pruning.begin_step(num_tokens)
        try:
            yield
        finally:
            if self.pruning is not None:
                self.pruning.end_step()
            self._written, self._running, self._ended = False, False, time.monotonic()

    def end_step(self, requests: Callable[[], Sequence[RequestRows]], finished: Sequence[str] = ()) -> None:
        """Record and tell; `requests` says whose tokens the rows are. Serving goes on whatever fails here."""
        if self.pruning is not None:
            self.pruning.end_step()
        if self.recorder is not None:
            self._try(self._record, requests, finished)
        if self._path is not None and time.monotonic() >= self._due:
            self._try(self._write_report)

    def report(self) -> dict[str, Any]:
        """What was done so far, ready for JSON."""
        told: dict[str, Any] = {
            "kind": KIND, "coterie": coterie.__version__, "vllm": self._engine.version, "rank": self._engine.rank,
            "model": self._engine.spec.model, "does": self.describe(),
        }  # fmt: skip
        if self.pruning is not None:
            rule = {name: value for name, value in self.pruning.rule.describe().items() if name != "theta"}
            told["pruning"] = {
                **rule, "topology": self.pruning.topology.to_json(), "home": self.pruning.home,
                "renormalise": self.pruning.renormalise, **self.pruning.stats().to_json(),
            }  # fmt: skip
        if self.recorder is not None:
            told["recorded_tokens"] = self.recorder.num_tokens
        return told

    def flush(self) -> dict[str, Any]:
        """Write the files now; what they and the log say so far."""
        with self._lock:
            if self._path is not None:
                self._try(self._write_report)
            if self.recorder is not None:
                self._try(self.recorder.save)
            self._written = True
            return self.report()

    def close(self) -> None:
        """Write the files for the last time; may be called again."""
        with self._lock:
            if not self._closed.is_set():
                self._closed.set()
                atexit.unregister(self.close)
                if not self._written:
                    self._try(self.flush)
                if self.recorder is not None:
                    self.recorder.close()

    def describe(self) -> str:
        """One line on what is done here."""
        parts = []
        if self.pruning is not None:
            parts.append(self._describe_pruning(self.pruning))
        if self._config.record is not None:
            limit = self._config.record.tokens
            where = "on another rank" if self.recorder is None else f"to {self.recorder.path}"
            parts.append(f"records up to {limit} tokens {where}, written at the end or when full")
        if self._path is not None:
            parts.append(f"counts go to {self._path}")
        return "; ".join(parts)

    def _describe_pruning(self, pruning: RouterPruning) -> str:
        engine = self._engine
        rule = pruning.rule.describe()
        strength = f"p = {rule['p']:g}" if "p" in rule else f"prices, floor {rule['floor']:g}"
        where = "as the placement says" if self._config.placement is not None else "in order"
        home = "tokens have no home, every device costs 1"
        if pruning.home is not None:
            home = f"tokens are at home on device {pruning.home}"
        ids = "get id -1" if engine.drops else "keep their ids and get weight 0"
        rescaled = "" if pruning.renormalise else "not "
        return (
            f"prunes destinations by {pruning.rule.name} ({strength}) over devices {pruning.topology}, experts {where}"
            f"; {home}; dropped experts {ids}, kept weights are {rescaled}rescaled; {engine.traffic()}"
        )

    def _make_recorder(self, device: torch.device | str) -> StepRecorder | None:
        engine, asked = self._engine, self._config.record
        if asked is None:
            return None
        if engine.gathers_first or engine.shards > 1:
            raise ConfigError(
                "the plugin cannot record where ranks share or gather a step's tokens before they route; record with "
                "--tensor-parallel-size alone, or with vLLM's --enable-return-routed-experts"
            )
        if engine.attention_ranks > 1 and engine.rank % engine.attention_ranks:
            return None  # the first of the ranks that see the same tokens records
        provenance = {
            "format": "recorded", "model": engine.spec.model, "engine": f"vllm {engine.version}", "rank": engine.rank,
            EXPERT_ORDER_KEY: engine.expert_order,
            "versions": {"coterie": coterie.__version__, "vllm": engine.version, "torch": str(torch.__version__)},
        }  # fmt: skip
        if self.pruning is not None:
            provenance["pruning"] = {**self.pruning.rule.describe(), "topology": self.pruning.topology.to_json()}
        path = ranked(asked.folder / "trace.safetensors", engine.rank)
        return StepRecorder(
            path, engine.spec, asked.tokens, engine.max_tokens, provenance, self.pruning is not None, device
        )

    def _record(self, requests: Callable[[], Sequence[RequestRows]], finished: Sequence[str]) -> None:
        assert self.recorder is not None
        if self.recorder.full:
            return
        try:
            self.recorder.end_step(requests(), finished)
        except Exception:  # of vLLM's insides too: what cannot be told apart any more is recorded no further
            self.recorder.close()
            self.recorder = None
            raise
        if self.recorder.full:
            self.recorder.save()
            _log.info("coterie: recorded %d tokens to %s", self.recorder.num_tokens, self.recorder.path)

    def _write_when_idle(self) -> None:
        """Write what the files lack while there is nothing to do: vLLM kills its workers when it is told to stop."""
        wait = max(self._config.interval, 0.5)
        while not self._closed.wait(wait):
            with self._lock:
                idle = not self._running and time.monotonic() - self._ended >= wait
                if idle and not self._written and not self._closed.is_set():
                    self._try(self.flush)

    def _write_report(self) -> None:
        assert self._path is not None
        self._due = time.monotonic() + self._config.interval
        write_text(self._path, json.dumps(self.report(), indent=1) + "\n")

    def _try(self, do: Callable[..., object], *arguments: Any) -> None:
        try:
            do(*arguments)
        except CoterieError as error:
            _log.error("coterie: %s", error)
        except Exception:  # a fault of the plugin's must not end the engine
            _log.exception("coterie: %s failed; serving goes on without it", getattr(do, "__name__", do))


def ranked(path: Path, rank: int) -> Path:
    """Where a rank writes what all are to write to `path`: counts.json becomes counts-rank0.json."""
    return path.with_name(f"{path.stem}-rank{rank}{path.suffix}")
