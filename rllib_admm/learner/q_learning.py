"""Q-learning losses by the shortest path, for RLlib's default Q-network and ours.

Stock DQN forwards obs and next_obs in one concatenated pass and back-propagates through both
halves, though only the first has a gradient, and it goes through a dozen Python frames per
layer. The functions here compute the same values (tests compare 50 updates with stock's).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from ray.rllib.algorithms.dqn.torch.default_dqn_torch_rl_module import DefaultDQNTorchRLModule
from ray.rllib.core.columns import Columns
from ray.rllib.core.models.torch.encoder import TorchMLPEncoder
from ray.rllib.core.models.torch.heads import TorchMLPHead
from torch import Tensor, nn

from rllib_admm.learner.branching_q_learning import module_loss
from rllib_admm.rl_modules import BranchingQRLModule

Forward = Callable[[Tensor], Tensor]
Loss = Callable[[Mapping[str, Any], Any], tuple[Tensor, Tensor, Tensor]]
"""(batch, config) -> loss, absolute TD errors (B,), Q(s, a) (B,)."""
_QF_PREDS = "qf_preds"


@functools.cache
def _method(cls: Any, name: str) -> Any:
    # Ray wraps the methods of an actor's class to trace calls.
    return inspect.unwrap(getattr(cls, name))


def overrides(obj: Any, base: Any, *names: str) -> bool:
    """Returns whether the class of `obj` has methods of its own in place of those of `base`."""
    cls: Any = type(obj)
    return any(_method(cls, name) is not _method(base, name) for name in names)


def direct_loss(module: Any) -> Loss | None:
    """Returns the loss of `module` without RLlib's forward pass; None if there is none."""
    if isinstance(module, BranchingQRLModule):
        if overrides(module, BranchingQRLModule, "forward_train", "_forward_train"):
            return None
        return functools.partial(module_loss, module)
    functions = q_functions(module)
    return None if functions is None else functools.partial(q_learning_loss, *functions)


def q_functions(module: Any) -> tuple[Forward, Forward] | None:
    """Returns functions obs (B, ...) -> Q (B, A) of the online and the target network.

    None if `module` is not RLlib's default Q-network for expectation learning, so that its
    own `forward_train` must decide.
    """
    if (
        not isinstance(module, DefaultDQNTorchRLModule)
        or module.num_atoms > 1
        or module.is_stateful()
        or overrides(module, DefaultDQNTorchRLModule, "forward_train", "_forward_train")
    ):
        return None
    if not overrides(
        module, DefaultDQNTorchRLModule, "compute_q_values", "forward_target", "_qf_forward_helper"
    ):
        online = _plain_q(module.encoder, module.af, getattr(module, "vf", None))
        target = _plain_q(
            module._target_encoder, module._target_af, getattr(module, "_target_vf", None)
        )
        if online is not None and target is not None:
            return online, target
    return (
        lambda obs: module.compute_q_values({Columns.OBS: obs})[_QF_PREDS],
        lambda obs: module.forward_target({Columns.OBS: obs})[_QF_PREDS],
    )


def _plain_q(encoder: Any, af: Any, vf: Any | None) -> Forward | None:
    """Returns the Q-function of an MLP encoder with MLP heads, or None if it is another."""
    if type(encoder) is not TorchMLPEncoder:
        return None
    heads = [head for head in (af, vf) if head is not None]
    if any(type(head) is not TorchMLPHead or head.clip_log_std for head in heads):
        return None
    encode, advantage = _chain(encoder.net.mlp), _chain(af.net.mlp)
    if vf is None:
        return lambda obs: advantage(encode(obs))
    value = _chain(vf.net.mlp)

    def dueling(obs: Tensor) -> Tensor:
        h = encode(obs)
        a = advantage(h)
        return a - a.mean(dim=-1, keepdim=True) + value(h)

    return dueling


def _chain(layers: nn.Sequential) -> Forward:
    """Returns `layers` as one function, without a module call per layer."""
    steps: list[Forward] = []
    for layer in layers:
        if type(layer) is nn.Linear:
            # The tensors are looked up at each call: a module's may be replaced.
            steps.append(lambda x, m=layer: nn.functional.linear(x, m.weight, m.bias))  # type: ignore[misc]
        elif type(layer) is nn.ReLU:
            steps.append(torch.relu)
        elif type(layer) is nn.Tanh:
            steps.append(torch.tanh)
        else:
            steps.append(layer)

    def forward(x: Tensor) -> Tensor:
        for step in steps:
            x = step(x)
        return x

    return forward


def q_learning_loss(
    online: Forward, target: Forward, batch: Mapping[str, Any], config: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns DQN's loss (double-Q or not, Huber or MSE, importance weighted).

    Args:
        online: obs (B, ...) -> Q (B, A), with gradient.
        target: Likewise, of the target network.
        batch: Columns of a minibatch, (B, ...).
        config: A DQNConfig.

    Returns:
        The loss (scalar, with gradient), the absolute TD errors (B,) and Q(s, a) (B,).
    """
    with torch.no_grad():
        target_next = target(batch[Columns.NEXT_OBS])
        if config.double_q:
            best = online(batch[Columns.NEXT_OBS]).argmax(-1, keepdim=True)
        else:
            best = target_next.argmax(-1, keepdim=True)
        q_next = target_next.gather(-1, best).squeeze(-1)
        live = torch.logical_not(batch[Columns.TERMINATEDS])
        y = batch[Columns.REWARDS] + config.gamma ** batch["n_step"] * (q_next * live)
    actions = batch[Columns.ACTIONS].view(-1, 1).long()
    q = online(batch[Columns.OBS]).gather(-1, actions).squeeze(-1)
    huber = config.td_error_loss_fn == "huber"
    loss_fn = nn.functional.huber_loss if huber else nn.functional.mse_loss
    loss = (batch["weights"] * loss_fn(q, y, reduction="none")).mean()
    q = q.detach()
    return loss, (q - y).abs_(), q
