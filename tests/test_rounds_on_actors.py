"""Rounds between real actors: what they hold, what they refuse, what they repeat exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rllib_admm import ADMMDQNConfig
from rllib_admm.learner import ConsensusLearnerGroup, PlacementError
from rllib_admm.replay.errors import ReplayDataError
from tests.envs import NaNReward, TwoWorlds
from tests.helpers import has_learned

MODULE = "default_policy"
BLOCK = 256


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR")
    yield
    ray.shutdown()


def make_config(**training: Any) -> ADMMDQNConfig:
    options = {
        "local_steps": 16,
        "train_batch_size_per_learner": 32,
        "num_steps_sampled_before_learning_starts": 200,
        "replay_buffer_config": {"type": "EpisodeReplayBuffer", "capacity": 10_000},
    }
    return (
        ADMMDQNConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=2, num_envs_per_env_runner=2, num_cpus_per_env_runner=0.25)
        .learners(num_learners=2, num_cpus_per_learner=0.25)
        .training(**(options | training))
        .rl_module(model_config={"fcnet_hiddens": [32, 32]})
        .reporting(min_sample_timesteps_per_iteration=1)
        .debugging(seed=11, log_level="ERROR")
    )


def warm_up(algo: Any) -> None:
    while not has_learned(algo.train()):
        pass
    algo.learner_group.settle()


def half_step(x: np.ndarray, bits: int) -> np.ndarray:
    """Half a step of the codec per element: the block's largest magnitude over 2 * 127."""
    blocks = [np.abs(x[i : i + BLOCK]).max() for i in range(0, len(x), BLOCK)]
    return np.repeat(blocks, BLOCK)[: len(x)] / (2 ** (bits - 1) - 1) / 2


def test_rounds_recomputed_by_hand_from_the_actors_states() -> None:
    # In the euclidean metric a constant lr means a constant rho, so that u is not rescaled.
    config = make_config(over_relaxation=1.4, proximal_metric="euclidean").environment(TwoWorlds)
    algo = config.build_algo()
    try:
        warm_up(algo)
        group = algo.learner_group
        before = group.get_consensus_states(MODULE)
        z_start = before[0]["z"]
        kinds = set()
        for _ in range(6):
            round_ = group.round
            algo.train()
            group.settle()
            after = group.get_consensus_states(MODULE)
            x = [
                1.4 * new["theta"] - 0.4 * old["z"] + old["u"]
                for old, new in zip(before, after, strict=True)
            ]
            keyframe = round_ % 5 == 0
            kinds.add(keyframe)
            for x_i, old, new in zip(x, before, after, strict=True):
                allowed = 0.0 if keyframe else half_step(x_i - old["h"], 8)
                assert (np.abs(new["h"] - x_i) <= allowed + 2e-6).all()
            # Both learners took 16 steps with data, so their weights are equal.
            mean = (after[0]["h"] + after[1]["h"]) / 2
            z_old = before[0]["z"]
            allowed = 0.0 if keyframe else half_step(mean - z_old, 8)
            for x_i, new in zip(x, after, strict=True):
                assert (np.abs(new["z"] - mean) <= allowed + 2e-6).all()
                np.testing.assert_allclose(new["u"], x_i - new["z"], rtol=0, atol=3e-6)
            assert np.array_equal(after[0]["z"], after[1]["z"])
            assert np.array_equal(after[0]["z"], group.z(MODULE).numpy())
            assert not np.array_equal(after[0]["theta"], after[1]["theta"])
            before = after
        assert kinds == {True, False}
        # The two worlds pull the learners apart: the duals carry that.
        for state in before:
            moved = np.linalg.norm(state["z"] - z_start)
            assert np.linalg.norm(state["u"]) > 0.05 * moved
    finally:
        algo.stop()


def _no_full_precision(runner: Any) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("full-precision weights arrived")

    runner.module.set_state = refuse


def test_training_and_evaluation_need_no_full_precision_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_config().evaluation(
        evaluation_interval=1, evaluation_num_env_runners=1, evaluation_duration=1
    )
    algo = config.build_algo()
    try:

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise AssertionError("RLlib's sync_weights was called")

        monkeypatch.setattr(EnvRunnerGroup, "sync_weights", refuse)
        kinds: list[str] = []
        broadcast = ConsensusLearnerGroup.broadcast

        def spy(self: Any, held_round: int | None) -> Any:
            sent = broadcast(self, held_round)
            if sent is not None:
                kinds.append("keyframe" if sent.base_round is None else "difference")
            return sent

        monkeypatch.setattr(ConsensusLearnerGroup, "broadcast", spy)
        for group in (algo.env_runner_group, algo.eval_env_runner_group):
            group.foreach_env_runner(_no_full_precision)
        warm_up(algo)
        for _ in range(4):
            result = algo.train()
        assert result["evaluation"]["env_runners"]["num_episodes"] >= 1
        z = algo.learner_group.z(MODULE).numpy()
        for group in (algo.env_runner_group, algo.eval_env_runner_group):
            group.deliver(algo.learner_group, group.healthy_env_runner_ids())
            held = group.foreach_env_runner(
                lambda r: np.concatenate(
                    [p.detach().numpy().ravel() for p in r.module.parameters()]
                ),
                local_env_runner=False,
            )
            assert held
            for weights in held:
                assert np.array_equal(weights, z)
        local = algo.get_module().parameters()
        assert np.array_equal(np.concatenate([p.detach().numpy().ravel() for p in local]), z)
        # Keyframes went out once per runner, differences ever after.
        assert kinds.count("keyframe") <= 3 + 1
        assert kinds.count("difference") >= 2 * 3
    finally:
        algo.stop()


