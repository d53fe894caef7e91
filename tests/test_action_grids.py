"""Actions on a grid: the mapping, the network with a head per dimension, its loss, real runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import ray
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.rllib.core.columns import Columns

from rllib_admm import ADMMDQNConfig
from rllib_admm.learner.branching_q_learning import branching_q_learning_loss, value_of
from rllib_admm.learner.q_learning import q_learning_loss
from rllib_admm.replay import reward_bounds
from rllib_admm.rl_modules import ActionGrid, BranchingQRLModule
from tests.envs import MixedActions
from tests.helpers import in_process_rounds

NESTED = Dict(
    {
        "torque": Box(np.array([[-1, 0.5]], np.float32), np.array([[1, 2.5]], np.float32)),
        "gear": Discrete(4, start=1),
        "a": Tuple((MultiDiscrete([2, 5]), MultiBinary(3), Box(0, 7, (1,), np.int32))),
    }
)


# ---- The mapping ----------------------------------------------------------------------


@given(seed=st.integers(0, 2**16), bins=st.integers(2, 9))
@settings(max_examples=50, deadline=None)
def test_every_choice_is_an_action_of_the_space(seed: int, bins: int) -> None:
    grid = ActionGrid(NESTED, bins)
    assert grid.nvec.tolist() == [2, 5, 2, 2, 2, bins, 4, bins, bins]
    choice = np.random.default_rng(seed).integers(grid.nvec)
    action = grid.to_env(choice)
    assert NESTED.contains(action)
    # What each leaf gets, in the order of the flattened space.
    assert action["a"][0].tolist() == choice[:2].tolist()
    assert action["a"][1].tolist() == choice[2:5].tolist()
    assert action["gear"] == choice[6] + 1
    np.testing.assert_allclose(
        action["torque"][0],
        [-1 + 2 * choice[7] / (bins - 1), 0.5 + 2 * choice[8] / (bins - 1)],
        rtol=1e-6,
    )


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_ends_of_the_grid_are_the_bounds(shape: tuple[int, ...]) -> None:
    space = Box(-0.1, 0.3, shape, np.float32)
    grid = ActionGrid(space, 3)
    for bin_, bound in ((0, space.low), (2, space.high)):
        action = grid.to_env(np.full(grid.nvec.shape, bin_))
        assert action.shape == shape and action.dtype == np.float32
        np.testing.assert_array_equal(action, bound)


def test_a_joint_grid_has_every_combination_once() -> None:
    grid = ActionGrid(Box(-1, 1, (2,), np.float32), 3, "joint")
    assert grid.module_space == Discrete(9)
    actions = {tuple(grid.to_env(i).tolist()) for i in range(9)}
    assert actions == {(x, y) for x in (-1.0, 0.0, 1.0) for y in (-1.0, 0.0, 1.0)}


@pytest.mark.parametrize(
    ("space", "kind", "message"),
    [
        (Box(-np.inf, 1, (3,), np.float32), "per_dimension", r"dimension \[0\] .*low -inf, high 1"),
        (Dict({"x": Box(0, np.inf, (1, 2), np.float32)}), "joint", r"dimension \['x'\]\[0, 0\]"),
        (Tuple((Discrete(2), gym.spaces.Text(3))), "per_dimension", r"Text.*\[1\] can not be put"),
        (Box(-1, 1, (8,), np.float32), "joint", r"6561 combinations .*per_dimension"),
    ],
)
def test_spaces_that_have_no_grid_are_named(space: Any, kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActionGrid(space, 3, kind)


# ---- Network and loss -----------------------------------------------------------------


def _module(nvec: list[int], **model_config: Any) -> BranchingQRLModule:
    torch.manual_seed(0)
    module = BranchingQRLModule(
        observation_space=Box(-1, 1, (6,), np.float32),
        action_space=MultiDiscrete(nvec),
        model_config={"fcnet_hiddens": [16, 16], "epsilon": 0.0, "dueling": True} | model_config,
    )
    module.make_target_networks()
    return module


@pytest.mark.parametrize("dueling", [False, True])
def test_uneven_heads_never_choose_what_they_do_not_have(dueling: bool) -> None:
    nvec = [2, 5, 3]
    module = _module(nvec, dueling=dueling, num_critics=2, epsilon=0.5)
    obs = torch.randn(500, 6)
    q = module.q_values(obs)
    assert q.shape == (2, 500, 3, 5)
    assert torch.isneginf(q[:, :, 0, 2:]).all() and torch.isfinite(q[:, :, 1]).all()
    for forward in (module.forward_inference, lambda b: module.forward_exploration(b, t=0)):
        actions = forward({Columns.OBS: obs})[Columns.ACTIONS]
        assert (actions < torch.tensor(nvec)).all() and (actions >= 0).all()
    if dueling:
        # Advantages are centred over the bins that exist: the mean is the state's value.
        value = module.q_network.value(module.q_network.trunk(obs))
        torch.testing.assert_close(q[:, :, 0, :2].mean(-1), value.squeeze(-1))
    value_of(q, actions).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in module.q_network.parameters() if dueling)


def test_exploration_is_per_dimension() -> None:
    module = _module([3] * 4, epsilon=0.3)
    obs = torch.randn(1, 6).expand(20_000, 6)
    greedy = module.forward_inference({Columns.OBS: obs[:1]})[Columns.ACTIONS]
    actions = module.forward_exploration({Columns.OBS: obs}, t=0)[Columns.ACTIONS]
    changed = (actions != greedy).float()
    expected = 0.3 * 2 / 3
    assert (changed.mean(0) - expected).abs().max() < 0.015
    # Independent dimensions: two change together as often as chance has it.
    assert abs(float((changed[:, 0] * changed[:, 1]).mean()) - expected**2) < 0.01


def _config(**options: Any) -> Any:
    defaults = {"double_q": True, "gamma": 0.9, "td_error_loss_fn": "mse"}
    return SimpleNamespace(**(defaults | options))


def test_clipped_double_q_by_hand() -> None:
    # One transition, two critics, two dimensions of two bins.
    q = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]], [[[5.0, 6.0], [7.0, 8.0]]]], requires_grad=True)
    q_next = torch.tensor([[[[0.0, 1.0], [5.0, 0.0]]], [[[0.0, 1.0], [0.0, 1.0]]]])
    target = torch.tensor([[[[9.0, 2.0], [4.0, 9.0]]], [[[9.0, 1.0], [1.0, 9.0]]]])
    batch = {
        Columns.ACTIONS: torch.tensor([[1, 0]]),
        Columns.REWARDS: torch.tensor([0.5]),
        Columns.TERMINATEDS: torch.tensor([False]),
        "weights": torch.tensor([2.0]),
        "n_step": torch.tensor([2.0]),
    }
    # Online chooses bins (1, 0); the critics' targets there are (2+4)/2 and (1+1)/2: the least, 1.
    y = 0.5 + 0.81 * 1.0
    chosen = [(2.0 + 3.0) / 2, (6.0 + 7.0) / 2]
    loss, errors, mean = branching_q_learning_loss(q, q_next, target, batch, _config())
    assert loss.item() == pytest.approx(2.0 * sum((c - y) ** 2 for c in chosen))
    assert errors.item() == pytest.approx(sum(abs(c - y) for c in chosen) / 2)
    assert mean.item() == pytest.approx(sum(chosen) / 2)
    loss.backward()
    assert q.grad is not None
    # Only the chosen bins learn, each by its share of the mean.
    assert q.grad[0, 0, 0, 0] == 0 and q.grad[0, 0, 0, 1].item() == pytest.approx(
        2.0 * 2 * (chosen[0] - y) / 2
    )
    # Without double Q the targets choose their own maximum: bins (0, 1), worth 9 for both.
    loss, _, _ = branching_q_learning_loss(q, None, target, batch, _config(double_q=False))
    y = 0.5 + 0.81 * 9.0
    assert loss.item() == pytest.approx(2.0 * sum((c - y) ** 2 for c in chosen))
    batch[Columns.TERMINATEDS] = torch.tensor([True])
    loss, _, _ = branching_q_learning_loss(q, q_next, target, batch, _config())
    assert loss.item() == pytest.approx(2.0 * sum((c - 0.5) ** 2 for c in chosen))


@pytest.mark.parametrize("double_q", [True, False])
@pytest.mark.parametrize("loss_fn", ["huber", "mse"])
def test_one_dimension_and_one_critic_is_dqn(double_q: bool, loss_fn: str) -> None:
    torch.manual_seed(1)
    q, q_next, target = (torch.randn(32, 5) for _ in range(3))
    batch = {
        Columns.OBS: q,
        Columns.NEXT_OBS: q_next,
        Columns.ACTIONS: torch.randint(5, (32,)),
        Columns.REWARDS: torch.randn(32),
        Columns.TERMINATEDS: torch.rand(32) < 0.3,
        "weights": torch.rand(32),
        "n_step": torch.randint(1, 4, (32,)).float(),
    }
    config = _config(double_q=double_q, td_error_loss_fn=loss_fn)

    def shaped(x: torch.Tensor) -> torch.Tensor:
        return x.view(1, 32, 1, 5)

    ours = branching_q_learning_loss(shaped(q), shaped(q_next), shaped(target), batch, config)
    stock = q_learning_loss(lambda obs: obs, lambda obs: target, batch, config)
    for a, b in zip(ours, stock, strict=True):
        torch.testing.assert_close(a, b)


def test_layer_norm_and_critics_are_in_the_network() -> None:
    def size(**options: Any) -> int:
        return sum(p.numel() for p in _module([3, 3], **options).q_network.parameters())

    plain = size()
    assert size(num_critics=2) == 2 * plain
    assert size(layer_norm=True) == plain + 2 * 16


def test_grid_options_change_what_is_learned() -> None:
    def z(**options: Any) -> np.ndarray:
        config = (
            ADMMDQNConfig()
            .environment("Pendulum-v1")
            .training(local_steps=4, train_batch_size_per_learner=16, **options)
            .rl_module(model_config={"fcnet_hiddens": [16]})
            .debugging(seed=5)
        )
        return config.get_rl_module_spec(env=gym.make("Pendulum-v1")).action_space

    assert z() == MultiDiscrete([3])
    assert z(action_bins=5) == MultiDiscrete([5])
    assert z(action_bins=5, action_grid="joint") == Discrete(5)
    assert z(action_bins=5, action_grid="joint", layer_norm=True) == MultiDiscrete([5])


def test_a_subclass_that_overrides_the_loss_gets_the_same_values() -> None:
    """The path through RLlib's forward pass, for losses of users' own, learns the same."""
    from rllib_admm.learner import ADMMDQNTorchLearner

    class OwnLoss(ADMMDQNTorchLearner):
        calls = 0

        def compute_loss_for_module(self, **kwargs: Any) -> Any:
            OwnLoss.calls += 1
            return super().compute_loss_for_module(**kwargs)

    def z(learner: type) -> np.ndarray:
        config = (
            ADMMDQNConfig()
            .environment("CartPole-v1")
            .learners(learner_class=learner)
            .training(
                local_steps=4,
                train_batch_size_per_learner=16,
                clipped_double_q=True,
                layer_norm=True,
                replay_buffer_config={"type": "PrioritizedEpisodeReplayBuffer", "capacity": 2000},
            )
            .rl_module(model_config={"fcnet_hiddens": [16]})
            .debugging(seed=5)
        )
        return in_process_rounds(config, gym.make("CartPole-v1"))[0]

    np.testing.assert_allclose(z(ADMMDQNTorchLearner), z(OwnLoss), rtol=1e-5, atol=1e-6)
    assert OwnLoss.calls == 2 * 6 * 4


# ---- Rewards ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "bounds"),
    [
        (None, None),
        (False, None),
        (True, "sign"),
        (2, (-2.0, 2.0)),
        ([-10, math.inf], (-10.0, math.inf)),
    ],
)
def test_clip_rewards_means_what_rllib_says(value: Any, bounds: Any) -> None:
    assert reward_bounds(value) == bounds


@pytest.mark.parametrize("value", [0, -1, (1, 1), (2, 1), "sign", (1, 2, 3), float("nan")])
def test_clip_rewards_is_checked(value: Any) -> None:
    with pytest.raises(ValueError, match=r"clip_rewards=.* is not allowed"):
        ADMMDQNConfig().environment("CartPole-v1", clip_rewards=value).validate()


# ---- With real actors ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR")
    yield
    ray.shutdown()


def _small(env: Any, **training: Any) -> ADMMDQNConfig:
    return (
        ADMMDQNConfig()
        .environment(env)
        .env_runners(num_env_runners=1, num_envs_per_env_runner=2, num_cpus_per_env_runner=0.25)
        .learners(num_learners=2, num_cpus_per_learner=0.25)
        .training(
            local_steps=8,
            train_batch_size_per_learner=16,
            training_intensity=16,
            num_steps_sampled_before_learning_starts=100,
            **training,
        )
        .rl_module(model_config={"fcnet_hiddens": [16]})
        .debugging(seed=0, log_level="ERROR")
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clipped_double_q": True, "layer_norm": True, "weight_sync": "ddp"},
        {"action_grid": "joint", "num_atoms": 5},
    ],
    ids=["per-dimension", "critics-ddp", "joint-atoms"],
)
@pytest.mark.usefixtures("cluster")
def test_nested_actions_frames_and_clipped_rewards_train(options: dict[str, Any]) -> None:
    config = _small(MixedActions, **options)
    config.environment(action_repeat=2, frame_stack=3, clip_rewards=(-0.5, 2.0))
    config.reporting(min_sample_timesteps_per_iteration=200)
    algo = config.build_algo()
    try:
        for _ in range(4):
            result = algo.train()
        assert result["consensus"]["gradient_steps_lifetime"] > 0
        # MixedActions raises at an action that is not its own; 20 frames are 10 decisions.
        assert result["env_runners"]["episode_len_mean"] == 10
        # 2 or -2 per decision, unclipped: clipped, ten decisions would lose 5 at most.
        assert result["env_runners"]["episode_return_min"] < -5.0
        assert algo.get_module().observation_space.shape == (9,)
        learner = algo.learner_group.foreach_learner(
            lambda learner, **_: learner._replay.shard("default_policy").sample(
                64, n_step=1, gamma=1.0
            )
        )
        sample = next(iter(learner)).get()
        assert set(np.unique(sample.rewards)) == {-0.5, 2.0}
        # The newest frame is last and counts on by two.
        assert (np.diff(sample.obs[:, ::3], axis=1) % 2 == 0).all()
    finally:
        algo.stop()


@pytest.mark.usefixtures("cluster")
def test_pendulum_swings_up() -> None:
    steps = 12_000
    config = _small(
        "Pendulum-v1",
        action_bins=5,
        clipped_double_q=True,
        layer_norm=True,
        lr=[[0, 1e-3], [steps, 2e-4]],
        gamma=0.98,
        n_step=3,
        tau=0.01,
        target_network_update_freq=2,
        epsilon=[[0, 1.0], [4000, 0.05]],
        replay_buffer_config={"type": "EpisodeReplayBuffer", "capacity": 50_000},
    )
    config.training(train_batch_size_per_learner=64, training_intensity=64, local_steps=32)
    config.env_runners(num_envs_per_env_runner=4)
    config.rl_module(model_config={"fcnet_hiddens": [128, 128], "fcnet_activation": "relu"})
    config.evaluation(evaluation_num_env_runners=1, evaluation_duration=20)
    config.reporting(min_sample_timesteps_per_iteration=3000)
    algo = config.build_algo()
    try:
        before = algo.evaluate()["env_runners"]["episode_return_mean"]
        while algo.train()["num_env_steps_sampled_lifetime"] < steps:
            pass
        after = algo.evaluate()["env_runners"]["episode_return_mean"]
    finally:
        algo.stop()
    assert before < -800
    assert after >= -250
