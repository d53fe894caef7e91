"""The table of a report: a row for each group of runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rllib_admm.report.runs import Run
from rllib_admm.report.statistics import Interval, interquartile_mean, interval


@dataclass(frozen=True)
class Row:
    """What a group of runs came to. Numbers per run are averaged by interquartile means.

    Attributes:
        group: What these are runs of.
        env: Environment.
        num_runs: How many.
        num_unfinished: How many of them had not ended.
        env_steps: Env steps made.
        threshold: Return that counts as solved; None if none is known.
        num_reached: Runs that reached it.
        steps_to_threshold: Env steps at the first report at or above it, over the runs that
            reached it.
        final_return: Mean of the reports of the last fifth of a run's env steps.
        greedy_return: Greedy return of the last weights: as measured at the end of
            `rllib train`, else by RLlib's last evaluation; None if neither was made.
        variance: Variance of the reports of the last fifth, within a run.
        bytes_per_gradient_step: Message bytes over gradient steps; None if not counted.
        gradient_steps_per_s: Summed over learners, evaluations included in the time.
        env_steps_per_s: Likewise.
        seconds: Wall-clock time.
    """

    group: str
    env: str
    num_runs: int
    num_unfinished: int
    env_steps: float
    threshold: float | None
    num_reached: int
    steps_to_threshold: Interval | None
    final_return: Interval | None
    greedy_return: Interval | None
    variance: float | None
    bytes_per_gradient_step: float | None
    gradient_steps_per_s: float | None
    env_steps_per_s: float | None
    seconds: float


class Columns(NamedTuple):
    """A part of the table that is read together.

    Attributes:
        title: What it is about.
        headings: One per column; the first one names the group.
        texts: The cells of a row.
    """

    title: str
    headings: tuple[str, ...]
    texts: Callable[[Row], list[str]]


def _learning(row: Row) -> list[str]:
    unfinished = f" ({row.num_unfinished} unfinished)" if row.num_unfinished else ""
    reached = "-"
    if row.threshold is not None:
        reached = f"{row.num_reached} of {row.num_runs} reached {row.threshold:g}"
        if row.steps_to_threshold is not None:
            reached = f"{_with_interval(row.steps_to_threshold, ',.0f')}; {reached}"
    return [
        row.group,
        f"{row.num_runs}{unfinished}",
        f"{row.env_steps:,.0f}",
        reached,
        _with_interval(row.final_return, ".1f"),
        _with_interval(row.greedy_return, ".1f"),
        _number(row.variance, ",.0f"),
    ]


def _speed(row: Row) -> list[str]:
    return [
        row.group,
        _number(row.bytes_per_gradient_step, ",.0f"),
        _number(row.gradient_steps_per_s, ",.0f"),
        _number(row.env_steps_per_s, ",.0f"),
        f"{row.seconds:,.0f}",
    ]


LEARNING = Columns(
    "learning",
    (
        "runs of",
        "runs",
        "env steps",
        "steps to threshold",
        "final return",
        "greedy return",
        "variance, last fifth",
    ),
    _learning,
)
SPEED = Columns(
    "traffic and speed",
    ("runs of", "bytes / gradient step", "gradient steps / s", "env steps / s", "seconds"),
    _speed,
)


def rows(runs: Sequence[Run], threshold: float | None = None) -> list[Row]:
    """Returns a row per group, environments together, in the order of the runs.

    Args:
        runs: As read.
        threshold: Return that counts as solved; None: the environment's own, if it has one.
    """
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.env, run.group), []).append(run)
    envs = list(dict.fromkeys(run.env for run in runs))
    return [
        _row(env, group, members, _threshold(env) if threshold is None else threshold)
        for (env, group), members in sorted(groups.items(), key=lambda item: envs.index(item[0][0]))
    ]


def _threshold(env: str) -> float | None:
    import gymnasium as gym

    spec = gym.registry.get(env)
    return None if spec is None or spec.reward_threshold is None else float(spec.reward_threshold)


def _row(env: str, group: str, runs: list[Run], threshold: float | None) -> Row:
    tails = [run.returns[run.env_steps >= 0.8 * run.env_steps[-1]] for run in runs]
    tails = [tail[~np.isnan(tail)] for tail in tails]
    tails = [tail for tail in tails if len(tail)]
    reached = []
    if threshold is not None:
        hits = (run.env_steps[run.returns >= threshold] for run in runs)
        reached = [float(hit[0]) for hit in hits if len(hit)]
    greedy = [value for run in runs if (value := _greedy(run)) is not None]
    return Row(
        group=group,
        env=env,
        num_runs=len(runs),
        num_unfinished=sum(not run.finished for run in runs),
        env_steps=float(interquartile_mean([run.env_steps[-1] for run in runs])),
        threshold=threshold,
        num_reached=len(reached),
        steps_to_threshold=interval(reached) if reached else None,
        final_return=interval([float(tail.mean()) for tail in tails]) if tails else None,
        greedy_return=interval(greedy) if greedy else None,
        variance=_mean([float(tail.var()) for tail in tails if len(tail) > 1]),
        bytes_per_gradient_step=_mean(
            [_ratio(run.bytes_sent[-1], run.gradient_steps[-1]) for run in runs]
        ),
        gradient_steps_per_s=_mean(
            [_ratio(run.gradient_steps[-1], run.seconds[-1]) for run in runs]
        ),
        env_steps_per_s=_mean([_ratio(run.env_steps[-1], run.seconds[-1]) for run in runs]),
        seconds=float(interquartile_mean([run.seconds[-1] for run in runs])),
    )


def _greedy(run: Run) -> float | None:
    if run.greedy_return is not None:
        return run.greedy_return
    made = run.evaluations[~np.isnan(run.evaluations)]
    return float(made[-1]) if len(made) else None


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom > 0 else math.nan


def _mean(values: list[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return float(interquartile_mean(known)) if known else None


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _with_interval(value: Interval | None, form: str) -> str:
    if value is None:
        return "-"
    centre, low, high = (format(x, form) for x in value)
    return centre if low == high else f"{centre} [{low}, {high}]"
