"""Return and traffic of the ways to make learners agree, at equal env steps and replay ratio.

Every run trains `--env-steps` env steps with two learners, then evaluates z greedily (fixed
budget, never a maximum over time). Results are appended to a JSON-lines file, a line per run,
so that an interrupted table goes on where it stopped; `--table` prints it.

    python examples/benchmarks/learning.py --methods ddp,average,diloco,admm,admm-relaxed \
        --local-steps 32,128,512 --shards equal,different --seeds 0,1,2
    python examples/benchmarks/learning.py --table
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import ray
import torch
from ray.tune.registry import register_env

from rllib_admm import ADMMDQNConfig
from rllib_admm.report import interval

METHODS: dict[str, dict[str, Any]] = {
    "ddp": {"weight_sync": "ddp"},
    # What "ddp" computes (tests/test_learner_equivalence.py), without a call per gradient step:
    # one learner, whose minibatch is as large as all of theirs.
    "ddp-joint": {"train_batch_size_per_learner": 128},
    "average": {"rho": 0},
    "diloco": {"rho": 0, "outer_momentum": 0.9, "outer_lr": 0.7},
    "admm": {"over_relaxation": 1.0, "proximal_metric": "adam"},
    "admm-relaxed": {"over_relaxation": 1.5, "proximal_metric": "adam"},
    "admm-euclidean": {"over_relaxation": 1.5, "proximal_metric": "euclidean"},
}
GRAVITIES = (-10.0, -6.0)
ENV = "lander-by-worker"
# What makes two rows the same run: a finished run is not repeated, one with any other setting is.
IDENTITY = (
    "method",
    "local_steps",
    "shards",
    "seed",
    "override",
    "lr",
    "intensity",
    "width",
    "budget",
    "bits",
    "final_lr_fraction",
)
# Settings that older rows do not name, with the value that they ran with.
DEFAULTS = {"final_lr_fraction": 0.1}


def make_env(context: Any) -> gym.Env[Any, Any]:
    """Makes LunarLander-v3; with `different`, workers land under two gravities."""
    different = context.get("different", False)
    gravity = GRAVITIES[max(0, context.worker_index - 1) % 2] if different else GRAVITIES[0]
    return gym.make("LunarLander-v3", gravity=gravity)


def make_config(args: argparse.Namespace, method: str, k: int, shards: str, seed: int) -> Any:
    """Returns the configuration of one run; all methods share everything but the agreement."""
    return (
        ADMMDQNConfig()
        .environment(ENV, env_config={"different": shards == "different"})
        .env_runners(num_env_runners=2, num_envs_per_env_runner=8, num_cpus_per_env_runner=0.25)
        .learners(num_learners=1 if method == "ddp-joint" else 2, num_cpus_per_learner=0.5)
        .training(
            **(
                {
                    "lr": [[0, args.lr], [args.env_steps, args.lr * args.final_lr_fraction]],
                    "training_intensity": args.intensity,
                    "epsilon": [(0, 1.0), (args.env_steps // 5, 0.05)],
                    "num_steps_sampled_before_learning_starts": 2000,
                    "replay_buffer_config": {"type": "EpisodeReplayBuffer", "capacity": 100_000},
                    "target_network_update_freq": 500,
                    "n_step": 3,
                    "local_steps": k,
                    "quantization_bits": args.bits,
                    "train_batch_size_per_learner": 64,
                }
                | METHODS[method]
                | json.loads(args.override)
            )
        )
        .rl_module(
            model_config={"fcnet_hiddens": [args.width, args.width], "fcnet_activation": "relu"}
        )
        .reporting(min_sample_timesteps_per_iteration=5000)
        .debugging(seed=seed, log_level="ERROR")
    )


def greedy_returns(module: Any, gravity: float, episodes: int, seed: int) -> list[float]:
    """Returns the undiscounted returns of `episodes` greedy episodes."""
    env = gym.make_vec("LunarLander-v3", num_envs=episodes, gravity=gravity)
    obs, _ = env.reset(seed=seed)
    returns, alive = np.zeros(episodes), np.ones(episodes, bool)
    while alive.any():
        with torch.no_grad():
            batch = {"obs": torch.from_numpy(obs)}
            actions = module.forward_inference(batch)["actions"].numpy().reshape(-1)
        obs, rewards, terminated, truncated, _ = env.step(actions)
        returns += rewards * alive
        alive &= ~(terminated | truncated)
    env.close()
    return [float(r) for r in returns]


def random_returns(episodes: int) -> list[float]:
    """Returns the control: a policy that acts at random."""
    env = gym.make("LunarLander-v3", gravity=GRAVITIES[0])
    env.action_space.seed(0)
    totals = []
    for episode in range(episodes):
        env.reset(seed=episode)
        total, done = 0.0, False
        while not done:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            total, done = total + float(reward), terminated or truncated
        totals.append(total)
    return totals


def run(args: argparse.Namespace, method: str, k: int, shards: str, seed: int) -> dict[str, Any]:
    """Trains once and returns the row of the results file."""
    algo = make_config(args, method, k, shards, seed).build_algo()
    began, curve, training = time.time(), [], []
    try:
        result: dict[str, Any] = {"num_env_steps_sampled_lifetime": 0}
        while result["num_env_steps_sampled_lifetime"] < args.env_steps:
            result = algo.train()
            steps = result["num_env_steps_sampled_lifetime"]
            mean = float(result["env_runners"].get("episode_return_mean", float("nan")))
            curve.append([steps, mean])
            if steps >= 0.8 * args.env_steps:
                training.append(mean)
        gravities = GRAVITIES if shards == "different" else GRAVITIES[:1]
        greedy = [
            r
            for gravity in gravities
            for r in greedy_returns(algo.get_module(), gravity, args.episodes, 10_000 + seed)
        ]
        consensus = {key: float(value) for key, value in result["consensus"].items()}
    finally:
        algo.stop()
    return {
        "method": method,
        "local_steps": k,
        "shards": shards,
        "seed": seed,
        "budget": args.env_steps,
        "env_steps": steps,
        "bits": args.bits,
        "override": args.override,
        "lr": args.lr,
        "intensity": args.intensity,
        "width": args.width,
        "final_lr_fraction": args.final_lr_fraction,
        "greedy_mean": float(np.mean(greedy)),
        "greedy_std": float(np.std(greedy)),
        "training_mean": float(np.nanmean(training)),
        "training_std_over_time": float(np.nanstd(training)),
        "seconds": time.time() - began,
        "curve": curve,
        **{
            key: consensus[key]
            for key in (
                "gradient_steps_lifetime",
                "bytes_per_gradient_step",
                "compression_per_nic",
                "compression_wire",
                "dual_norm",
            )
        },
    }


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a results file."""
    return [DEFAULTS | json.loads(line) for line in path.read_text().splitlines()]


