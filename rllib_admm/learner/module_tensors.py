"""Which tensors of an RLModule take part in the consensus, and which follow them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray.rllib.core.rl_module.apis import TargetNetworkAPI
from torch import Tensor, nn

from rllib_admm.consensus import Layout
from rllib_admm.learner.q_learning import Loss


@dataclass
class ModuleTensors:
    """The tensors of one RLModule that take part in the consensus.

    Attributes:
        layout: Their layout.
        params: The trainable parameters, in layout order.
        targets: Pairs of (index into `params`, target network's parameter).
        target_copies: Pairs (source, destination) of what the target networks only copy:
            frozen parameters and buffers.
        direct_loss: The loss without RLlib's forward pass, if there is one.
    """

    layout: Layout
    params: list[Tensor]
    targets: list[tuple[int, Tensor]]
    target_copies: list[tuple[Tensor, Tensor]]
    direct_loss: Loss | None = None


def module_tensors(module_id: str, module: Any, trained: Mapping[Any, Any]) -> ModuleTensors:
    """Finds which tensors of `module` the optimizers train and which targets follow them."""
    named = {n: p for n, p in module.named_parameters() if p in trained and p.requires_grad}
    targets: list[tuple[int, Tensor]] = []
    copies: list[tuple[Tensor, Tensor]] = []
    position = {id(p): i for i, p in enumerate(named.values())}
    if isinstance(module, TargetNetworkAPI):
        for main, target in module.get_target_network_pairs():
            for p, t in zip(main.parameters(), target.parameters(), strict=True):
                if id(p) in position:
                    targets.append((position[id(p)], t))
                else:
                    copies.append((p, t))
            for b, t in zip(main.buffers(), target.buffers(), strict=True):
                copies.append((b, t))
    # Other buffers are constants of RLlib's heads; running statistics would drift apart.
    running = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats
    ]
    if running:
        raise ValueError(
            f"RLModule {module_id!r} keeps running statistics ({', '.join(running[:4])}): ADMMDQN "
            "agrees on parameters only. Use LayerNorm in place of BatchNorm, or "
            "track_running_stats=False."
        )
    return ModuleTensors(Layout.of(named), list(named.values()), targets, copies)
