"""Settings of a file on their way into an RLlib config."""

from __future__ import annotations

from typing import Any

import pytest
from ray.rllib.examples.envs.classes.simple_corridor import SimpleCorridor

from rllib_admm.cli.algorithm_config import build_config
from rllib_admm.cli.errors import CommandError
from rllib_admm.cli.experiment_file import Experiment


def experiment(config: dict[str, Any], run: str = "DQN", env: str = "CartPole-v1") -> Experiment:
    return Experiment(name="x", run=run, env=env, stop={"training_iteration": 1}, config=config)


def test_attributes_sections_and_old_names_reach_the_config() -> None:
    config = build_config(
        experiment(
            {
                "lr": 0.25,
                "num_workers": 3,
                "train_batch_size_per_learner": 17,
                "env_runners": {"num_envs_per_env_runner": 4},
                "training": {"gamma": 0.5, "double_q": False},
                "evaluation": {"evaluation_interval": 2},
                "evaluation_config": {"explore": False},
                "replay_buffer_config": {"capacity": 123},
            },
            env="Acrobot-v1",
        )
    )
    assert config.env == "Acrobot-v1"
    assert (config.lr, config.gamma, config.double_q) == (0.25, 0.5, False)
    assert (config.num_env_runners, config.num_envs_per_env_runner) == (3, 4)
    assert config.train_batch_size_per_learner == 17
    assert config.evaluation_interval == 2
    # Merged into the default, not put in its place.
    assert config.replay_buffer_config["capacity"] == 123
    assert "type" in config.replay_buffer_config
    assert config.enable_rl_module_and_learner
    assert config.enable_env_runner_and_connector_v2


@pytest.mark.parametrize(
    "settings",
    [
        {"model": {"fcnet_hiddens": [7]}},
        {"model_config": {"fcnet_hiddens": [7]}},
        {"rl_module": {"model_config": {"fcnet_hiddens": [7]}}},
        {"training": {"model": {"fcnet_hiddens": [7]}}},
    ],
)
def test_every_spelling_of_the_model_reaches_the_rl_module(settings: dict[str, Any]) -> None:
    config = build_config(experiment(settings))
    assert config.model_config["fcnet_hiddens"] == [7]
    # What DQN adds by itself is still there.
    assert "dueling" in config.model_config


def test_resources_may_be_fractions_whatever_rllib_annotates() -> None:
    config = build_config(
        experiment(
            {
                "num_cpus_per_env_runner": 0.25,
                "num_cpus_for_main_process": 0.5,
                "learners": {"num_cpus_per_learner": 0.5},
            }
        )
    )
    assert config.num_cpus_per_env_runner == 0.25
    assert config.num_cpus_for_main_process == 0.5
    assert config.num_cpus_per_learner == 0.5


def test_a_default_of_another_type_than_annotated_is_allowed() -> None:
    # Annotated as text, with the default False.
    assert build_config(experiment({"offline_sampling": True})).offline_sampling is True


def test_lambda_is_no_python_name_and_still_a_setting() -> None:
    assert build_config(experiment({"lambda": 0.5}, run="PPO")).lambda_ == 0.5


def test_a_list_becomes_the_tuple_that_rllib_asks_for() -> None:
    assert build_config(experiment({"n_step": [1, 3]})).n_step == (1, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_env_runer": 1}, "DQN has no setting `num_env_runer`; did you mean `num_env_runn"),
        ({"_is_frozen": True}, "DQN has no setting `_is_frozen`"),
        ({"num_rollout_workers": 1}, "Use `AlgorithmConfig.num_env_runners` instead"),
        ({"num_env_runners": "two"}, "`num_env_runners` must be a whole number, is 'two'"),
        ({"num_env_runners": True}, "`num_env_runners` must be a whole number, is True"),
        ({"num_env_runners": 1.5}, "`num_env_runners` must be a whole number, is 1.5"),
        ({"lr": "fast"}, "`lr` must be a number or a list, is 'fast'"),
        ({"double_q": 1}, "`double_q` must be true or false, is 1"),
        ({"training": {"gama": 0.9}}, "`training` has no setting `gama`; did you mean `gamma`"),
        ({"training": {"num_learners": 1}}, "it belongs under `learners`"),
        ({"training": 3}, "`training` must be a mapping, is 3"),
        ({"model_config": {"fcnet_hidden": [1]}}, "did you mean `fcnet_hiddens`"),
        ({"model_config": {"fcnet_hiddens": 64}}, "`fcnet_hiddens` must be a list, is 64"),
        ({"model": {}, "model_config": {}}, "`model` is the old name of `model_config`"),
        ({"enable_rl_module_and_learner": False}, "runs on the new API stack"),
        ({"api_stack": {"enable_rl_module_and_learner": False}}, "runs on the new API stack"),
        ({"framework": "tf2"}, "PyTorch"),
        ({"callbacks": "no.such.Class"}, "`callbacks`: "),
        ({"gym_env_vectorize_mode": "foo"}, "DQN refuses the config: `gym_env_vectorize_mode`"),
        ({"env_config": {"no_such_argument": 1}}, "environment `CartPole-v1`: .*no_such_argument"),
    ],
)
def test_mistakes_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        build_config(experiment(settings))


def test_rllibs_advice_to_switch_validation_off_is_not_passed_on() -> None:
    with pytest.raises(CommandError) as error:
        build_config(experiment({"gym_env_vectorize_mode": "foo"}))
    assert "_validate_config" not in str(error.value)


@pytest.mark.parametrize(
    ("run", "hint"),
    [
        ("ADMMDQM", "did you mean `ADMMDQN`"),
        ("dqn", "did you mean `DQN`"),
        ("Zebra", "known are ADMMDQN, APEX, APPO"),
    ],
)
def test_unknown_algorithm_names_the_nearest(run: str, hint: str) -> None:
    with pytest.raises(CommandError, match=rf"unknown algorithm `{run}`; {hint}"):
        build_config(experiment({}, run=run))


def test_unknown_environment_names_the_nearest() -> None:
    with pytest.raises(CommandError, match=r"environment `CartPol-v1`: .*Did you mean: `CartPole`"):
        build_config(experiment({}, env="CartPol-v1"))


def test_class_paths_are_imported_and_a_wrong_one_names_the_nearest() -> None:
    module = "ray.rllib.examples.envs.classes.simple_corridor"
    assert build_config(experiment({}, env=f"{module}.SimpleCorridor")).env is SimpleCorridor
    with pytest.raises(CommandError, match=r"did you mean `SimpleCorridor`\?"):
        build_config(experiment({}, env=f"{module}.SimpleCoridor"))
    with pytest.raises(CommandError, match="No module named"):
        build_config(experiment({}, env="no.such.Env"))
