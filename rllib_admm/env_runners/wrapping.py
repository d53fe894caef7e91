"""Wrappers that the configuration asks for, around each sub-environment of an EnvRunner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import FrameStackObservation, TransformObservation
from ray.rllib.env.env_context import EnvContext
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.utils.annotations import override
from ray.tune.registry import ENV_CREATOR, _global_registry


class TerminalReward(gym.Wrapper[Any, Any, Any, Any]):
    """Truncates where an episode ends with more than a given reward, so that Q bootstraps there.

    Args:
        env: The environment.
        most: Largest reward of a step that is terminal, such as a fall's.
    """

    def __init__(self, env: gym.Env[Any, Any], most: float) -> None:
        super().__init__(env)
        self._most = most

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Returns the step, truncated in place of terminated if it paid more."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        if terminated and float(reward) > self._most:
            terminated, truncated = False, True
        return obs, float(reward), terminated, truncated, info


class ActionRepeat(gym.Wrapper[Any, Any, Any, Any]):
    """Takes each action several times; rewards add up, the last observation counts.

    Args:
        env: The environment.
        repeat: How often, at least 1. A time limit inside goes on counting its own steps.
    """

    def __init__(self, env: gym.Env[Any, Any], repeat: int) -> None:
        super().__init__(env)
        self._repeat = repeat

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Returns what the last of the steps returned, with the sum of rewards."""
        total = 0.0
        for _ in range(self._repeat):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, info


def stack_frames(env: gym.Env[Any, Any], frames: int) -> gym.Env[Any, Any]:
    """Puts the last observations side by side along their last axis, the newest last.

    Raises:
        ValueError: If the observations are no arrays.
    """
    space = env.observation_space
    if not isinstance(space, gym.spaces.Box) or not space.shape:
        raise ValueError(
            f"frame_stack={frames} needs observations that are arrays, got {space}. Use "
            "frame_stack=1."
        )
    low, high = (np.concatenate([bound] * frames, axis=-1) for bound in (space.low, space.high))
    stacked: gym.Env[Any, Any] = FrameStackObservation(env, frames)
    return TransformObservation(
        stacked,
        lambda obs: np.concatenate(list(obs), axis=-1),
        gym.spaces.Box(low, high, dtype=space.dtype),  # type: ignore[arg-type]
    )


@dataclass(frozen=True)
class WrappedEnv:
    """Creator of an environment with the configuration's wrappers; RLlib's `config.env`.

    Attributes:
        env: The environment that the user named: a registered name, a gymnasium ID, or a
            callable that takes an EnvContext.
        action_repeat: See `ActionRepeat`.
        frame_stack: See `stack_frames`.
        terminal_reward: See `TerminalReward`.
    """

    env: str | Callable[[Any], gym.Env[Any, Any]]
    action_repeat: int
    frame_stack: int
    terminal_reward: float | None

    def __call__(self, context: EnvContext) -> gym.Env[Any, Any]:
        """Makes one sub-environment."""
        env: gym.Env[Any, Any] = make_env(self.env, context)
        if self.terminal_reward is not None:
            env = TerminalReward(env, self.terminal_reward)
        if self.action_repeat > 1:
            env = ActionRepeat(env, self.action_repeat)
        if self.frame_stack > 1:
            env = stack_frames(env, self.frame_stack)
        return env


def make_env(env: Any, context: EnvContext) -> Any:
    """Makes one environment as RLlib does from `config.env`."""
    if isinstance(env, str):
        if _global_registry.contains(ENV_CREATOR, env):
            return _global_registry.get(ENV_CREATOR, env)(context)
        return gym.make(env, **context)
    return env(context)


class WrappingEnvRunner(SingleAgentEnvRunner):
    """RLlib's EnvRunner, whose environments have the configuration's wrappers."""

    config: Any

    @override(SingleAgentEnvRunner)
    def make_env(self) -> None:
        """Makes the vectorised environment."""
        config = self.config
        if not isinstance(config.env, WrappedEnv):
            self.config = config.copy(copy_frozen=False)
            self.config.env = WrappedEnv(
                config.env, config.action_repeat, config.frame_stack, config.terminal_reward
            )
        super().make_env()
