"""ADMMDQN: DQN on many learners that agree by consensus ADMM.

    N learners, each with a whole Q-network and its own shard of replay, take K local proximal
    steps; one consensus round makes them agree; a quantised difference crosses the wire.

See the README for the algorithm, its metrics and what was measured; `rllib_admm.consensus`
for the mathematics.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import NotProvided
from ray.rllib.algorithms.dqn.dqn import DQN, DQNConfig
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    ENV_RUNNER_SAMPLING_TIMER,
    LEARNER_RESULTS,
    LEARNER_UPDATE_TIMER,
    SYNCH_WORKER_WEIGHTS_TIMER,
    TIMERS,
)

from rllib_admm.config_validation import validate_consensus_options
from rllib_admm.env_runners import SampleReply, SampleRequest
from rllib_admm.sharded_dqn import MOST_STEPS_PER_CALL, ShardedDQN, ShardedDQNConfig

logger = logging.getLogger(__name__)

CONSENSUS_RESULTS = "consensus"
"""Key of the consensus' metrics in a train result."""


class ADMMDQNConfig(ShardedDQNConfig):
    """Configuration of `ADMMDQN`: a `DQNConfig` plus how learners agree.

    .. code-block:: python

        from rllib_admm import ADMMDQNConfig

        config = (
            ADMMDQNConfig()
            .environment("CartPole-v1")
            .learners(num_learners=2)
            .training(local_steps=128, quantization_bits=8)
        )
        algo = config.build_algo()
        print(algo.train()["consensus"])
    """

    def __init__(self, algo_class: type[Algorithm] | None = None) -> None:
        super().__init__(algo_class=algo_class or ADMMDQN)
        self.num_learners = 2
        self.train_batch_size_per_learner = 32
        # One minibatch of 32 per env step and learner-equivalent: DQN's own default ratio.
        self.training_intensity = 32.0

        self.local_steps = 128
        self.rho: float | str = "auto"
        self.rho_strength = 1.0
        self.rho_schedule = "constant"
        self.rho_decay_rounds = 1000
        self.rho_final_fraction = 0.1
        self.proximal_metric = "adam"
        self.local_start = "theta"
        self.over_relaxation = 1.5
        self.outer_momentum = 0.0
        self.outer_lr = 1.0
        self.dual_updates = True
        self.quantization_bits = 8
        self.full_precision_every = 5
        self.weight_sync = "admm"
        self.on_learner_failure = "mean_dual"
        self.max_learner_restarts = 10
        self.round_timeout_s = 300.0
        self.placement_timeout_s = 120.0
        self._admm_ready = True

    @override(DQNConfig)
    def training(
        self,
        *,
        local_steps: int = NotProvided,
        rho: float | str = NotProvided,
        rho_strength: float = NotProvided,
        rho_schedule: str = NotProvided,
        rho_decay_rounds: int = NotProvided,
        rho_final_fraction: float = NotProvided,
        proximal_metric: str = NotProvided,
        local_start: str = NotProvided,
        over_relaxation: float = NotProvided,
        outer_momentum: float = NotProvided,
        outer_lr: float = NotProvided,
        dual_updates: bool = NotProvided,
        quantization_bits: int = NotProvided,
        full_precision_every: int = NotProvided,
        weight_sync: str = NotProvided,
        on_learner_failure: str = NotProvided,
        max_learner_restarts: int = NotProvided,
        round_timeout_s: float = NotProvided,
        placement_timeout_s: float = NotProvided,
        **kwargs: Any,
    ) -> ADMMDQNConfig:
        """Sets the training related configuration.

        Args:
            local_steps: K, gradient steps per learner between two rounds (default 128; usual
                32 to 1,000). Larger: less traffic, learners drift further apart in between.
                Env steps per round are K * N * train_batch_size_per_learner /
                `training_intensity`.
            rho: Penalty of disagreement. "auto" (default): rho_strength / (lr * K), in units
                of the pull's metric, which follows the learning rate. A positive number:
                absolute. 0: no pull and no dual, i.e. local averaging. Larger: learners stay
                closer to z and learn less from their own data per round. With
                local_steps=1 and rho_strength=1, "auto" is the published rho0 = 1/lr.
            rho_strength: c of "auto" (default 1.0; usual 0.1 to 3): over one round the pull
                takes theta 1 - (1 + c/K)^-K of the way to z - u (63% at c = 1).
            rho_schedule: "constant" (default), "cosine" (published), or
                "residual_balancing" (relative residuals, Wohlberg 2017).
            rho_decay_rounds: Rounds until the cosine reaches its floor (default 1,000).
            rho_final_fraction: The cosine's floor as a fraction of rho0, in (0, 1].
            proximal_metric: "adam" (default): the pull acts in Adam's own metric
                1/(sqrt(v) + eps), which leaves the fixed point where the gradients put it.
                "euclidean": it is decoupled from Adam, as AdamW decouples decay, and moves
                the fixed point when shards differ.
            local_start: "theta" (default): local steps go on from the learner's own
                parameters. "z": every round starts from the consensus, as always with rho=0.
            over_relaxation: alpha in (0, 2) (default 1.5; usual 1 to 1.8). Larger: z moves
                further per round. In force only with a dual.
            outer_momentum: Nesterov momentum of z in [0, 1) (default 0). With rho=0 and
                outer_momentum=0.9, outer_lr=0.7 this is DiLoCo.
            outer_lr: Step size of z towards the learners' mean (default 1).
            dual_updates: Whether duals are kept (default True). False: proximal averaging.
            quantization_bits: Bits per parameter of a difference: 32, 16, 8 (default), 4.
            full_precision_every: Every that many rounds both directions go uncompressed
                (default 5, as published); 1: always, 0: never.
            weight_sync: "admm" (default), or "ddp": gradients averaged on every step over the
                same replay and runner code, the baseline for learning and bytes.
            on_learner_failure: Dual of a replacement for a dead learner: "mean_dual"
                (default, as published) or "recentre" (zero, all duals re-centred).
            max_learner_restarts: How often one learner may be restarted (default 10).
            round_timeout_s: Seconds that a learner may take for one round before it counts
                as dead (default 300).
            placement_timeout_s: Seconds to wait for room in the cluster, and for learners to start
                (default 120).
            **kwargs: All of `DiscretizedDQNConfig.training` and of `DQNConfig.training`.

        Returns:
            This config.

        Raises:
            ValueError: If a keyword does not exist; names the nearest that does.
        """
        own = {k: v for k, v in locals().items() if k not in ("self", "kwargs", "__class__")}
        super().training(**kwargs)
        self._set(own)
        return self

    @override(ShardedDQNConfig)
    def _validate_own_options(self) -> None:
        validate_consensus_options(self)


