"""Run a model over windows of text and add up what its MoE layers do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.calibration.activations import check_experts
from coterie.calibration.dominance import anchor_pairs, role_sums
from coterie.calibration.importance import LayerWindow, neuron_sums
from coterie.calibration.sums import Sums
from coterie.calibration.text_windows import TextWindow, window_loss
from coterie.errors import CheckpointError
from coterie.models.intercept import intercept
from coterie.models.layers import MoELayer
from coterie.profile.combinations import anchor_pair_counts

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def collecting(model: Any, sums: Sums, *, gradients: bool) -> Iterator[Collector]:
    """Inside the block `Collector.run` adds windows to the sums; afterwards the model is as it was.

    Args:
        model: a Transformers model in eval mode.
        sums: what is added to.
        gradients: also run backward; no gradient of a parameter is computed or kept.

    Raises:
        CheckpointError: when the model's MoE layers or their neurons cannot be recognised.
    """
    with ExitStack() as stack:
        collector = Collector(model, sums, gradients)
        layers = stack.enter_context(intercept(model, collector.decide))
        for layer in layers:
            check_experts(layer)
            if gradients:
                stack.callback(layer.experts.register_forward_hook(collector.hook(layer.index)).remove)
        if gradients:
            stack.enter_context(frozen(model))
            embeddings = model.get_input_embeddings()
            stack.callback(embeddings.register_forward_hook(_start_gradients).remove)
        collector.layers = layers
        yield collector


class Collector:
    """What `collecting` yields.

    Attributes:
        layers: the model's MoE layers.
    """

    layers: list[MoELayer]

    def __init__(self, model: Any, sums: Sums, gradients: bool) -> None:
        self._model, self._sums, self._wants_gradients = model, sums, gradients
        self._inputs: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._gradients: dict[int, Tensor] = {}
        self._sample: tuple[Any, Any] = (np.empty(0, np.int64), np.empty(0, np.int64))

    def run(self, window: TextWindow) -> None:
        """Run the model over a window and add it.

        Raises:
            CheckpointError: for NaN or infinite activations, losses or gradients; the sums are then of no use.
        """
        import torch

        self._sample = self._sums.sample_slots(len(window.inputs))
        if not self._wants_gradients:
            with torch.inference_mode():
                torch_ids = torch.tensor([list(window.inputs)], device=self._model.device)
                self._model.get_decoder()(input_ids=torch_ids, use_cache=False)
        else:
            self._sums.nats += self._run_backward(window)
        self._sums.num_tokens += len(window.inputs)
        self._sums.windows += 1

    def _run_backward(self, window: TextWindow) -> float:
        import torch

        with torch.enable_grad():
            loss = window_loss(self._model, window)
            nats = float(loss.detach())
            if not np.isfinite(nats):
                self._blame_activations()
                raise self._no_number("the loss is")
            loss.backward()
        for layer in sorted(self._inputs):
            self._add(layer, self._gradients[layer])
        self._inputs.clear()
        self._gradients.clear()
        return nats

    def _blame_activations(self) -> None:
        """The first layer whose activations are no numbers is what to tell of, not what they spoiled."""
        for layer in sorted(self._inputs):
            self._add(layer, None)

    def decide(self, layer: int, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        """See a layer's decisions; they stay as they are."""
        self._inputs[layer] = hidden_TH.detach(), ids_TK, weights_TK.detach()
        if not self._wants_gradients:
            self._add(layer, None)
            del self._inputs[layer]

    def hook(self, layer: int) -> Any:
        """A forward hook that waits for the gradient of an experts module's output."""

        def keep(gradient: Tensor) -> None:
            self._gradients[layer] = gradient

        def hook(module: Any, args: Any, output: Any) -> None:
            output.register_hook(keep)

        return hook

    def _add(self, layer: int, gradients_TH: Tensor | None) -> None:
        import torch

        sums, experts = self._sums, self.layers[layer].num_experts
        hidden_TH, ids_TK, weights_TK = self._inputs[layer]
        window = LayerWindow(self.layers[layer].experts, hidden_TH, ids_TK, weights_TK, gradients_TH)
        with torch.no_grad():
            added, changes_TK = neuron_sums(window, experts)
            shares = window.normalised().cpu().numpy()
        for name, values in added.items():
            self._check(layer, values, "activations" if name != "gradient_square" else "gradients")
            sums.neurons[name][layer] += values
        self._check(layer, shares.sum(axis=0, keepdims=True), "routing weights")
        order_TK, ids = anchor_pairs(ids_TK.cpu().numpy(), shares)
        shares, changes = (np.take_along_axis(each, order_TK, axis=1) for each in (shares, changes_TK))
        sums.load_LE[layer] += np.bincount(ids.reshape(-1), minlength=experts)
        sums.pairs_LEE[layer] += anchor_pair_counts(ids, None, None, experts)
        sums.roles["weight"][layer] += role_sums(ids, shares, experts)
        if "fisher" in sums.roles:
            sums.roles["fisher"][layer] += role_sums(ids, changes.astype(np.float64) ** 2, experts)
        rows, where = self._sample
        sums.sample_ids_LSK[layer, where], sums.sample_weights_LSK[layer, where] = ids[rows], shares[rows]

    def _check(self, layer: int, values: Any, what: str) -> None:
        if np.isfinite(values).all():
            return
        rows = np.flatnonzero(~np.isfinite(values).all(axis=1))
        raise self._no_number(f"MoE layer {layer}, expert {rows[0]}: its {what} are")

    def _no_number(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{what} NaN or infinite in window {self._sums.windows}; check the weights, or load the model in another "
            "dtype (float32)"
        )


@contextmanager
def frozen(model: Any) -> Iterator[None]:
    """No parameter wants a gradient inside the block."""
    wanting = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in wanting:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in wanting:
            parameter.requires_grad_(True)


def _start_gradients(module: Any, args: Any, output: Tensor) -> Tensor:
    """Let gradients begin at the embeddings, so that they reach every layer's output without any parameter's."""
    return output.detach().requires_grad_()
