"""ADMMDQN as an RLlib Algorithm: schedules, replay ratio, checkpoints, Tune."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray import tune
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.core.rl_module.rl_module import RLModule

import rllib_admm
from rllib_admm import ADMMDQN, ADMMDQNConfig
from rllib_admm.admm_dqn import shards_of_runner
from rllib_admm.learner import ADMMDQNTorchLearner
from tests.helpers import has_learned

MODULE = "default_policy"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR")
    yield
    ray.shutdown()


def local_config(**training: Any) -> ADMMDQNConfig:
    """One learner and one runner in this process: fast, same code path."""
    options = {
        "local_steps": 8,
        "train_batch_size_per_learner": 16,
        "num_steps_sampled_before_learning_starts": 100,
        "replay_buffer_config": {"type": "EpisodeReplayBuffer", "capacity": 5_000},
    }
    return (
        ADMMDQNConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0, num_envs_per_env_runner=2)
        .learners(num_learners=0)
        .training(**(options | training))
        .rl_module(model_config={"fcnet_hiddens": [16]})
        .reporting(min_sample_timesteps_per_iteration=1)
        .debugging(seed=2, log_level="ERROR")
    )


def remote_config(**training: Any) -> ADMMDQNConfig:
    return (
        local_config(**training)
        .env_runners(num_env_runners=2, num_cpus_per_env_runner=0.25)
        .learners(num_learners=2, num_cpus_per_learner=0.25)
    )


@pytest.mark.parametrize("intensity", [4.0, 16.0, 50.0])
def test_replay_ratio_is_exact(intensity: float) -> None:
    algo = local_config(training_intensity=intensity, local_steps=5).build_algo()
    try:
        while not has_learned(algo.train()):
            pass
        begin, steps = algo.train(), 30
        for _ in range(steps):
            end = algo.train()
        sampled = end["num_env_steps_sampled_lifetime"] - begin["num_env_steps_sampled_lifetime"]
        key = "gradient_steps_lifetime"
        replayed = 16 * (end["consensus"][key] - begin["consensus"][key])
        # Whole steps of both sub-environments: at most one step each is still owed.
        assert abs(sampled - replayed / intensity) <= 2
    finally:
        algo.stop()


def test_native_ratio_is_dqns() -> None:
    config = local_config(training_intensity=None, n_step=3)
    # One update of 16 per sample call of 3 steps in 2 environments.
    assert config.replay_ratio == pytest.approx(16 / 6)


def test_learning_starts_when_it_should_and_epsilon_follows_env_steps() -> None:
    config = local_config(
        num_steps_sampled_before_learning_starts=500, epsilon=[(0, 1.0), (1000, 0.1)]
    )
    algo = config.build_algo()
    try:
        result = algo.train()
        assert result["consensus"]["gradient_steps_lifetime"] == 0
        assert result["num_env_steps_sampled_lifetime"] == 500
        result = algo.train()
        assert result["consensus"]["gradient_steps_lifetime"] == 8
        while result["num_env_steps_sampled_lifetime"] < 1100:
            result = algo.train()
        epsilon = algo.env_runner.module.epsilon_schedule.get_current_value()
        assert float(epsilon) == pytest.approx(0.1)
    finally:
        algo.stop()


def test_everything_dqn_reports_is_reported() -> None:
    """The keys of stock DQN's result, as far as they are not about its driver-side buffer."""

    def keys(config: Any) -> set[tuple[str, ...]]:
        algo = config.build_algo()
        try:
            result = algo.train()
            while "learners" not in result or MODULE not in result["learners"]:
                result = algo.train()
            result = algo.train()
        finally:
            algo.stop()
        found: set[tuple[str, ...]] = set()

        def walk(node: Any, path: tuple[str, ...]) -> None:
            if isinstance(node, dict):
                for key, value in node.items():
                    walk(value, (*path, key))
            else:
                found.add(path)

        for part in ("env_runners", "learners"):
            walk(result[part], (part,))
        return found

    stock = (
        DQNConfig()
        .environment("CartPole-v1")
        .training(num_steps_sampled_before_learning_starts=50, train_batch_size_per_learner=16)
        .reporting(min_sample_timesteps_per_iteration=100)
        .debugging(log_level="ERROR")
    )
    ours = local_config().reporting(min_sample_timesteps_per_iteration=600)
    missing = keys(stock) - keys(ours)
    # Timers of learner connector pieces: minibatches come from the columns, not through them.
    missing = {path for path in missing if not any("connector" in part for part in path)}
    assert missing == set()


