"""The sum tree against plain numpy."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_admm.replay import sum_tree
from rllib_admm.replay.sum_tree import SumTree

# Multiples of 1/64 below 2**10: every sum of them is exact, so results must be equal.
exact_leaves = st.integers(0, 2**16).map(lambda i: i / 64)


@st.composite
def updates(draw):
    capacity = draw(st.integers(1, 20_000))
    batches = draw(
        st.lists(
            st.lists(st.tuples(st.integers(0, capacity - 1), exact_leaves), max_size=150),
            min_size=1,
            max_size=5,
        )
    )
    return capacity, batches


@settings(max_examples=60, deadline=None)
@given(updates(), st.sampled_from([1, 3, 4096]), st.integers(0, 2**32))
def test_it_equals_a_cumulative_sum_over_plain_leaves(case, max_top, seed):
    capacity, batches = case
    with mock.patch.object(sum_tree, "_MAX_TOP", max_top):  # forces one to three levels
        tree = SumTree(capacity)
    leaves = np.zeros(capacity)
    for batch in batches:
        indices = np.array([index for index, _ in batch], np.int64)
        values = np.array([value for _, value in batch])
        tree.update(indices, values)
        for index, value in batch:
            leaves[index] = value

        np.testing.assert_array_equal(tree.leaves, leaves)
        np.testing.assert_array_equal(tree.get(indices), leaves[indices])
        cumulative = np.cumsum(leaves)
        assert tree.total == cumulative[-1]
        assert tree.minimum() == min(leaves[leaves > 0], default=np.inf)
        if tree.total:
            rng = np.random.default_rng(seed)
            # Multiples of 1/64 hit the borders between leaves exactly.
            wanted = rng.integers(0, int(64 * tree.total), 100) / 64
            expected = np.searchsorted(cumulative, wanted, side="right")
            np.testing.assert_array_equal(tree.find(wanted), expected)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(1e-38, 1e38) | st.just(0.0), min_size=1, max_size=300).filter(any),
    st.sampled_from([1, 2, 4096]),
)
def test_a_zero_leaf_is_never_found_whatever_is_rounded(values, max_top):
    with mock.patch.object(sum_tree, "_MAX_TOP", max_top):
        tree = SumTree(len(values))
    tree.update(np.arange(len(values)), np.array(values))
    fractions = np.concatenate((np.linspace(0.0, 1.0, 97), [np.nextafter(1.0, 0.0), 1.0 + 1e-9]))
    assert (tree.get(tree.find(fractions * tree.total)) > 0).all()


@pytest.mark.parametrize("max_top", [1, 4096])
def test_sums_in_another_order_do_not_lead_past_the_last_child(max_top):
    # A node's sum is added in another order than its children's running sum and may exceed it
    # by a rounding error; a search past the end would fall back on child 0, here not drawable.
    rng = np.random.default_rng(0)
    leaves = 10.0 ** rng.uniform(-6, 6, (200, sum_tree.BRANCHING))
    leaves[:, 0] = 0.0
    with mock.patch.object(sum_tree, "_MAX_TOP", max_top):
        tree = SumTree(leaves.size)
    for block in np.float32(leaves):
        tree.update(np.arange(leaves.size), np.zeros(leaves.size))
        tree.update(np.arange(sum_tree.BRANCHING), block)
        assert tree.get(tree.find(np.array([tree.total]))) > 0


def test_sums_do_not_drift_over_updates():
    rng = np.random.default_rng(0)
    tree = SumTree(5000)
    for _ in range(2000):
        tree.update(rng.integers(0, 5000, 64), 10.0 ** rng.uniform(-12, 6, 64))
    fresh = SumTree(5000)
    fresh.update(np.arange(5000), tree.leaves.copy())
    assert tree.total == fresh.total


@pytest.mark.parametrize("value", [1e-300, 1e-45, 1e300, np.inf])
def test_extreme_leaves_stay_positive_and_finite(value):
    tree = SumTree(100)
    tree.update(np.array([3, 70]), np.array([value, 1.0]))
    assert 0 < tree.leaves[3] < np.inf
    assert np.isfinite(tree.total)


def test_it_takes_little_more_than_four_bytes_per_leaf():
    assert SumTree(100_000).nbytes <= 4.35 * 100_000
    assert SumTree(1_000_000).nbytes <= 4.2 * 1_000_000


def test_a_tree_needs_a_leaf():
    with pytest.raises(ValueError, match="capacity=0 must be at least 1"):
        SumTree(0)
