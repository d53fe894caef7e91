"""Searches penalty, local steps, bits and learning rate of ADMMDQN with ASHA in Ray Tune.

Trials that learn slowly are ended early; Optuna proposes the settings if it is installed
(`pip install 'rllib-admm[optuna]'`), else they are drawn at random.

    python examples/tune_sweep.py --env CartPole-v1 --num-samples 16 --env-steps 60000

Ends with the best settings; `rllib report` compares the trials.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from rich.console import Console

from rllib_admm import ADMMDQNConfig
from rllib_admm.cli.progress import ProgressReporter

METRIC = "env_runners/episode_return_mean"
STEPS = "num_env_steps_sampled_lifetime"
SPACE = {
    "rho_strength": tune.loguniform(0.1, 10.0),
    "local_steps": tune.choice([32, 64, 128, 256]),
    "quantization_bits": tune.choice([4, 8, 16]),
    "lr": tune.loguniform(1e-4, 2e-3),
}


def make_space(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings of all trials, with what is searched."""
    config = (
        ADMMDQNConfig()
        .environment(args.env)
        .env_runners(num_env_runners=2, num_envs_per_env_runner=8, num_cpus_per_env_runner=0.25)
        .learners(num_learners=2, num_cpus_per_learner=0.5)
        .resources(num_cpus_for_main_process=0.25)
        .training(
            train_batch_size_per_learner=64,
            training_intensity=64,
            num_steps_sampled_before_learning_starts=1000,
            n_step=3,
            epsilon=[(0, 1.0), (args.env_steps // 5, 0.05)],
        )
        .rl_module(model_config={"fcnet_hiddens": [128, 128], "fcnet_activation": "relu"})
        .reporting(min_sample_timesteps_per_iteration=args.env_steps // 20)
        .debugging(seed=args.seed, log_level="ERROR")
    )
    return {**config.to_dict(), **SPACE}


def main(argv: list[str] | None = None) -> int:
    """Searches, and prints the best settings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--num-samples", type=int, default=16)
    parser.add_argument("--env-steps", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--storage-path", type=Path, default=Path("results"))
    args = parser.parse_args(argv)
    search = None
    if importlib.util.find_spec("optuna") is not None:
        from ray.tune.search import ConcurrencyLimiter
        from ray.tune.search.optuna import OptunaSearch

        search = ConcurrencyLimiter(OptunaSearch(seed=args.seed), max_concurrent=1)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    progress = ProgressReporter("search", Console())
    tuner = tune.Tuner(
        "ADMMDQN",
        param_space=make_space(args),
        tune_config=tune.TuneConfig(
            metric=METRIC,
            mode="max",
            num_samples=args.num_samples,
            search_alg=search,
            scheduler=ASHAScheduler(
                time_attr=STEPS, max_t=args.env_steps, grace_period=args.env_steps // 4
            ),
        ),
        run_config=tune.RunConfig(
            # With the time, so that a repeated search is not added to the last one.
            name=f"admm-sweep_{time.strftime('%Y-%m-%d_%H-%M-%S')}",
            storage_path=str(args.storage_path.resolve()),
            stop={STEPS: args.env_steps},
            callbacks=[progress],
            verbose=0,
        ),
    )
    with progress:
        results = tuner.fit()
    best = results.get_best_result()
    print(
        f"last return {best.metrics['env_runners']['episode_return_mean']:.1f} of the best trial:"
    )
    print({key: best.config[key] for key in SPACE})
    print(f"results: {results.experiment_path}")
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
