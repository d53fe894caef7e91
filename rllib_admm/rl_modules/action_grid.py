"""Action spaces on a grid: what a Q-network chooses from, and what an environment gets.

Owns the mapping between an environment's action space and the bins of a Q-network. It knows
spaces only; networks and connectors use it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import tree  # type: ignore[import-untyped]  # dm_tree has no stubs
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from numpy.typing import NDArray

ACTION_GRIDS = ("per_dimension", "joint")
"""How dimensions are valued: each with bins of its own, or all combinations together."""

MAX_JOINT_ACTIONS = 4096
"""Most combinations of a joint grid: beyond it a network's head is larger than its body."""


class ActionGrid:
    """A grid of bins over an action space.

    Every dimension d of the space, in the order of its flattened leaves, has `nvec[d]` bins.
    Boxes are cut evenly, their bounds included; discrete spaces keep their values.

    Args:
        space: The environment's action space: Discrete, MultiDiscrete, MultiBinary, a bounded
            Box of any shape, or a Dict or Tuple of those.
        bins: Bins per dimension of a Box, at least 2; 3 is bang-off-bang.
        kind: One of `ACTION_GRIDS`.

    Raises:
        ValueError: If the space can not be put on a grid; names dimension and fix.
    """

    def __init__(self, space: gym.Space[Any], bins: int = 3, kind: str = "per_dimension") -> None:
        self.space = space
        self.kind = kind
        self._structure = _structure(space)
        self._leaves = [_Leaf(leaf, path, bins) for path, leaf in _leaves(space)]
        self.nvec: NDArray[np.int64] = np.concatenate([leaf.nvec for leaf in self._leaves])
        self._cuts = np.cumsum([len(leaf.nvec) for leaf in self._leaves])[:-1]
        if kind == "joint" and math.prod(self.nvec.tolist()) > MAX_JOINT_ACTIONS:
            raise ValueError(
                f"action_grid='joint' makes {math.prod(self.nvec.tolist())} combinations of {space}"
                f", more than {MAX_JOINT_ACTIONS}. Use action_grid='per_dimension', or smaller "
                "action_bins."
            )

    @property
    def module_space(self) -> MultiDiscrete | Discrete[Any]:
        """What a Q-network chooses from: a bin per dimension, or one of all combinations."""
        if self.kind == "joint":
            return Discrete(int(math.prod(self.nvec.tolist())))
        return MultiDiscrete(self.nvec)

    def to_env(self, choice: Any) -> Any:
        """Returns the environment's action for a choice of bins.

        Args:
            choice: Bin indices, shape (D,), or with a joint grid one index, shape () or (1,).
        """
        indices = np.asarray(choice, np.int64).reshape(-1)
        if self.kind == "joint":
            indices = np.asarray(np.unravel_index(indices[0], self.nvec))
        if self._structure is None:
            return self._leaves[0].action(indices)
        parts = np.split(indices, self._cuts)
        actions = [leaf.action(part) for leaf, part in zip(self._leaves, parts, strict=True)]
        return tree.unflatten_as(self._structure, actions)


class _Leaf:
    """One Box, Discrete, MultiDiscrete or MultiBinary space."""

    def __init__(self, space: gym.Space[Any], path: str, bins: int) -> None:
        self._space: Any = space
        self._values: NDArray[Any] | None = None
        if isinstance(space, Box):
            self._values = _box_values(space, path, bins)
            self.nvec = np.full(self._values.shape[0], bins, np.int64)
            self._rows = np.arange(self._values.shape[0])
        elif isinstance(space, Discrete):
            self.nvec = np.array([space.n], np.int64)
        elif isinstance(space, MultiDiscrete):
            self.nvec = space.nvec.astype(np.int64).reshape(-1)
        elif isinstance(space, MultiBinary):
            self.nvec = np.full(int(np.prod(space.shape)), 2, np.int64)
        else:
            raise ValueError(
                f"The action space {space}{path} can not be put on a grid: allowed are Discrete, "
                "MultiDiscrete, MultiBinary, bounded Box, and Dict or Tuple of those. Wrap the "
                "environment so that it offers one of them."
            )

    def action(self, indices: NDArray[Any]) -> Any:
        """Returns the action of bin indices, shape (D,)."""
        space = self._space
        if self._values is not None:
            return self._values[self._rows, indices].reshape(space.shape)
        if isinstance(space, Discrete):
            return np.dtype(space.dtype).type(indices[0] + space.start)
        action = indices.reshape(space.shape)
        if isinstance(space, MultiDiscrete):
            action = action + space.start
        return action.astype(space.dtype)


def _box_values(space: Box, path: str, bins: int) -> NDArray[Any]:
    """Returns the values of a Box's bins, shape (D, bins), in the Box's dtype."""
    low = np.asarray(space.low, np.float64).reshape(-1)
    high = np.asarray(space.high, np.float64).reshape(-1)
    # Unbounded integer boxes have bounds at the ends of their type.
    most = 1e30 if space.dtype is None or space.dtype.kind == "f" else 1e9
    for dimension, (least, greatest) in enumerate(zip(low, high, strict=True)):
        if not (abs(least) < most and abs(greatest) < most):
            index = np.unravel_index(dimension, space.shape)
            where = f"{path}[{', '.join(str(int(i)) for i in index)}]"
            raise ValueError(
                f"The action space {space} has no finite bounds in dimension {where} (low "
                f"{least:g}, high {greatest:g}), so that its bins are not defined. Wrap the "
                "environment in gymnasium.wrappers.RescaleAction, or give its action space finite "
                "bounds."
            )
    steps = np.linspace(0.0, 1.0, bins)
    values = low[:, None] + (high - low)[:, None] * steps
    if space.dtype is not None and space.dtype.kind in "iu":
        values = np.rint(values)
    # The last value of a float32 Box must not round past its bound.
    values = np.clip(
        values.astype(space.dtype), *(b.reshape(-1, 1) for b in (space.low, space.high))
    )
    return values


def _leaves(space: gym.Space[Any], path: str = "") -> Iterator[tuple[str, gym.Space[Any]]]:
    """Yields the leaves of a space in the order in which dm_tree flattens its actions."""
    if isinstance(space, Dict):
        for key in sorted(space.spaces):
            yield from _leaves(space.spaces[key], f"{path}[{key!r}]")
    elif isinstance(space, Tuple):
        for i, part in enumerate(space.spaces):
            yield from _leaves(part, f"{path}[{i}]")
    else:
        yield path, space


def _structure(space: gym.Space[Any]) -> Any:
    """Returns the nesting of a Dict or Tuple space; None for a leaf."""

    def nesting(part: gym.Space[Any]) -> Any:
        if isinstance(part, Dict):
            return {key: nesting(p) for key, p in part.spaces.items()}
        if isinstance(part, Tuple):
            return tuple(nesting(p) for p in part.spaces)
        return 0

    return nesting(space) if isinstance(space, (Dict, Tuple)) else None