def print_table(path: Path) -> None:
    """Prints the results file as a Markdown table."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    table = read_rows(path)
    # Runs of different settings are never pooled; what differs within the file is named.
    extra = [k for k in IDENTITY[5:] if len({row[k] for row in table}) > 1]
    for row in table:
        named = " ".join(f"{k}={row[k]}" for k in extra)
        key = (row["shards"], row["local_steps"], row["method"], row["override"], named)
        groups[key].append(row)
    print(
        "| shards | K | method | seeds | greedy return of z: IQM [90% interval] | training return, "
        "last fifth | its std over time | bytes per gradient step | compression per NIC |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for (shards, k, method, override, named), rows in sorted(groups.items()):
        centre, low, high = interval([r["greedy_mean"] for r in rows])
        name = " ".join(part for part in (method, override, named) if part not in ("", "{}"))

        def mean(key: str, rows: list[dict[str, Any]] = rows) -> float:
            return float(np.mean([r[key] for r in rows]))

        # One learner sends nothing: its row stands for replicas that average every gradient.
        joint = method == "ddp-joint"
        traffic = "-" if joint else f"{mean('bytes_per_gradient_step'):,.0f}"
        compression = "1" if joint else f"{mean('compression_per_nic'):,.0f}"
        print(
            f"| {shards} | {k} | {name} | {len(rows)} | "
            f"{centre:.0f} [{low:.0f}, {high:.0f}] | "
            f"{mean('training_mean'):.0f} | {mean('training_std_over_time'):.1f} | "
            f"{traffic} | {compression} |"
        )


def select(rows: list[dict[str, Any]], selection: str) -> list[dict[str, Any]]:
    """Returns the rows that match `key=value,...`; a bare word is the method.

    Raises:
        SystemExit: If no row matches, or the rows differ in more than the seed.
    """
    wanted = dict(
        part.split("=", 1) if "=" in part else ("method", part) for part in selection.split(",")
    )
    found = [row for row in rows if all(str(row[k]) == v for k, v in wanted.items())]
    mixed = [k for k in IDENTITY if k != "seed" and len({row[k] for row in found}) > 1]
    if not found or mixed:
        raise SystemExit(f"{selection!r}: {'no row' if not found else f'rows differ in {mixed}'}")
    return sorted(found, key=lambda row: row["seed"])


def print_comparison(path: Path, first: str, second: str) -> None:
    """Prints the difference of two settings' greedy returns with its bootstrap interval."""
    rows = read_rows(path)
    a, b = (
        np.array([row["greedy_mean"] for row in select(rows, selection)])
        for selection in (first, second)
    )
    rng = np.random.default_rng(0)
    draws = a[rng.integers(0, len(a), (5000, len(a)))].mean(axis=1) - b[
        rng.integers(0, len(b), (5000, len(b)))
    ].mean(axis=1)
    low, high = np.percentile(draws, [10, 90])
    print(f"{first}: {np.round(a).tolist()} mean={a.mean():.0f} median={np.median(a):.0f}")
    print(f"{second}: {np.round(b).tolist()} mean={b.mean():.0f} median={np.median(b):.0f}")
    print(
        f"difference={a.mean() - b.mean():.0f} lower_90_bound={low:.0f} upper_90_bound={high:.0f} "
        f"minus_10_percent={-0.1 * abs(b.mean()):.0f}"
    )


