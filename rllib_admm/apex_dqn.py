"""ApexDQN: distributed prioritized replay (Horgan et al. 2018) on RLlib's new API stack.

    EnvRunners sample without a pause, each sub-environment with an epsilon of its own, and
    give every transition a first priority; replay actors hold the transitions; one learner
    draws from them, a bounded number of minibatches ahead, and returns priorities to the
    shard that they belong to. Nobody waits for anybody, unless a replay ratio is asked for.

EnvRunners, replay, learner and broadcast are those of `ADMMDQN`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from typing import Any, ClassVar

import ray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.algorithms.dqn.dqn import DQN, DQNConfig
from ray.rllib.utils.annotations import override
from ray.rllib.utils.checkpoints import Checkpointable
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    LEARNER_RESULTS,
    SYNCH_WORKER_WEIGHTS_TIMER,
    TIMERS,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rllib_admm.config_validation import validate_apex_options
from rllib_admm.env_runners import ApexRequest, SampleReply, SampleRequest
from rllib_admm.learner.apex_learner import ApexDQNTorchLearner
from rllib_admm.learner.members import PendingRound
from rllib_admm.learner.replay_actor import ReplayActor
from rllib_admm.replay import reward_bounds
from rllib_admm.replay.errors import ReplayDataError
from rllib_admm.sharded_dqn import MOST_STEPS_PER_CALL, ShardedDQN, ShardedDQNConfig

logger = logging.getLogger(__name__)

APEX_RESULTS = "apex"
"""Key of Ape-X' metrics in a train result."""

# A training step ends after this time, or as soon as the learner has reported.
_STEP_S = 0.5


