"""The command as a user meets it: in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

TINY_DQN = """\
tiny-dqn:
  run: DQN
  env: CartPole-v1
  stop:
    num_env_steps_sampled_lifetime: 400
  config:
    num_env_runners: 0
    learners: {num_learners: 0}
    num_steps_sampled_before_learning_starts: 100
    min_time_s_per_iteration: 0
    min_sample_timesteps_per_iteration: 200
    model: {fcnet_hiddens: [16]}
"""


def rllib(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rllib_admm", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=100,
    )


def test_help_needs_neither_ray_nor_torch() -> None:
    # The package's own `__init__` registers the algorithm and may import Ray; the command may not.
    program = """\
        import pathlib, sys, types
        package = types.ModuleType("rllib_admm")
        package.__path__ = [sys.argv.pop(1)]
        sys.modules["rllib_admm"] = package
        from rllib_admm.cli import main
        try:
            main()
        except SystemExit:
            pass
        print(sorted({"gymnasium", "ray", "torch"} & set(sys.modules)))
        """
    package = Path(__file__).parents[1] / "rllib_admm"
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), package, "train", "file", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    seconds = time.monotonic() - start
    assert "--storage-path" in done.stdout
    assert done.stdout.rstrip().endswith("[]"), done.stdout + done.stderr
    assert seconds < 5  # 0.3 s on an idle machine


def test_an_error_is_one_line_and_code_2(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(TINY_DQN.replace("model:", "num_env_runer: 1\n    model:"))
    done = rllib("train", "file", path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f"rllib: error: {path}:12: DQN has no setting `num_env_runer`; "
        "did you mean `num_env_runners`?"
    ]


def test_missing_file_is_one_line_and_vv_shows_the_traceback(tmp_path: Path) -> None:
    done = rllib("train", "file", tmp_path / "none.yaml")
    assert done.returncode == 2
    assert done.stderr == f"rllib: error: no such file: {tmp_path / 'none.yaml'}\n"
    done = rllib("train", "file", tmp_path / "none.yaml", "-vv")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert done.stderr.endswith(f"rllib: error: no such file: {tmp_path / 'none.yaml'}\n")


def test_a_run_that_cannot_be_placed_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(TINY_DQN.replace("num_env_runners: 0", "num_env_runners: 3"))
    done = rllib("train", "file", path, "--ray-num-cpus", "2", cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "the run asks for 4 CPU, the Ray cluster has 2" in done.stderr
    assert "3 env runners at 1" in done.stderr
    assert "num_cpus_per_env_runner: 0.25" in done.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.timeout(200)
def test_a_run_ends_with_folders_and_the_greedy_return(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(TINY_DQN)
    done = rllib("train", "file", path, "--ray-num-cpus", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *reports, result, checkpoint, greedy = done.stdout.splitlines()
    assert re.match(r"iter 1  env steps 200  return \d+\.\d ", reports[0])
    assert re.match(r"iter 2  env steps 400  .*grad steps \d+", reports[1])
    folder = Path(result.removeprefix("result folder:").strip())
    assert folder.is_relative_to(tmp_path / "results")
    assert (folder / "result.json").is_file()
    saved = Path(checkpoint.removeprefix("checkpoint folder:").strip())
    assert saved.parent == folder
    assert (saved / "learner_group").is_dir()
    assert re.fullmatch(r"greedy return: +\d+\.\d\d \+- \d+\.\d\d \(20 episodes\)", greedy)

    film, rows = tmp_path / "film.gif", tmp_path / "rows.parquet"
    done = rllib("evaluate", saved, "--render", film, "--out", rows, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # The same seeds, so the same number.
    assert done.stdout.splitlines()[0] == greedy
    table = pq.read_table(rows).to_pydict()
    mean = float(greedy.split()[2])
    assert len(table["return"]) == 20 and abs(sum(table["return"]) / 20 - mean) < 0.006
    with Image.open(film) as picture:
        assert picture.n_frames >= 5 and picture.size[0] >= 300
        picture.seek(0)
        first = picture.convert("RGB").tobytes()
        picture.seek(picture.n_frames - 1)
        assert picture.convert("RGB").tobytes() != first

    done = rllib("evaluate", saved.parent)
    assert done.returncode == 2 and f"the newest below it is {saved}" in done.stderr
    done = rllib(
        *("train", "--algo", "ADMMDQN", "--env", "CartPole-v1", "--restore", saved),
        *("--stop", '{"training_iteration": 1}'),
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert done.stderr == f"rllib: error: {saved} is a checkpoint of DQN, not of ADMMDQN\n"


@pytest.mark.timeout(200)
def test_train_without_a_file_and_from_a_checkpoint(tmp_path: Path) -> None:
    config = {
        "num_workers": 0,
        "num_learners": 0,
        "num_steps_sampled_before_learning_starts": 100,
        "min_sample_timesteps_per_iteration": 200,
        "model_config": {"fcnet_hiddens": [16]},
    }
    arguments = [
        *("train", "--run", "rllib_admm:ADMMDQN", "--env", "CartPole-v1"),
        *("--config", json.dumps(config), "--ray-num-cpus", "1", "--name", "mine"),
    ]
    done = rllib(*arguments, "--stop", '{"timesteps_total": 400}', cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "rllib: hint: `timesteps_total` is now `num_env_steps_sampled_lifetime`",
        "rllib: hint: `num_workers` is now `num_env_runners`",
    ]
    (saved,) = (tmp_path / "results").glob("mine_*/*/checkpoint_*")
    stop = '{"num_env_steps_sampled_lifetime": 1000}'
    done = rllib(*arguments, "--stop", stop, "--restore", saved, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # It went on from 400, rather than from 0.
    first = re.search(r"env steps ([\d,]+)", done.stdout)
    assert first is not None and int(first[1].replace(",", "")) > 400


def test_a_python_file_trains_its_config(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from rllib_admm import ADMMDQNConfig\n"
        "config = ADMMDQNConfig().environment('CartPole-v1').learners(num_learners=0)\n"
        "config.training(num_steps_sampled_before_learning_starts=100)\n"
        "config.env_runners(num_env_runners=0)\n"
        "stop = {'training_iteration': 1}\n"
    )
    done = rllib("train", "file", path, "--ray-num-cpus", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "greedy return" in done.stdout
    path.write_text("config = 3\n")
    done = rllib("train", "file", path)
    assert done.returncode == 2 and "no `config` that is an AlgorithmConfig" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "say what to train: --algo and --env"),
        (["train", "--algo", "ADMMDQM", "--env", "CartPole-v1", "--stop", '{"a": 1}'], "`ADMMDQN`"),
        (["train", "--algo", "ADMMDQN", "--stop", '{"a": 1}'], "has no `env`"),
        (["train", "--algo", "DQN", "--env", "CartPole-v1"], "has no `stop`"),
        (["train", "--algo", "DQN", "--config", "{"], "--config: not valid JSON"),
        (["train", "--algo", "DQN", "file", "x.yaml"], "options stand behind `file`"),
        (["evaluate", "none"], "no such checkpoint folder: none"),
        (["example", "run", "cartpole-admm"], "did you mean `cartpole-admm-dqn`?"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str) -> None:
    done = rllib(*arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and len(done.stderr.splitlines()) == 1


def test_examples_are_listed_and_copied(tmp_path: Path) -> None:
    names = rllib("example", "list").stdout.split()
    assert "cartpole-admm-dqn" in names
    done = rllib("example", "get", "cartpole-admm-dqn", tmp_path)
    copied = tmp_path / "cartpole-admm-dqn.yaml"
    assert done.stdout.strip() == str(copied) and "run: ADMMDQN" in copied.read_text()
    done = rllib("example", "get", "cartpole-admm-dqn", tmp_path)
    assert done.returncode == 2 and "exists already" in done.stderr
