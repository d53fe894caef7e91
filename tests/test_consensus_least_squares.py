"""The example: consensus ADMM finds the closed form; what it would not find without its parts."""

import importlib.util
import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rllib_admm.consensus import (
    ConsensusOptions,
    ConstantPenalty,
    Coordinator,
    LocalState,
    adam_metric,
    decode,
    encode,
    pull,
)

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "consensus_least_squares.py"


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("consensus_least_squares", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


example = load_example()


@cache
def errors(
    bits: int = 8,
    drop: float = 0.0,
    alpha: float = 1.0,
    momentum: float = 0.0,
    every: int = 5,
    duals: bool = True,
    rounds: int = 150,
) -> list[float]:
    options = ConsensusOptions(
        over_relaxation=alpha,
        outer_momentum=momentum,
        dual_updates=duals,
        bits=bits,
        full_precision_every=every,
    )
    problem = example.Problem.heterogeneous(4, 40, 60, seed=0)
    return example.run(problem, options, rounds=rounds, local_steps=10, rho=0.3, drop=drop, seed=0)


def rounds_to(threshold: float, curve: list[float]) -> int:
    return next(r for r, error in enumerate(curve, 1) if error <= threshold)


@pytest.mark.parametrize("bits", [4, 8, 32])
def test_every_codec_finds_the_closed_form_within_150_rounds(bits):
    assert errors(bits)[-1] <= 1e-9


def test_no_codec_is_slower_than_full_precision():
    rounds = [rounds_to(1e-3, errors(bits)) for bits in (4, 8, 32)]
    assert max(rounds) <= 1.1 * min(rounds)
    assert min(rounds) > 5  # not solved before quantisation could matter


@pytest.mark.parametrize("bits", [4, 8])
def test_the_difference_codec_needs_no_keyframes(bits):
    assert errors(bits, every=0)[-1] <= 1e-9


@pytest.mark.parametrize("bits", [4, 8])
def test_it_converges_although_three_in_ten_uploads_are_lost(bits):
    assert errors(bits, drop=0.3)[-1] <= 1e-6


@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_over_relaxation_with_outer_momentum_converges_and_sooner(drop):
    fast = errors(alpha=1.5, momentum=0.4, drop=drop)
    assert fast[-1] <= 1e-9
    assert rounds_to(1e-3, fast) < rounds_to(1e-3, errors(drop=drop))


def test_control_without_duals_it_stalls():
    assert min(errors(duals=False)) > 1e-2


def test_control_encoding_the_state_instead_of_the_difference_stalls():
    problem = example.Problem.heterogeneous(4, 40, 60, 0)
    solution, curvature = problem.solution(), problem.smoothness()
    lr, rho = 0.5 / curvature, 0.3 * curvature

    def stalls_at(bits: int) -> float:
        z = torch.zeros_like(solution)
        thetas, duals = [z.clone() for _ in range(4)], [z.clone() for _ in range(4)]
        curve = []
        for _ in range(130):
            heard = []
            for i, theta in enumerate(thetas):
                for _ in range(10):
                    theta.sub_(problem.gradient(i, theta), alpha=lr)
                    pull([theta], [z - duals[i]], lr * rho)
                heard.append(decode(encode(theta + duals[i], bits)))
            z = decode(encode(sum(heard) / 4, bits))
            duals = [t + u - z for t, u in zip(thetas, duals, strict=True)]
            curve.append(float((z - solution).norm() / solution.norm()))
        return min(curve[100:])

    assert stalls_at(32) <= 1e-9  # the control differs in nothing else
    assert stalls_at(8) > 1e-4


def adam_error(metric: str, c: float, seed: int) -> float:
    """Relative error of z after Adam local steps whose step size decays to nothing."""
    rounds, steps, lr0, beta2, eps = 60, 10, 3e-2, 0.999, 1e-8
    problem = example.Problem.heterogeneous(4, 20, 40, seed)
    solution = problem.solution()
    z = torch.zeros_like(solution)
    options = ConsensusOptions(bits=32)
    names = [str(i) for i in range(4)]
    coordinator = Coordinator(z, options, "", ConstantPenalty(), names, c / (lr0 * steps))
    states = [LocalState(n, z, options, "", coordinator.rho) for n in names]
    thetas = [z.clone() for _ in names]
    optimizers = [torch.optim.Adam([t], betas=(0.9, beta2), eps=eps) for t in thetas]
    for round_ in range(rounds):
        lr = lr0 * 0.5 * (1 + math.cos(math.pi * round_ / rounds)) + 1e-5
        for i, (state, theta, adam) in enumerate(zip(states, thetas, optimizers, strict=True)):
            anchor = state.anchor()
            adam.param_groups[0]["lr"] = lr
            for _ in range(steps):
                theta.grad = problem.gradient(i, theta)
                adam.step()
                v = adam.state[theta]
                d = adam_metric([v["exp_avg_sq"]], float(v["step"]), beta2, eps)
                pull([theta], [anchor], lr * state.rho, d if metric == "adam" else None)
            coordinator.receive(state.upload(theta, steps))
        reply = coordinator.close_round(c / (lr * steps))
        for state, theta in zip(states, thetas, strict=True):
            state.complete(reply, theta)
    return float((coordinator.consensus.z - solution).norm() / solution.norm())


def test_with_adam_the_pull_in_adams_metric_finds_the_joint_optimum_and_the_euclidean_not():
    adam, euclidean = adam_error("adam", 0.3, 0), adam_error("euclidean", 1.0, 0)
    assert adam < 0.01
    assert euclidean > 10 * adam
    assert euclidean > 0.1


def command(*args: str) -> "subprocess.CompletedProcess[str]":
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, str(SCRIPT), *args],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_line_prints_the_error_per_round_and_the_final_one_last():
    done = command("--learners", "4", "--bits", "4", "--drop", "0.3", "--rounds", "60")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:60]] == [f"round={r}" for r in range(1, 61)]
    assert lines[-1].startswith("final_relative_error=")
    final = float(lines[-1].partition("=")[2])
    assert final <= 1e-3 and f"{final:.6e}" in lines[59]


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (["--bits", "7"], "invalid choice: 7"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--local-steps", "0"], "--local-steps must be at least 1"),
        (["--drop", "1.5"], r"--drop must be in [0, 1)"),
        (["--over-relaxation", "2"], r"over_relaxation must be in (0, 2)"),
    ],
)
def test_the_command_line_names_what_it_can_not_do(args, match, capsys):
    with pytest.raises((SystemExit, ValueError)) as raised:
        example.main(args)
    assert match in capsys.readouterr().err + str(raised.value)
