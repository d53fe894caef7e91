"""Gradient steps per second of ADMMDQN beside RLlib's DQN and beside a bare torch loop.

LunarLander-v3, batch 64, 256x256, two learners, one EnvRunner with 16 environments,
`training_intensity` 32 on both sides. Both algorithms live in one Ray cluster and are trained
in turns, so that whatever else happens on the machine happens to both. The bare loop (same
network, batch, loss and optimizer, data in memory, one process per core) is the limit.

    python examples/benchmarks/throughput.py            # on an otherwise idle machine
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from typing import Any

import ray
import torch
from ray.rllib.algorithms.dqn import DQNConfig
from torch import nn

from rllib_admm import ADMMDQNConfig

BATCH = 64
WIDTH = 256


def common(config: DQNConfig, learners: int, envs: int, intensity: float) -> DQNConfig:
    """Applies what both sides share."""
    return (
        config.environment("LunarLander-v3")
        .env_runners(num_env_runners=1, num_envs_per_env_runner=envs, num_cpus_per_env_runner=0.5)
        .learners(num_learners=learners, num_cpus_per_learner=0.5)
        .training(
            train_batch_size_per_learner=BATCH,
            training_intensity=intensity,
            num_steps_sampled_before_learning_starts=1000,
        )
        .rl_module(model_config={"fcnet_hiddens": [WIDTH, WIDTH]})
        .reporting(min_sample_timesteps_per_iteration=1)
        .debugging(seed=0, log_level="ERROR")
    )


class Turns:
    """One algorithm and what it did in its turns."""

    def __init__(self, name: str, algo: Any) -> None:
        self.name, self.algo = name, algo
        self.gradients: list[float] = []
        self.env_steps: list[float] = []

    def _counts(self) -> tuple[float, float, float]:
        result = self.algo.train()
        modules = result.get("learners", {}).get("__all_modules__", {})
        trained = modules.get("num_module_steps_trained_lifetime", 0)
        return time.perf_counter(), trained / BATCH, result["num_env_steps_sampled_lifetime"]

    def warm_up(self) -> None:
        """Trains until learning has begun and a few steps are done."""
        while self._counts()[1] < 200:
            pass

    def take(self, seconds: float) -> None:
        """Trains for about `seconds` and notes both rates."""
        t0, g0, e0 = self._counts()
        t1, g1, e1 = t0, g0, e0
        while t1 - t0 < seconds:
            t1, g1, e1 = self._counts()
        self.gradients.append((g1 - g0) / (t1 - t0))
        self.env_steps.append((e1 - e0) / (t1 - t0))


class QNetwork(nn.Module):
    """The same network as RLlib's default module for LunarLander."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )
        self.af, self.vf = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns dueling Q-values, (B, 4)."""
        h = self.encoder(x)
        a = self.af(h)
        return a - a.mean(-1, keepdim=True) + self.vf(h)


def bare_loop(seconds: float, queue: Any) -> None:
    """Double-DQN steps on random data in memory; puts steps per second."""
    torch.set_num_threads(1)
    q, target = QNetwork(), QNetwork()
    params = list(q.parameters())
    optimizer = torch.optim.Adam(params, lr=5e-4, fused=True)
    n = 50_000
    obs, rewards = torch.randn(n, 8), torch.randn(n)
    actions, live = torch.randint(0, 4, (n, 1)), torch.ones(n)
    steps, began = 0, 0.0
    for i in range(10**9):
        if i == 100:
            steps, began = 0, time.perf_counter()
        rows = torch.randint(0, n - 1, (BATCH,))
        with torch.no_grad():
            nxt = obs[rows + 1]
            best = q(nxt).argmax(1, keepdim=True)
            y = rewards[rows] + 0.99 * live[rows] * target(nxt).gather(1, best).squeeze(1)
        loss = nn.functional.huber_loss(q(obs[rows]).gather(1, actions[rows]).squeeze(1), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(params, 40.0)
        optimizer.step()
        steps += 1
        if i > 100 and time.perf_counter() - began > seconds:
            break
    queue.put(steps / (time.perf_counter() - began))


def limit(seconds: float, processes: int) -> float:
    """Returns the bare loop's gradient steps per second, summed over processes."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [context.Process(target=bare_loop, args=(seconds, queue)) for _ in range(processes)]
    for worker in workers:
        worker.start()
    total = sum(queue.get() for _ in workers)
    for worker in workers:
        worker.join()
    return float(total)


def main(argv: list[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="per turn")
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--intensity", type=float, default=32.0)
    parser.add_argument("--local-steps", type=int, default=512)
    args = parser.parse_args(argv)
    cores = len(os.sched_getaffinity(0))
    print(f"cores={cores} load={os.getloadavg()[0]:.2f}")
    bare = limit(args.seconds, min(cores, args.learners))
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR")
    shared = (args.learners, args.envs, args.intensity)
    ours = common(ADMMDQNConfig().training(local_steps=args.local_steps), *shared)
    stock = common(DQNConfig(), *shared)
    turns = [Turns("rllib_admm ADMMDQN", ours.build_algo()), Turns("RLlib DQN", stock.build_algo())]
    for turn in turns:
        turn.warm_up()
    for i in range(args.turns):
        for turn in turns:
            turn.take(args.seconds)
            print(
                f"turn={i} {turn.name}: gradient_steps_per_s={turn.gradients[-1]:.1f} "
                f"env_steps_per_s={turn.env_steps[-1]:.1f}",
                flush=True,
            )
    for turn in turns:
        print(
            f"{turn.name}: median gradient_steps_per_s={statistics.median(turn.gradients):.1f} "
            f"env_steps_per_s={statistics.median(turn.env_steps):.1f}"
        )
    mine, theirs = (statistics.median(turn.gradients) for turn in turns)
    pairs = [a / b for a, b in zip(turns[0].gradients, turns[1].gradients, strict=True)]
    print(f"bare_torch_loop: gradient_steps_per_s={bare:.1f}")
    print(f"share_of_limit={mine / bare:.2f}")
    print(f"ratio={mine / theirs:.1f} (turn by turn {min(pairs):.1f} to {max(pairs):.1f})")
    for turn in turns:
        turn.algo.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
