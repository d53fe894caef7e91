"""One stored quantity (observations, actions, ...) as one array per leaf of its structure.

Owns shapes, dtypes and the check of incoming data against them. It knows rows, not episodes:
which row is whose successor is the shard's business.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tree  # type: ignore[import-untyped]  # dm_tree has no stubs
from numpy.typing import NDArray
from ray.rllib.utils.spaces.space_utils import batch

_STORABLE_KINDS = "biuf"
_INT32 = np.iinfo(np.int32)


class ColumnProblem(Exception):
    """What is wrong with incoming data; the shard adds episode and source to it.

    Args:
        problem: What is wrong, and what would be right.
        column: The column's name with the path of the leaf.
        step: The index of the offending item within the chunk.
    """

    def __init__(self, problem: str, column: str, step: int) -> None:
        super().__init__(problem)
        self.problem = problem
        self.column = column
        self.step = step


class _Leaf(NamedTuple):
    path: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Column:
    """A ring of rows for a possibly nested quantity.

    The structure, shapes and dtypes are those of the first data checked; later data must be
    alike. The arrays are allocated at the first `put`.

    Args:
        name: Name used in messages.
        narrow_integers: Store a plain integer per row as int32, whatever its incoming width
            (Discrete actions arrive as int32 or int64, depending on who chose them).
    """

    def __init__(self, name: str, *, narrow_integers: bool = False) -> None:
        self.name = name
        self._narrow = narrow_integers
        self._specs: list[_Leaf] | None = None
        self._structure: Any = None
        self._leaves: list[NDArray[Any]] = []

    @property
    def allocated(self) -> bool:
        """Whether the arrays exist."""
        return bool(self._leaves)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays; 0 before the first `put`."""
        return sum(leaf.nbytes for leaf in self._leaves)

    def forget(self) -> None:
        """Unlearns structure and shapes, unless something is stored already."""
        if not self._leaves:
            self._specs = self._structure = None

    def check(self, buffer: Any, count: int) -> list[NDArray[Any]]:
        """Returns the leaves of an episode's data without its lookback.

        Args:
            buffer: RLlib's `InfiniteLookbackBuffer`, numpy'ized or not; None if absent.
            count: The number of items there must be.

        Returns:
            One array per leaf, shape (count, ...); views where possible.

        Raises:
            ColumnProblem: An item is missing or non-finite, or shape, dtype or structure
                differ from what is stored.
        """
        data, lookback = (None, 0) if buffer is None else (buffer.data, buffer.lookback)
        if isinstance(data, list):
            data, lookback = (batch(data[lookback:]) if len(data) > lookback else None), 0
        if data is None:
            raise ColumnProblem(f"missing: 0 items for {count} expected.", self.name, 0)

        if isinstance(data, np.ndarray):
            paths: list[tuple[Any, ...]] = [()]
            arrays = [data[lookback:]]
        else:
            flat = tree.flatten_with_path(data)
            paths = [path for path, _ in flat]
            arrays = [np.asarray(leaf)[lookback:] for _, leaf in flat]

        arrays = [self._check_leaf(p, a, count) for p, a in zip(paths, arrays, strict=True)]
        if self._specs is None:
            self._specs = [
                _Leaf(p, a.shape[1:], a.dtype) for p, a in zip(paths, arrays, strict=True)
            ]
            self._structure = None if isinstance(data, np.ndarray) else _numbered(data)
            return arrays
        if paths != [spec.path for spec in self._specs]:
            stored = ", ".join(_label(self.name, spec.path) for spec in self._specs)
            got = ", ".join(_label(self.name, path) for path in paths)
            raise ColumnProblem(f"its parts are {got}; stored are {stored}.", self.name, 0)
        for spec, array in zip(self._specs, arrays, strict=True):
            if array.shape[1:] != spec.shape or array.dtype != spec.dtype:
                raise ColumnProblem(
                    f"shape {array.shape[1:]}, dtype {array.dtype}; stored are shape "
                    f"{spec.shape}, dtype {spec.dtype}. Every EnvRunner must use the same "
                    "spaces and connectors.",
                    _label(self.name, spec.path),
                    0,
                )
        return arrays

    def put(
        self, rows: NDArray[np.int64], leaves: list[NDArray[Any]], first: int, capacity: int
    ) -> None:
        """Writes items `first:` of checked leaves into `rows`.

        Args:
            rows: Row numbers, shape (k,).
            leaves: As returned by `check`, each of shape (first + k, ...).
            first: Number of leading items to leave out.
            capacity: Rows to allocate if this is the first write.
        """
        if not self._leaves:
            assert self._specs is not None
            # Zero pages cost no memory before they are written to.
            self._leaves = [np.zeros((capacity, *s.shape), s.dtype) for s in self._specs]
        for stored, leaf in zip(self._leaves, leaves, strict=True):
            stored[rows] = leaf[first:]

    def take(self, rows: NDArray[np.integer]) -> Any:
        """Gathers rows.

        Args:
            rows: Row numbers of any shape S.

        Returns:
            The column's structure with leaves of shape (*S, ...).
        """
        if self._structure is None:
            return self._leaves[0].take(rows, axis=0)
        return tree.map_structure(lambda i: self._leaves[i].take(rows, axis=0), self._structure)

    def get_state(self, size: int) -> Any:
        """Copies the first `size` rows; None before the first `put`."""
        if not self._leaves:
            return None
        if self._structure is None:
            return self._leaves[0][:size].copy()
        return tree.map_structure(lambda i: self._leaves[i][:size].copy(), self._structure)

    def set_state(self, state: Any, capacity: int) -> None:
        """Restores what `get_state` returned, into new arrays of `capacity` rows."""
        self._leaves = []
        self._specs = self._structure = None
        if state is None:
            return
        if isinstance(state, np.ndarray):
            flat: list[tuple[tuple[Any, ...], Any]] = [((), state)]
        else:
            flat = tree.flatten_with_path(state)
            self._structure = _numbered(state)
        self._specs = [_Leaf(path, leaf.shape[1:], leaf.dtype) for path, leaf in flat]
        for _, leaf in flat:
            stored = np.zeros((capacity, *leaf.shape[1:]), leaf.dtype)
            stored[: len(leaf)] = leaf
            self._leaves.append(stored)

    def _check_leaf(self, path: tuple[Any, ...], leaf: NDArray[Any], count: int) -> NDArray[Any]:
        if len(leaf) != count:
            raise ColumnProblem(
                f"missing: {len(leaf)} items for {count} expected.",
                _label(self.name, path),
                min(len(leaf), count),
            )
        if leaf.dtype.kind not in _STORABLE_KINDS:
            raise ColumnProblem(
                f"dtype {leaf.dtype} cannot be stored; allowed are bool, integer and floating "
                "types. Encode it in an env-to-module connector or an environment wrapper.",
                _label(self.name, path),
                0,
            )
        if leaf.dtype.kind == "f":
            if not np.isfinite(leaf).all():
                finite = np.isfinite(leaf.reshape(count, -1))
                step, item = divmod(int(finite.argmin()), finite.shape[1])
                value = leaf.reshape(count, -1)[step, item]
                raise ColumnProblem(f"value {value} is not finite.", _label(self.name, path), step)
        elif self._narrow and not path and leaf.ndim == 1 and leaf.dtype.kind in "iu":
            if leaf.dtype.itemsize > 2 and leaf.dtype != np.int32:
                outside = (leaf < _INT32.min) | (leaf > _INT32.max)
                if outside.any():
                    step = int(outside.argmax())
                    raise ColumnProblem(
                        f"value {leaf[step]} does not fit int32, in which integers are stored.",
                        self.name,
                        step,
                    )
            return leaf.astype(np.int32, copy=False)
        return leaf


def _numbered(structure: Any) -> Any:
    """The structure with the number of each leaf in the leaf's place."""
    return tree.unflatten_as(structure, list(range(len(tree.flatten(structure)))))


def _label(name: str, path: tuple[Any, ...]) -> str:
    return name + "".join(f"[{key!r}]" for key in path)
