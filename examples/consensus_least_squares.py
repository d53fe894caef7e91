"""Consensus ADMM on a heterogeneous least-squares problem with a known solution.

Drives exactly the classes that the Learners use (`LocalState`, `Coordinator`, `pull`), in
float64, on N learners whose data differ, with a few inexact local gradient steps per round.
Prints the relative error to the closed-form solution per round and, last,
`final_relative_error=<float>`.

    python examples/consensus_least_squares.py --learners 4 --bits 4
    python examples/consensus_least_squares.py --learners 4 --bits 8 --drop 0.3
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from rllib_admm.consensus import (
    SUPPORTED_BITS,
    ConsensusOptions,
    ConstantPenalty,
    Coordinator,
    Layout,
    LocalState,
    pull,
)


@dataclass(frozen=True)
class Problem:
    """min over x of sum_i |A_i x - b_i|^2 / (2 n), every A_i, b_i on another learner.

    Attributes:
        a: One matrix (n, P) per learner.
        b: One vector (n,) per learner.
    """

    a: list[Tensor]
    b: list[Tensor]

    @classmethod
    def heterogeneous(cls, learners: int, size: int, rows: int, seed: int) -> Problem:
        """Draws a problem whose learners disagree: other data, other noise-free optimum."""
        g = torch.Generator().manual_seed(seed)
        a, b = [], []
        for _ in range(learners):
            scale = 0.5 + torch.rand(size, generator=g, dtype=torch.float64)
            a.append(torch.randn(rows, size, generator=g, dtype=torch.float64) * scale)
            own_optimum = torch.randn(size, generator=g, dtype=torch.float64)
            b.append(a[-1] @ own_optimum)
        return cls(a, b)

    def gradient(self, i: int, x: Tensor) -> Tensor:
        """Returns learner i's gradient at `x`, shape (P,)."""
        return self.a[i].T @ (self.a[i] @ x - self.b[i]) / self.a[i].shape[0]

    def smoothness(self) -> float:
        """Returns the largest curvature of any learner's objective."""
        norms = (torch.linalg.matrix_norm(a, 2) ** 2 / a.shape[0] for a in self.a)
        return float(max(norms))

    def solution(self) -> Tensor:
        """Returns the joint optimum in closed form, shape (P,)."""
        return torch.linalg.lstsq(torch.cat(self.a), torch.cat(self.b)).solution


def run(
    problem: Problem,
    options: ConsensusOptions,
    *,
    rounds: int,
    local_steps: int,
    rho: float,
    drop: float,
    seed: int,
) -> list[float]:
    """Runs consensus ADMM.

    Args:
        problem: What to solve.
        options: The consensus' constants.
        rounds: Rounds to run.
        local_steps: Inexact gradient steps per learner and round.
        rho: Penalty as a multiple of the smoothness.
        drop: Probability that a learner is left out of a round.
        seed: Seed of who is left out.

    Returns:
        The relative error |z - x*| / |x*| after each round.
    """
    generator = torch.Generator().manual_seed(seed)
    solution, curvature = problem.solution(), problem.smoothness()
    lr, penalty = 0.5 / curvature, rho * curvature
    zero = torch.zeros_like(solution)
    layout = Layout.of({"x": zero})
    names = [f"learner-{i}" for i in range(len(problem.a))]
    coordinator = Coordinator(zero, options, layout.hash, ConstantPenalty(), names, penalty)
    locals_ = [LocalState(name, zero, options, layout.hash, penalty) for name in names]
    thetas = [zero.clone() for _ in names]
    errors = []
    for round_ in range(rounds):
        for i, (state, theta) in enumerate(zip(locals_, thetas, strict=True)):
            anchor = state.anchor()
            for _ in range(local_steps):
                theta.sub_(problem.gradient(i, theta), alpha=lr)
                pull([theta], [anchor], lr * state.rho)
            upload = state.upload(theta, weight=local_steps)
            # Everybody is heard in the first round: rho needs at least two learners.
            if round_ == 0 or torch.rand((), generator=generator) >= drop:
                coordinator.receive(upload)
        reply = coordinator.close_round(penalty)
        for state, theta in zip(locals_, thetas, strict=True):
            state.complete(reply, theta)
        distance = torch.linalg.vector_norm(coordinator.consensus.z - solution)
        errors.append(float(distance / torch.linalg.vector_norm(solution)))
    return errors


def main(argv: list[str] | None = None) -> int:
    """Parses the command line, runs, prints the error per round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--bits", type=int, default=8, choices=SUPPORTED_BITS)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--local-steps", type=int, default=10)
    parser.add_argument("--rho", type=float, default=0.3, help="as a multiple of the smoothness")
    parser.add_argument("--over-relaxation", type=float, default=1.0)
    parser.add_argument("--outer-momentum", type=float, default=0.0)
    parser.add_argument("--full-precision-every", type=int, default=5)
    parser.add_argument("--drop", type=float, default=0.0, help="share of uploads left out")
    parser.add_argument("--size", type=int, default=40)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    for name in ("learners", "rounds", "local_steps", "size", "rows"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not 0 <= args.drop < 1:
        parser.error("--drop must be in [0, 1)")
    errors = run(
        Problem.heterogeneous(args.learners, args.size, args.rows, args.seed),
        ConsensusOptions(
            over_relaxation=args.over_relaxation,
            outer_momentum=args.outer_momentum,
            bits=args.bits,
            full_precision_every=args.full_precision_every,
        ),
        rounds=args.rounds,
        local_steps=args.local_steps,
        rho=args.rho,
        drop=args.drop,
        seed=args.seed,
    )
    for round_, error in enumerate(errors, 1):
        print(f"round={round_} relative_error={error:.6e}")
    below = next((r for r, error in enumerate(errors, 1) if error <= 1e-3), None)
    print(f"rounds_to_1e-3={below}")
    print(f"final_relative_error={errors[-1]:.6e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
