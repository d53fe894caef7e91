"""The group's records: its members, a round in progress, a round's summary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rllib_admm.consensus import LocalNorms, Reply, Snapshot
from rllib_admm.learner.round import RoundRequest


@dataclass
class RoundSummary:
    """What a round did, for metrics.

    Attributes:
        learner_results: One reduced metrics dict per learner.
        gradient_steps: Minibatch gradients of this round, summed over learners.
        consensus: The `consensus` metrics, see the README's glossary.
        busy_s: Seconds of local steps, summed over learners.
        replay: Per learner the counters of a replay outside of it, see `RemoteReplay`.
    """

    learner_results: list[Any] = field(default_factory=list)
    gradient_steps: int = 0
    consensus: dict[str, float] = field(default_factory=dict)
    busy_s: float = 0.0
    replay: list[dict[str, float]] = field(default_factory=list)


@dataclass
class Member:
    """One learner as the group sees it.

    Attributes:
        index: Its place, which also names its shard.
        actor: Its Ray actor; None for the local learner.
        replies: What it has not been told yet of the last round.
        snapshots: What it must start anew from before its next round.
        fragments: Data for its shard that it has not confirmed yet.
        norms: Its norms of the last settled round, per ModuleID.
        metric_scale: The newest mean of Adam's sqrt(v) + eps, per ModuleID.
        building: Reference that is ready once a restarted actor is built; None otherwise.
        restarts: How often it was restarted.
        rejected: ModuleIDs whose last reply it could not apply.
    """

    index: int
    actor: Any = None
    replies: dict[str, Reply] = field(default_factory=dict)
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    fragments: list[tuple[str, Any]] = field(default_factory=list)
    norms: dict[str, LocalNorms] = field(default_factory=dict)
    metric_scale: dict[str, float] = field(default_factory=dict)
    building: Any = None
    restarts: int = 0
    rejected: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The learner's name in messages."""
        return f"learner-{self.index}"


@dataclass
class PendingRound:
    """A round whose learners are at work.

    Attributes:
        requests: What each member was asked.
        references: The answers to come, per member index (empty for a local learner).
    """

    requests: dict[int, RoundRequest]
    references: dict[int, Any]
    local_steps: int
    began: float
