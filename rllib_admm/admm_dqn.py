"""ADMMDQN: DQN on many learners that agree by consensus ADMM.

    N learners, each with a whole Q-network and its own shard of replay, take K local proximal
    steps; one consensus round makes them agree; a quantised difference crosses the wire.

See the README for the algorithm, its metrics and what was measured; `rllib_admm.consensus`
for the mathematics.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from typing import Any

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.algorithms.dqn.dqn import DQN, DQNConfig
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core import (
    COMPONENT_ENV_TO_MODULE_CONNECTOR,
    COMPONENT_MODULE_TO_ENV_CONNECTOR,
)
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.annotations import override
from ray.rllib.utils.checkpoints import Checkpointable
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    ENV_RUNNER_SAMPLING_TIMER,
    LEARNER_RESULTS,
    LEARNER_UPDATE_TIMER,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    SYNCH_WORKER_WEIGHTS_TIMER,
    TIMERS,
)
from ray.tune.result import STDERR_FILE, STDOUT_FILE

from rllib_admm.config_validation import (
    refuse_old_api_stack,
    refuse_unknown_attribute,
    refuse_unknown_key,
    refuse_unknown_keywords,
    validate_admm_options,
    validate_discretization,
)
from rllib_admm.connectors import QuantizedBroadcast
from rllib_admm.discretized_dqn import DiscretizedDQNConfig
from rllib_admm.env_runners import ConsensusEnvRunnerGroup, SampleReply, SampleRequest
from rllib_admm.learner import ADMMDQNTorchLearner, ConsensusLearnerGroup
from rllib_admm.placement import wait_for_room

logger = logging.getLogger(__name__)

CONSENSUS_RESULTS = "consensus"
"""Key of the consensus' metrics in a train result."""

_STATE = "admm"
# Per sub-environment: bounds what one sample call may take, so that `sample_timeout_s` holds.
_MOST_STEPS_PER_CALL = 1000


