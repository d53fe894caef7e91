"""What is read from RLlib's `replay_buffer_config`, and what is refused."""

import dataclasses
import re

import pytest
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.utils.replay_buffers import EpisodeReplayBuffer, PrioritizedEpisodeReplayBuffer
from ray.rllib.utils.replay_buffers.multi_agent_episode_buffer import MultiAgentEpisodeReplayBuffer
from ray.rllib.utils.replay_buffers.multi_agent_prioritized_episode_buffer import (
    MultiAgentPrioritizedEpisodeReplayBuffer,
)

from rllib_admm.replay import ReplayConfig, parse_replay_config


def test_the_defaults_are_those_of_dqn():
    assert parse_replay_config(DQNConfig().replay_buffer_config) == ReplayConfig()
    assert parse_replay_config({}) == ReplayConfig()


@pytest.mark.parametrize(
    ("cls", "prioritized"),
    [
        (EpisodeReplayBuffer, False),
        (PrioritizedEpisodeReplayBuffer, True),
        (MultiAgentEpisodeReplayBuffer, False),
        (MultiAgentPrioritizedEpisodeReplayBuffer, True),
    ],
)
def test_a_type_may_be_a_name_a_path_or_a_class(cls, prioritized):
    paths = [f"{cls.__module__}.{cls.__name__}", f"ray.rllib.utils.replay_buffers.{cls.__name__}"]
    for type_ in (cls, cls.__name__, *paths):
        config = parse_replay_config({"type": type_, "capacity": 7})
        assert config == ReplayConfig(capacity=7, prioritized=prioritized)


def test_values_are_taken_over():
    config = parse_replay_config({"capacity": 5, "alpha": 0, "beta": 1})
    assert dataclasses.astuple(config) == (5, True, 0.0, 1.0)


class OwnBuffer(PrioritizedEpisodeReplayBuffer):
    """A user's subclass, whose behaviour the shard cannot know."""


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"type": "PrioritisedEpisodeReplayBuffer"}, "mean 'PrioritizedEpisodeReplayBuffer'"),
        ({"type": "PrioritizedReplayBuffer"}, "['type']='PrioritizedReplayBuffer' is not supp"),
        ({"type": OwnBuffer}, "OwnBuffer'> is not supported; allowed: ['EpisodeReplayBuffer'"),
        ({"type": "mine.EpisodeReplayBuffer"}, "'mine.EpisodeReplayBuffer' is not supported"),
        ({"type": None}, "['type']=None is not supported"),
        ({"capacty": 5}, "['capacty']=5 is not supported; allowed keys: ['type', 'capacity'"),
        ({"capacty": 5}, "Did you mean 'capacity'?"),
        ({"metrics_num_episodes_for_smoothing": 9}, "['metrics_num_episodes_for_smoothing']=9"),
        ({"type": "EpisodeReplayBuffer", "alpha": 0.5}, "['alpha']=0.5 has no effect on uniform"),
        ({"capacity": 0}, "['capacity']=0 must be an integer from 2"),
        ({"capacity": -5}, "['capacity']=-5 must be"),
        ({"capacity": 10.0}, "['capacity']=10.0 must be"),
        ({"capacity": True}, "['capacity']=True must be"),
        ({"alpha": -0.1}, "['alpha']=-0.1 must be a finite number of at least 0"),
        ({"beta": -1}, "['beta']=-1 must be"),
        ({"alpha": float("nan")}, "['alpha']=nan must be"),
        ({"beta": float("inf")}, "['beta']=inf must be"),
        ({"beta": "0.4"}, "['beta']='0.4' must be"),
    ],
)
def test_anything_else_is_refused_by_name(config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_replay_config(config)
