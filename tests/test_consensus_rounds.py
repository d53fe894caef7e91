"""Rounds as trajectories: by hand, by invariants, and the same at every end."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rllib_admm.consensus import (
    SUPPORTED_BITS,
    Consensus,
    ConsensusError,
    ConsensusOptions,
    ConstantPenalty,
    Coordinator,
    Kind,
    LocalNorms,
    LocalState,
    MessageError,
    PenaltySchedule,
    Reply,
    ResidualBalancing,
    unpack,
)

LAYOUT = "layout"
ALL = ("a", "b", "c")


class Fleet:
    """A coordinator and its learners, with random walks for their parameters."""

    def __init__(
        self,
        options: ConsensusOptions,
        *,
        size: int = 300,
        rho: float = 1.0,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        schedule: PenaltySchedule | None = None,
        names: Sequence[str] = ALL,
    ) -> None:
        self.options = options
        self.g = torch.Generator().manual_seed(seed)
        self.z0 = self.randn(size, dtype)
        self.schedule = schedule or ConstantPenalty()
        self.coordinator = Coordinator(self.z0, options, LAYOUT, self.schedule, names, rho)
        self.locals = {n: LocalState(n, self.z0, options, LAYOUT, rho) for n in names}
        self.thetas = {n: self.z0.clone() for n in names}
        self.norms: list[LocalNorms] = []

    def randn(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(size, generator=self.g, dtype=torch.float64).to(dtype)

    @property
    def z(self) -> Tensor:
        return self.coordinator.consensus.z

    def walk(self) -> None:
        """Moves every theta; learners differ, so that duals do not vanish."""
        for k, theta in enumerate(self.thetas.values()):
            theta.add_(self.randn(len(theta), theta.dtype) + k, alpha=0.1)

    def round(
        self,
        heard: Sequence[str] | None = None,
        weights: dict[str, float] | None = None,
        rho0: float = 1.0,
    ) -> Reply:
        for name, state in self.locals.items():
            data = state.upload(self.thetas[name], (weights or {}).get(name, 1.0))
            if heard is None or name in heard:
                self.coordinator.receive(data)
        reply = self.coordinator.close_round(rho0, self.norms)
        self.norms = [s.complete(reply, self.thetas[n]) for n, s in self.locals.items()]
        return reply

    def draw(self) -> list[str]:
        """Who is heard when each upload is lost with probability 0.3."""
        return [n for n in self.locals if torch.rand((), generator=self.g) > 0.3]

    def check_ends(self) -> None:
        for name, state in self.locals.items():
            assert torch.equal(state.h, self.coordinator.memory(name))
            assert torch.equal(state.consensus.z, self.z)
            assert state.consensus.round == self.coordinator.consensus.round
            assert state.rho == self.coordinator.rho
            assert state.pending is None


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_two_rounds_by_hand():
    options = ConsensusOptions(
        over_relaxation=1.5, outer_momentum=0.5, bits=32, full_precision_every=1
    )
    fleet = Fleet(options, size=1, rho=2.0)
    fleet.z.zero_()
    for state in fleet.locals.values():
        state.consensus.z.zero_()
        state.h.zero_()

    fleet.thetas = {"a": numbers(1), "b": numbers(2), "c": numbers(6)}
    fleet.round(weights={"a": 1, "b": 1, "c": 2}, rho0=1.0)
    # x = 1.5 theta = 1.5, 3, 9; z_bar = (1.5 + 3 + 2 * 9) / 4 = 5.625
    # v = 5.625; z = 5.625 + 0.5 * 5.625; u = x - z_bar, times 2 because rho falls from 2 to 1
    assert fleet.z.item() == 8.4375
    assert [s.u.item() for s in fleet.locals.values()] == [-8.25, -5.25, 6.75]
    assert [s.h.item() for s in fleet.locals.values()] == [1.5, 3.0, 9.0]
    assert [n.primal for n in fleet.norms] == [4.625, 3.625, 0.375]
    assert [n.weight for n in fleet.norms] == [1, 1, 2]

    fleet.thetas = {"a": numbers(8), "b": numbers(4), "c": numbers(-70)}
    fleet.round(heard=["a", "b"], weights={"a": 3, "b": 1, "c": 9})
    # c is left out: its memory 9 counts on with its old weight 2.
    # x_a = 12 - 0.5 * 8.4375 - 8.25 = -0.46875; x_b = 6 - 4.21875 - 5.25 = -3.46875
    # z_bar = (3 * -0.46875 - 3.46875 + 2 * 9) / 6 = 2.1875; d = -6.25
    # v = 0.5 * 5.625 - 6.25 = -3.4375; z = 8.4375 - 6.25 + 0.5 * -3.4375
    assert fleet.z.item() == pytest.approx(0.46875, abs=1e-12)
    assert [s.u.item() for s in fleet.locals.values()] == pytest.approx([-2.65625, -5.65625, 6.75])
    assert [s.h.item() for s in fleet.locals.values()] == [-0.46875, -3.46875, 9.0]
    assert [n.weight for n in fleet.norms] == [3, 1, 0]


def test_without_dual_or_momentum_a_full_precision_round_is_the_weighted_mean():
    fleet = Fleet(ConsensusOptions.plain(), rho=0.0)
    for _ in range(3):
        fleet.walk()
        fleet.round(weights={"a": 1, "b": 2, "c": 5}, rho0=0.0)
        a, b, c = fleet.thetas.values()
        torch.testing.assert_close(fleet.z, (a + 2 * b + 5 * c) / 8, rtol=1e-12, atol=1e-12)
        assert not any(s.u.any() for s in fleet.locals.values())


def test_the_outer_learning_rate_scales_the_step():
    fleet = Fleet(ConsensusOptions(outer_lr=0.25, bits=32), rho=0.0)
    fleet.walk()
    fleet.round(rho0=0.0)
    mean = sum(fleet.thetas.values()) / 3
    torch.testing.assert_close(fleet.z, fleet.z0 + 0.25 * (mean - fleet.z0), rtol=0, atol=1e-12)


@given(
    st.sampled_from(SUPPORTED_BITS),
    st.sampled_from((0, 1, 2, 5)),
    st.sampled_from((0.5, 1.0, 1.5)),
    st.sampled_from((0.0, 0.4, 0.9)),
    st.integers(0, 2**31),
)
@settings(max_examples=30, deadline=None)
def test_the_weighted_duals_sum_to_what_quantisation_left_over(bits, every, alpha, mu, seed):
    options = ConsensusOptions(
        over_relaxation=alpha, outer_momentum=mu, bits=bits, full_precision_every=every
    )
    fleet = Fleet(options, seed=seed, size=40)
    for round_ in range(6):
        fleet.walk()
        w = {n: float(torch.randint(1, 9, (), generator=fleet.g)) for n in ALL}
        x = {
            n: alpha * fleet.thetas[n] + (1 - alpha) * fleet.z + s.u
            for n, s in fleet.locals.items()
        }
        old_z = fleet.z.clone()
        reply = fleet.round(weights=w)
        replay = Consensus(old_z, ConsensusOptions(), LAYOUT)
        replay.round = round_
        z_bar = replay.read(reply.message)
        total = sum(w.values())
        mean_h = sum(w[n] * s.h for n, s in fleet.locals.items()) / total
        left = sum(w[n] * s.u for n, s in fleet.locals.items())
        right = sum(w[n] * (x[n] - s.h) for n, s in fleet.locals.items())
        torch.testing.assert_close(left, right + total * (mean_h - z_bar), rtol=0, atol=1e-10)
        if bits == 32 or options.is_keyframe(round_):
            assert left.abs().max() < 1e-10
        else:
            assert left.abs().max() > 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("every", [0, 4])
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_all_ends_hold_the_same_bits_after_random_losses(bits, every, dtype):
    options = ConsensusOptions(
        over_relaxation=1.5, outer_momentum=0.4, bits=bits, full_precision_every=every
    )
    fleet = Fleet(options, dtype=dtype)
    runner = Consensus(fleet.z0.clone(), options, LAYOUT)
    late = None
    for round_ in range(25):
        fleet.walk()
        reply = fleet.round(
            heard=fleet.draw(),
            weights={n: float(torch.randint(0, 3, (), generator=fleet.g)) for n in ALL},
            rho0=0.5 + round_ % 3,
        )
        fleet.check_ends()
        runner.advance(runner.read(reply.message))
        assert torch.equal(runner.z, fleet.z) and torch.equal(
            runner.velocity, fleet.coordinator.consensus.velocity
        )
        if late is None and round_ == 10:
            late = Consensus(torch.zeros_like(fleet.z), options, LAYOUT)
            late.load(fleet.coordinator.consensus.snapshot())
        elif late is not None:
            late.advance(late.read(reply.message))
            assert torch.equal(late.z, fleet.z)
    assert fleet.z.std() > 0.1 and any(s.u.std() > 0.01 for s in fleet.locals.values())


@pytest.mark.parametrize("every", [0, 1, 3, 5])
def test_keyframes_come_in_both_directions_every_so_many_rounds(every):
    fleet = Fleet(ConsensusOptions(bits=4, full_precision_every=every))
    kinds = []
    for _ in range(11):
        fleet.walk()
        up = {
            n: fleet.coordinator.receive(s.upload(fleet.thetas[n], 1))
            for n, s in fleet.locals.items()
        }
        down = fleet.coordinator.close_round(1.0)
        for n, s in fleet.locals.items():
            s.complete(down, fleet.thetas[n])
        both = {m.kind for m in up.values()} | {unpack(down.message).kind}
        assert len(both) == 1
        kinds.append(both.pop())
    expected = [every > 0 and r % every == 0 for r in range(11)]
    assert [k is Kind.KEYFRAME for k in kinds] == expected
    assert set(kinds) <= {Kind.KEYFRAME, Kind.DIFFERENCE}


def test_a_keyframe_heals_a_memory_that_went_wrong():
    fleet = Fleet(ConsensusOptions(full_precision_every=3))
    fleet.round()
    fleet.locals["a"].h.add_(1.0)
    fleet.round()
    assert not torch.equal(fleet.locals["a"].h, fleet.coordinator.memory("a"))
    fleet.round()
    fleet.round()
    fleet.check_ends()


def test_weight_zero_says_unchanged_and_keeps_h_and_u():
    fleet = Fleet(ConsensusOptions())
    fleet.round(weights={"a": 4.0, "b": 4.0, "c": 4.0})
    fleet.walk()
    fleet.round()
    a = fleet.locals["a"]
    h, u = a.h.clone(), a.u.clone()
    fleet.walk()
    data = a.upload(fleet.thetas["a"], 0)
    assert len(data) < 1500 and unpack(data).kind is Kind.UNCHANGED
    reply = fleet.round(weights={"a": 0.0, "b": 1.0, "c": 1.0})
    assert "a" in reply.included
    assert torch.equal(a.h, h) and torch.equal(a.u, u)
    fleet.check_ends()


def test_a_learner_without_data_does_not_drag_z_back():
    fleet = Fleet(ConsensusOptions(bits=32), rho=0.0)
    fleet.thetas = {"a": fleet.z0 + 2, "b": fleet.z0 + 4, "c": fleet.z0.clone()}
    fleet.round(weights={"a": 1.0, "b": 1.0, "c": 0.0})
    torch.testing.assert_close(fleet.z, fleet.z0 + 3, rtol=0, atol=1e-12)


def test_nobody_with_data_leaves_z_where_it_is():
    fleet = Fleet(ConsensusOptions(outer_momentum=0.4))
    reply = fleet.round(weights=dict.fromkeys(ALL, 0.0))
    assert unpack(reply.message).kind is Kind.UNCHANGED
    assert torch.equal(fleet.z, fleet.z0) and reply.rho == 0.0
    fleet.check_ends()
    fleet.walk()
    assert fleet.round(rho0=2.0).rho == 2.0
    fleet.check_ends()


def test_one_active_learner_is_neither_pulled_nor_relaxed():
    options = ConsensusOptions(over_relaxation=1.5, bits=32)
    fleet = Fleet(options, names=["a"])
    fleet.round()
    for _ in range(3):
        fleet.walk()
        assert fleet.round().rho == 0.0
        torch.testing.assert_close(fleet.z, fleet.thetas["a"], rtol=0, atol=1e-12)
        assert not fleet.locals["a"].u.any()


def test_over_relaxation_is_off_where_duals_are():
    fleet = Fleet(ConsensusOptions(over_relaxation=1.5, dual_updates=False, bits=32))
    fleet.walk()
    assert fleet.round().rho == 1.0
    torch.testing.assert_close(fleet.z, sum(fleet.thetas.values()) / 3, rtol=0, atol=1e-12)
    assert not any(s.u.any() for s in fleet.locals.values())
    assert not fleet.coordinator.mean_dual(ALL).any()


def test_rho_times_u_survives_a_change_of_rho_also_while_left_out():
    fleet = Fleet(ConsensusOptions())
    fleet.walk()
    fleet.round(rho0=1.0)
    a = fleet.locals["a"]
    before = a.rho * a.u
    assert before.norm() > 0.1
    for rho in (0.5, 4.0, 0.125):
        fleet.walk()
        fleet.round(heard=["b", "c"], rho0=rho)
        torch.testing.assert_close(a.rho * a.u, before, rtol=1e-12, atol=0)
    fleet.round(heard=["b", "c"], rho0=0.0)
    assert not a.u.any()


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_the_coordinator_knows_every_dual_up_to_quantisation(bits):
    fleet = Fleet(ConsensusOptions(bits=bits, over_relaxation=1.5))
    zero = torch.zeros_like(fleet.z0)
    # Per learner rho (x - h) of the round in which its dual was last assigned.
    left = dict.fromkeys(ALL, zero)
    worst = 0.0
    for round_ in range(24):
        fleet.walk()
        rho, heard = fleet.coordinator.rho, fleet.draw()
        x = {n: s._x(fleet.thetas[n]) for n, s in fleet.locals.items()}
        fleet.round(heard=heard, rho0=(1.0, 0.25, 3.0, 0.0)[round_ // 3 % 4])
        left |= {n: rho * (x[n] - fleet.locals[n].h) for n in heard}
        now = fleet.coordinator.rho
        if now == 0:
            left = dict.fromkeys(ALL, zero)
        for n, state in fleet.locals.items():
            expected = left[n] / now if now else zero
            error = state.u - fleet.coordinator.dual(n)
            torch.testing.assert_close(error, expected, rtol=0, atol=1e-11)
            worst = max(worst, float(error.norm() / (1e-9 + state.u.norm())))
        mean = sum(s.u for s in fleet.locals.values()) / 3
        error = mean - fleet.coordinator.mean_dual(ALL)
        expected = sum(left.values()) / 3 / now if now else zero
        torch.testing.assert_close(error, expected, rtol=0, atol=1e-11)
    assert worst < {32: 1e-12, 16: 1e-3, 8: 0.05, 4: 1.0}[bits]
    assert fleet.coordinator.mean_dual([]).equal(zero)


def test_a_replacement_starts_from_z_and_the_survivors_mean_dual():
    fleet = Fleet(ConsensusOptions(outer_momentum=0.4))
    for _ in range(4):
        fleet.walk()
        fleet.round(rho0=0.5)
    fleet.coordinator.remove("c")
    del fleet.locals["c"]
    fleet.walk()
    assert fleet.round(rho0=0.5).rho == 0.5
    mean = fleet.coordinator.mean_dual(["a", "b"])
    snapshot = fleet.coordinator.add("c", mean)
    joiner = LocalState("c", torch.zeros_like(fleet.z), fleet.options, LAYOUT, 9.0)
    joiner.load(snapshot)
    fleet.locals["c"], fleet.thetas["c"] = joiner, fleet.z.clone()
    fleet.check_ends()
    assert torch.equal(joiner.h, fleet.z) and torch.equal(joiner.u, mean) and mean.any()
    # Its dual is known, also rescaled, before it was ever heard.
    fleet.round(heard=["a", "b"], rho0=2.0)
    torch.testing.assert_close(joiner.u, mean / 4)
    torch.testing.assert_close(fleet.coordinator.dual("c"), mean / 4, rtol=0, atol=1e-12)
    z = fleet.z.clone()
    for _ in range(7):
        fleet.walk()
        fleet.round(heard=fleet.draw())
        fleet.check_ends()
    assert not torch.equal(z, fleet.z)


def test_a_joiner_does_not_weigh_before_it_is_heard_and_the_removed_no_longer_do():
    fleet = Fleet(ConsensusOptions(bits=32, full_precision_every=1), rho=0.0)
    fleet.thetas = {n: fleet.z0 + k for k, n in enumerate(ALL)}
    fleet.round(rho0=0.0)
    torch.testing.assert_close(fleet.z, fleet.z0 + 1, rtol=0, atol=1e-12)
    fleet.coordinator.remove("c")
    del fleet.locals["c"]
    fleet.coordinator.add("d")
    fleet.round(rho0=0.0)
    torch.testing.assert_close(fleet.z, fleet.z0 + 0.5, rtol=0, atol=1e-12)
    assert fleet.coordinator.learners == ("a", "b", "d")


def test_a_learner_removed_in_the_middle_of_a_round_is_not_counted():
    fleet = Fleet(ConsensusOptions(bits=32), rho=0.0)
    for n, s in fleet.locals.items():
        fleet.coordinator.receive(s.upload(fleet.z0 + ord(n), 1))
    fleet.coordinator.remove("c")
    reply = fleet.coordinator.close_round(0.0)
    assert reply.included == {"a", "b"}
    torch.testing.assert_close(fleet.z, fleet.z0 + ord("a") + 0.5, rtol=0, atol=1e-12)
    with pytest.raises(MessageError, match="none of"):
        fleet.coordinator.receive(fleet.locals["c"].upload(fleet.z0, 1))


def test_nobody_joins_twice():
    with pytest.raises(ConsensusError, match="a takes part already"):
        Fleet(ConsensusOptions()).coordinator.add("a")


def test_recentring_takes_the_shift_off_every_dual_in_the_units_of_the_new_rho():
    fleet = Fleet(ConsensusOptions())
    fleet.walk()
    for n in ("a", "b"):
        fleet.coordinator.receive(fleet.locals[n].upload(fleet.thetas[n], 1))
    reply = fleet.coordinator.close_round(0.25)
    shift = fleet.coordinator.dual("a")
    packed = fleet.coordinator.consensus.snapshot(dual=shift).dual
    a = fleet.locals["a"]
    a.complete(Reply(reply.message, reply.included, reply.rho, packed), fleet.thetas["a"])
    # Round 0 is a keyframe: the coordinator's dual is the learner's, so nothing is left.
    assert shift.norm() > 1
    torch.testing.assert_close(a.u, torch.zeros_like(a.u), rtol=0, atol=1e-12)


def numpied(state: Any) -> Any:
    """What a checkpoint makes of a state: tensors as arrays."""
    if isinstance(state, Tensor):
        return state.numpy().copy()
    return {k: numpied(v) for k, v in state.items()} if isinstance(state, dict) else state


@pytest.mark.parametrize("momentum", [0.0, 0.4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_restored_run_continues_bit_for_bit(dtype, momentum):
    options = ConsensusOptions(
        over_relaxation=1.5, outer_momentum=momentum, bits=8, full_precision_every=4
    )

    def fresh(seed: int) -> Fleet:
        # A low threshold, so that the schedule moves within these few rounds.
        schedule = ResidualBalancing(threshold=1.0)
        return Fleet(options, dtype=dtype, seed=seed, schedule=schedule)

    one, two = fresh(0), fresh(1)
    for _ in range(6):
        one.walk()
        one.round(heard=one.draw())
    two.coordinator.set_state(numpied(one.coordinator.get_state()))
    snapshot = two.coordinator.consensus.snapshot(rho=two.coordinator.rho)
    for n in ALL:
        two.locals[n].load(snapshot)
        two.locals[n].set_state(numpied(one.locals[n].get_state()))
        two.thetas[n].copy_(one.thetas[n])
    two.norms = list(one.norms)
    two.g.set_state(one.g.get_state())
    two.check_ends()
    assert one.coordinator.residuals(one.norms) == two.coordinator.residuals(two.norms)
    rhos = set()
    for _ in range(9):
        for fleet in (one, two):
            fleet.walk()
            fleet.round(heard=fleet.draw())
        rhos.add(one.coordinator.rho)
        assert torch.equal(one.z, two.z) and one.coordinator.rho == two.coordinator.rho
        assert one.coordinator.residuals(one.norms) == two.coordinator.residuals(two.norms)
        for n in ALL:
            for field in ("u", "h"):
                assert torch.equal(getattr(one.locals[n], field), getattr(two.locals[n], field))
            assert torch.equal(one.coordinator.dual(n), two.coordinator.dual(n))
    assert len(rhos) > 1


def test_a_state_may_name_other_learners_than_this_coordinator():
    fleet, other = Fleet(ConsensusOptions()), Fleet(ConsensusOptions(), names=["x"])
    fleet.walk()
    fleet.round()
    saved = fleet.coordinator.get_state()
    other.coordinator.set_state({**saved, "h": {"d": saved["z"]}, "weights": {"d": 0.0}})
    assert other.coordinator.learners == ("d",)
    assert not other.coordinator.dual("d").any()
    assert torch.equal(other.z, fleet.z)


def test_residuals_are_of_one_round_and_leave_out_who_was_not_heard():
    fleet = Fleet(ConsensusOptions(bits=32), rho=2.0)
    assert fleet.coordinator.residuals([]) is None
    z_bars = [fleet.z0]
    for _ in range(3):
        fleet.walk()
        fleet.thetas["c"].fill_(np.nan)
        weights = {"a": 3.0, "b": 1.0, "c": 0.0}
        fleet.round(weights=weights, rho0=2.0)
        z_bars.append(fleet.z.clone())  # without momentum z is z_bar
    residuals = fleet.coordinator.residuals(fleet.norms)
    a, b = fleet.thetas["a"], fleet.thetas["b"]
    u = {n: s.u.norm() ** 2 for n, s in fleet.locals.items()}
    primal = ((3 * (a - fleet.z).norm() ** 2 + (b - fleet.z).norm() ** 2) / 4).sqrt()
    theta = ((3 * a.norm() ** 2 + b.norm() ** 2) / 4).sqrt()
    assert residuals.primal == pytest.approx(primal.item())
    assert residuals.dual == pytest.approx(2 * (z_bars[-1] - z_bars[-2]).norm().item())
    assert residuals.primal_scale == pytest.approx(max(theta, fleet.z.norm()).item())
    assert residuals.dual_scale == pytest.approx(2 * ((3 * u["a"] + u["b"]) / 4).sqrt().item())


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_a_learner_holds_at_most_four_vectors(bits):
    p = 20_011
    options = ConsensusOptions(over_relaxation=1.5, bits=bits, full_precision_every=2)
    fleet = Fleet(options, size=p, dtype=torch.float32)
    block_and_scales = 4 * 256 + 4 * (p // 256 + 1)
    for round_ in range(3):
        fleet.walk()
        for n, state in fleet.locals.items():
            assert state.nbytes == 3 * 4 * p
            fleet.coordinator.receive(state.upload(fleet.thetas[n], 1))
            assert state.pending is not None
            assert 3 * 4 * p < state.nbytes <= 4 * 4 * p + block_and_scales
        reply = fleet.coordinator.close_round(1.0)
        for n, state in fleet.locals.items():
            state.complete(reply, fleet.thetas[n])
        if options.is_keyframe(round_):
            assert len(reply.message) <= 4 * p + block_and_scales + 1500


def test_the_coordinator_shares_the_bases_of_duals_between_learners():
    fleet = Fleet(ConsensusOptions())
    for _ in range(5):
        fleet.walk()
        fleet.round()
    assert len(fleet.coordinator.get_state()["duals"]["bases"]) == 1