class ADMMDQNConfig(DiscretizedDQNConfig):
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

    n_step: int | tuple[int, int]
    _train_batch_size_per_learner: int | None
    rollout_fragment_length: int | str

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
        refuse_unknown_keywords(type(self), kwargs)
        super().training(**kwargs)
        if "train_batch_size" in kwargs and "train_batch_size_per_learner" not in kwargs:
            # RLlib divides it by the number of learners, unless the other one is set.
            self._train_batch_size_per_learner = None
        for key, value in own.items():
            if value is not NotProvided:
                setattr(self, key, value)
        return self

    def __setattr__(self, key: str, value: Any) -> None:
        """Refuses attributes that look like a misspelt option."""
        if self.__dict__.get("_admm_ready") and not key.startswith("_"):
            refuse_unknown_attribute(self, key)
        super().__setattr__(key, value)

    @override(AlgorithmConfig)
    def update_from_dict(self, config_dict: dict[str, Any]) -> ADMMDQNConfig:
        """Like RLlib's, but a key that does not exist is an error that names the nearest.

        Raises:
            ValueError: If a key does not exist.
        """
        config_dict = dict(config_dict)
        for key in list(config_dict):
            refuse_unknown_key(self, key)
        for key in (STDOUT_FILE, STDERR_FILE):
            config_dict.pop(key, None)
        per_learner = {"train_batch_size_per_learner", "_train_batch_size_per_learner"}
        if "train_batch_size" in config_dict and not per_learner & set(config_dict):
            self._train_batch_size_per_learner = None
        model_config = config_dict.pop("model_config", None)
        learner_class = config_dict.pop("learner_class", None)
        super().update_from_dict(config_dict)
        if model_config is not None:
            self.rl_module(model_config=model_config)
        if learner_class is not None:
            self.learners(learner_class=learner_class)
        return self

    @override(DQNConfig)
    def validate(self) -> None:
        """Checks every option, before any actor starts.

        Raises:
            ValueError: Names option, value, allowed values and the nearest fix.
        """
        if self._validate_config:
            refuse_old_api_stack(self)
        # Stock DQN compares these two also where n_step is a range.
        n_step, fragment = self.n_step, self.rollout_fragment_length
        if isinstance(n_step, (tuple, list)):
            self.n_step = max(n_step)
        try:
            super().validate()
        finally:
            self.n_step = n_step
            self.rollout_fragment_length = fragment
        if self._validate_config:
            validate_admm_options(self)
            validate_discretization(self)

    @override(DQNConfig)
    def get_rollout_fragment_length(self, worker_index: int = 0) -> int:
        """Returns the least number of steps per sub-environment in one sample call."""
        if self.rollout_fragment_length == "auto":
            return 1
        return int(self.rollout_fragment_length)

    @property
    def replay_ratio(self) -> float:
        """Transitions replayed (over all learners) per env step sampled.

        `training_intensity`, or for None DQN's native ratio: one update of the total train
        batch per sample call.
        """
        if self.training_intensity:
            return float(self.training_intensity)
        n_step = self.n_step[1] if isinstance(self.n_step, (tuple, list)) else self.n_step
        fragment = (
            n_step if self.rollout_fragment_length == "auto" else self.rollout_fragment_length
        )
        sampled = fragment * self.num_envs_per_env_runner * max(1, self.num_env_runners)
        return float(self.total_train_batch_size / sampled)

    @property
    def env_steps_per_round(self) -> float:
        """Env steps that one round's K * N minibatches are worth at the replay ratio."""
        return float(self.local_steps * self.total_train_batch_size / self.replay_ratio)

    @override(DQNConfig)
    def get_default_learner_class(self) -> type[ADMMDQNTorchLearner]:
        """Returns `ADMMDQNTorchLearner`."""
        return ADMMDQNTorchLearner

    @override(AlgorithmConfig)
    def build_learner_group(
        self,
        *,
        env: Any = None,
        spaces: Any = None,
        rl_module_spec: Any = None,
        placement_group: Any = None,
    ) -> ConsensusLearnerGroup:
        """Returns the group of learners that agree by consensus."""
        if rl_module_spec is None:
            rl_module_spec = self.get_multi_rl_module_spec(env=env, spaces=spaces)
        return ConsensusLearnerGroup(
            config=self.copy(), module_spec=rl_module_spec, placement_group=placement_group
        )

    @override(AlgorithmConfig)
    def build_env_to_module_connector(
        self, env: Any = None, spaces: Any = None, device: Any = None
    ) -> ConnectorV2:
        """Returns RLlib's pipeline with `QuantizedBroadcast` at its end.

        At the end, because RLlib merges the states of all EnvRunners' pieces by position and
        does not count pieces without state.
        """
        pipeline = super().build_env_to_module_connector(env=env, spaces=spaces, device=device)
        pipeline.append(QuantizedBroadcast())
        return pipeline


