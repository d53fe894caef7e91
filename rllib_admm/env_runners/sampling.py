"""Sampling on RLlib's own EnvRunners: z in, fragments out, both in one call.

Runs inside the EnvRunner's process. The fragments stay there as objects; only references
go back, so that the data flows from runner to learner and never through the driver.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from rllib_admm.connectors.quantized_broadcast import BROADCAST, QuantizedBroadcast
from rllib_admm.consensus import MessageError
from rllib_admm.env_runners.apex import FixedEpsilon, initial_td_errors, set_epsilons
from rllib_admm.learner.broadcast import Broadcast


@dataclass(frozen=True)
class ApexRequest:
    """What Ape-X asks of its EnvRunners.

    Attributes:
        ladder: (base, exponent) of their epsilons; None: those of `config.epsilon`.
        num_runners: How many EnvRunners stand on the ladder.
        n_step: Of first priorities.
        gamma: Likewise.
        clip_rewards: As `reward_bounds` returns it, likewise.
    """

    ladder: tuple[float, float] | None
    num_runners: int
    n_step: int
    gamma: float
    clip_rewards: tuple[float, float] | str | None


@dataclass(frozen=True)
class SampleRequest:
    """What one EnvRunner is asked.

    Attributes:
        broadcast: The newest z, if it is not held there already.
        num_steps: Env steps per sub-environment; 0 samples nothing.
        complete_episodes: Sample whole episodes, one per sub-environment, instead.
        env_steps: Env steps sampled so far by all, which schedules exploration.
        shards: Indices of the shards that this runner feeds.
        apex: What Ape-X asks of its runners; None: nothing.
    """

    broadcast: Broadcast | None
    num_steps: int
    complete_episodes: bool
    env_steps: int
    shards: tuple[int, ...]
    apex: ApexRequest | None = None


@dataclass
class SampleReply:
    """What it answers.

    Attributes:
        held_round: The round of the z that acted; None: it needs a keyframe.
        fragments: Per shard a reference to a list of episodes (or the list, if local).
        td_errors: With Ape-X, per shard and chunk the TD errors of its transitions, (T,).
        metrics: The EnvRunner's reduced metrics.
        env_steps: Env steps sampled now.
        broken: Why the broadcast could not be taken, if so.
    """

    held_round: int | None = None
    fragments: dict[int, Any] = field(default_factory=dict)
    td_errors: dict[int, list[NDArray[np.float32]]] = field(default_factory=dict)
    metrics: Any = None
    env_steps: int = 0
    broken: str | None = None


def broadcast_piece(env_runner: Any) -> QuantizedBroadcast:
    """Returns the QuantizedBroadcast piece of an EnvRunner, bound to its module."""
    for piece in env_runner._env_to_module.connectors:
        if isinstance(piece, QuantizedBroadcast):
            if env_runner.module is not None:
                piece.bind(env_runner.module)
            return piece
    raise RuntimeError("This EnvRunner's env-to-module pipeline has no QuantizedBroadcast piece.")


def take_broadcast(env_runner: Any, broadcast: Broadcast | None) -> int | None:
    """Applies z to an EnvRunner; returns the round held there afterwards.

    Raises:
        MessageError: If the broadcast is broken or does not continue what is held.
    """
    piece = broadcast_piece(env_runner)
    if broadcast is not None:
        piece.set_state({BROADCAST: broadcast})
        env_runner._weights_seq_no = broadcast.round + 1
    return piece.round


def sample_fragments(env_runner: Any, *, request: SampleRequest, remote: bool) -> SampleReply:
    """Applies z, samples, and deals the chunks out to the shards."""
    reply = SampleReply()
    try:
        reply.held_round = take_broadcast(env_runner, request.broadcast)
    except MessageError as error:
        reply.broken = str(error)
        return reply
    if request.num_steps or request.complete_episodes:
        env_runner.num_env_steps_sampled_lifetime = request.env_steps
        if request.apex is not None:
            climb(env_runner, request.apex)
        if request.complete_episodes:
            episodes = env_runner.sample(num_episodes=env_runner.num_envs)
        else:
            episodes = env_runner.sample(num_timesteps=request.num_steps * env_runner.num_envs)
        dealt = _deal(env_runner, episodes, request.shards)
        if request.apex is not None:
            apex = request.apex
            reply.td_errors = {
                shard: initial_td_errors(
                    env_runner.module,
                    part,
                    n_step=apex.n_step,
                    gamma=apex.gamma,
                    clip=apex.clip_rewards,
                )
                for shard, part in dealt.items()
            }
        reply.fragments = {
            shard: ray.put(part) if remote else part for shard, part in dealt.items() if part
        }
        reply.env_steps = sum(
            e.env_steps() if hasattr(e, "env_steps") else len(e) for e in episodes
        )
        reply.metrics = env_runner.get_metrics()
    return reply


def climb(env_runner: Any, request: ApexRequest) -> None:
    """Puts an EnvRunner on its rungs of the epsilon ladder, if it is not there yet."""
    schedule = getattr(env_runner.module, "epsilon_schedule", None)
    if request.ladder is not None and not isinstance(schedule, FixedEpsilon):
        base, exponent = request.ladder
        set_epsilons(env_runner, base=base, exponent=exponent, num_runners=request.num_runners)


def _deal(env_runner: Any, episodes: list[Any], shards: tuple[int, ...]) -> dict[int, list[Any]]:
    """Deals episode chunks to shards: one episode to one shard, all shards evenly filled."""
    if len(shards) == 1:
        return {shards[0]: episodes}
    state = env_runner.__dict__.setdefault("_admm_dealing", {"shard": {}, "steps": {}})
    shard_of, steps = state["shard"], state["steps"]
    dealt: dict[int, list[Any]] = {shard: [] for shard in shards}
    for episode in episodes:
        shard = shard_of.get(episode.id_)
        if shard is None or shard not in dealt:
            shard = min(shards, key=lambda s: (steps.get(s, 0), s))
        steps[shard] = steps.get(shard, 0) + len(episode)
        dealt[shard].append(episode)
        if episode.is_done:
            shard_of.pop(episode.id_, None)
        else:
            shard_of[episode.id_] = shard
    return dealt
