"""The greedy return of a checkpoint, measured in this process without any actor."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core import (
    COMPONENT_ENV_RUNNER,
    COMPONENT_LEARNER,
    COMPONENT_LEARNER_GROUP,
    COMPONENT_RL_MODULE,
    DEFAULT_MODULE_ID,
)
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

from rllib_admm.env_runners import WrappingEnvRunner

# Evaluation episodes must not start where training episodes with the same seed started.
_SEED_OFFSET = 10_000


@dataclass(frozen=True)
class GreedyReturn:
    """Undiscounted returns of greedy episodes.

    Attributes:
        returns: One per episode.
        num_cut: How many of the episodes did not end in the time allowed; their returns are those
            of the steps that were made.
    """

    returns: tuple[float, ...]
    num_cut: int = 0

    def __str__(self) -> str:
        spread = stdev(self.returns) if len(self.returns) > 1 else 0.0
        cut = f", {self.num_cut} of them cut off by the limit" if self.num_cut else ""
        return f"{fmean(self.returns):.2f} +- {spread:.2f} ({len(self.returns)} episodes{cut})"


def greedy_return(
    config: AlgorithmConfig,
    checkpoint: Path,
    num_episodes: int,
    time_limit_s: float = 120.0,
    max_steps: int | None = None,
) -> GreedyReturn:
    """Runs greedy episodes with the weights and connector states of a checkpoint.

    Args:
        config: The config the checkpoint was trained with; its evaluation overrides apply.
        checkpoint: An Algorithm checkpoint in the local file system.
        num_episodes: How many episodes.
        time_limit_s: Seconds after which episodes are cut off: in an environment without a time
            limit of its own a bad policy may never end one. Not for multi-agent environments.
        max_steps: Env steps after which an episode is cut off; None: none. Likewise.

    Returns:
        The returns of exactly that many episodes.
    """
    runner = evaluation_runner(config, num_episodes)
    try:
        load_module(runner, checkpoint)
        if isinstance(runner, MultiAgentEnvRunner):
            return _one_after_the_other(runner, num_episodes)
        return _side_by_side(runner, time_limit_s, max_steps)
    finally:
        runner.stop()


def load_module(runner: Any, checkpoint: Path) -> None:
    """Gives an EnvRunner the connector states and the weights of a checkpoint."""
    runner.restore_from_path(checkpoint / COMPONENT_ENV_RUNNER)
    modules = checkpoint / COMPONENT_LEARNER_GROUP / COMPONENT_LEARNER / COMPONENT_RL_MODULE
    # After the connectors, one of which may carry weights itself. A single-agent runner holds
    # the one module, a multi-agent runner all of them.
    if not isinstance(runner, MultiAgentEnvRunner):
        modules = modules / DEFAULT_MODULE_ID
    runner.module.restore_from_path(modules)


def evaluation_runner(config: AlgorithmConfig, num_envs: int) -> Any:
    """Returns a greedy EnvRunner in this process, with the config's evaluation overrides."""
    runner_config = config.copy(copy_frozen=False).get_evaluation_config_object()
    single_agent = not runner_config.is_multi_agent
    # Zero runners: the local one makes its environment itself.
    runner_config.env_runners(
        num_env_runners=0,
        num_envs_per_env_runner=num_envs if single_agent else 1,
        gym_env_vectorize_mode="sync",
        batch_mode="truncate_episodes",
        explore=False,
    )
    runner_config.debugging(seed=(config.seed or 0) + _SEED_OFFSET)
    cls = runner_config.env_runner_cls or (
        SingleAgentEnvRunner if single_agent else MultiAgentEnvRunner
    )
    # Validation chooses this class; a config that comes from a file was validated as a copy.
    if cls is SingleAgentEnvRunner and getattr(runner_config, "wraps_env", False):
        cls = WrappingEnvRunner
    return cls(config=runner_config, worker_index=0)


def _one_after_the_other(runner: Any, num_episodes: int) -> GreedyReturn:
    """Runs whole episodes: the fragments of a multi-agent episode do not add up to its return."""
    episodes = runner.sample(num_episodes=num_episodes, explore=False)
    return GreedyReturn(tuple(float(episode.get_return()) for episode in episodes[:num_episodes]))


def _side_by_side(runner: Any, time_limit_s: float, max_steps: int | None) -> GreedyReturn:
    """Runs the first episode of each of the runner's environments to its end.

    The first N episodes to end, out of N environments side by side, would be the short ones.
    """
    deadline = time.monotonic() + time_limit_s
    returns: dict[str, float] = {}
    running: set[str] | None = None
    count = 0
    while running is None or (
        running and time.monotonic() < deadline and (max_steps is None or count < max_steps)
    ):
        first = running is None
        # At first one step in each environment: what comes back are the first episodes.
        each = 1 if first else min(50, max_steps - count if max_steps else 50)
        count += each
        steps = runner.num_envs * each
        fragments = runner.sample(num_timesteps=steps, explore=False, force_reset=first)
        if running is None:
            running = {fragment.id_ for fragment in fragments}
            returns = dict.fromkeys(running, 0.0)
        for fragment in fragments:
            if fragment.id_ in running:
                returns[fragment.id_] += float(fragment.get_return())
                if fragment.is_done:
                    running.discard(fragment.id_)
    return GreedyReturn(tuple(returns.values()), num_cut=len(running))
