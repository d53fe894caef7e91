"""Columnar replay: a ring of rows per Learner, sampled by index arrays."""

from rllib_admm.replay.config import ReplayConfig as ReplayConfig
from rllib_admm.replay.config import clip as clip
from rllib_admm.replay.config import parse_replay_config as parse_replay_config
from rllib_admm.replay.config import reward_bounds as reward_bounds
from rllib_admm.replay.errors import ReplayDataError as ReplayDataError
from rllib_admm.replay.samples import Sample as Sample
from rllib_admm.replay.samples import SequenceSample as SequenceSample
from rllib_admm.replay.shard import ReplayShard as ReplayShard
from rllib_admm.replay.sum_tree import SumTree as SumTree
