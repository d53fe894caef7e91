"""Several equally shaped networks as one: a batched matrix product in place of a loop."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class EnsembleLinear(nn.Module):
    """M linear layers, initialised as `torch.nn.Linear` is.

    Args:
        members: M.
        in_features: I.
        out_features: O.
    """

    def __init__(self, members: int, in_features: int, out_features: int) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(in_features)
        self.weight = nn.Parameter(torch.empty(members, in_features, out_features))
        self.bias = nn.Parameter(torch.empty(members, 1, out_features))
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x, shape (M, B, I), to shape (M, B, O)."""
        if self.weight.shape[0] == 1:
            return nn.functional.linear(x, self.weight[0].t(), self.bias[0, 0])
        return torch.baddbmm(self.bias, x, self.weight)


class EnsembleLayerNorm(nn.Module):
    """M layer norms over the last axis.

    Args:
        members: M.
        features: H.
    """

    def __init__(self, members: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(members, 1, features))
        self.bias = nn.Parameter(torch.zeros(members, 1, features))

    def forward(self, x: Tensor) -> Tensor:
        """Normalises x, shape (M, B, H)."""
        normal = nn.functional.layer_norm(x, x.shape[-1:])
        return torch.addcmul(self.bias, normal, self.weight)


class EnsembleMLP(nn.Sequential):
    """M multi-layer perceptrons; the last size has the activation too.

    Args:
        members: M.
        sizes: Widths, the input's first.
        activation: Class of the activation.
        layer_norm: Whether the first layer's output is normalised before its activation, which
            bounds what features far from the data can do to Q (Ball et al. 2023, RLPD).
    """

    def __init__(
        self, members: int, sizes: Sequence[int], activation: type[nn.Module], layer_norm: bool
    ) -> None:
        layers: list[nn.Module] = []
        for i in range(len(sizes) - 1):
            layers.append(EnsembleLinear(members, sizes[i], sizes[i + 1]))
            if layer_norm and i == 0:
                layers.append(EnsembleLayerNorm(members, sizes[i + 1]))
            layers.append(activation())
        super().__init__(*layers)
