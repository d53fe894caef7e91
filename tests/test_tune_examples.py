"""The Tune examples run, each in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: str, storage: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments, "--storage-path", str(storage)],
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_comparison_trains_every_method_and_reports_it(tmp_path: Path) -> None:
    out = run("tune_compare.py", "--smoke", storage=tmp_path)
    for method in ("admm", "apex", "diloco", "dqn", "ddp"):
        assert f"{method}, seed 0: greedy return" in out
        (result,) = tmp_path.glob(f"{method}_*/*/result.json")
        last = json.loads(result.read_text().splitlines()[-1])
        assert last["num_env_steps_sampled_lifetime"] >= 800 and last["done"]
        assert f"│ {method} " in out
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000


def test_the_search_ends_with_the_best_settings(tmp_path: Path) -> None:
    out = run("tune_sweep.py", "--num-samples", "1", "--env-steps", "2000", storage=tmp_path)
    assert re.search(r"last return -?\d+\.\d of the best trial:", out)
    assert "'rho_strength': " in out and "'local_steps': " in out