class ADMMDQN(ShardedDQN):
    """DQN whose learners keep their data and agree by consensus ADMM once per round."""

    config: ADMMDQNConfig

    @classmethod
    @override(DQN)
    def get_default_config(cls) -> ADMMDQNConfig:
        """Returns the default configuration."""
        return ADMMDQNConfig()

    @override(DQN)
    def training_step(self) -> None:
        """One round: learners take local steps while runners sample for the next round.

        - Learners: settle the last round, take in its fragments, take K local steps.
        - EnvRunners, meanwhile: take z, sample the next round's fragments with it.
        - Coordinator: z from the learners' uploads.
        - Fragments go to the shards by reference; z goes to the local EnvRunner.
        """
        learning = self._steps_in_shards >= self._steps_before_learning
        # Without runners nothing new comes in: learning on would wear out the old data.
        learning = learning and (self._samples_locally or self._some_runner_is_healthy)
        group, runners = self.learner_group, self.env_runner_group
        with self.metrics.log_time((TIMERS, LEARNER_UPDATE_TIMER)):
            work = group.start_round(
                env_steps=self._env_steps_sampled,
                local_steps=self.config.local_steps if learning else 0,
            )
            with self.metrics.log_time((TIMERS, ENV_RUNNER_SAMPLING_TIMER)):
                self._start_sampling(learning)
                local_reply = self._sample_locally() if self._samples_locally else None
            summary = group.finish_round(work)
        replies = (
            {0: local_reply} if local_reply else self._finish_sampling(self.config.sample_timeout_s)
        )
        self._take_fragments(replies)
        with self.metrics.log_time((TIMERS, SYNCH_WORKER_WEIGHTS_TIMER)):
            runners.write_local(group)
        if summary.learner_results:
            self.metrics.aggregate(summary.learner_results, key=LEARNER_RESULTS)
        consensus = summary.consensus
        if consensus:
            consensus["bytes_broadcast_lifetime"] = float(self._bytes_broadcast)
            consensus["num_messages_rejected"] += float(runners.num_broadcasts_rejected)
        for key, value in consensus.items():
            self.metrics.log_value((CONSENSUS_RESULTS, key), value, window=1)

    def _start_sampling(self, learning: bool) -> None:
        """Asks the runners for as many env steps as the replay ratio owes."""
        c = self.config
        workers = [0] if self._samples_locally else self.env_runner_group.idle_env_runner_ids()
        per_call = max(1, len(workers)) * c.num_envs_per_env_runner
        if learning:
            self._steps_owed += c.env_steps_per_round
            num_steps = math.floor(self._steps_owed / per_call)
            if num_steps < c.get_rollout_fragment_length():
                num_steps = 0
            num_steps = min(num_steps, MOST_STEPS_PER_CALL)
        else:
            missing = max(1, self._steps_before_learning - self._steps_in_shards)
            num_steps = min(MOST_STEPS_PER_CALL, math.ceil(missing / per_call))
        complete = c.batch_mode == "complete_episodes" and num_steps > 0
        self._requests = {
            worker: SampleRequest(
                broadcast=self.env_runner_group.broadcast_for(worker, self.learner_group),
                num_steps=num_steps,
                complete_episodes=complete,
                env_steps=self._env_steps_sampled,
                shards=shards_of_runner(
                    worker, max(1, c.num_env_runners), self.learner_group.num_shards
                ),
            )
            for worker in workers
        }
        self._learning = learning
        if not self._samples_locally:
            self.env_runner_group.start_sampling(self._requests)

    def _sample_locally(self) -> SampleReply:
        return self.env_runner_group.sample_locally(self._requests[0])

    def _take_fragments(self, replies: dict[int, SampleReply]) -> None:
        """Addresses the fragments to the learners' shards and books their env steps."""
        for worker, reply in replies.items():
            source = f"EnvRunner {worker}"
            self.learner_group.deliver(
                {shard: [(source, part)] for shard, part in reply.fragments.items()}
            )
            self._steps_in_shards += reply.env_steps
            if self._learning:
                self._steps_owed -= reply.env_steps
        metrics = [reply.metrics for reply in replies.values() if reply.metrics is not None]
        if metrics:
            self.metrics.aggregate(metrics, key=ENV_RUNNER_RESULTS)


def shards_of_runner(worker_index: int, num_runners: int, num_shards: int) -> tuple[int, ...]:
    """Returns the indices of the shards that an EnvRunner feeds.

    EnvRunner w feeds shard (w - 1) mod N. With fewer runners than shards it feeds every
    shard i with i mod W = w - 1 and deals its episodes out evenly. The local runner (0)
    counts as the first.
    """
    position = max(0, worker_index - 1)
    if num_runners >= num_shards:
        return (position % num_shards,)
    return tuple(i for i in range(num_shards) if i % num_runners == position)


__all__ = ["ADMMDQN", "CONSENSUS_RESULTS", "ADMMDQNConfig", "shards_of_runner"]