def test_corrupted_upload_is_named_and_not_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    algo = make_config().build_algo()
    try:
        warm_up(algo)
        group = algo.learner_group
        receive = ConsensusLearnerGroup._receive
        hit: list[str] = []

        def corrupt(self: Any, coordinator: Any, upload: bytes, name: str) -> None:
            if name == "learner-1" and not hit:
                hit.append(name)
                memory = coordinator.memory(name).clone()
                middle = len(upload) // 2
                upload = upload[:middle] + bytes([upload[middle] ^ 1]) + upload[middle + 1 :]
                receive(self, coordinator, upload, name)
                assert bool((coordinator.memory(name) == memory).all())
            else:
                receive(self, coordinator, upload, name)

        monkeypatch.setattr(ConsensusLearnerGroup, "_receive", corrupt)
        with caplog.at_level("WARNING", logger="rllib_admm"):
            result = algo.train()
        assert result["consensus"]["num_messages_rejected"] == 1
        assert "upload of learner-1 was not counted" in caplog.text
        assert "checksum" in caplog.text
        for _ in range(3):
            algo.train()
        group.settle()
        states = group.get_consensus_states(MODULE)
        coordinator = group._coordinators[MODULE]
        for i, state in enumerate(states):
            assert np.array_equal(state["h"], coordinator.memory(f"learner-{i}").numpy())
        assert np.isfinite(states[0]["z"]).all()
    finally:
        algo.stop()


def test_corrupted_broadcast_is_named_and_replaced_by_a_keyframe(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    algo = make_config(full_precision_every=0).build_algo()
    try:
        warm_up(algo)
        algo.train()
        broadcast = ConsensusLearnerGroup.broadcast
        kinds: list[str] = []
        hit: list[bool] = []

        def corrupt(self: Any, held_round: int | None) -> Any:
            sent = broadcast(self, held_round)
            if sent is None:
                return sent
            kinds.append("keyframe" if sent.base_round is None else "difference")
            if not hit:
                hit.append(True)
                move = bytearray(sent.moves[MODULE])
                move[-40] ^= 255
                sent.moves[MODULE] = bytes(move)
            return sent

        monkeypatch.setattr(ConsensusLearnerGroup, "broadcast", corrupt)
        with caplog.at_level("WARNING", logger="rllib_admm"):
            algo.train()
        assert kinds[0] == "difference"
        assert "could not take z" in caplog.text and "checksum" in caplog.text
        kinds.clear()
        result = algo.train()
        assert "keyframe" in kinds
        assert result["consensus"]["num_messages_rejected"] == 1
    finally:
        algo.stop()


def test_same_seed_same_result() -> None:
    z, returns = [], []
    for _ in range(2):
        algo = make_config().build_algo()
        try:
            for _ in range(8):
                result = algo.train()
            z.append(algo.learner_group.z(MODULE).numpy().copy())
            returns.append(result["env_runners"]["episode_return_mean"])
        finally:
            algo.stop()
    assert np.array_equal(z[0], z[1])
    assert returns[0] == returns[1]


def test_nan_reward_names_runner_and_step_and_leaves_z_finite() -> None:
    algo = make_config().environment(NaNReward).build_algo()
    try:
        with pytest.raises(ReplayDataError, match=r"EnvRunner 1.*step 2") as error:
            for _ in range(10):
                algo.train()
        assert "reward" in str(error.value)
        assert np.isfinite(algo.learner_group.z(MODULE).numpy()).all()
    finally:
        algo.stop()


def test_infeasible_placement_is_an_error_after_its_timeout() -> None:
    config = make_config(placement_timeout_s=1.0).learners(num_cpus_per_learner=50)
    with pytest.raises(PlacementError, match=r"offers 4 CPU.*asks for 100.5 CPU.*fractions"):
        config.build_algo()


def test_ddp_replicas_stay_equal_over_rounds() -> None:
    algo = make_config(weight_sync="ddp").build_algo()
    try:
        warm_up(algo)
        result = algo.train()
        algo.learner_group.settle()
        first, second = algo.learner_group.get_consensus_states(MODULE)
        assert np.array_equal(first["theta"], second["theta"])
        assert np.array_equal(first["theta"], algo.learner_group.z(MODULE).numpy())
        # Gradients up and their mean down on every step, plus z once per round of 16 steps.
        assert 0.85 < result["consensus"]["compression_per_nic"] < 1.0
    finally:
        algo.stop()


def test_local_averaging_starts_every_round_from_z() -> None:
    algo = make_config(rho=0).build_algo()
    try:
        warm_up(algo)
        algo.train()
        algo.learner_group.settle()
        for state in algo.learner_group.get_consensus_states(MODULE):
            assert np.array_equal(state["theta"], state["z"])
            assert not state["u"].any()
    finally:
        algo.stop()


@pytest.mark.parametrize("num_learners", [0, 1])
def test_one_learner_is_plain_dqn(num_learners: int) -> None:
    config = make_config().learners(num_learners=num_learners)
    algo = config.build_algo()
    try:
        warm_up(algo)
        result = algo.train()
        algo.learner_group.settle()
        (state,) = algo.learner_group.get_consensus_states(MODULE)
        assert np.array_equal(state["theta"], state["z"])
        assert not state["u"].any()
        assert result["consensus"]["rho"] == 0
    finally:
        algo.stop()
