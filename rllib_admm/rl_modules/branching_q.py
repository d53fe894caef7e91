"""A Q-network with a head per action dimension, and optionally several critics.

Q(s, a) is the mean over dimensions d of Q_d(s, a_d) (Seyde et al. 2023, "Solving continuous
control via Q-learning"), with a state value shared by the dimensions if dueling (Tavakoli et
al. 2018, "Action branching architectures").
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import MultiDiscrete
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.utils import make_target_network
from ray.rllib.core.models.base import ENCODER_OUT
from ray.rllib.core.rl_module.apis import InferenceOnlyAPI, TargetNetworkAPI
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from ray.rllib.models.utils import get_activation_fn
from ray.rllib.utils.annotations import override
from ray.rllib.utils.schedules.scheduler import Scheduler
from torch import Tensor, nn

from rllib_admm.rl_modules.ensemble import EnsembleLinear, EnsembleMLP

Q_VALUES = "q_values"
NEXT_Q_VALUES = "next_q_values"
TARGET_NEXT_Q_VALUES = "target_next_q_values"


class BranchingQNetwork(nn.Module):
    """M critics, each a trunk with D heads of n bins.

    Args:
        trunk: Maps observations to features, shape (M, B, H).
        features: H.
        nvec: Bins per dimension, D of them; n is the largest.
        critics: M.
        dueling: Whether a state value is added to centred advantages.
    """

    def __init__(
        self, trunk: nn.Module, features: int, nvec: list[int], critics: int, dueling: bool
    ) -> None:
        super().__init__()
        self.trunk = trunk
        self.heads = EnsembleLinear(critics, features, sum(nvec))
        self.value = EnsembleLinear(critics, features, 1) if dueling else None
        self._shape = (critics, -1, len(nvec), max(nvec))
        # Heads of different widths are laid into the widest; what is beyond a head's own bins
        # is never chosen.
        self._even = len(set(nvec)) == 1
        ends = np.cumsum(nvec)
        column = np.minimum(np.arange(max(nvec)) + (ends - nvec)[:, None], ends[:, None] - 1)
        absent = np.arange(max(nvec)) >= np.asarray(nvec)[:, None]
        self.register_buffer("_column", torch.from_numpy(column), persistent=False)
        self.register_buffer("_absent", torch.from_numpy(absent), persistent=False)

    def forward(self, obs: Any) -> Tensor:
        """Returns Q_d(s, .), shape (M, B, D, n); -inf beyond a dimension's own bins."""
        features = self.trunk(obs)
        flat = self.heads(features)
        if self._even:
            q = flat.view(self._shape)
            mean = q.mean(-1, keepdim=True) if self.value is not None else None
        else:
            q = flat[..., self._column]
            mean = None
            if self.value is not None:
                present = ~self._absent  # type: ignore[operator]
                mean = (q * present).sum(-1, keepdim=True) / present.sum(-1, keepdim=True)
            q = q.masked_fill(self._absent, -torch.inf)
        if mean is not None:
            assert self.value is not None
            q = q - mean + self.value(features).unsqueeze(-1)
        assert isinstance(q, Tensor)
        return q


class _FlatTrunk(nn.Module):
    """The trunk for observations that are vectors."""

    def __init__(
        self, critics: int, sizes: list[int], activation: type[nn.Module], layer_norm: bool
    ) -> None:
        super().__init__()
        self.critics = critics
        self.mlp = EnsembleMLP(critics, sizes, activation, layer_norm)

    def forward(self, obs: Tensor) -> Tensor:
        x = obs.float().unsqueeze(0).expand(self.critics, -1, -1)
        features: Tensor = self.mlp(x)
        return features


class _EncoderTrunk(nn.Module):
    """The trunk for other observations (images, ...): an encoder of RLlib per critic."""

    def __init__(self, encoders: list[nn.Module]) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(encoders)

    def forward(self, obs: Any) -> Tensor:
        return torch.stack([e({Columns.OBS: obs})[ENCODER_OUT] for e in self.encoders])


