"""The whole path learns: a short run on CartPole-v1, beside controls that must not look learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import ray
import torch

from rllib_admm import ADMMDQNConfig

ENV_STEPS = 20_000
EPISODES = 20
# An untrained network that happens to balance a little reaches 92 with this seed.
UNTRAINED = 100.0
LEARNED = 200.0


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR")
    yield
    ray.shutdown()


def config() -> ADMMDQNConfig:
    """The settings of tuned_examples/cartpole-admm-dqn.yaml, with a schedule for fewer steps."""
    return (
        ADMMDQNConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=2, num_envs_per_env_runner=8, num_cpus_per_env_runner=0.25)
        .learners(num_learners=2, num_cpus_per_learner=0.5)
        .training(
            lr=[[0, 1e-3], [ENV_STEPS, 1e-4]],
            train_batch_size_per_learner=64,
            training_intensity=64,
            num_steps_sampled_before_learning_starts=1000,
            target_network_update_freq=500,
            n_step=3,
            epsilon=[(0, 1.0), (5000, 0.05)],
            replay_buffer_config={"type": "EpisodeReplayBuffer", "capacity": 50_000},
            local_steps=64,
        )
        .rl_module(model_config={"fcnet_hiddens": [128, 128], "fcnet_activation": "relu"})
        .reporting(min_sample_timesteps_per_iteration=4000)
        .debugging(seed=0, log_level="ERROR")
    )


def mean_return(act: Any) -> float:
    """Returns the mean return of a fixed set of episodes; `act` maps (B, 4) to (B,)."""
    env = gym.make_vec("CartPole-v1", num_envs=EPISODES)
    obs, _ = env.reset(seed=10_000)
    returns, alive = np.zeros(EPISODES), np.ones(EPISODES, bool)
    while alive.any():
        obs, rewards, terminated, truncated, _ = env.step(act(obs))
        returns += rewards * alive
        alive &= ~(terminated | truncated)
    env.close()
    return float(returns.mean())


def greedy(module: Any) -> float:
    def act(obs: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return module.forward_inference({"obs": torch.from_numpy(obs)})["actions"].numpy()

    return mean_return(act)


def test_z_learns_cartpole_and_controls_do_not() -> None:
    rng = np.random.default_rng(0)
    assert mean_return(lambda obs: rng.integers(2, size=len(obs))) < UNTRAINED
    algo = config().build_algo()
    try:
        assert greedy(algo.get_module()) < UNTRAINED
        result: dict[str, Any] = {"num_env_steps_sampled_lifetime": 0}
        while result["num_env_steps_sampled_lifetime"] < ENV_STEPS:
            result = algo.train()
        print("GREEDY", greedy(algo.get_module()), result["num_env_steps_sampled_lifetime"])
        assert greedy(algo.get_module()) > LEARNED
    finally:
        algo.stop()
