"""A replay shard in a process of its own, between EnvRunners and a learner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rllib_admm.learner.replay import LearnerReplay
from rllib_admm.replay import Sample


@dataclass(frozen=True)
class Bundle:
    """Several minibatches of one draw.

    Attributes:
        samples: Per ModuleID one `Sample` whose batch axis holds the minibatches in turn.
        drawn_at: Per ModuleID the shard's `num_rows_written` at the draw.
    """

    samples: dict[str, Sample]
    drawn_at: dict[str, int]


class ReplayActor:
    """Holds one shard; calls are made by EnvRunners' fragments (`add`) and by the learner.

    Args:
        config: The algorithm's configuration.
        index: Which shard this is; its draws have a seed of their own.
    """

    def __init__(self, config: Any, index: int) -> None:
        seed = config.seed
        self._replay = LearnerReplay(
            config, stateful=(), seed=None if seed is None else seed + 7919 * index
        )

    def add(
        self, source: str, episodes: Sequence[Any], td_errors: Sequence[NDArray[np.float32]] | None
    ) -> int:
        """Takes in one fragment and returns how many transitions are held now.

        Raises:
            ReplayDataError: If it holds data that must not be learned from.
        """
        self._replay.add(episodes, source, td_errors)
        return len(self._replay)

    def sample(self, module_ids: Sequence[str], minibatches: int) -> Bundle:
        """Returns minibatches; an empty bundle while there is nothing to draw."""
        samples = self._replay.sample(module_ids, minibatches)
        clocks = {mid: self._replay.shard(mid).num_rows_written for mid in samples}
        return Bundle(samples, clocks)

    def update_priorities(
        self,
        module_id: str,
        indices: NDArray[np.int64],
        td_errors: NDArray[np.float32],
        drawn_at: int,
    ) -> int:
        """Sets priorities of drawn rows; returns how many had been overwritten meanwhile."""
        shard = self._replay.shard(module_id)
        return shard.update_priorities(indices, td_errors, drawn_at=drawn_at)

    def get_state(self) -> dict[str, Any]:
        """Returns the shard with its priorities."""
        return self._replay.get_state(with_rows=True)

    def set_state(self, state: dict[str, Any]) -> int:
        """Restores what `get_state` returned; returns the number of transitions."""
        self._replay.set_state(state)
        return len(self._replay)
