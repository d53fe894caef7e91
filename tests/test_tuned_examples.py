"""Every tuned example trains through the command, in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

EXAMPLES = sorted((Path(__file__).parents[1] / "tuned_examples").glob("*.yaml"))
# Most of a short run is starting and waiting, so some go on beside each other.
AT_ONCE = 2


def shorten(path: Path, folder: Path) -> Path:
    """Writes the file with two iterations that learn, and episodes that soon end."""
    experiments = yaml.safe_load(path.read_text())
    for body in experiments.values():
        config = body["config"]
        body["stop"] = {"num_env_steps_sampled_lifetime": 1600}
        config["min_sample_timesteps_per_iteration"] = 400
        config["num_steps_sampled_before_learning_starts"] = 200
        config["training_intensity"] = 16
        config.setdefault("env_config", {})["max_episode_steps"] = 100
        config.pop("evaluation_interval", None)
        if "local_steps" in config:
            config["local_steps"] = min(config["local_steps"], 8)
    short = folder / path.name
    short.write_text(yaml.safe_dump(experiments))
    return short


def train(path: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    short = shorten(path, folder)
    command = [sys.executable, "-m", "rllib_admm", "train", "file", str(short)]
    return subprocess.run(
        [*command, "--ray-num-cpus", "2", "--storage-path", str(folder / path.stem)],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=230,
    )


def in_here(item: pytest.Item) -> bool:
    return getattr(item, "originalname", "") == "test_example_trains"


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    folder = tmp_path_factory.mktemp("tuned")
    selected = {item.callspec.params["name"] for item in request.session.items if in_here(item)}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {
            path.stem: pool.submit(train, path, folder)
            for path in EXAMPLES
            if path.stem in selected
        }


@pytest.mark.parametrize("name", [path.stem for path in EXAMPLES])
def test_example_trains(
    name: str, runs: dict[str, Future[subprocess.CompletedProcess[str]]]
) -> None:
    done = runs[name].result()
    assert done.returncode == 0, done.stdout + done.stderr
    experiments = yaml.safe_load((EXAMPLES[0].parent / f"{name}.yaml").read_text())
    assert done.stdout.count("greedy return:") == len(experiments)
    assert len(re.findall(r"grad steps [1-9]", done.stdout)) >= len(experiments)


def test_every_environment_has_its_three_algorithms_and_their_comparison() -> None:
    names = {path.stem for path in EXAMPLES}
    for env in ("cartpole", "lunarlander"):
        assert {f"{env}-{kind}" for kind in ("admm-dqn", "apex", "dqn", "compare")} <= names
        # The comparison is of the same settings.
        compared = yaml.safe_load((EXAMPLES[0].parent / f"{env}-compare.yaml").read_text())
        for name, body in compared.items():
            alone = yaml.safe_load((EXAMPLES[0].parent / f"{name}.yaml").read_text())
            assert alone[name] == body
