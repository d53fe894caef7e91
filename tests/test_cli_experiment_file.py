"""The experiment file: what is read from it, and what is said when it is wrong."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from rllib_admm.cli.errors import CommandError
from rllib_admm.cli.experiment_file import read_experiments

TUNED_EXAMPLES = sorted((Path(__file__).parents[1] / "tuned_examples").glob("*.yaml"))


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "experiment.yaml"
    path.write_text(textwrap.dedent(text))
    return path


def test_reads_the_classic_form(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
        first:
          run: DQN
          env: CartPole-v1
          stop:
            training_iteration: 3
            evaluation/env_runners/episode_return_mean: 450
            env_runners: {episode_return_mean: 475.5}
          config:
            lr: 0.1
          num_samples: 2
          local_dir: somewhere
          checkpoint_config: {checkpoint_frequency: 5}
        second:
          run: PPO
          config: {env: Acrobot-v1}
          stop: {time_total_s: 10}
        """,
    )
    first, second = read_experiments(path)
    assert (first.name, first.run, first.env) == ("first", "DQN", "CartPole-v1")
    assert first.stop == {
        "training_iteration": 3,
        "evaluation/env_runners/episode_return_mean": 450,
        "env_runners/episode_return_mean": 475.5,
    }
    assert first.config == {"lr": 0.1}
    assert (first.num_samples, first.storage_path) == (2, "somewhere")
    assert first.checkpoint_config == {"checkpoint_frequency": 5}
    assert (second.run, second.env, second.config) == ("PPO", "Acrobot-v1", {})


@pytest.mark.parametrize(
    ("text", "number"),
    [("5e-4", 5e-4), ("1E6", 1e6), ("-2e3", -2e3), (".5e1", 5.0), ("1.5e+2", 150.0)],
)
def test_exponents_are_numbers(tmp_path: Path, text: str, number: float) -> None:
    path = write(tmp_path, f"x: {{run: A, env: B, stop: {{a: 1}}, config: {{lr: {text}}}}}")
    assert read_experiments(path)[0].config["lr"] == number


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x:\n  run: [DQN\n  env: a\n", r"experiment\.yaml:3:6: not valid YAML: "),
        ("x:\n\trun: DQN\n", r"experiment\.yaml:2:1: not valid YAML: "),
        ("", r"experiment\.yaml: expected `name: .*found empty"),
        ("- run: DQN\n", r"expected `name: .*found a list"),
        ("run: DQN\nenv: CartPole-v1\n", r":1: `run` stands at the top level; indent it"),
        ("x: DQN\n", r":1: experiment `x` must be a mapping, is 'DQN'"),
        ("x:\n  runn: DQN\n", r":2: unknown key `runn` in experiment `x`; did you mean `run`\?"),
        ("x:\n  run: DQN\n  lr: 1\n", r":3: unknown key `lr`.*goes under `config`"),
        ("x:\n  env: a\n", r":1: experiment `x` has no `run`"),
        ("x:\n  run:\n  env: a\n", r":1: experiment `x` has no `run`"),
        ("x:\n  run: 3\n", r":2: `run` must be text, is 3"),
        ("x:\n  run: DQN\n  stop: {a: 1}\n", r":1: experiment `x` has no `env`"),
        ("x:\n  run: DQN\n  env: a\n", r":1: experiment `x` has no `stop`"),
        ("x:\n  run: D\n  env: a\n  stop: 3\n", r":4: `stop` must be a mapping, is 3"),
        ("x:\n  run: D\n  env: a\n  stop:\n    b: c\n", r":5: `stop` value of `b` must be a num"),
        ("x:\n  run: D\n  env: a\n  stop: {b: true}\n", r"`stop` value of `b` must be a number"),
        ("x:\n  run: D\n  env: a\n  stop: {b: .nan}\n", r"`stop` value of `b` is not a number"),
        ("x:\n  run: D\n  run: E\n", r":3: `run` stands already in line 2"),
        ("x:\n  run: D\n  env: a\n  config: [1]\n", r":4: `config` must be a mapping, is a list"),
        ("x:\n  run: D\n  env: a\n  num_samples: 0\n", r":4: `num_samples` must be at least 1"),
        ("x:\n  run: D\n  env: a\n  num_samples: yes\n", r":4: `num_samples` must be a whole"),
        ("x:\n  run: D\n  env: a\n  config: {env: b}\n", r":4: `env` is given twice"),
    ],
)
def test_mistakes_are_named_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(text)
    with pytest.raises(CommandError, match=message):
        read_experiments(path)


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "cartpole.yaml").touch()
    with pytest.raises(CommandError, match=r"no such file: .*did you mean `cartpole\.yaml`\?"):
        read_experiments(tmp_path / "cartpol.yaml")


def test_anchor_that_refers_to_itself_is_no_endless_loop(tmp_path: Path) -> None:
    path = write(tmp_path, "x: &a\n  run: DQN\n  env: e\n  stop: {b: 1}\n  config: {y: *a}\n")
    assert read_experiments(path)[0].run == "DQN"


@pytest.mark.parametrize("path", TUNED_EXAMPLES, ids=lambda path: path.stem)
def test_tuned_examples_ask_for_at_most_two_cpus(path: Path) -> None:
    (experiment,) = read_experiments(path)
    config = experiment.config
    cpus = (
        config["num_cpus_for_main_process"]
        + config["num_env_runners"] * config["num_cpus_per_env_runner"]
        + config["num_learners"] * config["num_cpus_per_learner"]
    )
    assert config["num_learners"] == 2
    assert cpus <= 2
