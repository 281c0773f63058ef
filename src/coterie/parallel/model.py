"""A Transformers model whose experts are spread over the ranks of a group: one rank's part of it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from coterie.errors import ConfigError
from coterie.models.layers import MoELayer, find_moe_layers
from coterie.ops.gated_ffn import ExpertWeights
from coterie.parallel.comms import Comms
from coterie.parallel.copy_choice import copy_choices
from coterie.parallel.experts import route
from coterie.parallel.layer_placement import LayerPlacement
from coterie.parallel.load import RankModel
from coterie.parallel.traffic import Traffic
from coterie.placement.placement import Placement


class ExpertParallel:
    """What `coterie.expert_parallel` returns.

    Attributes:
        model: the Transformers model; call it, or its `generate`, as any other.
        placement: where the experts are.
        comms: the group.
        loaded: what this rank holds.
        traffic: bytes sent so far.
    """

    def __init__(
        self, loaded: RankModel, placement: Placement, comms: Comms, two_hop: bool = False,
        dispatch: str | None = None,
    ) -> None:  # fmt: skip
        self.model, self.loaded = loaded.model.to(comms.device), loaded
        self.placement, self.comms, self.two_hop = placement, comms, two_hop
        spec = placement.spec
        self.traffic = Traffic(spec.num_layers, comms.size)
        self._placed_L = [LayerPlacement.of(placement, layer, comms.device) for layer in range(spec.num_layers)]
        self._choice_L = copy_choices(placement, range(spec.num_layers), comms.rank, dispatch)
        layers = find_moe_layers(self.model)
        self._weights_L = [ExpertWeights.of(layer.experts) for layer in layers]
        self._top_k = spec.top_k
        self._keep_T: Tensor | None = None
        self.ended_B: Tensor | None = None
        self.model.register_forward_pre_hook(self._see_batch, with_kwargs=True)
        for layer in layers:
            self._replace_forward(layer)

    def drain(self) -> None:
        """Take part, without tokens of this rank's own, until no rank has any more.

        Every rank calls it when it has run what it had to run; it returns on all at the same time.
        """
        while True:
            for layer in range(len(self._placed_L)):
                if not self._run(layer, *self._nothing(layer), active=False)[1]:
                    assert layer == 0, "a rank that runs a layer runs them all"
                    return

    def _nothing(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """No tokens, as the layer would be given them."""
        weights = self._weights_L[layer].gate_up
        hidden_0H = weights.new_empty((0, self._weights_L[layer].hidden_size))
        ids_0K = torch.empty((0, self._top_k), dtype=torch.int64, device=weights.device)
        return hidden_0H, ids_0K, torch.empty_like(ids_0K, dtype=torch.float32)

    def _run(
        self, layer: int, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, active: bool
    ) -> tuple[Tensor, bool]:
        """One layer's experts on this rank's tokens, [T, H]; and whether any rank is active."""
        ids_TK = self._choice_L[layer](ids_TK.masked_fill(weights_TK == 0, -1))
        output_TH, handle = route(
            hidden_TH, ids_TK, weights_TK, self._placed_L[layer], self._weights_L[layer], self.comms,
            two_hop=self.two_hop, active=active,
        )  # fmt: skip
        self.traffic.add(layer, handle)
        return output_TH, handle.any_active

    def _replace_forward(self, layer: MoELayer) -> None:
        """The experts of all ranks in place of this one's; hooks are called around it."""
        experts: Any = layer.experts

        @functools.wraps(experts.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden_TH, ids_TK, weights_TK = (*args, *kwargs.values())
            if torch.is_grad_enabled() and hidden_TH.requires_grad:
                raise ConfigError("experts on other ranks do not train; run the model under torch.inference_mode()")
            if self._keep_T is not None:  # padding stays at home
                ids_TK = ids_TK.masked_fill(~self._keep_T[:, None], -1)
            return self._run(layer.index, hidden_TH, ids_TK, weights_TK, active=True)[0]

        experts.forward = forward

    def _see_batch(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward call of the model: which of its tokens are padding, or of rows that have ended."""
        ids = kwargs.get("input_ids", args[0] if args else None)
        mask = kwargs.get("attention_mask")
        self._keep_T = None
        if ids is None:
            return
        keep_BS = torch.ones_like(ids, dtype=torch.bool)
        if mask is not None and mask.dim() == 2:
            keep_BS &= mask[:, -ids.shape[1] :].bool()
        if self.ended_B is not None and len(self.ended_B) == len(ids):
            keep_BS &= ~self.ended_B[:, None]
        self._keep_T = keep_BS.reshape(-1)