def main(argv: list[str] | None = None) -> int:
    """Parses the command line; runs what is missing, or prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default="ddp,average,diloco,admm,admm-relaxed")
    parser.add_argument("--local-steps", default="32,128,512")
    parser.add_argument("--shards", default="equal,different")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--env-steps", type=int, default=120_000)
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--final-lr-fraction", type=float, default=0.1)
    parser.add_argument("--intensity", type=float, default=64.0)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--bits", type=int, default=8)
    parser.add_argument("--override", default="{}", help="JSON of .training() options")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/learning.jsonl"))
    parser.add_argument("--table", action="store_true")
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar="SELECTION",
        help="two settings, e.g. admm-relaxed,local_steps=100 ddp-joint",
    )
    parser.add_argument("--random", action="store_true", help="print the random control")
    args = parser.parse_args(argv)
    if args.table:
        print_table(args.out)
        return 0
    if args.compare:
        print_comparison(args.out, *args.compare)
        return 0
    if args.random:
        print(f"random policy: {np.mean(random_returns(args.episodes)):.0f}")
        return 0
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.touch()
    done = {tuple(row[key] for key in IDENTITY) for row in read_rows(args.out)}
    register_env(ENV, make_env)
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR")
    cells = itertools.product(
        [int(s) for s in args.seeds.split(",")],
        args.shards.split(","),
        [int(k) for k in args.local_steps.split(",")],
        args.methods.split(","),
    )
    for seed, shards, k, method in cells:
        settings = (args.override, args.lr, args.intensity, args.width, args.env_steps, args.bits)
        if (method, k, shards, seed, *settings, args.final_lr_fraction) in done:
            continue
        row = run(args, method, k, shards, seed)
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print({key: row[key] for key in row if key != "curve"}, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
