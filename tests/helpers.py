"""Real data for tests."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode


def random_episodes(env: gym.Env[Any, Any], *, steps: int, seed: int) -> list[SingleAgentEpisode]:
    """Returns whole episodes of a random policy with at least `steps` env steps in all."""
    rng = np.random.default_rng(seed)
    episodes: list[SingleAgentEpisode] = []
    total = 0
    while total < steps:
        episode = SingleAgentEpisode()
        obs, info = env.reset(seed=int(rng.integers(2**31)))
        episode.add_env_reset(obs, info)
        while not episode.is_done:
            action = int(rng.integers(env.action_space.n))  # type: ignore[attr-defined]
            obs, reward, terminated, truncated, info = env.step(action)
            episode.add_env_step(
                obs, action, float(reward), info, terminated=terminated, truncated=truncated
            )
        total += len(episode)
        episodes.append(episode.to_numpy())
    return episodes