class ADMMDQN(DQN):
    """DQN whose learners keep their data and agree by consensus ADMM once per round."""

    config: ADMMDQNConfig
    learner_group: ConsensusLearnerGroup
    env_runner_group: ConsensusEnvRunnerGroup
    eval_env_runner_group: ConsensusEnvRunnerGroup | None

    @classmethod
    @override(DQN)
    def get_default_config(cls) -> ADMMDQNConfig:
        """Returns the default configuration."""
        return ADMMDQNConfig()

    @override(DQN)
    def setup(self, config: AlgorithmConfig) -> None:
        """Builds EnvRunners and learners.

        Raises:
            PlacementError: If the cluster has no room within `placement_timeout_s`.
        """
        wait_for_room(self.config, type(self))
        super().setup(config)
        self.env_runner_group = ConsensusEnvRunnerGroup.adopt(self.env_runner_group)
        if self.eval_env_runner_group is not None:
            self.eval_env_runner_group = ConsensusEnvRunnerGroup.adopt(self.eval_env_runner_group)
        self._steps_owed = 0.0
        self._steps_in_shards = 0

    @override(Algorithm)
    def _create_local_replay_buffer_if_necessary(self, config: Any) -> None:
        """Returns None: replay lives with the learners."""

    # ---- The algorithm --------------------------------------------------------------

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
        replies = {0: local_reply} if local_reply else self._finish_sampling()
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

    @property
    def _env_steps_sampled(self) -> int:
        key = (ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME)
        return int(self.metrics.peek(key, default=0))

    @property
    def _samples_locally(self) -> bool:
        return bool(self.env_runner_group.num_remote_env_runners() == 0)

    @property
    def _some_runner_is_healthy(self) -> bool:
        return bool(self.env_runner_group.num_healthy_remote_env_runners() > 0)

    @property
    def _steps_before_learning(self) -> int:
        return int(self.config.num_steps_sampled_before_learning_starts or 0)

    @property
    def _bytes_broadcast(self) -> int:
        groups = (self.env_runner_group, self.eval_env_runner_group)
        return sum(group.bytes_broadcast for group in groups if group is not None)

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
            num_steps = min(num_steps, _MOST_STEPS_PER_CALL)
        else:
            missing = max(1, self._steps_before_learning - self._steps_in_shards)
            num_steps = min(_MOST_STEPS_PER_CALL, math.ceil(missing / per_call))
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

    def _finish_sampling(self) -> dict[int, SampleReply]:
        replies = self.env_runner_group.finish_sampling(self.config.sample_timeout_s)
        broken = {worker: r for worker, r in replies.items() if r.broken is not None}
        for worker, reply in broken.items():
            logger.warning(
                "EnvRunner %d could not take z (%s); it gets a keyframe.", worker, reply.broken
            )
        return replies

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

    # ---- Faults and state -----------------------------------------------------------

    @override(Algorithm)
    def restore_env_runners(self, env_runner_group: EnvRunnerGroup) -> list[int]:
        """Brings restarted EnvRunners back: connector states, counters, z as a keyframe."""
        restored = list(env_runner_group.probe_unhealthy_env_runners() or [])
        if not restored:
            return []
        self._counters["total_num_restored_workers"] += len(restored)
        runner = env_runner_group.local_env_runner or self.env_runner
        if runner is not None:
            state = runner.get_state(
                components=[COMPONENT_ENV_TO_MODULE_CONNECTOR, COMPONENT_MODULE_TO_ENV_CONNECTOR]
            )
        else:
            state = {
                COMPONENT_ENV_TO_MODULE_CONNECTOR: self.env_to_module_connector.get_state(),
                COMPONENT_MODULE_TO_ENV_CONNECTOR: self.module_to_env_connector.get_state(),
            }
        state[NUM_ENV_STEPS_SAMPLED_LIFETIME] = self._env_steps_sampled
        env_runner_group.foreach_env_runner(
            "set_state",
            kwargs={"state": state},
            remote_worker_ids=restored,
            local_env_runner=False,
            timeout_seconds=self.config.env_runner_restore_timeout_s,
        )
        assert isinstance(env_runner_group, ConsensusEnvRunnerGroup)
        for worker_id in restored:
            env_runner_group.forget(worker_id)
        env_runner_group.deliver(self.learner_group, restored)
        return restored

    @override(Algorithm)
    def add_module(self, *args: Any, **kwargs: Any) -> Any:
        """Refused, for now: a new module makes a new layout on all ends.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "ADMMDQN can not add RLModules while it trains. Define all of them in "
            "config.rl_module(rl_module_spec=...) and choose with policies_to_train."
        )

    remove_module = add_module

    @override(DQN)
    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Returns the state of a checkpoint; z is its RLModule."""
        state: dict[str, Any] = super().get_state(
            components, not_components=not_components, **kwargs
        )
        if self._check_component(_STATE, components, not_components):
            kept = self._steps_in_shards if self.config.store_buffer_in_checkpoints else 0
            state[_STATE] = {"steps_owed": self._steps_owed, "steps_in_shards": kept}
        return state

    @override(DQN)
    def set_state(self, state: dict[str, Any]) -> None:
        """Restores `state`; all EnvRunners get a keyframe."""
        self._forget_held_rounds()
        super().set_state(state)
        if _STATE in state:
            self._steps_owed = state[_STATE]["steps_owed"]
            restored = self.learner_group.replay_restored
            self._steps_in_shards = state[_STATE]["steps_in_shards"] if restored else 0

    @override(Checkpointable)
    def restore_from_path(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Restores a checkpoint folder; all EnvRunners get a keyframe."""
        self._forget_held_rounds()
        super().restore_from_path(path, *args, **kwargs)
        self._forget_held_rounds()
        self.env_runner_group.sync_weights(from_worker_or_learner_group=self.learner_group)

    def _forget_held_rounds(self) -> None:
        for group in (self.env_runner_group, self.eval_env_runner_group):
            if group is not None:
                group.held_rounds.clear()


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