@pytest.mark.parametrize("with_buffer", [True, False])
def test_checkpoint_continues(tmp_path: Path, with_buffer: bool) -> None:
    algo = remote_config(store_buffer_in_checkpoints=with_buffer).build_algo()
    try:
        while not has_learned(algo.train()):
            pass
        for _ in range(3):
            result = algo.train()
        path = algo.save_to_path(tmp_path / "checkpoint")
        states = algo.learner_group.get_consensus_states(MODULE)
        z = algo.learner_group.z(MODULE).numpy().copy()
        module = RLModule.from_checkpoint(
            tmp_path / "checkpoint" / "learner_group" / "learner" / "rl_module" / MODULE
        )
        saved = np.concatenate(
            [
                p.detach().numpy().ravel()
                for n, p in module.named_parameters()
                if not n.startswith("_target")
            ]
        )
        assert np.array_equal(saved, z)
        algo.train()
    finally:
        algo.stop()
    again = Algorithm.from_checkpoint(path)
    try:
        assert isinstance(again, ADMMDQN)
        for before, after in zip(
            states, again.learner_group.get_consensus_states(MODULE), strict=True
        ):
            for key in ("theta", "u", "h", "z"):
                assert np.array_equal(before[key], after[key]), key
        assert np.array_equal(again.learner_group.z(MODULE).numpy(), z)
        assert again.learner_group.round == result["consensus"]["round"]
        after = again.train()
        assert after["num_env_steps_sampled_lifetime"] > result["num_env_steps_sampled_lifetime"]
        # Without the buffer the shards fill up first; with it learning goes on at once.
        rounds = after["consensus"]["round"]
        assert rounds == result["consensus"]["round"] + with_buffer
    finally:
        again.stop()


def test_checkpoint_restores_onto_another_number_of_learners(tmp_path: Path) -> None:
    algo = remote_config().build_algo()
    try:
        while not has_learned(algo.train()):
            pass
        algo.train()
        path = algo.save_to_path(tmp_path / "two")
        z = algo.learner_group.z(MODULE).numpy().copy()
    finally:
        algo.stop()
    algo = remote_config().learners(num_learners=3).build_algo()
    try:
        algo.restore_from_path(path)
        for state in algo.learner_group.get_consensus_states(MODULE):
            assert np.array_equal(state["theta"], z)
            assert not state["u"].any()
        while not has_learned(algo.train()):
            pass
        assert np.isfinite(algo.learner_group.z(MODULE).numpy()).all()
    finally:
        algo.stop()


def test_a_custom_learner_is_used() -> None:
    algo = local_config().learners(learner_class=HalfLoss).build_algo()
    try:
        while not has_learned(algo.train()):
            pass
        assert algo.train()["learners"][MODULE]["half_loss"] > 0
    finally:
        algo.stop()


class HalfLoss(ADMMDQNTorchLearner):
    """A user's Learner: overriding the loss must switch the short path off."""

    def compute_loss_for_module(self, *, module_id: str, **kwargs: Any) -> Any:
        loss = super().compute_loss_for_module(module_id=module_id, **kwargs) / 2
        self.metrics.log_value((module_id, "half_loss"), loss.detach(), window=1)
        return loss


@pytest.mark.parametrize(
    ("runners", "shards", "expected"),
    [
        (2, 2, [(0,), (1,)]),
        (4, 2, [(0,), (1,), (0,), (1,)]),
        (1, 2, [(0, 1)]),
        (2, 5, [(0, 2, 4), (1, 3)]),
        (3, 1, [(0,), (0,), (0,)]),
    ],
)
def test_fragments_go_to_the_shard_of_their_runner(
    runners: int, shards: int, expected: list[tuple[int, ...]]
) -> None:
    assert [shards_of_runner(w + 1, runners, shards) for w in range(runners)] == expected
    assert set().union(*expected) == set(range(shards))


def test_one_runner_fills_both_shards_evenly() -> None:
    config = remote_config().env_runners(num_env_runners=1, num_envs_per_env_runner=4)
    algo = config.build_algo()
    try:
        while not has_learned(algo.train()):
            pass
        for _ in range(10):
            algo.train()
        group = algo.learner_group
        group.settle()
        sizes = [
            len(replay)
            for replay in ray.get(
                [m.actor.apply.remote(lambda learner: learner._replay) for m in group._members]
            )
        ]
        assert min(sizes) > 0.7 * max(sizes)
    finally:
        algo.stop()


def _fit(tmp_path: Path) -> Any:
    tuner = tune.Tuner(
        "ADMMDQN",
        param_space=local_config(),
        run_config=tune.RunConfig(
            stop={"training_iteration": 2}, storage_path=str(tmp_path), verbose=0
        ),
    )
    return tuner.fit()


def test_tuner_finds_the_name_also_after_a_new_connection(tmp_path: Path) -> None:
    assert _fit(tmp_path / "a").num_errors == 0
    ray.shutdown()
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR")
    assert _fit(tmp_path / "b").num_errors == 0


def test_register_is_idempotent() -> None:
    rllib_admm.register()
    rllib_admm.register()
    assert tune.registry.get_trainable_cls("ADMMDQN") is ADMMDQN


def test_a_config_dict_in_a_tuner_refuses_a_misspelt_option() -> None:
    with pytest.raises(ValueError, match=r"'local_step'.*'local_steps'"):
        ADMMDQN(config={"env": "CartPole-v1", "local_step": 3})
