"""The implicit proximal pull of one local step.

    theta <- (theta' + lr D rho (z - u)) / (1 + lr D rho)

which is a step of theta' towards z - u by the fraction s = lr D rho / (1 + lr D rho). D = 1
decouples the pull from the optimizer (as AdamW does with decay); D = 1/(sqrt(v) + eps) pulls
in Adam's own metric, which leaves the fixed point where the gradients put it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

PROXIMAL_METRICS = ("euclidean", "adam")


@torch.no_grad()
def pull(
    params: Sequence[Tensor],
    anchors: Sequence[Tensor],
    lr_rho: float,
    metric: Sequence[Tensor] | None = None,
) -> None:
    """Pulls `params` towards `anchors` = z - u, in place.

    Args:
        params: Parameters after the optimizer's step, any shapes.
        anchors: z - u, in the same shapes.
        lr_rho: lr * rho >= 0; larger pulls harder.
        metric: D per element in the same shapes, >= 0 (infinite: onto the anchor); None
            means D = 1.

    Raises:
        ValueError: If `lr_rho` is negative or not finite; `params` are unchanged.
    """
    if not 0 <= lr_rho < math.inf:
        raise ValueError(f"lr * rho must be finite and not negative, not {lr_rho}.")
    if lr_rho == 0:
        return
    if metric is None:
        torch._foreach_lerp_(list(params), list(anchors), lr_rho / (1.0 + lr_rho))
        return
    # s / (1 + s) spelt as 1 / (1 + 1/s), which has its limits at s = 0 and at infinity.
    fraction = torch._foreach_mul(list(metric), lr_rho)
    torch._foreach_reciprocal_(fraction)
    torch._foreach_add_(fraction, 1.0)
    torch._foreach_reciprocal_(fraction)
    torch._foreach_lerp_(list(params), list(anchors), fraction)


@torch.no_grad()
def adam_metric(squares: Sequence[Tensor], step: float, beta2: float, eps: float) -> list[Tensor]:
    """Returns Adam's metric D = 1 / (sqrt(v / (1 - beta2^step)) + eps), as Adam applies it.

    Args:
        squares: Adam's running second moments v (`exp_avg_sq`).
        step: Adam steps taken, > 0.
        beta2: Decay of v.
        eps: Adam's epsilon.

    Raises:
        ValueError: If no step was taken, when Adam has no metric yet.
    """
    if step <= 0:
        raise ValueError(f"Adam has no metric before its first step (step={step}).")
    roots = torch._foreach_sqrt(list(squares))
    torch._foreach_mul_(roots, (1.0 - beta2**step) ** -0.5)
    torch._foreach_add_(roots, eps)
    torch._foreach_reciprocal_(roots)
    return list(roots)