class BranchingQRLModule(TorchRLModule, InferenceOnlyAPI, TargetNetworkAPI):
    """The RLModule around `BranchingQNetwork`, acting epsilon-greedily per dimension.

    Its action space is a MultiDiscrete of bins (see `ActionGrid`). Of `model_config` it reads
    `fcnet_hiddens`, `fcnet_activation` (and what RLlib's encoders read, for observations that
    are no vectors), `dueling`, `epsilon`, `num_critics` and `layer_norm`.
    """

    @override(RLModule)
    def setup(self) -> None:
        """Builds the network."""
        if not isinstance(self.action_space, MultiDiscrete):
            raise ValueError(
                f"BranchingQRLModule needs a MultiDiscrete action space, got {self.action_space}. "
                "ADMMDQNConfig makes it from the environment's own."
            )
        c = self.model_config
        nvec = [int(n) for n in self.action_space.nvec]
        self.num_critics = int(c.get("num_critics", 1))
        space = self.observation_space
        if isinstance(space, gym.spaces.Box) and len(space.shape) == 1:
            hiddens = [int(h) for h in c.get("fcnet_hiddens", [256, 256])]
            activation = get_activation_fn(c.get("fcnet_activation", "relu"), framework="torch")
            trunk: nn.Module = _FlatTrunk(
                self.num_critics,
                [space.shape[0], *hiddens],
                activation or nn.Identity,
                bool(c.get("layer_norm")),
            )
            features = hiddens[-1]
        else:
            encoders = [
                self.catalog.build_encoder(framework="torch") for _ in range(self.num_critics)
            ]
            trunk, features = _EncoderTrunk(encoders), int(self.catalog.latent_dims[0])
        self.q_network = BranchingQNetwork(
            trunk, features, nvec, self.num_critics, bool(c.get("dueling"))
        )
        self.register_buffer("_nvec", torch.tensor(nvec), persistent=False)
        self.epsilon_schedule = Scheduler(fixed_value_or_schedule=c["epsilon"], framework="torch")

    # ---- Values -----------------------------------------------------------------------

    def q_values(self, obs: Any) -> Tensor:
        """Returns the critics' Q_d(s, .), shape (M, B, D, n)."""
        q: Tensor = self.q_network(obs)
        return q

    def target_q_values(self, obs: Any) -> Tensor:
        """Returns the target networks' Q_d(s, .), shape (M, B, D, n)."""
        q: Tensor = self._target_q_network(obs)
        return q

    # ---- Acting -----------------------------------------------------------------------

    def _greedy(self, batch: dict[str, Any]) -> Tensor:
        return self.q_values(batch[Columns.OBS]).sum(0).argmax(-1)

    @override(RLModule)
    def _forward_inference(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Returns the bins that maximise the critics' sum, shape (B, D)."""
        return {Columns.ACTIONS: self._greedy(batch)}

    @override(RLModule)
    def _forward_exploration(self, batch: dict[str, Any], t: int, **kwargs: Any) -> dict[str, Any]:
        """Returns the same, each dimension with probability epsilon at random instead."""
        greedy = self._greedy(batch)
        self.epsilon_schedule.update(t)
        # One for all, or one per row.
        epsilon = torch.as_tensor(self.epsilon_schedule.get_current_value(), device=greedy.device)
        explores = torch.rand(greedy.shape, device=greedy.device) < epsilon.reshape(-1, 1)
        uniform = (torch.rand(greedy.shape, device=greedy.device) * self._nvec).long()
        return {Columns.ACTIONS: torch.where(explores, uniform, greedy)}

    @override(RLModule)
    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Returns the values that a loss of a user's own needs, each (M, B, D, n)."""
        return {
            Q_VALUES: self.q_values(batch[Columns.OBS]),
            NEXT_Q_VALUES: self.q_values(batch[Columns.NEXT_OBS]),
            TARGET_NEXT_Q_VALUES: self.target_q_values(batch[Columns.NEXT_OBS]),
        }

    # ---- Target networks --------------------------------------------------------------

    @override(TargetNetworkAPI)
    def make_target_networks(self) -> None:
        """Makes the target network, a copy."""
        self._target_q_network = make_target_network(self.q_network)

    @override(TargetNetworkAPI)
    def get_target_network_pairs(self) -> list[tuple[nn.Module, nn.Module]]:
        """Returns (network, its target)."""
        return [(self.q_network, self._target_q_network)]

    @override(TargetNetworkAPI)
    def forward_target(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns the target network's values."""
        return {Q_VALUES: self.target_q_values(batch[Columns.OBS])}

    @override(InferenceOnlyAPI)
    def get_non_inference_attributes(self) -> list[str]:
        """Returns the names of what an acting module does not need."""
        return ["_target_q_network"]
