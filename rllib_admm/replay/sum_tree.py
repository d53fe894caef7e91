"""A wide sum tree over float32 leaves: proportional draws for a whole batch at once.

Owns the (already exponentiated) priorities of one replay shard and nothing else: it knows
neither episodes nor TD errors, and uses numpy only.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

BRANCHING: Final = 64
"""Children per node. Wider: fewer levels, but more children summed per draw and per update."""

_MAX_TOP: Final = 4096
"""A level this small is searched through its cumulative sum (4 us for 4,096 nodes)."""

_SMALLEST_LEAF: Final = float(np.finfo(np.float32).tiny)
_LARGEST_LEAF: Final = 1e37


class SumTree:
    """Sums and the positive minimum of `capacity` float32 leaves, updated in batches.

    A leaf of zero can never be drawn. Each level's node holds the float64 sum of 64 children;
    an update recomputes the touched nodes from their children, so that no rounding error
    accumulates over millions of updates. The topmost level is searched by its cumulative sum.

    Memory: 4 bytes per leaf, 12 bytes per 64 leaves (sum and minimum), and a 64th of that per
    further level: 4.2 bytes per row.
    """

    def __init__(self, capacity: int) -> None:
        """Makes a tree whose leaves are all zero.

        Args:
            capacity: Number of leaves, at least 1.
        """
        if capacity < 1:
            raise ValueError(f"SumTree: capacity={capacity} must be at least 1.")
        self.capacity = capacity
        blocks = -(-capacity // BRANCHING)
        self._leaves: NDArray[np.float32] = np.zeros((blocks, BRANCHING), np.float32)
        self._minima: NDArray[np.float32] = np.full(blocks, np.inf, np.float32)
        # Every inner level but the topmost is padded to whole blocks of 64 and kept 2-D.
        self._inner: list[NDArray[np.float64]] = []
        while blocks > _MAX_TOP:
            blocks = -(-blocks // BRANCHING)
            self._inner.append(np.zeros((blocks, BRANCHING), np.float64))
        self._top: NDArray[np.float64] = np.zeros(blocks, np.float64)
        # The leading 0 makes `_cumulative[node]` the sum of everything left of `node`.
        self._cumulative: NDArray[np.float64] = np.zeros(blocks + 1, np.float64)
        self._stale = False

    @property
    def total(self) -> float:
        """Sum of all leaves."""
        self._refresh()
        return float(self._cumulative[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        inner = sum(level.nbytes for level in self._inner)
        arrays = (self._leaves, self._minima, self._top, self._cumulative)
        return inner + sum(array.nbytes for array in arrays)

    @property
    def leaves(self) -> NDArray[np.float32]:
        """The leaves, shape (capacity,): a view, to be read only."""
        return self._leaves.reshape(-1)[: self.capacity]

    def minimum(self) -> float:
        """The smallest positive leaf; infinity if there is none."""
        return float(self._minima.min())

    def get(self, indices: NDArray[np.int64]) -> NDArray[np.float32]:
        """Leaves at `indices`.

        Args:
            indices: Leaf numbers, shape (B,).

        Returns:
            The leaves' values, shape (B,).
        """
        return self._leaves.reshape(-1).take(indices)

    def update(self, indices: NDArray[np.int64], values: NDArray[np.floating]) -> None:
        """Sets leaves. Where an index occurs twice, the last value stays.

        A positive value is kept within (1.2e-38, 1e37): it must not become zero, hence
        undrawable, nor infinite in float32.

        Args:
            indices: Leaf numbers, shape (B,).
            values: New values, at least 0, shape (B,).
        """
        if indices.size == 0:
            return
        kept = np.clip(values, _SMALLEST_LEAF, _LARGEST_LEAF)
        self._leaves.reshape(-1)[indices] = np.where(values > 0.0, kept, 0.0)
        nodes = indices // BRANCHING
        if nodes.size > BRANCHING:
            nodes = np.unique(nodes)
        children = self._leaves.take(nodes, axis=0)
        sums = children.sum(axis=1, dtype=np.float64)
        np.copyto(children, np.inf, where=children <= 0.0)
        self._minima[nodes] = children.min(axis=1)
        for level in self._inner:
            level.reshape(-1)[nodes] = sums
            nodes = nodes // BRANCHING
            sums = level.take(nodes, axis=0).sum(axis=1)
        self._top[nodes] = sums
        self._stale = True

    def find(self, prefix_sums: NDArray[np.float64]) -> NDArray[np.int64]:
        """For each prefix sum s: the first leaf i with leaf_0 + ... + leaf_i > s.

        Args:
            prefix_sums: Values in [0, total), shape (B,). Values at or above `total` (by
                rounding) find the last positive leaf.

        Returns:
            Leaf numbers, shape (B,). Each of these leaves is positive.
        """
        self._refresh()
        cumulative = self._cumulative
        # Rounding must not lead past the last positive child, at any level.
        wanted = np.minimum(prefix_sums, np.nextafter(cumulative[-1], 0.0))
        node: NDArray[np.int64] = cumulative[1:].searchsorted(wanted, side="right")
        wanted -= cumulative.take(node)
        levels: list[NDArray[Any]] = [*reversed(self._inner), self._leaves]
        for level in levels:
            sums = level.take(node, axis=0).cumsum(axis=1, dtype=np.float64)
            np.minimum(wanted, np.nextafter(sums[:, -1], 0.0), out=wanted)
            child = (sums > wanted[:, None]).argmax(axis=1)
            if level is not self._leaves:
                left = sums[np.arange(len(child)), child - 1]
                wanted -= np.where(child > 0, left, 0.0)
            node = node * BRANCHING + child
        return node

    def _refresh(self) -> None:
        if self._stale:
            np.cumsum(self._top, out=self._cumulative[1:])
            self._stale = False
