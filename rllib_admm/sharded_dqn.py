"""What all algorithms here share: a DQN whose replay is sharded and lives outside of the driver.

The configuration's part that is not about one algorithm, and the Algorithm's: EnvRunners that
take their weights through `QuantizedBroadcast`, a `ConsensusLearnerGroup`, faults, checkpoints.
"""

from __future__ import annotations

import logging
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
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME
from ray.tune.result import STDERR_FILE, STDOUT_FILE

from rllib_admm.config_validation import (
    refuse_old_api_stack,
    refuse_unknown_attribute,
    refuse_unknown_key,
    refuse_unknown_keywords,
    validate_discretization,
    validate_shared_options,
)
from rllib_admm.connectors import QuantizedBroadcast
from rllib_admm.discretized_dqn import DiscretizedDQNConfig
from rllib_admm.env_runners import ConsensusEnvRunnerGroup, SampleReply
from rllib_admm.learner import ADMMDQNTorchLearner, ConsensusLearnerGroup
from rllib_admm.placement import wait_for_room

logger = logging.getLogger(__name__)

# Key of this class' own state in checkpoints.
_STATE = "admm"
# Per sub-environment: bounds what one sample call may take, so that `sample_timeout_s` holds.
MOST_STEPS_PER_CALL = 1000


class ShardedDQNConfig(DiscretizedDQNConfig):
    """A `DQNConfig` that refuses what does not exist, for a `ShardedDQN`."""

    n_step: int | tuple[int, int]
    _train_batch_size_per_learner: int | None
    rollout_fragment_length: int | str

    @override(DiscretizedDQNConfig)
    def training(self, **kwargs: Any) -> Any:
        """Sets the training related configuration.

        Raises:
            ValueError: If a keyword does not exist; names the nearest that does.
        """
        refuse_unknown_keywords(type(self), kwargs)
        super().training(**kwargs)
        if "train_batch_size" in kwargs and "train_batch_size_per_learner" not in kwargs:
            # RLlib divides it by the number of learners, unless the other one is set.
            self._train_batch_size_per_learner = None
        return self

    def _set(self, options: dict[str, Any]) -> None:
        """Sets the options of a class of its own that were provided."""
        for key, value in options.items():
            if value is not NotProvided:
                setattr(self, key, value)

    def __setattr__(self, key: str, value: Any) -> None:
        """Refuses attributes that look like a misspelt option."""
        if self.__dict__.get("_admm_ready") and not key.startswith("_"):
            refuse_unknown_attribute(self, key)
        super().__setattr__(key, value)

    @override(AlgorithmConfig)
    def update_from_dict(self, config_dict: dict[str, Any]) -> Any:
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
            validate_shared_options(self)
            self._validate_own_options()
            validate_discretization(self)

    def _validate_own_options(self) -> None:
        """Checks what an algorithm adds; for subclasses."""

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


class ShardedDQN(DQN):
    """DQN with sharded replay, a consensus' learner group and broadcasts to its EnvRunners."""

    config: ShardedDQNConfig
    learner_group: ConsensusLearnerGroup
    env_runner_group: ConsensusEnvRunnerGroup
    eval_env_runner_group: ConsensusEnvRunnerGroup | None

    # Counters of env steps that a checkpoint keeps.
    _steps_owed: float
    _steps_in_shards: int

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

    def _finish_sampling(self, timeout_s: float | None) -> dict[int, SampleReply]:
        """Returns the replies of remote EnvRunners that came within `timeout_s`."""
        replies = self.env_runner_group.finish_sampling(timeout_s)
        for worker, reply in replies.items():
            if reply.broken is not None:
                logger.warning(
                    "EnvRunner %d could not take z (%s); it gets a keyframe.", worker, reply.broken
                )
        return replies

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
            f"{type(self).__name__} can not add RLModules while it trains. Define all of them in "
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
