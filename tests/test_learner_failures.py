"""Killed and hanging learners: the round ends, a replacement starts from z, all is counted."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

from rllib_admm import ADMMDQNConfig
from rllib_admm.learner import ADMMDQNTorchLearner, LearnerFailure

MODULE = "default_policy"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR")
    yield
    ray.shutdown()


class Hangs(ADMMDQNTorchLearner):
    """Learner 1 falls asleep in its third round, once."""

    calls = 0

    def run_round(self, request: Any) -> Any:
        if request.local_steps and self._learner_index == 1 and self._restarted() is False:
            Hangs.calls += 1
            if Hangs.calls == 3:
                time.sleep(600)
        return super().run_round(request)

    def _restarted(self) -> bool:
        return bool(self._consensus[MODULE].consensus.round > 5)


def make_config(num_learners: int = 3, **training: Any) -> ADMMDQNConfig:
    options = {
        "local_steps": 8,
        "train_batch_size_per_learner": 16,
        "num_steps_sampled_before_learning_starts": 150,
        "round_timeout_s": 60.0,
        "replay_buffer_config": {"type": "EpisodeReplayBuffer", "capacity": 5_000},
    }
    return (
        ADMMDQNConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=1, num_envs_per_env_runner=6, num_cpus_per_env_runner=0.25)
        .learners(num_learners=num_learners, num_cpus_per_learner=0.25)
        .training(**(options | training))
        .rl_module(model_config={"fcnet_hiddens": [16]})
        .reporting(min_sample_timesteps_per_iteration=1)
        .debugging(seed=1, log_level="ERROR")
    )


def train_until_active(algo: Any, learners: int, seconds: float = 150.0) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        result = algo.train()
        if result.get("consensus", {}).get("num_learners_active") == learners:
            return result
        assert time.monotonic() < deadline, result.get("consensus")


@pytest.mark.parametrize("policy", ["mean_dual", "recentre"])
def test_killed_learner_is_replaced_and_survivors_go_on(policy: str) -> None:
    algo = make_config(on_learner_failure=policy).build_algo()
    try:
        train_until_active(algo, 3)
        for _ in range(3):
            algo.train()
        group = algo.learner_group
        before = group.round
        os.kill(group.get_pids()[1], signal.SIGKILL)
        began = time.monotonic()
        result = algo.train()
        assert time.monotonic() - began < 10
        assert result["consensus"]["round"] == before + 1
        assert result["consensus"]["num_learners_active"] == 2
        assert result["consensus"]["num_learner_restarts"] == 1
        train_until_active(algo, 3)
        for _ in range(3):
            result = algo.train()
        group.settle()
        states = group.get_consensus_states(MODULE)
        for i, state in enumerate(states):
            assert np.isfinite(state["theta"]).all()
            memory = group._coordinators[MODULE].memory(f"learner-{i}").numpy()
            assert np.array_equal(state["h"], memory)
            assert np.array_equal(state["z"], group.z(MODULE).numpy())
        assert result["consensus"]["num_learner_restarts"] == 1
    finally:
        algo.stop()


def test_mean_dual_is_the_mean_of_the_survivors_duals() -> None:
    algo = make_config(on_learner_failure="mean_dual", full_precision_every=1).build_algo()
    try:
        train_until_active(algo, 3)
        for _ in range(3):
            algo.train()
        group = algo.learner_group
        os.kill(group.get_pids()[2], signal.SIGKILL)
        algo.train()
        member = group._members[2]
        ray.get(member.building, timeout=60)
        group.settle()
        states = group.get_consensus_states(MODULE)
        mean = (states[0]["u"] + states[1]["u"]) / 2
        np.testing.assert_allclose(states[2]["u"], mean, rtol=0, atol=1e-6)
        assert np.array_equal(states[2]["theta"], states[2]["z"])
    finally:
        algo.stop()


def test_a_learner_that_hangs_is_replaced_after_the_timeout() -> None:
    algo = (
        make_config(num_learners=2, round_timeout_s=3.0).learners(learner_class=Hangs).build_algo()
    )
    try:
        began = time.monotonic()
        result = train_until_active(algo, 2)
        while result["consensus"]["num_learner_restarts"] < 1:
            result = algo.train()
            assert time.monotonic() - began < 180
        assert result["consensus"]["num_learners_active"] == 1
    finally:
        algo.stop()


def test_restarts_are_bounded() -> None:
    algo = make_config(num_learners=2, max_learner_restarts=0).build_algo()
    try:
        train_until_active(algo, 2)
        os.kill(algo.learner_group.get_pids()[0], signal.SIGKILL)
        with pytest.raises(LearnerFailure, match="max_learner_restarts=0"):
            algo.train()
        assert np.isfinite(algo.learner_group.z(MODULE).numpy()).all()
    finally:
        algo.stop()


def test_killed_env_runner_comes_back_with_a_keyframe() -> None:
    config = make_config(num_learners=2).env_runners(num_env_runners=2)
    config = config.fault_tolerance(
        restart_failed_env_runners=True, delay_between_env_runner_restarts_s=0
    )
    algo = config.build_algo()
    try:
        train_until_active(algo, 2)
        group = algo.env_runner_group
        pid = group.foreach_env_runner(
            lambda r: os.getpid(), remote_worker_ids=[2], local_env_runner=False
        )[0]
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 150
        while True:
            result = algo.train()
            stats = result["fault_tolerance"]
            if stats["num_remote_worker_restarts"] >= 1 and stats["num_healthy_workers"] == 2:
                break
            assert time.monotonic() < deadline
        group.deliver(algo.learner_group, group.healthy_env_runner_ids())
        z = algo.learner_group.z(MODULE).numpy()
        for weights in group.foreach_env_runner(
            lambda r: np.concatenate([p.detach().numpy().ravel() for p in r.module.parameters()]),
            local_env_runner=False,
        ):
            assert np.array_equal(weights, z)
    finally:
        algo.stop()


def test_all_learners_dead_start_again_from_z() -> None:
    algo = make_config(num_learners=2).build_algo()
    try:
        train_until_active(algo, 2)
        algo.train()
        group = algo.learner_group
        before, z = group.round, group.z(MODULE).numpy().copy()
        for pid in group.get_pids():
            os.kill(pid, signal.SIGKILL)
        # The round that all of them left did not happen: z stays, both start again from it.
        algo.train()
        assert group.round == before
        assert np.array_equal(group.z(MODULE).numpy(), z)
        result = train_until_active(algo, 2)
        assert result["consensus"]["num_learner_restarts"] == 2
        rounds = result["consensus"]["round"]
        result = algo.train()
        assert result["consensus"]["round"] > rounds
        assert np.isfinite(group.z(MODULE).numpy()).all()
        assert not np.array_equal(group.z(MODULE).numpy(), z)
    finally:
        algo.stop()


def test_a_reply_that_is_damaged_and_parameters_that_are_nan_are_recovered_from(
    caplog: pytest.LogCaptureFixture,
) -> None:
    algo = make_config(
        num_learners=2,
        replay_buffer_config={"type": "PrioritizedEpisodeReplayBuffer", "capacity": 5_000},
    ).build_algo()
    try:
        train_until_active(algo, 2)
        algo.train()
        group = algo.learner_group

        # One bit of the reply to learner 1 is flipped on its way.
        reply = group._members[1].replies[MODULE]
        message, middle = reply.message, len(reply.message) // 2
        damaged = message[:middle] + bytes([message[middle] ^ 1]) + message[middle + 1 :]
        group._members[1].replies[MODULE] = dataclasses.replace(reply, message=damaged)
        with caplog.at_level("WARNING", logger="rllib_admm"):
            result = algo.train()
        assert result["consensus"]["num_messages_rejected"] == 1
        assert "learner-1 could not apply a reply" in caplog.text and "checksum" in caplog.text

        # The parameters of learner 0 become NaN: it is left out, and starts again from z.
        def poison(learner: Any, **_: Any) -> None:
            if learner._learner_index == 0:
                learner.write_theta(MODULE, learner.theta(MODULE) * float("nan"))

        # With nothing pending, as if the local steps themselves had gone wrong.
        group.settle()
        list(group.foreach_learner(poison))
        with caplog.at_level("WARNING", logger="rllib_admm"):
            result = algo.train()
        assert result["consensus"]["num_non_finite"] == 1
        assert "learner-0 (default_policy) were not finite" in caplog.text
        assert np.isfinite(group.z(MODULE).numpy()).all()

        for _ in range(3):
            result = algo.train()
        assert result["consensus"]["num_messages_rejected"] == 1
        assert result["consensus"]["num_non_finite"] == 1
        assert result["consensus"]["num_learner_restarts"] == 0
        group.settle()
        for i, state in enumerate(group.get_consensus_states(MODULE)):
            assert np.isfinite(state["theta"]).all() and np.isfinite(state["u"]).all()
            memory = group._coordinators[MODULE].memory(f"learner-{i}").numpy()
            assert np.array_equal(state["h"], memory)
            assert np.array_equal(state["z"], group.z(MODULE).numpy())

        # NaN TD errors did not become priorities.
        def priorities(learner: Any, **_: Any) -> Any:
            return learner._replay.shard(MODULE).get_state()["priorities"]

        for result in group.foreach_learner(priorities):
            assert np.isfinite(result.get()).all() and (result.get() > 0).any()
    finally:
        algo.stop()
