"""Means over few runs, with what they leave open.

Source: Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical
Precipice": interquartile means with percentile bootstrap intervals over runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

CONFIDENCE = 0.9
DRAWS = 2000


class Interval(NamedTuple):
    """A mean with its bootstrap interval.

    Attributes:
        centre: The interquartile mean.
        low: Lower end.
        high: Upper end.
    """

    centre: float
    low: float
    high: float


def interquartile_mean(values: ArrayLike) -> NDArray[np.float64]:
    """Returns the mean without the lowest and the highest quarter, along the first axis.

    Args:
        values: ``(n, ...)``; of up to three values none is left out.

    Returns:
        ``(...)``.
    """
    ordered = np.sort(np.asarray(values, np.float64), axis=0)
    cut = len(ordered) // 4
    mean: NDArray[np.float64] = ordered[cut : len(ordered) - cut].mean(axis=0)
    return mean


def bootstrap(values: ArrayLike, draws: int = DRAWS) -> tuple[NDArray[np.float64], ...]:
    """Returns the interquartile mean over runs with its 90% bootstrap interval.

    Args:
        values: ``(runs, ...)``.
        draws: How many resamplings of the runs; the same ones at each call.

    Returns:
        Centre, low, high; ``(...)`` each. With one run they are the same.
    """
    data = np.asarray(values, np.float64)
    picks = np.random.default_rng(0).integers(0, len(data), (draws, len(data)))
    centre = interquartile_mean(data)
    if len(data) == 1:
        return centre, centre, centre
    means = np.stack([interquartile_mean(data[pick]) for pick in picks])
    tail = 50.0 * (1.0 - CONFIDENCE)
    low, high = np.percentile(means, [tail, 100.0 - tail], axis=0)
    return centre, low, high


def interval(values: Sequence[float]) -> Interval:
    """Returns the interquartile mean of a number per run, with its interval."""
    return Interval(*(float(x) for x in bootstrap(values)))
