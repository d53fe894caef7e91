"""weight_sync="ddp": gradients averaged on every step, over the same replay and runner code.

The baseline for learning and bytes: what synchronous data-parallel DQN would do, with the
average formed by the group instead of by a torch process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME

from rllib_admm.consensus import LocalState
from rllib_admm.learner.metrics import MutedMetrics
from rllib_admm.learner.module_tensors import ModuleTensors
from rllib_admm.learner.round import RoundRequest, RoundResult


class GradientAveraging:
    """The part of `ADMMDQNTorchLearner` that takes synchronous steps.

    A round is one `ddp_begin`, K `ddp_step`s and one `ddp_end`.
    """

    # Of the Learner that this is a part of.
    metrics: Any
    _muted: MutedMetrics
    _tensors: dict[str, ModuleTensors]
    _consensus: dict[str, LocalState]
    _begin: Any
    _finish: Any
    _gradients: Any
    _apply: Any
    _upload: Any
    _log_round: Any

    _ddp_steps = 0

    def ddp_begin(self, request: RoundRequest) -> RoundResult:
        """Like the first half of `run_round`: data in, targets on schedule."""
        result = RoundResult()
        self._begin(request, result)
        self._finish(RoundRequest(request.env_steps, 0), result)
        return result

    def ddp_step(self, mean: dict[str, np.ndarray] | None, last: bool) -> dict[str, np.ndarray]:
        """Applies the last step's mean gradient, then computes the next gradient.

        Args:
            mean: Per ModuleID the mean gradient of the last step, float32, shape (P,).
            last: Whether this is the round's last gradient (its metrics are logged).

        Returns:
            Per ModuleID this learner's gradient, shape (P,); empty without data.
        """
        if mean is not None:
            self.ddp_apply(mean)
        logger = self.metrics
        if not last:
            self.metrics = self._muted
        try:
            with_data = self._gradients()
        finally:
            self.metrics = logger
        self._ddp_steps += bool(with_data)
        gradients = {}
        for module_id in with_data:
            tensors = self._tensors[module_id]
            grads = (torch.zeros_like(p) if p.grad is None else p.grad for p in tensors.params)
            gradients[module_id] = tensors.layout.flatten(grads).numpy()
        return gradients

    def ddp_apply(self, mean: dict[str, np.ndarray]) -> None:
        """Applies a mean gradient, shape (P,) per ModuleID."""
        for module_id, tensors in self._tensors.items():
            if module_id not in mean:
                for p in tensors.params:
                    p.grad = None
                continue
            flat = torch.from_numpy(np.array(mean[module_id]))
            for p, view in zip(tensors.params, tensors.layout.views(flat), strict=True):
                p.grad = view.to(p.device)
        self._apply({})

    def ddp_end(self, mean: dict[str, np.ndarray] | None, request: RoundRequest) -> RoundResult:
        """Applies the round's last mean gradient and uploads the (common) parameters."""
        result = RoundResult()
        if mean is not None:
            self.ddp_apply(mean)
        steps, self._ddp_steps = self._ddp_steps, 0
        self._log_round(
            dict.fromkeys(self._tensors, steps),
            {NUM_ENV_STEPS_SAMPLED_LIFETIME: request.env_steps},
        )
        result.gradient_steps = steps
        for module_id, state in self._consensus.items():
            result.uploads[module_id] = self._upload(module_id, state, float(steps), result)
        self._finish(request, result)
        return result


def mean_gradients(gradients: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Averages gradients, (P,) per ModuleID, over the learners that have data for it."""
    mean = {}
    for module_id in sorted({mid for g in gradients for mid in g}):
        parts = [g[module_id] for g in gradients if module_id in g]
        mean[module_id] = sum(parts[1:], parts[0].copy()) / np.float32(len(parts))
    return mean
