"""What EnvRunners do in Ape-X: a ladder of epsilons, first priorities (Horgan et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import tree  # type: ignore[import-untyped]  # dm_tree has no stubs
from numpy.typing import NDArray
from ray.rllib.core.columns import Columns
from torch import Tensor

from rllib_admm.replay import clip as clip_rewards
from rllib_admm.rl_modules import BranchingQRLModule


def ladder(base: float, exponent: float, count: int) -> NDArray[np.float64]:
    """Returns epsilon_i = base ** (1 + i / (count - 1) * exponent), shape (count,)."""
    steps = np.arange(count) / max(1, count - 1)
    return np.asarray(base ** (1.0 + exponent * steps), np.float64)


class FixedEpsilon:
    """Stands in for RLlib's schedule: an epsilon for each sub-environment, for good.

    Args:
        epsilons: Shape (E,).
    """

    def __init__(self, epsilons: NDArray[np.float64]) -> None:
        self._epsilons = torch.from_numpy(epsilons.astype(np.float32))

    def update(self, timestep: int) -> float:
        """Changes nothing; returns the mean."""
        return float(self._epsilons.mean())

    def get_current_value(self) -> Tensor:
        """Returns shape (E,)."""
        return self._epsilons


def set_epsilons(env_runner: Any, *, base: float, exponent: float, num_runners: int) -> None:
    """Gives an EnvRunner its rungs: all sub-environments of all runners make one ladder."""
    each = int(env_runner.num_envs)
    # The local runner (0) counts as the first.
    first = max(0, int(env_runner.worker_index) - 1) * each
    rungs = ladder(base, exponent, max(1, num_runners) * each)[first : first + each]
    env_runner.module.epsilon_schedule = FixedEpsilon(rungs)


def bin_values(module: Any, obs: Any) -> Tensor:
    """Returns Q of a module by dimension and bin, shape (B, D, n); D = 1 if not branching.

    Critics are averaged.
    """
    if isinstance(module, BranchingQRLModule):
        return module.q_values(obs).mean(0)
    q: Tensor = module.compute_q_values({Columns.OBS: obs})["qf_preds"]
    return q.unsqueeze(1)


@torch.no_grad()
def initial_td_errors(
    module: Any,
    episodes: Sequence[Any],
    *,
    n_step: int,
    gamma: float,
    clip: tuple[float, float] | str | None = None,
) -> list[NDArray[np.float32]]:
    """Returns TD errors of chunks by the acting network alone, which has no target network.

    Args:
        module: The EnvRunner's RLModule.
        episodes: Chunks as `EnvRunner.sample` returns them.
        n_step: Steps of the return; fewer at a chunk's end, where the rest is not known yet.
        gamma: Discount per step.
        clip: How rewards are clipped in the replay, as `reward_bounds` returns it.

    Returns:
        Per chunk shape (T,), not negative.
    """
    if not episodes:
        return []
    obs = tree.map_structure(
        lambda *parts: torch.from_numpy(np.concatenate(parts)),
        *(tree.map_structure(np.asarray, e.get_observations()) for e in episodes),
    )
    q = bin_values(module, obs)
    best = q.amax(-1).mean(-1).numpy()
    errors, start = [], 0
    for episode in episodes:
        steps = len(episode)
        bins = np.asarray(episode.get_actions(), np.int64).reshape(steps, -1)
        chosen = q[start : start + steps].gather(-1, torch.from_numpy(bins).unsqueeze(-1))
        values = best[start : start + steps + 1].copy()
        if episode.is_terminated:
            values[-1] = 0.0
        rewards = np.asarray(episode.get_rewards(), np.float32)
        y = n_step_returns(clip_rewards(rewards, clip), values, n_step, gamma)
        errors.append(np.abs(y - chosen.squeeze(-1).mean(-1).numpy()).astype(np.float32))
        start += steps + 1
    return errors


def n_step_returns(
    rewards: NDArray[np.float32], values: NDArray[np.float32], n_step: int, gamma: float
) -> NDArray[np.float64]:
    """Returns sum_{k<m} gamma^k r_{t+k} + gamma^m V_{t+m}, m = min(n, T - t), shape (T,).

    Args:
        rewards: Shape (T,).
        values: V of the T + 1 observations, 0 at a terminal one.
        n_step: n.
        gamma: Discount per step.
    """
    count = len(rewards)
    reached = np.minimum(np.arange(count) + n_step, count)
    discounts = np.power(float(gamma), reached - np.arange(count))
    returns: NDArray[np.float64] = discounts * values[reached].astype(np.float64)
    for k in range(min(n_step, count)):
        returns[: count - k] += gamma**k * rewards[k:]
    return returns
