"""Schedules of the penalty rho.

A schedule yields the *fraction* of rho0 that is in force, so that rho0 itself may follow
the learning rate ("auto"). Deterministic, small state, saved in checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

PENALTY_SCHEDULES = ("constant", "cosine", "residual_balancing")


@dataclass(frozen=True)
class Residuals:
    """Norms that tell how far the learners are from agreement (Boyd et al. 2011, 3.3).

    Attributes:
        primal: sqrt(sum_i w_i |theta_i - z_bar|^2 / W).
        dual: rho |z_bar - previous z_bar|.
        primal_scale: max of the weighted norms of theta_i and of z_bar.
        dual_scale: rho sqrt(sum_i w_i |u_i|^2 / W).
    """

    primal: float
    dual: float
    primal_scale: float
    dual_scale: float


class PenaltySchedule(Protocol):
    """What every schedule offers; `fraction` is > 0 at all times."""

    @property
    def fraction(self) -> float:
        """The fraction of rho0 in force now."""
        ...

    def advance(self, residuals: Residuals | None) -> None:
        """Moves on by one round; `residuals` are the newest known, if any."""
        ...

    def get_state(self) -> dict[str, Any]:
        """Returns the schedule's position."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a position that `get_state` returned."""
        ...


class ConstantPenalty:
    """rho = rho0 in every round."""

    fraction = 1.0

    def advance(self, residuals: Residuals | None) -> None:
        """Does nothing."""

    def get_state(self) -> dict[str, Any]:
        """Returns an empty state."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Accepts the empty state."""


class CosinePenalty:
    """Half a cosine from rho0 down to `final_fraction` * rho0, then constant.

    Args:
        decay_rounds: Rounds until the floor is reached.
        final_fraction: The floor as a fraction of rho0, in (0, 1].
    """

    def __init__(self, decay_rounds: int, final_fraction: float) -> None:
        if decay_rounds < 1:
            raise ValueError(f"decay_rounds must be at least 1, not {decay_rounds}.")
        if not 0 < final_fraction <= 1:
            raise ValueError(f"final_fraction must be in (0, 1], not {final_fraction}.")
        self.decay_rounds, self.final_fraction = decay_rounds, final_fraction
        self.rounds = 0

    @property
    def fraction(self) -> float:
        """The fraction of rho0 in force now."""
        progress = min(1.0, self.rounds / self.decay_rounds)
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.final_fraction + (1.0 - self.final_fraction) * cosine

    def advance(self, residuals: Residuals | None) -> None:
        """Moves on by one round."""
        self.rounds += 1

    def get_state(self) -> dict[str, Any]:
        """Returns the number of rounds done."""
        return {"rounds": self.rounds}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores the number of rounds done."""
        self.rounds = int(state["rounds"])


class ResidualBalancing:
    """Multiplies or divides rho by `factor` when one relative residual outweighs the other.

    Relative residuals (Wohlberg 2017) make the rule independent of the scale of the
    parameters. The fraction stays within [1/limit, limit].

    Args:
        threshold: The ratio of relative residuals that is still balanced, >= 1. Boyd et al.
            2011, 3.4.1, use 10.
        factor: What rho moves by, > 1. Boyd et al. use 2.
        limit: The furthest that rho may get from rho0, as a ratio, >= 1.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(self, threshold: float = 10.0, factor: float = 2.0, limit: float = 1024.0) -> None:
        if not 1 <= threshold < math.inf:
            raise ValueError(f"threshold must be finite and at least 1, not {threshold}.")
        if not 1 < factor < math.inf:
            raise ValueError(f"factor must be finite and above 1, not {factor}.")
        if not 1 <= limit < math.inf:
            raise ValueError(f"limit must be finite and at least 1, not {limit}.")
        self.threshold, self.factor, self.limit = threshold, factor, limit
        self.fraction = 1.0

    def advance(self, residuals: Residuals | None) -> None:
        """Compares the relative residuals and moves rho by at most one factor.

        Residuals that are unknown, not finite or without a scale (no dual yet) say nothing.
        """
        if residuals is None or residuals.primal_scale <= 0 or residuals.dual_scale <= 0:
            return
        primal = residuals.primal / residuals.primal_scale
        dual = residuals.dual / residuals.dual_scale
        if not (math.isfinite(primal) and math.isfinite(dual)):
            return
        if primal > self.threshold * dual:
            self.fraction = min(self.limit, self.fraction * self.factor)
        elif dual > self.threshold * primal:
            self.fraction = max(1.0 / self.limit, self.fraction / self.factor)

    def get_state(self) -> dict[str, Any]:
        """Returns the fraction in force."""
        return {"fraction": self.fraction}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores the fraction in force."""
        self.fraction = float(state["fraction"])


def make_schedule(name: str, *, decay_rounds: int, final_fraction: float) -> PenaltySchedule:
    """Returns the schedule called `name`.

    Raises:
        ValueError: If there is none of that name.
    """
    if name == "constant":
        return ConstantPenalty()
    if name == "cosine":
        return CosinePenalty(decay_rounds, final_fraction)
    if name == "residual_balancing":
        return ResidualBalancing()
    raise ValueError(f"rho_schedule must be one of {PENALTY_SCHEDULES}, not {name!r}.")
