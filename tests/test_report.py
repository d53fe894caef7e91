"""`rllib report`: what it reads, its numbers, its files, and folders that are broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.stats import trim_mean
from typer.testing import CliRunner

from rllib_admm.cli.app import app
from rllib_admm.report import interquartile_mean, interval, read_runs, rows, write_greedy_returns


def result(steps: float, value: float, *, seed: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "num_env_steps_sampled_lifetime": steps,
        "time_total_s": steps / 100,
        "env_runners": {"episode_return_mean": value},
        "config": {"env": "CartPole-v1", "seed": seed, "lr": 0.001},
        **more,
    }


def consensus(gradient_steps: float, each_way: float) -> dict[str, Any]:
    return {
        "gradient_steps_lifetime": gradient_steps,
        "bytes_up_lifetime": each_way,
        "bytes_down_lifetime": each_way,
        "bytes_broadcast_lifetime": each_way / 2,
    }


def write_trial(folder: Path, results: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "params.json").write_text("{}")
    (folder / "result.json").write_text("".join(json.dumps(r) + "\n" for r in results))
    return folder


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """Three seeds that climb by 100 per report, of which each next one is 10 better."""
    folder = tmp_path / "cartpole-admm_2026-01-02_03-04-05"
    for seed in range(3):
        write_trial(
            folder / f"trial_{seed}",
            [
                result(
                    1000 * i,
                    100.0 * i + 10 * seed,
                    seed=seed,
                    consensus=consensus(100 * i, 4000 * i),
                    done=i == 5,
                )
                for i in range(1, 6)
            ],
        )
        write_greedy_returns(folder / f"trial_{seed}", [490.0, 500.0])
    return folder


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 11])
def test_interquartile_mean_is_the_trimmed_mean(n: int) -> None:
    values = np.random.default_rng(n).normal(size=(n, 3))
    np.testing.assert_allclose(interquartile_mean(values), trim_mean(values, 0.25, axis=0))


def test_interval_covers_the_mean_nine_times_in_ten() -> None:
    rng = np.random.default_rng(1)
    covered = [
        low <= 0.0 <= high for _, low, high in (interval(rng.normal(size=30)) for _ in range(200))
    ]
    assert 0.82 <= np.mean(covered) <= 0.97
    assert interval([3.0]) == (3.0, 3.0, 3.0)


def test_the_table_by_hand(experiment: Path) -> None:
    runs, problems = read_runs([experiment])
    assert not problems and [run.seed for run in runs] == [0, 1, 2]
    (row,) = rows(runs)
    assert row.group == "cartpole-admm" and row.env == "CartPole-v1"
    assert (row.num_runs, row.num_unfinished, row.env_steps) == (3, 0, 5000)
    # CartPole's own threshold, 475: at 500, 510, 520 all have it.
    assert (row.threshold, row.num_reached) == (475.0, 3)
    assert row.steps_to_threshold == (5000.0, 5000.0, 5000.0)
    # The last fifth of 5000 env steps are the reports at 4000 and 5000.
    assert row.final_return is not None
    assert row.final_return.centre == pytest.approx(np.mean([450, 460, 470]))
    assert row.final_return.low < row.final_return.centre < row.final_return.high
    assert row.variance == pytest.approx(50.0**2)
    assert row.greedy_return == (495.0, 495.0, 495.0)
    assert row.bytes_per_gradient_step == pytest.approx(20_000 * 2 / 500)
    assert row.gradient_steps_per_s == pytest.approx(500 / 50)
    assert row.env_steps_per_s == pytest.approx(100.0) and row.seconds == 50.0
    (early,) = rows(runs, threshold=405.0)
    assert early.num_reached == 3 and early.steps_to_threshold is not None
    assert early.steps_to_threshold.centre == pytest.approx(np.mean([5000, 4000, 4000]))
    (never,) = rows(runs, threshold=1000.0)
    assert never.num_reached == 0 and never.steps_to_threshold is None


def test_settings_that_differ_name_the_groups(tmp_path: Path) -> None:
    for i, (lr, seed) in enumerate([(0.1, 0), (0.1, 1), (0.2, 0)]):
        report = result(100, 1.0, done=True)
        report["config"] |= {"lr": lr, "seed": seed}
        write_trial(tmp_path / "sweep" / f"t{i}", [report])
    runs, _ = read_runs([tmp_path])
    assert [run.group for run in runs] == ["sweep lr=0.1", "sweep lr=0.1", "sweep lr=0.2"]


def test_a_run_that_went_on_from_a_checkpoint_counts_once(tmp_path: Path) -> None:
    write_trial(
        tmp_path / "e" / "t",
        [result(s, v) for s, v in [(100, 1), (200, 2), (300, 99), (200, 5), (400, 6)]],
    )
    (run,), _ = read_runs([tmp_path])
    assert run.env_steps.tolist() == [100, 200, 400] and run.returns.tolist() == [1, 5, 6]


def test_runs_of_stock_algorithms_are_read(tmp_path: Path) -> None:
    learners = {
        "__all_modules__": {"num_module_steps_trained_lifetime": 640},
        "default_policy": {"module_train_batch_size_mean": 32.0},
    }
    write_trial(tmp_path / "e" / "t", [result(100, 1, learners=learners, done=True)])
    runs, _ = read_runs([tmp_path])
    (row,) = rows(runs)
    assert row.gradient_steps_per_s == pytest.approx(20.0)
    assert row.bytes_per_gradient_step is None


def test_page_and_picture_stand_alone_and_broken_folders_are_named(
    experiment: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    broken = tmp_path / "broken"
    write_trial(broken / "torn", [result(100, 20.0), result(200, 30.0)])
    with (broken / "torn" / "result.json").open("a") as file:
        file.write('{"num_env_steps_sampled_li')
    (broken / "silent").mkdir()
    (broken / "silent" / "params.json").write_text("{}")
    write_trial(broken / "supervised", [{"loss": 1.0}])
    (write_trial(broken / "list", []) / "result.json").write_text("[1]\n")
    (write_trial(broken / "binary", []) / "result.json").write_bytes(b"\xff\x00\x12")
    out = tmp_path / "out"
    folders = [experiment, tmp_path / "empty", broken, tmp_path / "missing"]
    done = CliRunner().invoke(app, ["report", *map(str, folders), "--out", str(out)])
    assert done.exit_code == 0, done.output
    for name, reason in {
        "empty": "no results of Ray Tune in it",
        "missing": "no such folder",
        "broken/torn": "line 3: not valid JSON",
        "broken/silent": "no result yet",
        "broken/supervised": "no result with `num_env_steps_sampled_lifetime`",
        "broken/list": "not an object",
        "broken/binary": "not valid JSON",
    }.items():
        (line,) = [line for line in done.output.splitlines() if f"{name}: " in line]
        assert line.startswith("rllib: hint: ") and reason in line
    assert "cartpole-admm" in done.output and "495.0" in done.output
    with Image.open(out / "report.png") as picture:
        assert picture.width > 1000 and np.unique(np.asarray(picture.convert("L"))).size > 20
    page = (out / "report.html").read_text()
    assert "data:image/png;base64," in page and "cartpole-admm" in page
    assert 'src="http' not in page and "href" not in page
    assert "broken/silent" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no run in nowhere"),
        (["{}", "--metric", "env_runners/episode_return"], "no run has a number at `env_runners/"),
    ],
)
def test_nothing_to_report_is_an_error(
    arguments: list[str], message: str, experiment: Path, tmp_path: Path
) -> None:
    command = ["report", *(a.format(experiment) for a in arguments), "--out", str(tmp_path / "o")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2 and message in done.output
    assert not (tmp_path / "o").exists()
