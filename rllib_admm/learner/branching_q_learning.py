"""Q-learning with a head per action dimension and optionally clipped double Q."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from ray.rllib.core.columns import Columns
from torch import Tensor, nn


def value_of(q: Tensor, bins: Tensor) -> Tensor:
    """Returns Q(s, a), the mean over dimensions of the chosen bins' values.

    Args:
        q: Q_d(s, .), shape (M, B, D, n).
        bins: a, shape (B, D).

    Returns:
        Shape (M, B).
    """
    index = bins.unsqueeze(-1).expand(q.shape[0], *bins.shape, 1)
    return q.gather(-1, index).squeeze(-1).mean(-1)


def branching_q_learning_loss(
    q: Tensor,
    q_next: Tensor | None,
    target_q_next: Tensor,
    batch: Mapping[str, Any],
    config: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the loss of decoupled Q-learning (Seyde et al. 2023), summed over critics.

    The next action maximises the critics' sum in every dimension, by the online networks with
    `double_q` and by the target networks without; its value is the smallest of the target
    critics' (Fujimoto et al. 2018, clipped double Q; with one critic, plain).

    Args:
        q: Q_d(s, .) of the online networks, shape (M, B, D, n), with gradient.
        q_next: Q_d(s', .) of the online networks, same shape; not needed without `double_q`.
        target_q_next: Q_d(s', .) of the target networks, same shape.
        batch: Columns of a minibatch, (B, ...); actions are bins, (B, D).
        config: A DQNConfig.

    Returns:
        The loss (scalar, with gradient), the absolute TD errors (B,) and Q(s, a) (B,), both
        averaged over critics.
    """
    with torch.no_grad():
        chooser = q_next if config.double_q else target_q_next
        assert chooser is not None
        value = value_of(target_q_next, chooser.sum(0).argmax(-1)).amin(0)
        live = torch.logical_not(batch[Columns.TERMINATEDS])
        y = batch[Columns.REWARDS] + config.gamma ** batch["n_step"] * (value * live)
    actions = batch[Columns.ACTIONS].long()
    chosen = value_of(q, actions.view(len(actions), -1))
    huber = config.td_error_loss_fn == "huber"
    loss_fn = nn.functional.huber_loss if huber else nn.functional.mse_loss
    losses = loss_fn(chosen, y.expand_as(chosen), reduction="none")
    loss = (batch["weights"] * losses).mean(-1).sum()
    chosen = chosen.detach()
    return loss, (chosen - y).abs_().mean(0), chosen.mean(0)


def module_loss(
    module: Any, batch: Mapping[str, Any], config: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `branching_q_learning_loss` of a `BranchingQRLModule` on a minibatch."""
    with torch.no_grad():
        next_obs = batch[Columns.NEXT_OBS]
        target_q_next = module.target_q_values(next_obs)
        q_next = module.q_values(next_obs) if config.double_q else None
    q = module.q_values(batch[Columns.OBS])
    return branching_q_learning_loss(q, q_next, target_q_next, batch, config)
