"""The group of learners that agree by consensus ADMM."""

from __future__ import annotations

from typing import Any

import numpy as np
import ray
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.utils.annotations import override

from rllib_admm.learner.broadcast import Broadcast
from rllib_admm.learner.group_state import GroupState


class ConsensusLearnerGroup(GroupState):
    """N Learners, each with its own shard, and the coordinator that they agree through.

    The group's weights (`get_weights`, `get_state`, checkpoints, evaluation) are z, which
    the coordinator holds in this process. Learners are plain Ray actors: no torch process
    group, no DDP wrapper, so none of them can block the others.

    What the death of a learner costs, by moment: before or during its local steps, its shard
    and this round's work of that learner; while uploading, the same (an upload is counted
    whole or not at all); between rounds, its shard. In all cases the survivors finish the
    round, and a replacement starts from z with the dual that `on_learner_failure` names, as
    soon as its process is up. Fragments that it had not confirmed are delivered again.

    With one learner nothing has to agree: z is its theta, there is no pull and no dual.
    """

    # ---- EnvRunners -----------------------------------------------------------------

    def broadcast(self, held_round: int | None) -> Broadcast | None:
        """Returns what brings an EnvRunner that holds `held_round` up to date.

        Args:
            held_round: The round that it holds; None if it holds nothing yet.

        Returns:
            A difference if it is one round behind, a keyframe if more, None if up to date.
        """
        with self._lock:
            return self._broadcast(held_round)

    def _broadcast(self, held_round: int | None) -> Broadcast | None:
        now = self.round
        if held_round == now:
            return None
        if held_round is not None and held_round == now - 1 and self._last_replies:
            moves = {mid: reply.message for mid, reply in self._last_replies.items()}
            return Broadcast(now, held_round, moves)
        return Broadcast(
            now,
            None,
            snapshots={mid: c.consensus.snapshot() for mid, c in self._coordinators.items()},
            layouts=self.layouts,
            options=self.options,
        )

    # ---- The rest of RLlib's interface, inspection ----------------------------------

    @override(LearnerGroup)
    def __len__(self) -> int:
        """Number of remote learners, as in RLlib (0 for a local one)."""
        return len(self._members) if self.is_remote else 0

    @property
    def num_shards(self) -> int:
        """Number of replay shards, one per learner."""
        return len(self._members)

    def get_consensus_states(self, module_id: str) -> list[dict[str, np.ndarray]]:
        """Returns theta, u, h and z of every learner, each of shape (P,)."""
        return self._get([self._call(m, "consensus_state", module_id) for m in self._members])

    def get_pids(self) -> list[int]:
        """Returns the learners' process IDs."""
        return self._get([self._call(m, "pid") for m in self._members])

    @override(LearnerGroup)
    def update(self, **kwargs: Any) -> list[Any]:
        """Refused: learners learn from their own shards.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "ConsensusLearnerGroup has no update(batch): its learners own their data. Use "
            "deliver(), start_round() and finish_round()."
        )

    @override(LearnerGroup)
    def shutdown(self) -> None:
        """Ends all learners' processes."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        if not ray.is_initialized():  # ray.kill would start Ray anew
            return
        for member in self._members:
            if member.actor is not None:
                ray.kill(member.actor)
