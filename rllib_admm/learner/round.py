"""What the group asks of a learner in one round, and what the learner answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rllib_admm.consensus import LocalNorms, Reply, Snapshot


@dataclass
class RoundRequest:
    """What the group asks of one learner in one round.

    Attributes:
        env_steps: Env steps sampled by all runners so far, for schedules.
        local_steps: K; 0 only takes in data.
        replies: Per ModuleID the coordinator's reply to this learner's last upload.
        snapshots: Per ModuleID a consensus to start anew from (after `replies`).
        fragments: References to lists of episodes for this learner's shard, with the name
            of the EnvRunner that each came from.
        replay_actors: Actors that hold the replay in place of the learner, if any do.
    """

    env_steps: int
    local_steps: int
    replies: dict[str, Reply] = field(default_factory=dict)
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    fragments: list[tuple[str, Any]] = field(default_factory=list)
    replay_actors: tuple[Any, ...] = ()


@dataclass
class RoundResult:
    """What a learner answers.

    Attributes:
        uploads: Per ModuleID the packed upload of this round.
        norms: Per ModuleID the norms of the *previous* round, which `replies` settled.
        metrics: `MetricsLogger.reduce()`'s result of this learner.
        gradient_steps: Minibatch gradients taken with data in this round.
        lr: Learning rate per ModuleID at the end of the round.
        metric_scale: Per ModuleID the mean of Adam's sqrt(v) + eps; 0 before its first step.
        shard_steps: Transitions that this learner's shard holds.
        fragments_lost: Fragments whose data died with their EnvRunner.
        rejected: Per ModuleID why a reply could not be applied; that consensus is unchanged
            and needs a snapshot.
        non_finite: ModuleIDs whose parameters were not finite and were reset to z.
        last_target_update: Per ModuleID the env steps of the last target update.
        busy_s: Seconds of local steps.
        replay: Counters of a replay outside of the learner, see `RemoteReplay.counters`.
    """

    uploads: dict[str, bytes] = field(default_factory=dict)
    norms: dict[str, LocalNorms] = field(default_factory=dict)
    metrics: Any = None
    gradient_steps: int = 0
    lr: dict[str, float] = field(default_factory=dict)
    metric_scale: dict[str, float] = field(default_factory=dict)
    shard_steps: int = 0
    fragments_lost: int = 0
    rejected: dict[str, str] = field(default_factory=dict)
    non_finite: list[str] = field(default_factory=list)
    last_target_update: dict[str, int] = field(default_factory=dict)
    busy_s: float = 0.0
    replay: dict[str, float] = field(default_factory=dict)
