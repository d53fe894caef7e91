"""Compares ADMMDQN with RLlib's DQN, Ape-X, synchronous averaging and DiLoCo in Ray Tune.

Every method gets the same env steps, replay ratio, network, batch per gradient step, learning
rate, epsilon and seeds; runs go one after the other, so that none takes another's cores. Stock
DQN has no remote learner: with several, RLlib 2.60 gives priorities to transitions that they do
not belong to (`tests/test_apex.py`). It is slow; `--slow-env-steps` gives it and "ddp" a smaller
budget, which then stands in the table.

    python examples/tune_compare.py --env-steps 200000 --slow-env-steps 50000 --seeds 0,1,2,3,4
    python examples/tune_compare.py --smoke

Ends with the table of `rllib report`, whose picture and page are in the storage path.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")

import ray
from ray import tune
from ray.rllib.algorithms.dqn import DQNConfig

from rllib_admm import ADMMDQNConfig, ApexDQNConfig
from rllib_admm.cli import report
from rllib_admm.cli.greedy import greedy_return
from rllib_admm.report import write_greedy_returns

GREEDY_EPISODES = 20
BATCH = 64
# Runs that cost a call per gradient step, or RLlib's own loop.
SLOW = ("dqn", "ddp")
METHODS: dict[str, dict[str, Any]] = {
    "admm": {"quantization_bits": 4, "full_precision_every": 20},
    "apex": {},
    "diloco": {"rho": 0, "outer_momentum": 0.9, "outer_lr": 0.7},
    "dqn": {},
    "ddp": {"weight_sync": "ddp"},
}


def make_config(args: argparse.Namespace, method: str, budget: int) -> Any:
    """Returns a method's configuration, over all seeds."""
    classes = {"apex": ApexDQNConfig, "dqn": DQNConfig}
    config = classes.get(method, ADMMDQNConfig)().environment(args.env)
    options: dict[str, Any] = {
        "lr": [[0, args.lr], [budget, args.lr / 10]],
        "train_batch_size_per_learner": BATCH,
        "training_intensity": args.intensity,
        "num_steps_sampled_before_learning_starts": args.warm_up,
        "target_network_update_freq": 500,
        "n_step": 3,
        "replay_buffer_config": {
            "type": "PrioritizedEpisodeReplayBuffer",
            "capacity": 100_000,
            "alpha": 0.6,
            "beta": 0.4,
        },
    }
    if method != "apex":  # which has an epsilon for each environment
        options["epsilon"] = [(0, 1.0), (budget // 5, 0.05)]
    if method != "dqn":
        options["local_steps"] = args.local_steps
    config.training(**options, **METHODS[method])
    learners = {"apex": 1, "dqn": 0}.get(method, 2)
    config.env_runners(num_env_runners=2, num_envs_per_env_runner=8, num_cpus_per_env_runner=0.25)
    config.learners(num_learners=learners, num_cpus_per_learner=0.5)
    config.resources(num_cpus_for_main_process=0.25)
    config.rl_module(model_config={"fcnet_hiddens": [128, 128], "fcnet_activation": "relu"})
    config.reporting(min_sample_timesteps_per_iteration=args.report_every)
    config.debugging(
        seed=tune.grid_search([int(seed) for seed in args.seeds.split(",")]), log_level="ERROR"
    )
    return config


def run(args: argparse.Namespace, method: str) -> Path:
    """Trains all seeds of a method, keeps their greedy returns, and returns the result folder."""
    budget = args.env_steps
    if method in SLOW and args.slow_env_steps is not None:
        budget = min(budget, args.slow_env_steps)
    config = make_config(args, method, budget)
    results = tune.Tuner(
        {"apex": "APEX", "dqn": "DQN"}.get(method, "ADMMDQN"),
        param_space=config,
        tune_config=tune.TuneConfig(max_concurrent_trials=1),
        run_config=tune.RunConfig(
            # With the time, so that a repeated comparison is not added to the last one.
            name=f"{method}_{time.strftime('%Y-%m-%d_%H-%M-%S')}",
            storage_path=str(args.storage_path.resolve()),
            stop={"num_env_steps_sampled_lifetime": budget},
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
            verbose=0,
        ),
    ).fit()
    for result in results:
        if result.error is not None or result.checkpoint is None:
            print(f"{method}: failed: {result.path}/error.txt", file=sys.stderr)
            continue
        seeded = config.copy(copy_frozen=False).debugging(seed=result.config["seed"])
        returns = greedy_return(seeded, Path(result.checkpoint.path), GREEDY_EPISODES)
        write_greedy_returns(Path(result.path), returns.returns)
        print(f"{method}, seed {result.config['seed']}: greedy return {returns}", flush=True)
    return Path(results.experiment_path)


def main(argv: list[str] | None = None) -> int:
    """Runs the methods that are asked for, then writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="LunarLander-v3")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--env-steps", type=int, default=200_000)
    parser.add_argument("--slow-env-steps", type=int, help=f"a smaller budget for {SLOW}")
    parser.add_argument("--intensity", type=float, default=64.0)
    parser.add_argument("--local-steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--warm-up", type=int, default=2000)
    parser.add_argument("--report-every", type=int, default=5000)
    parser.add_argument("--storage-path", type=Path, default=Path("results/compare"))
    parser.add_argument("--smoke", action="store_true", help="CartPole-v1, a minute in all")
    args = parser.parse_args(argv)
    if args.smoke:
        args.env, args.seeds, args.env_steps, args.local_steps = "CartPole-v1", "0", 800, 8
        args.intensity, args.warm_up, args.report_every = 16.0, 200, 200
    unknown = set(args.methods.split(",")) - set(METHODS)
    if unknown:
        parser.error(f"--methods: unknown {sorted(unknown)}; known are {', '.join(METHODS)}")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    folders = [run(args, method) for method in args.methods.split(",")]
    ray.shutdown()
    report.write(folders, out=args.storage_path / "report")
    return 0


if __name__ == "__main__":
    sys.exit(main())
