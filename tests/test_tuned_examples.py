"""Every tuned example trains through the command, in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

EXAMPLES = sorted((Path(__file__).parents[1] / "tuned_examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.timeout(230)
def test_example_trains(path: Path, tmp_path: Path) -> None:
    experiments = yaml.safe_load(path.read_text())
    for body in experiments.values():
        config = body["config"]
        # Two iterations that learn; evaluations are as long as the environment's episodes.
        body["stop"] = {"num_env_steps_sampled_lifetime": 1200}
        config["min_sample_timesteps_per_iteration"] = 600
        config["num_steps_sampled_before_learning_starts"] = 400
        config.pop("evaluation_interval", None)
        config["local_steps"] = min(config.get("local_steps", 16), 16)
        if body["run"] == "DQN":
            del config["local_steps"]
    short = tmp_path / path.name
    short.write_text(yaml.safe_dump(experiments))
    done = subprocess.run(
        [sys.executable, "-m", "rllib_admm", "train", "file", str(short), "--ray-num-cpus", "2"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=220,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("greedy return:") == len(experiments)
    assert re.search(r"grad steps [1-9]", done.stdout)


def test_every_environment_has_its_three_algorithms_and_their_comparison() -> None:
    names = {path.stem for path in EXAMPLES}
    for env in ("cartpole", "lunarlander"):
        assert {f"{env}-{kind}" for kind in ("admm-dqn", "apex", "dqn", "compare")} <= names
        # The comparison is of the same settings.
        compared = yaml.safe_load((EXAMPLES[0].parent / f"{env}-compare.yaml").read_text())
        for name, body in compared.items():
            alone = yaml.safe_load((EXAMPLES[0].parent / f"{name}.yaml").read_text())
            assert alone[name] == body
