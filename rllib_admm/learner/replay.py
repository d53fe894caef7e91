"""The replay of one Learner: one shard per RLModule, fed with whole fragments.

Decides what of an episode goes where, and whether minibatches come straight from the
columns or through the user's learner connector pipeline.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ray.rllib.connectors.common import (
    AddObservationsFromEpisodesToBatch,
    AddStatesFromEpisodesToBatch,
    AddTimeDimToBatchAndZeroPad,
    AgentToModuleMapping,
    BatchIndividualItems,
    NumpyToTensor,
)
from ray.rllib.connectors.learner import (
    AddColumnsFromEpisodesToTrainBatch,
    AddNextObservationsFromEpisodesToTrainBatch,
)
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from torch import Tensor

from rllib_admm.replay import ReplayShard, Sample, parse_replay_config, reward_bounds

logger = logging.getLogger(__name__)

_DEFAULT_PIECES = (
    AddObservationsFromEpisodesToBatch,
    AddNextObservationsFromEpisodesToTrainBatch,
    AddColumnsFromEpisodesToTrainBatch,
    AddTimeDimToBatchAndZeroPad,
    AddStatesFromEpisodesToBatch,
    AgentToModuleMapping,
    BatchIndividualItems,
    NumpyToTensor,
)


class LearnerReplay:
    """Per RLModule one `ReplayShard`; what the Learner sees of replay.

    Args:
        config: The ADMMDQNConfig.
        stateful: ModuleIDs of stateful RLModules, which learn from sequences.
        seed: Seed of all draws.
    """

    def __init__(self, config: Any, *, stateful: Iterable[str], seed: int | None) -> None:
        self._config = config
        self._stateful = set(stateful)
        self._settings = parse_replay_config(config.replay_buffer_config)
        self._seed = seed
        self._shards: dict[str, ReplayShard] = {}
        self._pipeline: bool | None = None

    def __len__(self) -> int:
        """Transitions held, over all modules."""
        return sum(len(shard) for shard in self._shards.values())

    def shard(self, module_id: str) -> ReplayShard:
        """Returns the shard of `module_id`, made on first use."""
        if module_id not in self._shards:
            s = self._settings
            seed = None if self._seed is None else self._seed + len(self._shards)
            self._shards[module_id] = ReplayShard(
                s.capacity,
                prioritized=s.prioritized,
                alpha=s.alpha,
                beta=s.beta,
                seed=seed,
                extra_columns=("state_out",) if module_id in self._stateful else (),
                clip_rewards=reward_bounds(self._config.clip_rewards),
            )
        return self._shards[module_id]

    def add(
        self,
        episodes: Iterable[SingleAgentEpisode | MultiAgentEpisode],
        source: str,
        td_errors: Sequence[NDArray[np.float32]] | None = None,
    ) -> None:
        """Takes in the episode chunks of one fragment.

        Args:
            episodes: The chunks.
            source: Who delivered them, for error messages.
            td_errors: First priorities, see `ReplayShard.add`; of single-agent chunks only.

        Raises:
            ReplayDataError: If a chunk holds data that must not be learned from.
        """
        chunks: dict[str, list[SingleAgentEpisode]] = {}
        for episode in episodes:
            if isinstance(episode, MultiAgentEpisode):
                for agent in episode.agent_episodes.values():
                    if len(agent):
                        chunks.setdefault(agent.module_id, []).append(agent)
            else:
                chunks.setdefault(episode.module_id or DEFAULT_MODULE_ID, []).append(episode)
        for module_id, parts in chunks.items():
            self.shard(module_id).add(parts, source=source, td_errors=td_errors)

    def needs_pipeline(self, learner: Any) -> bool:
        """Returns whether minibatches must run through the learner connector pipeline."""
        if self._pipeline is None:
            pieces = learner._learner_connector.connectors
            custom = [type(p).__name__ for p in pieces if type(p) not in _DEFAULT_PIECES]
            self._pipeline = bool(custom or self._stateful)
            if custom:
                logger.warning(
                    "Custom learner connector pieces (%s): minibatches are rebuilt as episodes "
                    "for them, which is slower than reading the replay's columns.",
                    ", ".join(custom),
                )
        return self._pipeline

    def sample(self, module_ids: Iterable[str], minibatches: int = 1) -> dict[str, Sample]:
        """Returns one minibatch (or several, one after the other) per module that has data."""
        samples = {}
        for module_id in module_ids:
            shard = self._shards.get(module_id)
            if shard is not None and len(shard):
                config = self._config.get_config_for_module(module_id)
                n_step = config.n_step
                samples[module_id] = shard.sample(
                    config.train_batch_size_per_learner * minibatches,
                    n_step=tuple(n_step) if isinstance(n_step, list) else n_step,
                    gamma=config.gamma,
                )
        return samples

    def sample_episodes(
        self, module_ids: Iterable[str]
    ) -> tuple[dict[str, Sample], list[SingleAgentEpisode]]:
        """Returns minibatches both as rows and as the episodes that stock DQN would sample."""
        samples = self.sample([mid for mid in module_ids if mid not in self._stateful])
        episodes: list[SingleAgentEpisode] = []
        for module_id, sample in samples.items():
            part = self._shards[module_id].to_episodes(sample)
            for episode in part:
                episode.module_id = module_id
            episodes.extend(part)
        return samples, episodes

    def update_priorities(self, module_id: str, sample: Sample, td_errors: Tensor) -> None:
        """Gives the rows of `sample` their new TD errors, shape (B,)."""
        if self._settings.prioritized:
            errors = td_errors.reshape(-1).cpu().numpy()
            self._shards[module_id].update_priorities(sample.indices, errors)

    def get_state(self, *, with_rows: bool) -> dict[str, Any]:
        """Returns all shards' states, or nothing if the rows are not wanted."""
        if not with_rows:
            return {}
        return {module_id: shard.get_state() for module_id, shard in self._shards.items()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned."""
        for module_id, shard in state.items():
            self.shard(module_id).set_state(shard)

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return int(np.sum([shard.nbytes for shard in self._shards.values()], dtype=np.int64))
