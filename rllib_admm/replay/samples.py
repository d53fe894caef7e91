"""What sampling returns: batches as arrays, one field per quantity."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Sample:
    """A batch of n-step transitions.

    `obs`, `next_obs`, `actions` and the entries of `extra` have the structure of the
    environment's (or the module's) data; every leaf has the batch as its first axis. The loss
    bootstraps with `rewards + gamma ** n_step * (1 - terminateds) * max Q(next_obs)`.
    """

    obs: Any  # (B, ...)
    next_obs: Any  # (B, ...), the observation reached after `n_step` steps
    actions: Any  # (B, ...), int32 if Discrete
    rewards: NDArray[np.float32]  # (B,), discounted sum over `n_step` steps
    terminateds: NDArray[np.bool_]  # (B,), of the observation reached
    truncateds: NDArray[np.bool_]  # (B,), of the observation reached
    weights: NDArray[np.float32]  # (B,), importance weights in (0, 1]; ones when uniform
    n_step: NDArray[np.float32]  # (B,), steps really taken: shorter at an episode's end
    indices: NDArray[np.int64]  # (B,), rows, for `ReplayShard.update_priorities`
    extra: dict[str, Any] = field(default_factory=dict)  # (B, ...), of the drawn row


@dataclass(frozen=True, slots=True)
class SequenceSample:
    """A batch of sequences as row numbers; `ReplayShard.transitions` reads the rows.

    Masked-out entries of `rows` repeat the row in which the sequence ended, those of
    `lookback_rows` the first row of the sequence, so that every entry may be gathered.
    """

    rows: NDArray[np.int64]  # (B, T), in the order of time
    mask: NDArray[np.bool_]  # (B, T), True where `rows` holds a transition of the sequence
    lookback_rows: NDArray[np.int64]  # (B, L), just before `rows`, in the order of time
    lookback_mask: NDArray[np.bool_]  # (B, L), False before the episode's first row
    weights: NDArray[np.float32]  # (B,), importance weights of the first rows
    indices: NDArray[np.int64]  # (B,), first rows, for `ReplayShard.update_priorities`
