"""A DQNConfig for any action space, with what control from few frames needs.

Adds to `DQNConfig`: actions on a grid, several critics, layer norm, action repeat, frame
stacks, and `clip_rewards`, which RLlib's new API stack ignores. `ADMMDQNConfig` builds on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import gymnasium as gym
from gymnasium.spaces import Discrete, MultiDiscrete
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.algorithms.dqn.dqn import DQNConfig
from ray.rllib.algorithms.dqn.torch.default_dqn_torch_rl_module import DefaultDQNTorchRLModule
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.module_to_env import NormalizeAndClipActions
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.utils.annotations import override

from rllib_admm.connectors.grid_actions import GridActions
from rllib_admm.env_runners.wrapping import WrappingEnvRunner
from rllib_admm.rl_modules import ActionGrid, BranchingQRLModule


class DiscretizedDQNConfig(DQNConfig):
    """The options of action grids, critics and frames, and what they change."""

    env_runner_cls: type | None

    def __init__(self, algo_class: Any = None) -> None:
        super().__init__(algo_class=algo_class)
        self.action_bins = 3
        self.action_grid = "per_dimension"
        self.clipped_double_q = False
        self.layer_norm = False
        self.action_repeat = 1
        self.frame_stack = 1
        self.terminal_reward: float | None = None

    @override(DQNConfig)
    def training(
        self,
        *,
        action_bins: int = NotProvided,
        action_grid: str = NotProvided,
        clipped_double_q: bool = NotProvided,
        layer_norm: bool = NotProvided,
        **kwargs: Any,
    ) -> Any:
        """Sets the training related configuration.

        Args:
            action_bins: Bins per dimension of a Box action space (default 3, bang-off-bang,
                which Seyde et al. 2023 found enough for locomotion; usual 2 to 11). Larger:
                finer actions, more to learn. Discrete spaces keep their own values.
            action_grid: "per_dimension" (default): Q(s, a) is the mean of a head per dimension,
                D * bins outputs. "joint": one value for each of the bins ** D combinations,
                exact, for few dimensions; works with `num_atoms` too. Without effect in
                Discrete action spaces.
            clipped_double_q: Two critics; the target is the smaller of their values (Fujimoto
                et al. 2018), which curbs overestimation. Default False. Costs about twice the
                computation and traffic.
            layer_norm: Normalise the first hidden layer (default False), which steadies
                learning at high replay ratios. For observations that are vectors.
            **kwargs: All of `DQNConfig.training`.

        Returns:
            This config.
        """
        own = {k: v for k, v in locals().items() if k not in ("self", "kwargs", "__class__")}
        super().training(**kwargs)
        for key, value in own.items():
            if value is not NotProvided:
                setattr(self, key, value)
        return self

    @override(AlgorithmConfig)
    def environment(
        self,
        env: Any = NotProvided,
        *,
        action_repeat: int = NotProvided,
        frame_stack: int = NotProvided,
        terminal_reward: float | None = NotProvided,
        clip_rewards: bool | float | Sequence[float] | None = NotProvided,
        **kwargs: Any,
    ) -> Any:
        """Sets the environment.

        Args:
            env: See `AlgorithmConfig.environment`.
            action_repeat: Env frames per decision (default 1; usual 1 to 4). All counters of env
                steps count decisions: multiply by it for frames.
            frame_stack: Observations side by side (default 1), so that velocities can be seen.
            terminal_reward: Largest reward of a step that ends an episode for good (default None:
                any). Episodes that end with more count as truncated, so that values bootstrap
                there: -100 for BipedalWalker, where only a fall is a reason to expect
                nothing more and the end of the track is none.
            clip_rewards: True takes rewards' signs, c > 0 clips them to [-c, c], (low, high) to
                that range; None (default) and False leave them. What is learned from is
                clipped, not the returns that are reported. RLlib's new API stack ignores it.
            **kwargs: All of `AlgorithmConfig.environment`.

        Returns:
            This config.
        """
        super().environment(env, **kwargs)
        own = {
            "action_repeat": action_repeat,
            "frame_stack": frame_stack,
            "terminal_reward": terminal_reward,
            "clip_rewards": clip_rewards,
        }
        for key, value in own.items():
            if value is not NotProvided:
                setattr(self, key, value)
        return self

    @override(DQNConfig)
    def validate(self) -> None:
        """Checks the options that this class adds.

        Raises:
            ValueError: Names option, value, allowed values and the nearest fix.
        """
        super().validate()
        if self.wraps_env and self.env_runner_cls in (None, SingleAgentEnvRunner):
            self.env_runner_cls = WrappingEnvRunner

    @property
    def wraps_env(self) -> bool:
        """Whether an option asks for a wrapper around the environment."""
        return bool(
            self.action_repeat > 1 or self.frame_stack > 1 or self.terminal_reward is not None
        )

    # ---- Actions ----------------------------------------------------------------------

    def grid_of(self, space: gym.Space[Any]) -> ActionGrid | None:
        """Returns the grid on which actions of `space` are chosen; None: as they are.

        Raises:
            ValueError: If the space can not be put on a grid.
        """
        if isinstance(space, Discrete) and not self.uses_critics:
            return ActionGrid(space, kind="joint") if space.start else None
        return ActionGrid(space, self.action_bins, self.action_grid)

    @property
    def uses_critics(self) -> bool:
        """Whether two critics or layer norm are asked for, which RLlib's network lacks."""
        return bool(self.clipped_double_q or self.layer_norm)

    def _choose_module(self, spec: RLModuleSpec) -> None:
        """Puts the action space of `spec` on the grid, and RLlib's network where it fits."""
        if spec.action_space is None:
            return
        grid = self.grid_of(spec.action_space)
        if grid is None:
            return
        space = grid.module_space
        if isinstance(space, Discrete) and self.uses_critics:
            space = MultiDiscrete([int(space.n)])
        spec.action_space = space
        if isinstance(space, MultiDiscrete) and spec.module_class in (
            None,
            DefaultDQNTorchRLModule,
        ):
            spec.module_class = BranchingQRLModule

    @override(AlgorithmConfig)
    def get_rl_module_spec(self, *args: Any, **kwargs: Any) -> RLModuleSpec:
        """Returns RLlib's spec, its action space on the grid."""
        spec = super().get_rl_module_spec(*args, **kwargs)
        self._choose_module(spec)
        return spec

    @override(AlgorithmConfig)
    def get_multi_rl_module_spec(self, **kwargs: Any) -> MultiRLModuleSpec:
        """Returns RLlib's spec, its modules' action spaces on the grid."""
        specs = super().get_multi_rl_module_spec(**kwargs)
        for spec in specs.rl_module_specs.values():
            self._choose_module(spec)
        return specs

    @property
    @override(DQNConfig)
    def _model_config_auto_includes(self) -> dict[str, Any]:
        return cast("dict[str, Any]", super()._model_config_auto_includes) | {
            "num_critics": 2 if self.clipped_double_q else 1,
            "layer_norm": self.layer_norm,
        }

    @override(AlgorithmConfig)
    def build_module_to_env_connector(self, env: Any = None, spaces: Any = None) -> ConnectorV2:
        """Returns RLlib's pipeline, with `GridActions` for actions on a grid."""
        pipeline = super().build_module_to_env_connector(env=env, spaces=spaces)
        if env is not None:
            space = getattr(env, "single_action_space", env.action_space)
        elif spaces is not None and INPUT_ENV_SINGLE_SPACES in spaces:
            space = spaces[INPUT_ENV_SINGLE_SPACES][1]
        else:
            space = self.action_space
        grid = self.grid_of(space) if space is not None and not self.is_multi_agent else None
        if grid is not None:
            piece = GridActions(grid=grid)
            if any(isinstance(p, NormalizeAndClipActions) for p in pipeline.connectors):
                pipeline.insert_before(NormalizeAndClipActions, piece)
                pipeline.remove(NormalizeAndClipActions.__name__)
            else:
                pipeline.append(piece)
        return pipeline
