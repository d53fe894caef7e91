"""Environments for tests, importable in actors."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class TwoWorlds(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole whose second worker's cart is pushed the other way."""

    def __init__(self, context: Any) -> None:
        super().__init__(gym.make("CartPole-v1"))
        if context.worker_index == 2:
            self.unwrapped.force_mag = -self.unwrapped.force_mag  # type: ignore[attr-defined]


class NaNReward(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole whose first worker pays NaN in the third step of its second episode."""

    def __init__(self, context: Any) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self._bad = context.worker_index == 1
        self._episode = self._step = 0

    def reset(self, **kwargs: Any) -> Any:
        self._episode, self._step = self._episode + 1, 0
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        self._step += 1
        if self._bad and self._episode == 2 and self._step == 3:
            reward = float("nan")
        return obs, reward, terminated, truncated, info


class HalfBoundedActions(gym.Env[Any, Any]):
    """An environment whose second action has no upper bound."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space: gym.spaces.Space[Any] = gym.spaces.Box(
        np.array([-1, -1], np.float32), np.array([1, np.inf], np.float32)
    )

    def __init__(self, context: Any = None) -> None:
        del context


class TextActions(HalfBoundedActions):
    """An environment that takes text."""

    action_space = gym.spaces.Text(5)


class MixedActions(gym.Env[Any, Any]):
    """Twenty frames; pays 1 for gear 2 and the highest torque, else -1. Strict about actions."""

    observation_space = gym.spaces.Box(-100, 100, (3,), np.float32)
    action_space: gym.spaces.Space[Any] = gym.spaces.Dict(
        {
            "torque": gym.spaces.Box(-1, 1, (2,), np.float32),
            "gear": gym.spaces.Discrete(2, start=1),
        }
    )

    def __init__(self, context: Any = None) -> None:
        del context
        self._frame = 0

    def _obs(self) -> np.ndarray:
        return np.full(3, self._frame, np.float32)

    def reset(self, **kwargs: Any) -> Any:
        super().reset(**kwargs)
        self._frame = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self._frame += 1
        good = action["gear"] == 2 and bool(action["torque"][0] == 1)
        return self._obs(), 1.0 if good else -1.0, self._frame == 20, False, {}


class Numbered(gym.Env[Any, Any]):
    """Episodes of 20 steps, 1 each, in which every observation is a number that occurs only once.

    The observation is the number / 1e5, so that networks see nothing large.
    """

    observation_space = gym.spaces.Box(0, 10, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, context: Any = None) -> None:
        worker = getattr(context, "worker_index", 0)
        vector = getattr(context, "vector_index", 0) or 0
        self._number = 100_000 * worker + 20_000 * vector
        self._step = 0

    def _obs(self) -> np.ndarray:
        self._number += 1
        return np.array([self._number / 1e5], np.float32)

    def reset(self, **kwargs: Any) -> Any:
        super().reset(**kwargs)
        self._step = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self._step += 1
        return self._obs(), 1.0, self._step == 20, False, {}
