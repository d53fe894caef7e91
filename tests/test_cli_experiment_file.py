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
    for experiment in read_experiments(path):
        config = experiment.config
        cpus = (
            config["num_cpus_for_main_process"]
            + config["num_env_runners"] * config["num_cpus_per_env_runner"]
            + config["num_learners"] * config.get("num_cpus_per_learner", 0)
        )
        assert config["num_learners"] == {"ADMMDQN": 2, "APEX": 1, "DQN": 0}[experiment.run]
        assert cpus <= 2


def test_old_names_are_translated_with_one_hint_each(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
        cartpole-dqn:
          env: CartPole-v1
          run: DQN
          local_dir: somewhere
          checkpoint_freq: 5
          keep_checkpoints_num: 2
          stop:
            sampler_results/episode_reward_mean: 150
            timesteps_total: 50000
          config:
            framework: torch
            num_workers: 0
            learning_starts: 100
            replay_buffer_config:
              type: MultiAgentPrioritizedReplayBuffer
              prioritized_replay_alpha: 0.5
            exploration_config: {epsilon_timesteps: 200, final_epsilon: 0.02}
        """,
    )
    hints: list[str] = []
    (read,) = read_experiments(path, hints.append)
    assert read.stop == {
        "env_runners/episode_return_mean": 150,
        "num_env_steps_sampled_lifetime": 50000,
    }
    assert read.storage_path == "somewhere"
    assert read.checkpoint_config == {"checkpoint_frequency": 5, "num_to_keep": 2}
    assert read.config == {
        "framework": "torch",
        "num_env_runners": 0,
        "num_steps_sampled_before_learning_starts": 100,
        "replay_buffer_config": {"type": "PrioritizedEpisodeReplayBuffer", "alpha": 0.5},
        "epsilon": [[0, 1.0], [200, 0.02]],
    }
    assert len(hints) == len(set(hints)) == 10
    assert "`num_workers` is now `num_env_runners`" in hints


def test_grid_search_anywhere_makes_an_experiment_per_combination(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
        sweep:
          run: DQN
          env: CartPole-v1
          stop: {training_iteration: 1}
          config:
            lr: {grid_search: [0.1, 0.2]}
            replay_buffer_config:
              type: EpisodeReplayBuffer
              capacity: {grid_search: [10, 20]}
        """,
    )
    read = read_experiments(path)
    assert [e.name for e in read] == [
        f"sweep[lr={lr},replay_buffer_config.capacity={capacity}]"
        for lr in (0.1, 0.2)
        for capacity in (10, 20)
    ]
    assert [(e.config["lr"], e.config["replay_buffer_config"]["capacity"]) for e in read] == [
        (0.1, 10),
        (0.1, 20),
        (0.2, 10),
        (0.2, 20),
    ]
    # Errors still know the line.
    assert str(read[3].error("config/lr", "wrong")) == f"{path}:6: wrong"


def test_json_is_read_as_well(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"a": {"run": "DQN", "env": "X-v0", "stop": {"training_iteration": 1}}}')
    (read,) = read_experiments(path)
    assert (read.run, read.env, read.stop) == ("DQN", "X-v0", {"training_iteration": 1})
