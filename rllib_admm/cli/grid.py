"""`grid_search` anywhere in a configuration: one experiment per combination."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

GRID = "grid_search"
# A YAML anchor may refer to itself.
_DEEPEST = 20


def grids(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], list[Any]]]:
    """Yields the place and the values of each `grid_search` in nested mappings and lists."""
    if len(path) > _DEEPEST:
        return
    if isinstance(value, dict):
        if set(value) == {GRID} and isinstance(value[GRID], list):
            yield path, value[GRID]
            return
        for key, part in value.items():
            yield from grids(part, (*path, key))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from grids(part, (*path, index))


def combinations(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields a name such as "lr=0.001,n_step=3" and the config of each combination.

    Without a `grid_search` it yields "" and the config itself.
    """
    axes = list(grids(config))
    for values in itertools.product(*(values for _, values in axes)):
        variant: Any = config
        for (path, _), value in zip(axes, values, strict=True):
            variant = _replaced(variant, path, value)
        name = ",".join(
            f"{'.'.join(map(str, path))}={value}"
            for (path, _), value in zip(axes, values, strict=True)
        )
        yield name, variant


def _replaced(container: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copied: Any = list(container) if isinstance(container, list) else dict(container)
    copied[path[0]] = _replaced(container[path[0]], path[1:], value)
    return copied
