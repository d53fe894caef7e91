"""What surrounds a run: resources, stop criteria, progress, greedy return."""

from __future__ import annotations

import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from ray.rllib.algorithms.dqn import DQNConfig
from rich.console import Console

from rllib_admm.cli.greedy import GreedyReturn, _side_by_side, evaluation_runner
from rllib_admm.cli.progress import ProgressReporter, gradient_steps, lookup
from rllib_admm.cli.resources import shortage
from rllib_admm.cli.run import _last_exception
from rllib_admm.cli.stopping import MetricStopper


@pytest.mark.parametrize(
    ("bundles", "nodes", "short"),
    [
        ([{"CPU": 1.0}] * 2, [{"CPU": 2.0}], []),
        ([{"CPU": 0.1}] * 20, [{"CPU": 2.0}], []),
        ([{"CPU": 1.0}] * 3, [{"CPU": 2.0}], ["CPU"]),
        ([{"CPU": 1.0}] * 3, [{"CPU": 2.0}, {"CPU": 1.0}], []),
        # The sum is there, but on no single node.
        ([{"CPU": 2.0}], [{"CPU": 1.0}, {"CPU": 1.0}], ["CPU"]),
        ([{"CPU": 1.0, "GPU": 1.0}], [{"CPU": 2.0}], ["GPU"]),
        ([{"CPU": 1.0, "GPU": 0}], [{"CPU": 2.0}], []),
        ([{"CPU": 1.0}], [], ["CPU"]),
    ],
)
def test_shortage(bundles: list[dict[str, float]], nodes: list[Any], short: list[str]) -> None:
    assert shortage(bundles, nodes)[1] == short


def test_stopper_ends_at_the_value_and_waits_for_late_metrics() -> None:
    stopper = MetricStopper(
        {"evaluation/env_runners/episode_return_mean": 9.0, "num_env_steps_sampled_lifetime": 100}
    )
    assert not stopper("t", {"num_env_steps_sampled_lifetime": 99})
    assert not stopper("t", {"evaluation": {"env_runners": {"episode_return_mean": np.nan}}})
    assert stopper("t", {"evaluation": {"env_runners": {"episode_return_mean": 9.0}}})
    assert stopper("t", {"num_env_steps_sampled_lifetime": 100})
    assert not stopper.stop_all()


def test_stopper_ends_the_experiment_for_a_misspelt_metric() -> None:
    stopper = MetricStopper({"training_iterations": 10})
    assert stopper("t", {"training_iteration": 1})
    assert stopper.stop_all()
    assert stopper.error is not None
    assert "did you mean `training_iteration`?" in stopper.error


def test_lookup_finds_numbers_only() -> None:
    result = {"a": {"b": 3, "nan": float("nan"), "text": "x", "flag": True}}
    assert lookup(result, "a/b") == 3.0
    for path in ("a", "a/b/c", "a/nan", "a/text", "a/flag", "z"):
        assert lookup(result, path) is None


def test_gradient_steps_are_reported_or_derived() -> None:
    learners = {
        "__all_modules__": {"num_module_steps_trained_lifetime": 640.0},
        "default_policy": {"module_train_batch_size_mean": 32.0},
    }
    assert gradient_steps({"learners": learners}) == 20
    assert gradient_steps({"consensus": {"gradient_steps_lifetime": 7}, "learners": learners}) == 7
    assert gradient_steps({}) is None


class _Trial:
    trial_id = "t"


def test_progress_is_one_line_per_result_without_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = {
        "training_iteration": 2,
        "num_env_steps_sampled_lifetime": 12345.0,
        "consensus": {"round": 4, "rho": 0.125, "compression_per_nic": 125.4},
        "time_total_s": 3.2,
    }
    with ProgressReporter("title", Console(force_terminal=False)) as progress:
        progress.on_trial_result(1, [_Trial()], _Trial(), result)  # type: ignore[list-item, arg-type]
    out = capsys.readouterr().out
    assert out == "iter 2  env steps 12,345  round 4  rho 0.125  compression 125  seconds 3\n"


def test_progress_is_a_table_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressReporter("title", Console(force_terminal=True, width=100)) as progress:
        for steps in (1000, 2000):
            result = {"num_env_steps_sampled_lifetime": steps}
            progress.on_trial_result(1, [_Trial()], _Trial(), result)  # type: ignore[list-item, arg-type]
        # Tune pickles its callbacks while they run.
        pickle.loads(pickle.dumps(progress))
    out = capsys.readouterr().out
    assert "title" in out
    assert "env steps" in out
    assert "2,000" in out


def test_greedy_return_shows_mean_and_sample_deviation() -> None:
    assert str(GreedyReturn((1.0, 3.0))) == "2.00 +- 1.41 (2 episodes)"


def test_a_failure_is_shown_by_its_last_exception() -> None:
    remote = RuntimeError(
        "The actor died:\n  File x, line 1\nValueError: first\n\nray.EnvError: no such env:\na)"
    )
    assert _last_exception(remote) == "ray.EnvError: no such env: a)"
    masked = RuntimeError(
        "died\nValueError: the reason\n\nDuring handling of the above exception, another "
        "exception occurred:\n\nAttributeError: 'NoneType' object"
    )
    assert _last_exception(masked) == "ValueError: the reason"


class CoinEnv(gym.Env[np.ndarray, int]):
    """Episodes of 1 or 40 steps, with equal chance; reward 1 per step."""

    observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        self._left = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._left = 1 if self.np_random.random() < 0.5 else 40
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> Any:
        self._left -= 1
        return np.zeros(1, np.float32), 1.0, self._left == 0, False, {}


def test_greedy_episodes_are_not_the_short_ones() -> None:
    runner = evaluation_runner(DQNConfig().environment(CoinEnv), 20)
    try:
        returns = _side_by_side(runner, 60.0, None).returns
    finally:
        runner.stop()
    assert len(returns) == 20
    assert set(returns) == {1.0, 40.0}
    # Twenty fair coins. The first 20 episodes to end would hardly hold a long one.
    assert 4 <= returns.count(40.0) <= 16


class EndlessEnv(CoinEnv):
    """No episode ends."""

    def step(self, action: int) -> Any:
        return np.zeros(1, np.float32), 1.0, False, False, {}


def test_greedy_episodes_that_do_not_end_are_cut_off_and_said_to_be() -> None:
    runner = evaluation_runner(DQNConfig().environment(EndlessEnv), 3)
    try:
        greedy = _side_by_side(runner, 0.3, None)
    finally:
        runner.stop()
    assert greedy.num_cut == 3
    assert min(greedy.returns) > 0
    assert str(greedy).endswith("(3 episodes, 3 of them cut off by the limit)")


def test_greedy_episodes_end_after_the_steps_asked_for() -> None:
    runner = evaluation_runner(DQNConfig().environment(EndlessEnv), 3)
    try:
        greedy = _side_by_side(runner, 60.0, 70)
    finally:
        runner.stop()
    assert greedy.returns == (70.0, 70.0, 70.0) and greedy.num_cut == 3