class ApexDQNConfig(ShardedDQNConfig):
    """Configuration of `ApexDQN`: a `DQNConfig` plus replay shards and the epsilon ladder.

    .. code-block:: python

        from rllib_admm import ApexDQNConfig

        config = (
            ApexDQNConfig()
            .environment("CartPole-v1")
            .env_runners(num_env_runners=2, num_envs_per_env_runner=8)
            .training(num_replay_shards=2)
        )
    """

    # What the learner group needs to know: there is one learner, which agrees with nobody.
    weight_sync: ClassVar[str] = "admm"
    rho: ClassVar[float] = 0.0
    rho_strength: ClassVar[float] = 1.0
    rho_schedule: ClassVar[str] = "constant"
    rho_decay_rounds: ClassVar[int] = 1
    rho_final_fraction: ClassVar[float] = 1.0
    proximal_metric: ClassVar[str] = "euclidean"
    local_start: ClassVar[str] = "theta"
    on_learner_failure: ClassVar[str] = "recentre"

    def __init__(self, algo_class: type[Algorithm] | None = None) -> None:
        super().__init__(algo_class=algo_class or ApexDQN)
        self.num_learners = 1
        self.num_env_runners = 2
        self.train_batch_size_per_learner = 64
        self.n_step = 3
        self.rollout_fragment_length = 25
        self.training_intensity = None

        self.num_replay_shards = 2
        self.sample_queue_size = 4
        self.minibatches_per_request = 8
        self.broadcast_interval = 400
        self.epsilon_ladder: tuple[float, float] | None = (0.4, 7.0)
        self.local_steps = 32
        self.max_learner_restarts = 10
        self.round_timeout_s = 300.0
        self.placement_timeout_s = 120.0
        self._admm_ready = True

    @override(DQNConfig)
    def training(
        self,
        *,
        num_replay_shards: int = NotProvided,
        sample_queue_size: int = NotProvided,
        minibatches_per_request: int = NotProvided,
        broadcast_interval: int = NotProvided,
        epsilon_ladder: tuple[float, float] | None = NotProvided,
        local_steps: int = NotProvided,
        max_learner_restarts: int = NotProvided,
        round_timeout_s: float = NotProvided,
        placement_timeout_s: float = NotProvided,
        **kwargs: Any,
    ) -> ApexDQNConfig:
        """Sets the training related configuration.

        `training_intensity` (transitions replayed per env step) holds both sides to that
        ratio, within a few calls; None (default) lets EnvRunners and learner run free.
        `capacity` in `replay_buffer_config` is that of one shard.

        Args:
            num_replay_shards: Replay actors (default 2; usual 1 to 8). More: more bandwidth,
                more processes.
            sample_queue_size: Requests for minibatches under way (default 4; usual 2 to 16).
                More: the learner waits less, priorities are older.
            minibatches_per_request: Minibatches that one request brings (default 8). More:
                fewer calls, older priorities.
            broadcast_interval: Env steps of an EnvRunner after which it gets new weights
                (default 400, as published).
            epsilon_ladder: (base, exponent) of the epsilons base ** (1 + i / (N - 1) *
                exponent) of all N sub-environments (default (0.4, 7), as published). None:
                `epsilon` is scheduled as in DQN.
            local_steps: Gradient steps per call of the learner (default 32), between which
                it takes no new weights or targets and reports nothing.
            max_learner_restarts: How often the learner may be restarted (default 10).
            round_timeout_s: Seconds that the learner may take for one call before it counts as
                dead (default 300).
            placement_timeout_s: Seconds to wait for room in the cluster, and for the learner
                to start (default 120).
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
        validate_apex_options(self)

    @override(ShardedDQNConfig)
    def get_default_learner_class(self) -> type[ApexDQNTorchLearner]:
        """Returns `ApexDQNTorchLearner`."""
        return ApexDQNTorchLearner


class ApexDQN(ShardedDQN):
    """DQN with distributed prioritized replay, an asynchronous learner and many actors."""

    config: ApexDQNConfig

    @classmethod
    @override(DQN)
    def get_default_config(cls) -> ApexDQNConfig:
        """Returns the default configuration."""
        return ApexDQNConfig()

    @override(DQN)
    def setup(self, config: AlgorithmConfig) -> None:
        """Builds EnvRunners, learner and replay actors."""
        super().setup(config)
        self._work: PendingRound | None = None
        self._updates_owed = 0.0
        self._next_shard = 0
        self._adding: dict[Any, str] = {}
        self._held_since: dict[int, int] = {}
        self._totals = dict.fromkeys(
            ("gradient_steps", "learner_wait_s", "bytes_replay", "num_stale_priorities"), 0.0
        )
        self._num_lost = 0
        self._shard_sizes: dict[int, int] = {}
        self._adding_to: dict[Any, int] = {}
        self.learner_group.replay_actors = tuple(self._make_replay_actors())
        self.learner_group.settle()

    def _make_replay_actors(self) -> list[Any]:
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1}
        group = ray.util.get_current_placement_group()
        if group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group)
        cls = ray.remote(**options)(ReplayActor)
        config = self.config.copy(copy_frozen=True)
        return [cls.remote(config, i) for i in range(self.config.num_replay_shards)]

    # ---- The algorithm --------------------------------------------------------------

    @override(DQN)
    def training_step(self) -> None:
        """Some calls of runners and, at most, one of the learner; nobody waits for the other.

        - EnvRunners that are idle: take the newest weights if it is time, sample.
        - Fragments go to the replay actors in turn, by reference.
        - Learner: `local_steps` minibatches per call from the replay actors.
        """
        deadline = time.monotonic() + _STEP_S
        while time.monotonic() < deadline:
            self._start_learning()
            self._start_sampling()
            if self._samples_locally:
                self._take_fragments({0: self.env_runner_group.sample_locally(self._request(0))})
            else:
                waiting = list(self._work.references.values()) if self._work else []
                self.env_runner_group.wait(waiting, max(0.0, deadline - time.monotonic()))
                self._take_fragments(self._finish_sampling(0.0))
            self._collect_added()
            if self._work is not None and self.learner_group.is_ready(self._work):
                self._finish_learning()
                break
        self._log_metrics()

    @property
    def _learns(self) -> bool:
        enough = self._steps_in_shards >= self._steps_before_learning
        # Without runners nothing new comes in: learning on would wear out the old data.
        return enough and (self._samples_locally or self._some_runner_is_healthy)

    def _start_learning(self) -> None:
        if self._work is not None or not self._learns:
            return
        if self.config.training_intensity is not None:
            if self._updates_owed < self.config.local_steps:
                return
            self._updates_owed -= self.config.local_steps
        self._work = self.learner_group.start_round(
            env_steps=self._env_steps_sampled, local_steps=self.config.local_steps
        )

    def _finish_learning(self) -> None:
        """Takes the learner's report, waiting for it if it is still at work."""
        if self._work is None:
            return
        work, self._work = self._work, None
        summary = self.learner_group.finish_round(work)
        if summary.learner_results:
            self.metrics.aggregate(summary.learner_results, key=LEARNER_RESULTS)
        with self.metrics.log_time((TIMERS, SYNCH_WORKER_WEIGHTS_TIMER)):
            self.env_runner_group.write_local(self.learner_group)
        self._totals["gradient_steps"] += summary.gradient_steps
        if self.config.training_intensity is not None:
            # Minibatches that did not come are still owed.
            self._updates_owed += work.local_steps - summary.gradient_steps
        for counters in summary.replay:
            self._totals["learner_wait_s"] += counters["wait_s"]
            self._totals["bytes_replay"] += counters["bytes"]
            self._totals["num_stale_priorities"] += counters["stale"]

    # ---- Sampling -------------------------------------------------------------------

    @property
    def _may_sample(self) -> bool:
        """Whether the replay ratio, if one is set, lets EnvRunners go on."""
        if self.config.training_intensity is None or not self._learns:
            return True
        return self._updates_owed < 4 * self.config.local_steps

    def _start_sampling(self) -> None:
        if self._samples_locally or not self._may_sample:
            return
        idle = self.env_runner_group.idle_env_runner_ids()
        self.env_runner_group.start_sampling({worker: self._request(worker) for worker in idle})

    def _request(self, worker: int) -> SampleRequest:
        c = self.config
        now = self._env_steps_sampled
        broadcast = None
        held = self.env_runner_group.held_rounds.get(worker)
        # An EnvRunner's own steps: all runners step at about the same rate.
        own_steps = (now - self._held_since.get(worker, 0)) / max(1, c.num_env_runners)
        if held is None or own_steps >= c.broadcast_interval:
            broadcast = self.env_runner_group.broadcast_for(worker, self.learner_group)
            self._held_since[worker] = now
        shard = self._next_shard
        self._next_shard = (shard + 1) % c.num_replay_shards
        n_step = c.n_step
        return SampleRequest(
            broadcast=broadcast,
            num_steps=min(MOST_STEPS_PER_CALL, c.get_rollout_fragment_length()),
            complete_episodes=c.batch_mode == "complete_episodes",
            env_steps=now,
            shards=(shard,),
            apex=ApexRequest(
                ladder=c.epsilon_ladder,
                num_runners=c.num_env_runners,
                n_step=n_step if isinstance(n_step, int) else n_step[1] - 1,
                gamma=c.gamma,
                clip_rewards=reward_bounds(c.clip_rewards),
            ),
        )

    def _take_fragments(self, replies: dict[int, SampleReply]) -> None:
        """Hands the fragments to the replay actors and books their env steps."""
        learns = self._learns
        for worker, reply in replies.items():
            for shard, episodes in reply.fragments.items():
                actor = self.learner_group.replay_actors[shard]
                reference = actor.add.remote(
                    f"EnvRunner {worker}", episodes, reply.td_errors[shard]
                )
                self._adding[reference] = f"EnvRunner {worker}"
                self._adding_to[reference] = shard
            self._steps_in_shards += reply.env_steps
            if learns and self.config.training_intensity is not None:
                batch = self.config.train_batch_size_per_learner
                self._updates_owed += reply.env_steps * self.config.training_intensity / batch
        metrics = [reply.metrics for reply in replies.values() if reply.metrics is not None]
        if metrics:
            self.metrics.aggregate(metrics, key=ENV_RUNNER_RESULTS)

    def _collect_added(self) -> None:
        """Takes the replay actors' answers; raises what was wrong with the data.

        Raises:
            ReplayDataError: If an EnvRunner delivered what must not be learned from.
        """
        if not self._adding:
            return
        ready, _ = ray.wait(list(self._adding), num_returns=len(self._adding), timeout=0)
        for reference in ready:
            source, shard = self._adding.pop(reference), self._adding_to.pop(reference)
            try:
                self._shard_sizes[shard] = ray.get(reference)
            except ReplayDataError:
                raise
            except ray.exceptions.RayActorError:
                # A shard died, with what it held; Ray starts it anew.
                self._num_lost += 1
                self._shard_sizes[shard] = 0
                logger.warning("Replay shard %d died: a fragment of %s is lost.", shard, source)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, ray.exceptions.ObjectLostError):
                    self._num_lost += 1
                    continue
                raise

    def _log_metrics(self) -> None:
        consensus = self.learner_group
        values = {
            "gradient_steps_lifetime": self._totals["gradient_steps"],
            "replay_ratio_lifetime": self._replay_ratio_so_far,
            "learner_wait_s_lifetime": self._totals["learner_wait_s"],
            "bytes_replay_lifetime": self._totals["bytes_replay"],
            "bytes_per_gradient_step": self._totals["bytes_replay"]
            / max(1.0, self._totals["gradient_steps"]),
            "bytes_broadcast_lifetime": float(self._bytes_broadcast),
            "num_stale_priorities": self._totals["num_stale_priorities"],
            "num_fragments_lost": float(self._num_lost),
            "num_transitions": float(sum(self._shard_sizes.values())),
            "num_learner_restarts": float(consensus.num_restarts),
            "num_non_finite": float(consensus.num_non_finite),
        }
        for key, value in values.items():
            self.metrics.log_value((APEX_RESULTS, key), value, window=1)

    @property
    def _replay_ratio_so_far(self) -> float:
        replayed = self._totals["gradient_steps"] * self.config.train_batch_size_per_learner
        steps = max(1, self._env_steps_sampled - self._steps_before_learning)
        return replayed / steps

    # ---- State: nothing is under way while it is taken or set -------------------------

    def _pause(self) -> None:
        self._finish_learning()
        if self._adding:
            ray.wait(
                list(self._adding),
                num_returns=len(self._adding),
                timeout=self.config.round_timeout_s,
            )
        self._collect_added()

    @override(Algorithm)
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates the newest weights."""
        self._pause()
        return super().evaluate(*args, **kwargs)

    @override(ShardedDQN)
    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Returns the state of a checkpoint."""
        self._pause()
        state: dict[str, Any] = super().get_state(
            components, not_components=not_components, **kwargs
        )
        if self._check_component(APEX_RESULTS, components, not_components):
            state[APEX_RESULTS] = {"totals": dict(self._totals), "updates_owed": self._updates_owed}
        return state

    @override(ShardedDQN)
    def set_state(self, state: dict[str, Any]) -> None:
        """Restores `state`."""
        self._pause()
        super().set_state(state)
        if APEX_RESULTS in state:
            self._totals.update(state[APEX_RESULTS]["totals"])
            self._updates_owed = state[APEX_RESULTS]["updates_owed"]

    @override(Checkpointable)
    def save_to_path(self, *args: Any, **kwargs: Any) -> Any:
        """Writes a checkpoint folder."""
        self._pause()
        return super().save_to_path(*args, **kwargs)

    @override(ShardedDQN)
    def restore_from_path(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Restores a checkpoint folder."""
        self._pause()
        super().restore_from_path(path, *args, **kwargs)

    @override(Algorithm)
    def cleanup(self) -> None:
        """Ends all processes."""
        for actor in self.learner_group.replay_actors:
            ray.kill(actor)
        super().cleanup()


__all__ = ["APEX_RESULTS", "ApexDQN", "ApexDQNConfig"]
