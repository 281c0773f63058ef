"""A small model with experts of several blocks, and its store."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie.profile.model_profile import ModelProfile


class LateEvent:
    """An event that something else sets."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def done(self) -> bool:
        return self.reached.is_set()


class FakeDevice:
    """A device on the host's memory: copies complete late and in a thread of their own, as a GPU's do.

    Computations are the caller's and complete at once, but are said to be done late. Whoever computes with, or reads
    again into, what a copy has not reached yet gets wrong bytes.

    Attributes:
        taken: bytes of device and pinned memory.
        log: what was issued, in order: "computed", "copy_after", "compute_after", and addresses of copies.
    """

    def __init__(self, late: float = 0.002) -> None:
        import torch

        self.where, self.taken, self.log, self._late = torch.device("cpu"), 0, [], late
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._chance = random.Random(3)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def free_bytes(self) -> int:
        return 10**9

    def empty(self, nbytes: int) -> Any:
        import torch

        self.taken += nbytes
        return torch.zeros(nbytes, dtype=torch.uint8)

    def pinned(self, nbytes: int) -> Any:
        import torch

        self.taken += nbytes
        whole = torch.zeros(nbytes + 4096, dtype=torch.uint8)
        start = -whole.data_ptr() % 4096
        return whole[start : start + nbytes]

    def copy(self, into: Any, source: Any) -> LateEvent:
        event = LateEvent()

        def work() -> None:
            time.sleep(self._late * self._chance.random())
            into.copy_(source)
            event.reached.set()

        self.log.append(into.data_ptr())
        self._work.put(work)
        return event

    def computed(self) -> LateEvent:
        event = LateEvent()
        self.log.append("computed")
        threading.Timer(self._late, event.reached.set).start()
        return event

    def copy_after(self, event: LateEvent) -> None:
        self.log.append("copy_after")
        self._work.put(lambda: (event.reached.wait(20), None)[1])

    def compute_after(self, event: LateEvent) -> None:
        self.log.append("compute_after")
        assert event.reached.wait(20)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(20)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


@pytest.fixture
def make_device() -> Iterator[Any]:
    """Makes fake devices, of this or a given class; their threads end with the test."""
    made = []

    def make(kind: Any = FakeDevice, **options: Any) -> Any:
        made.append(kind(**options))
        return made[-1]

    make.kind = FakeDevice  # type: ignore[attr-defined]
    yield make
    for device in made:
        device.close()


@dataclass(frozen=True)
class Small:
    """A checkpoint, the model in memory, a profile with importances by chance, and the store packed with it."""

    folder: Path
    model: Any
    profile: ModelProfile
    store: Path


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory, make_profile: Any) -> Small:
    """2 layers of 8 experts, top-2, of 256 neurons in 16 blocks; hidden size 64, float32."""
    import torch
    import transformers

    from coterie.models.backend import quiet
    from coterie.models.identity import identity_of
    from coterie.models.layers import spec_of
    from coterie.models.load import load_model

    folder = tmp_path_factory.mktemp("small") / "model"
    config = transformers.MixtralConfig(
        vocab_size=260, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, initializer_range=0.2, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with quiet(), torch.random.fork_rng():
        torch.manual_seed(5)
        transformers.MixtralForCausalLM(config).save_pretrained(folder)
    model = load_model(folder).requires_grad_(False)
    profile = make_profile(2, 8, 2, 256, spec=spec_of(model), identity=identity_of(model))
    store = folder.parent / "store"
    coterie.pack(folder, store, profile=profile)
    return Small(folder, model, profile, store)


@pytest.fixture
def offload(small: Small) -> Iterator[Any]:
    """`coterie.offload` of the small store; every model is closed at the end."""
    made = []

    def make(budget: Any, widths: Any = None, **options: Any) -> Any:
        made.append(coterie.offload(small.store, budget, widths, **options))
        return made[-1]

    yield make
    for model in made:
        model.close()


@pytest.fixture(scope="session")
def prompts() -> Any:
    """[2, 16] token ids."""
    import torch

    return torch.randint(3, 260, (2, 16), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="session")
def expected(small: Small, prompts: Any) -> Any:
    """What a resident model of the same layout computes: logits of a few inputs."""
    import torch

    model, inputs = coterie.offload(small.store, "100%"), (prompts, prompts[:1, :5], prompts[:, 3:4])
    try:
        with torch.inference_mode():
            return [(ids, model(input_ids=ids, use_cache=False).logits) for ids in inputs]
    finally:
        model.close()
