"""A frozen model with masked neurons on windows of text: the loss of masking, and its gradient at a share of bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.calibration.activations import slots_by_expert
from coterie.calibration.masked_experts import Masks, log_weights, masking
from coterie.calibration.text_windows import TextWindows
from coterie.errors import CheckpointError
from coterie.models.intercept import intercept
from coterie.profile.model_profile import ModelProfile
from coterie.pruning.value_share import ValueShares

if TYPE_CHECKING:
    from torch import Tensor

STEP_TOKENS = 1024  # of a step: windows are joined until they hold so many
ASIDE, _MOST_ASIDE = 5, 8192  # one window in five is put aside to judge by, up to so many tokens
_SOFTNESS = 0.25
_NO_NUMBER = "{} NaN or infinite; check the weights, or load the model in another dtype (float32)"


class MaskedModel:
    """A frozen model, its windows, and the share of bytes to learn at.

    Attributes:
        aside_WN: [W, N] token ids of the windows put aside.
    """

    def __init__(self, model: Any, profile: ModelProfile, chosen: TextWindows, bytes: float, seed: int) -> None:
        """Put windows aside.

        Args:
            model: a Transformers model in eval mode, no parameter of which wants a gradient.
            profile: its sample of decisions sets the threshold.
            chosen: windows of one length.
            bytes: share of the neurons to run.
            seed: of the windows' order.
        """
        import torch

        self._model, self._bytes, self._seed = model, bytes, seed
        self._shares = ValueShares(profile)
        self._experts = profile.spec.num_experts
        ids_WN: Any = torch.tensor([list(window.inputs) for window in chosen.windows])
        aside_W = _spread(len(ids_WN), chosen.length)
        self._ids_WN, self.aside_WN = ids_WN[~aside_W], ids_WN[aside_W]
        self._batch = max(1, min(STEP_TOKENS // chosen.length, len(self._ids_WN)))

    @property
    def tokens(self) -> int:
        """That are learnt from."""
        return int(self._ids_WN.numel())

    def gradient(self, log_value_LEI: NDArray[np.float32], step: int) -> NDArray[np.float32]:
        """The gradient of a batch's KL by each logarithm at a fixed share of bytes, [L, E, I]."""
        import torch

        ids_BN = self._ids_WN[self._rows(step)]
        expected_BNV, decisions = self._expected(ids_BN)
        masks = self._masks(log_value_LEI)
        masks.log_value_LEI.requires_grad_(True)
        with torch.enable_grad(), masking(self._model, masks):
            kl: Any = self._kl(expected_BNV, ids_BN)
            kl.backward()
        found: Any = masks.log_value_LEI.grad
        slopes = torch.zeros_like(masks.log_value_LEI, requires_grad=False)
        with torch.no_grad():
            for layer, (ids_TK, weights_TK) in enumerate(decisions):
                log_weight_S = log_weights(weights_TK).to(slopes.device)
                for expert, slots in slots_by_expert(ids_TK.to(slopes.device), self._experts):
                    slopes[layer, expert] = masks.slopes(masks.log_value_LEI[layer, expert], log_weight_S[slots])
        price = found.sum(dtype=torch.float64) / slopes.sum(dtype=torch.float64).clamp_min(1e-30)
        gradient_LEI = found - price.to(slopes.dtype) * slopes
        if not bool(gradient_LEI.isfinite().all()):
            raise CheckpointError(_NO_NUMBER.format(f"the gradient of step {step + 1} is"))
        result: NDArray[np.float32] = gradient_LEI.cpu().numpy()
        return result

    def divergence(self, log_value_LEI: NDArray[np.float32]) -> float:
        """Mean KL over the tokens put aside, nats."""
        import torch

        masks, sum_kl = self._masks(log_value_LEI), 0.0
        for ids_BN in self.aside_WN.split(self._batch):
            expected_BNV, _ = self._expected(ids_BN)
            with torch.no_grad(), masking(self._model, masks):
                sum_kl += float(self._kl(expected_BNV, ids_BN)) * ids_BN.numel()
        return sum_kl / int(self.aside_WN.numel())

    def _rows(self, step: int) -> NDArray[np.int64]:
        """The windows of a step: every window once before any comes again, in an order by seed and round."""
        count = len(self._ids_WN)
        rounds = range(step * self._batch // count, ((step + 1) * self._batch - 1) // count + 1)
        order = np.concatenate([np.random.default_rng([self._seed, each]).permutation(count) for each in rounds])
        first = step * self._batch - rounds[0] * count
        return order[first : first + self._batch]

    def _masks(self, log_value_LEI: NDArray[np.float32]) -> Masks:
        import torch

        threshold = self._shares.threshold(log_value_LEI, self._bytes)
        return Masks(torch.tensor(log_value_LEI, device=self._model.device), threshold, _SOFTNESS)

    def _expected(self, ids_BN: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The full model's log-probabilities, and what its routers chose in every layer."""
        import torch

        decisions: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad(), intercept(self._model, lambda _, hidden, ids, weights: decisions.append((ids, weights))):
            logits_BNV = self._model(input_ids=ids_BN.to(self._model.device), use_cache=False).logits
        return logits_BNV.float().log_softmax(-1), decisions

    def _kl(self, expected_BNV: Tensor, ids_BN: Tensor) -> Tensor:
        """Mean KL(full || masked) a token, nats; a tensor without axes."""
        logits_BNV = self._model(input_ids=ids_BN.to(self._model.device), use_cache=False).logits
        kl: Tensor = (expected_BNV.exp() * (expected_BNV - logits_BNV.float().log_softmax(-1))).sum(-1).mean()
        if not math.isfinite(float(kl.detach())):
            raise CheckpointError(_NO_NUMBER.format("the model's predictions are"))
        return kl


def _spread(count: int, length: int) -> NDArray[np.bool_]:
    """Which of `count` windows are put aside, spread evenly over them."""
    few = min(count // ASIDE, max(1, _MOST_ASIDE // length))
    aside_W = np.zeros(count, np.bool_)
    aside_W[((2 * np.arange(few) + 1) * count) // (2 * few)] = True
    return aside_W
