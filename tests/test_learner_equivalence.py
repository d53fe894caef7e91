"""One learner is RLlib's own DQN; two under "ddp" are one learner on the joint batch."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.dqn.torch.dqn_torch_learner import DQNTorchLearner
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME

from rllib_admm import ADMMDQNConfig
from rllib_admm.consensus import ConsensusOptions, ConstantPenalty, Coordinator
from rllib_admm.learner.round import RoundRequest
from rllib_admm.learner.torch_learner import ADMMDQNTorchLearner
from tests.helpers import random_episodes

MODULE = "default_policy"


def _configure(config: DQNConfig, **training: object) -> DQNConfig:
    return (
        config.environment("CartPole-v1")
        .learners(num_learners=0)
        .training(
            train_batch_size_per_learner=32,
            target_network_update_freq=100,
            tau=0.5,
            replay_buffer_config={
                "type": "PrioritizedEpisodeReplayBuffer",
                "capacity": 5000,
                "alpha": 0.6,
                "beta": 0.4,
            },
            **training,
        )
        .debugging(seed=3)
    )


def _parameters(learner: DQNTorchLearner) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in learner.module[MODULE].named_parameters()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"double_q": False, "dueling": False},
        {"td_error_loss_fn": "mse", "n_step": 3, "grad_clip": 0.5},
        # With dueling, stock adds the value to all atoms alike, so that its gradient is noise.
        {"num_atoms": 11, "v_min": 0.0, "v_max": 20.0, "dueling": False},
        {"grad_clip": 0.01, "grad_clip_by": "norm", "n_step": (1, 4)},
        {"grad_clip": 0.001, "grad_clip_by": "value", "lr": [[0, 1e-3], [1000, 1e-4]]},
    ],
    ids=["default", "plain", "mse-3step-clip", "atoms", "norm-clip-nrange", "value-clip-lr"],
)
def test_fifty_updates_equal_stock_dqn(options: dict[str, object]) -> None:
    env = gym.make("CartPole-v1")
    ours = _configure(ADMMDQNConfig(), local_steps=1, **options).build_learner(env=env)
    stock = _configure(DQNConfig(), **options).build_learner(env=env)
    assert isinstance(ours, ADMMDQNTorchLearner) and type(stock) is DQNTorchLearner
    stock.module.set_state(ours.module.get_state())

    batches = []
    columns = ours._columns

    def spy(module_id: str, sample: object) -> dict[str, object]:
        batch = columns(module_id, sample)  # type: ignore[arg-type]
        batches.append({k: v.clone() for k, v in batch.items()})
        return batch

    ours._columns = spy  # type: ignore[method-assign]
    plain = ConsensusOptions.plain()
    ours.join("learner-0", 0.0, plain)
    coordinator = Coordinator(
        ours.theta(MODULE), plain, ours.layouts[MODULE].hash, ConstantPenalty(), ["learner-0"], 0.0
    )
    replies: dict[str, object] = {}
    fragments = [("EnvRunner 1", random_episodes(env, steps=600, seed=1))]
    for update in range(50):
        env_steps = 40 * update
        result = ours.run_round(RoundRequest(env_steps, 1, replies, {}, fragments))
        fragments = []
        coordinator.receive(result.uploads[MODULE])
        replies = {MODULE: coordinator.close_round(0.0)}
        stock.update(
            batch=MultiAgentBatch({MODULE: SampleBatch(batches[-1])}, env_steps=32),
            timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: env_steps},
        )
    ours.run_round(RoundRequest(40 * 50, 0, replies))
    theirs = _parameters(stock)
    for name, value in _parameters(ours).items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-6, msg=name)
    moved = (ours.theta(MODULE) - coordinator.memory("learner-0")).abs().max()
    assert moved == 0.0


def test_ddp_replicas_are_bit_equal_and_equal_the_joint_batch() -> None:
    env = gym.make("CartPole-v1")
    config = _configure(ADMMDQNConfig(), weight_sync="ddp")
    pair = [config.copy().build_learner(env=env) for _ in range(2)]
    joint = config.copy().build_learner(env=env)
    for learner in (*pair, joint):
        learner.module.set_state(pair[0].module.get_state())
        learner.join("learner-0", 0.0, ConsensusOptions.plain())
    seen: list[list[dict[str, torch.Tensor]]] = [[], []]
    for i, learner in enumerate(pair):
        learner.ddp_begin(
            RoundRequest(0, 8, fragments=[("r", random_episodes(env, steps=400, seed=i))])
        )
        columns = learner._columns

        def spy(mid, sample, columns=columns, log=seen[i]):  # type: ignore[no-untyped-def]
            batch = columns(mid, sample)
            log.append(batch)
            return batch

        learner._columns = spy
    mean = None
    for step in range(8):
        gradients = [learner.ddp_step(mean, False) for learner in pair]
        mean = {MODULE: (gradients[0][MODULE] + gradients[1][MODULE]) / np.float32(2)}
        batch = {k: torch.cat([seen[0][-1][k], seen[1][-1][k]]) for k in seen[0][-1]}
        losses, _ = joint._losses({MODULE: batch})
        for optimizer in joint._optimizer_parameters:
            optimizer.zero_grad()
        losses[MODULE].backward()
        joint._apply({})
        assert step == 0 or torch.equal(pair[0].theta(MODULE), pair[1].theta(MODULE))
    for learner in pair:
        learner.ddp_apply(mean)
    assert torch.equal(pair[0].theta(MODULE), pair[1].theta(MODULE))
    torch.testing.assert_close(pair[0].theta(MODULE), joint.theta(MODULE), rtol=0, atol=2e-6)
