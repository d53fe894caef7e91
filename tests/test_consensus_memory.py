"""What a Learner holds for the consensus, measured on a built Learner."""

from __future__ import annotations

import gymnasium as gym

from rllib_admm import ADMMDQNConfig
from tests.helpers import in_process_rounds


def test_consensus_state_is_at_most_four_vectors() -> None:
    config = (
        ADMMDQNConfig()
        .environment("CartPole-v1")
        .training(
            local_steps=2,
            train_batch_size_per_learner=8,
            replay_buffer_config={"type": "EpisodeReplayBuffer", "capacity": 1000},
        )
        .rl_module(model_config={"fcnet_hiddens": [128, 128]})
        .debugging(seed=0)
    )
    # Six rounds end with a keyframe, whose pending upload is a whole uncompressed vector.
    _, learners = in_process_rounds(config, gym.make("CartPole-v1"))
    for learner in learners:
        state = learner._consensus["default_policy"]
        vector = 4 * learner.layouts["default_policy"].size
        assert state.pending is not None
        # One block of padding and its scales.
        assert 3 * vector < state.nbytes <= 4 * vector + 4 * 256 + vector // 256 + 4
        assert learner._anchors == {}
