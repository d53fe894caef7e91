"""Every option works, visibly, or is refused by name before any actor starts."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.learner.torch.torch_learner import TorchLearner

from rllib_admm import ADMMDQNConfig
from rllib_admm.config_validation import training_keywords
from rllib_admm.learner import ADMMDQNTorchLearner
from tests.envs import HalfBoundedActions, TextActions
from tests.helpers import in_process_rounds


def base_config(**training: Any) -> ADMMDQNConfig:
    options = {
        "local_steps": 4,
        "train_batch_size_per_learner": 16,
        "replay_buffer_config": {"type": "EpisodeReplayBuffer", "capacity": 2000},
        # So that clipping clips, target networks move and schedules have an effect.
        "grad_clip": 1.0,
        "target_network_update_freq": 150,
        "n_step": 2,
        # Huber's gradient would saturate, and hide what changes the target.
        "td_error_loss_fn": "mse",
    }
    return (
        ADMMDQNConfig()
        .environment("CartPole-v1")
        .training(**(options | training))
        .rl_module(model_config={"fcnet_hiddens": [16]})
        .debugging(seed=5)
    )


@functools.cache
def _env() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


@functools.cache
def _base_z() -> np.ndarray:
    return in_process_rounds(base_config(), _env())[0]


class HalveRewards(ConnectorV2):
    """A learner connector piece of a user."""

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            episode.set_rewards(new_data=np.asarray(episode.get_rewards()) * 0.5)
        return batch


PRIORITIZED = {
    "type": "PrioritizedEpisodeReplayBuffer",
    "capacity": 2000,
    "alpha": 0.9,
    "beta": 0.4,
}

# Options that change what is learned: z after six rounds must differ from the base config's.
CHANGES_Z: dict[str, Any] = {
    "gamma": 0.5,
    "lr": 1e-3,
    "grad_clip": 0.01,
    "grad_clip_by": "value",
    "train_batch_size_per_learner": 8,
    "replay_buffer_config": PRIORITIZED,
    "adam_epsilon": 1e-2,
    "tau": 0.3,
    "target_network_update_freq": 10_000,
    "num_atoms": 5,
    "dueling": False,
    "clipped_double_q": True,
    "layer_norm": True,
    "n_step": (1, 4),
    "td_error_loss_fn": "huber",
    "learner_connector": lambda *args: HalveRewards(),
    "local_steps": 6,
    "rho": 0,
    "rho_strength": 5.0,
    "rho_schedule": "cosine",
    "proximal_metric": "euclidean",
    "local_start": "z",
    "over_relaxation": 1.0,
    "outer_momentum": 0.5,
    "outer_lr": 0.5,
    "dual_updates": False,
    "quantization_bits": 4,
    "full_precision_every": 2,
}
# Options that matter only beside another one.
BESIDE: dict[str, tuple[dict[str, Any], Any]] = {
    "rho_decay_rounds": ({"rho_schedule": "cosine", "rho_decay_rounds": 100}, 3),
    "rho_final_fraction": (
        {"rho_schedule": "cosine", "rho_decay_rounds": 3, "rho_final_fraction": 0.9},
        0.01,
    ),
    "v_min": ({"num_atoms": 5, "v_min": -10.0}, -1.0),
    "v_max": ({"num_atoms": 5, "v_max": 10.0}, 2.0),
    "train_batch_size": ({"train_batch_size_per_learner": None}, 8),
    "grad_clip_by": ({"grad_clip": 0.05}, "norm"),
    # The online network must prefer other actions than the target network first.
    "double_q": ({"lr": 1e-2, "local_steps": 16, "target_network_update_freq": 10_000}, False),
}
REFUSED: dict[str, Any] = {
    "noisy": True,
    "sigma0": 0.1,
    "hiddens": [64],
    "before_learn_on_batch": print,
    "categorical_distribution_temperature": 2.0,
    "num_epochs": 2,
    "minibatch_size": 8,
    "shuffle_batch_per_epoch": True,
    "num_aggregator_actors_per_learner": 1,
    "optimizer": {"type": "sgd"},
    "model": {"fcnet_hiddens": [8]},
    "lr_schedule": [[0, 1e-3]],
    "burn_in_len": 3,
    "learner_class": TorchLearner,
}
# Options of running, not of learning; each is tested with the algorithm, in the file named.
ELSEWHERE = {
    "epsilon": "test_algorithm.py",
    "num_steps_sampled_before_learning_starts": "test_algorithm.py",
    "training_intensity": "test_algorithm.py",
    "store_buffer_in_checkpoints": "test_algorithm.py",
    "add_default_connectors_to_learner_pipeline": "test_algorithm.py",
    "learner_config_dict": "test_algorithm.py",
    "weight_sync": "test_rounds_on_actors.py",
    "placement_timeout_s": "test_rounds_on_actors.py",
    "action_bins": "test_action_grids.py",
    "action_grid": "test_action_grids.py",
    "round_timeout_s": "test_learner_failures.py",
    "on_learner_failure": "test_learner_failures.py",
    "max_learner_restarts": "test_learner_failures.py",
}
# RLlib's own deprecated spellings, which it translates or refuses itself.
RLLIBS_DEPRECATED = {
    "max_requests_in_flight_per_aggregator_actor",
    "max_requests_in_flight_per_sampler_worker",
    "num_sgd_iter",
}


def _all_training_options() -> set[str]:
    return training_keywords(ADMMDQNConfig)


def test_the_lists_cover_every_option() -> None:
    covered = set(CHANGES_Z) | set(BESIDE) | set(REFUSED) | set(ELSEWHERE) | RLLIBS_DEPRECATED
    assert _all_training_options() - covered == set()
    assert covered - _all_training_options() == set()


@pytest.mark.parametrize("name", sorted(CHANGES_Z))
def test_option_changes_what_is_learned(name: str) -> None:
    z, _ = in_process_rounds(base_config(**{name: CHANGES_Z[name]}), _env())
    assert z.shape != _base_z().shape or not np.array_equal(z, _base_z())


def test_the_base_run_repeats_itself() -> None:
    assert np.array_equal(in_process_rounds(base_config(), _env())[0], _base_z())


@pytest.mark.parametrize("name", sorted(BESIDE))
def test_option_beside_another_changes_what_is_learned(name: str) -> None:
    beside, value = BESIDE[name]
    before, _ = in_process_rounds(base_config(**beside), _env())
    after, _ = in_process_rounds(base_config(**(beside | {name: value})), _env())
    assert not np.array_equal(before, after)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_option_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        base_config(**{name: REFUSED[name]}).validate()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_steps": 0}, r"local_steps=0 .*integer >= 1"),
        ({"rho": -1.0}, r"rho=-1.0 .*'auto', 0, or a positive number"),
        ({"rho": float("nan")}, r"rho=nan .*'auto'"),
        ({"rho": "automatic"}, r"rho='automatic'"),
        ({"quantization_bits": 7}, r"quantization_bits=7 .*32, 16, 8, 4.*nearest is 8"),
        ({"weight_sync": "foo"}, r"weight_sync='foo' .*'admm', 'ddp'"),
        ({"weight_sync": "ddpp"}, r"Did you mean 'ddp'"),
        ({"rho_schedule": "cosin"}, r"Did you mean 'cosine'"),
        ({"over_relaxation": 2.0}, r"over_relaxation=2.0 .*\(0, 2\)"),
        ({"outer_momentum": 1.0}, r"outer_momentum=1.0 .*\[0, 1\)"),
        ({"full_precision_every": -1}, r"full_precision_every=-1"),
        ({"n_step": (3, 3)}, r"n_step=\(3, 3\)"),
        ({"replay_buffer_config": {"type": "EpisodeReplayBuffer", "capcity": 9}}, "capacity"),
        ({"training_intensity": -2}, r"training_intensity=-2"),
        ({"action_bins": 1}, r"action_bins=1 .*integer >= 2"),
        ({"action_grid": "joints"}, r"action_grid='joints'.*Did you mean 'joint'"),
        ({"layer_norm": 1}, r"layer_norm=1 .*one of True, False"),
        ({"clipped_double_q": True, "num_atoms": 5}, r"num_atoms=5 is not supported with"),
    ],
)
def test_bad_values_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        base_config(**options).validate()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (HalfBoundedActions, r"no finite bounds in dimension \[1\] \(low -1, high inf\)"),
        (TextActions, "Text.* can not be put on a grid: allowed are Discrete"),
    ],
)
def test_action_spaces_are_refused_before_any_actor_starts(env: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        base_config().environment(env).validate()


class WithSGD(ADMMDQNTorchLearner):
    """A learner whose optimizer has no second moments."""

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        params = self.get_parameters(self._module[module_id])
        self.register_optimizer(
            module_id=module_id,
            optimizer=torch.optim.SGD(params),
            params=params,
            lr_or_lr_schedule=config.lr,
        )


def test_adams_metric_needs_adam() -> None:
    config = base_config().learners(learner_class=WithSGD)
    with pytest.raises(ValueError, match=r"proximal_metric='adam'.*SGD.*'euclidean'"):
        config.build_learner(env=_env())
    z, _ = in_process_rounds(config.copy().training(proximal_metric="euclidean"), _env())
    assert np.isfinite(z).all()


def test_misspelt_options_name_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'local_step'.*Did you mean 'local_steps'"):
        base_config(local_step=3)
    with pytest.raises(ValueError, match=r"'quantisation_bits'.*'quantization_bits'"):
        base_config().update_from_dict({"quantisation_bits": 8})
    with pytest.raises(AttributeError, match=r"'local_step'.*'local_steps'"):
        base_config().local_step = 3  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="'training' is a method"):
        base_config().update_from_dict({"training": {"lr": 1e-3}})


def test_train_batch_size_is_divided_by_the_learners_as_in_rllib() -> None:
    config = ADMMDQNConfig().training(train_batch_size=64)
    assert config.train_batch_size_per_learner == 32
    config = ADMMDQNConfig().learners(num_learners=4).update_from_dict({"train_batch_size": 64})
    assert config.train_batch_size_per_learner == 16
    assert ADMMDQNConfig().train_batch_size_per_learner == 32


def test_update_from_dict_takes_model_config_and_its_own_to_dict() -> None:
    config = base_config().update_from_dict({"model_config": {"fcnet_hiddens": [7]}})
    assert config.model_config["fcnet_hiddens"] == [7]
    again = ADMMDQNConfig().update_from_dict(config.to_dict())
    assert again.local_steps == config.local_steps


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (lambda c: c.api_stack(False, False), "api_stack|new API stack"),
        (lambda c: c.rl_module(model_config={"use_lstm": True}), "use_lstm"),
        (
            lambda c: c.multi_agent(policies={"a", "b"}, policy_mapping_fn=lambda *a, **k: "a"),
            "multi_agent",
        ),
        (lambda c: c.learners(learner_class=TorchLearner), "learner_class"),
        (lambda c: c.framework("torch", torch_compile_learner=True), "torch_compile_learner"),
    ],
)
def test_what_does_not_work_yet_is_refused_by_name(apply: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply(base_config()).validate()
