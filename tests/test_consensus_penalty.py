"""What every schedule of rho owes, and what each does; the proximal pull."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_admm.consensus import (
    PENALTY_SCHEDULES,
    CosinePenalty,
    PenaltySchedule,
    ResidualBalancing,
    Residuals,
    adam_metric,
    make_schedule,
    pull,
)

HORIZON, FLOOR = 20, 0.1
NOWHERE = Residuals(1.0, 1.0, 1.0, 1.0)

# Per schedule: residuals that push it down as far as it goes, and how far that is.
DOWN: dict[str, tuple[Residuals | None, float]] = {
    "constant": (None, 1.0),
    "cosine": (None, FLOOR),
    "residual_balancing": (Residuals(0.0, 1.0, 1.0, 1.0), 1 / 1024),
}


def make(name: str) -> PenaltySchedule:
    return make_schedule(name, decay_rounds=HORIZON, final_fraction=FLOOR)


def test_the_suite_covers_every_schedule():
    assert set(DOWN) == set(PENALTY_SCHEDULES)


@pytest.mark.parametrize("name", PENALTY_SCHEDULES)
class TestEverySchedule:
    def test_starts_at_rho0(self, name):
        assert make(name).fraction == 1.0

    def test_reaches_its_floor_and_never_leaves_it(self, name):
        schedule, (residuals, floor) = make(name), DOWN[name]
        seen = [schedule.fraction]
        for _ in range(3 * HORIZON):
            schedule.advance(residuals)
            seen.append(schedule.fraction)
        assert seen == sorted(seen, reverse=True)
        assert seen[HORIZON] == pytest.approx(floor, rel=1e-12) and seen[-1] == seen[HORIZON]

    @pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, 1e300, -0.0])
    def test_stays_positive_and_finite_whatever_the_residuals(self, name, bad):
        schedule = make(name)
        for field in ("primal", "dual", "primal_scale", "dual_scale"):
            for _ in range(2 * HORIZON):
                schedule.advance(Residuals(**{**vars(NOWHERE), field: bad}))
                assert 0 < schedule.fraction < math.inf

    def test_goes_on_from_its_state_as_if_it_had_never_stopped(self, name):
        one, two = make(name), make(name)
        pushes = [Residuals(10.0**k, 1.0, 1.0, 1.0) for k in (2, 2, -2, 0, 3, -3, -3)]
        for r in pushes[:4]:
            one.advance(r)
        two.set_state(one.get_state())
        for r in pushes[4:]:
            assert two.fraction == one.fraction
            one.advance(r)
            two.advance(r)
        assert two.fraction == one.fraction


def test_the_cosine_is_half_way_down_at_half_the_horizon():
    schedule = CosinePenalty(10, 0.2)
    for _ in range(5):
        schedule.advance(None)
    assert schedule.fraction == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("residuals", "expected"),
    [
        (Residuals(11.0, 1.0, 1.0, 1.0), 2.0),  # far from agreement: pull harder
        (Residuals(1.0, 11.0, 1.0, 1.0), 0.5),  # z runs ahead of the duals: pull less
        (Residuals(9.0, 1.0, 1.0, 1.0), 1.0),
        (Residuals(1.0, 9.0, 1.0, 1.0), 1.0),
        (Residuals(11.0, 1.0, 100.0, 100.0), 2.0),  # only the relative ones count
        (Residuals(11.0, 1.0, 11.0, 1.0), 1.0),
        (Residuals(0.0, 0.0, 1.0, 1.0), 1.0),
        (Residuals(1.0, 0.0, 1.0, 1.0), 2.0),
        (Residuals(1.0, 0.0, 1.0, 0.0), 1.0),  # no dual yet: nothing to balance
        (Residuals(math.nan, 1.0, 1.0, 1.0), 1.0),
        (Residuals(math.inf, 1.0, 1.0, 1.0), 1.0),
        (None, 1.0),
    ],
)
def test_residual_balancing_reacts_in_the_right_direction(residuals, expected):
    schedule = ResidualBalancing()
    schedule.advance(residuals)
    assert schedule.fraction == expected


def test_residual_balancing_keeps_within_its_limit_and_comes_back():
    schedule = ResidualBalancing(limit=10, factor=3)
    for _ in range(5):
        schedule.advance(Residuals(100.0, 1.0, 1.0, 1.0))
    assert schedule.fraction == 10
    for _ in range(9):
        schedule.advance(Residuals(1.0, 100.0, 1.0, 1.0))
    assert schedule.fraction == 0.1


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: make_schedule("linear", decay_rounds=1, final_fraction=1), "not 'linear'"),
        (lambda: CosinePenalty(0, 0.5), "decay_rounds must be at least 1, not 0"),
        (lambda: CosinePenalty(5, 0.0), r"final_fraction must be in \(0, 1\], not 0.0"),
        (lambda: CosinePenalty(5, 1.1), "not 1.1"),
        (lambda: CosinePenalty(5, math.nan), "not nan"),
        (lambda: ResidualBalancing(threshold=0.5), "threshold"),
        (lambda: ResidualBalancing(threshold=math.nan), "threshold"),
        (lambda: ResidualBalancing(factor=1.0), "factor"),
        (lambda: ResidualBalancing(limit=0.5), "limit"),
    ],
)
def test_arguments_out_of_range_are_named(call: Callable[[], object], match: str):
    with pytest.raises(ValueError, match=match):
        call()


@given(st.integers(0, 2**31), st.floats(0, 1e4), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_pull_solves_the_implicit_equation(seed, lr_rho, adam):
    g = torch.Generator().manual_seed(seed)
    shapes = [(3, 2), (), (5,)]
    before, anchors, metric = (
        [torch.randn(s, generator=g, dtype=torch.float64) for s in shapes] for _ in range(3)
    )
    metric = [10 ** (3 * m) for m in metric] if adam else None
    theta = [p.clone() for p in before]
    pull(theta, anchors, lr_rho, metric)
    for i, (new, old, anchor) in enumerate(zip(theta, before, anchors, strict=True)):
        s = lr_rho * (metric[i] if metric else torch.ones_like(old))
        # theta = theta' - lr D rho (theta - (z - u)), the pull taken at where it ends.
        residual = (new - old + s * (new - anchor)) / (1 + s)
        torch.testing.assert_close(residual, torch.zeros_like(old), rtol=0, atol=1e-12)
        torch.testing.assert_close(new, (old + s * anchor) / (1 + s), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("metric", [None, [torch.tensor([3.0])]])
def test_no_pull_at_rho_zero(metric):
    theta = [torch.tensor([1.5])]
    pull(theta, [torch.tensor([9.0])], 0.0, metric)
    assert theta[0].item() == 1.5


def test_an_infinite_metric_pulls_onto_the_anchor_and_a_zero_one_not_at_all():
    theta = [torch.tensor([1.5, 1.5, 1.5])]
    pull(theta, [torch.full((3,), 9.0)], 1e-3, [torch.tensor([math.inf, 0.0, 1e-45])])
    assert theta[0].tolist() == [9.0, 1.5, 1.5]


@pytest.mark.parametrize("lr_rho", [-1e-9, math.nan, math.inf])
def test_a_pull_that_makes_no_sense_is_refused_and_changes_nothing(lr_rho):
    theta = [torch.tensor([1.5])]
    with pytest.raises(ValueError, match="finite and not negative"):
        pull(theta, [torch.tensor([9.0])], lr_rho)
    assert theta[0].item() == 1.5


def test_the_adam_metric_is_the_one_that_torchs_adam_steps_in():
    lr, betas, eps = 1e-2, (0.9, 0.99), 1e-3
    theta = torch.randn(7, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([theta], lr=lr, betas=betas, eps=eps)
    for step in range(1, 5):
        before = theta.detach().clone()
        theta.grad = torch.randn(7, dtype=torch.float64)
        optimizer.step()
        state = optimizer.state[theta]
        (d,) = adam_metric([state["exp_avg_sq"]], step, betas[1], eps)
        mean = state["exp_avg"] / (1 - betas[0] ** step)
        torch.testing.assert_close(before - lr * d * mean, theta.detach(), rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="before its first step"):
        adam_metric([torch.ones(1)], 0, 0.99, eps)
