"""Reads RLlib's `replay_buffer_config` and refuses what a shard cannot honour."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_DEFAULT_TYPE: Final = "PrioritizedEpisodeReplayBuffer"

_PACKAGE: Final = "ray.rllib.utils.replay_buffers"

_MODULES: Final = {
    "EpisodeReplayBuffer": "episode_replay_buffer",
    "PrioritizedEpisodeReplayBuffer": "prioritized_episode_buffer",
    "MultiAgentEpisodeReplayBuffer": "multi_agent_episode_buffer",
    "MultiAgentPrioritizedEpisodeReplayBuffer": "multi_agent_prioritized_episode_buffer",
}


@dataclass(frozen=True)
class ReplayConfig:
    """What a `ReplayShard` is built from.

    The defaults are those of RLlib's `DQNConfig`; see `ReplayShard` for what larger and
    smaller values do.
    """

    capacity: int = 50_000  # rows per shard, one per observation; at least 2
    prioritized: bool = True
    alpha: float = 0.6  # at least 0; usual range 0.5 to 1
    beta: float = 0.4  # at least 0; usual range 0.4 to 1


def reward_bounds(clip_rewards: Any) -> tuple[float, float] | str | None:
    """Turns `config.clip_rewards` into what a `ReplayShard` takes.

    Args:
        clip_rewards: None or False: as they are. True: their sign. c > 0: clipped to [-c, c].
            (low, high): clipped to that range, either of which may be infinite.

    Raises:
        ValueError, TypeError: Anything else.
    """
    if clip_rewards is None or clip_rewards is False:
        return None
    if clip_rewards is True:
        return "sign"
    if isinstance(clip_rewards, Real):
        low, high = -float(clip_rewards), float(clip_rewards)
    else:
        low, high = (float(bound) for bound in clip_rewards)
    if not low < high:
        raise ValueError(f"clip_rewards={clip_rewards!r}: low must be below high.")
    return low, high


def clip(
    rewards: NDArray[np.float32], bounds: tuple[float, float] | str | None
) -> NDArray[np.float32]:
    """Returns rewards clipped as `reward_bounds` says, in float32."""
    if bounds is None:
        return rewards
    if isinstance(bounds, str):
        return np.sign(rewards)
    return np.clip(rewards, *bounds).astype(np.float32)


def parse_replay_config(replay_buffer_config: Mapping[str, Any]) -> ReplayConfig:
    """Turns `config.replay_buffer_config` into a `ReplayConfig`.

    Args:
        replay_buffer_config: `type` (one of RLlib's four episode buffers as name, dotted path
            or class; default `"PrioritizedEpisodeReplayBuffer"`), `capacity` and, for a
            prioritized type, `alpha` and `beta`. Anything else is refused, keys that RLlib's
            buffers accept and this one would ignore included.

    Returns:
        The parsed configuration. The multi-agent types give the same as the others: there is
        one shard per module in any case.

    Raises:
        ValueError: A key, the type or a value is not allowed.
    """
    given = dict(replay_buffer_config)
    prioritized = "Prioritized" in _type_name(given.pop("type", _DEFAULT_TYPE))
    allowed = ["capacity", "alpha", "beta"] if prioritized else ["capacity"]
    for key, value in given.items():
        if key in allowed:
            continue
        if key in ("alpha", "beta"):
            raise ValueError(
                f"replay_buffer_config[{key!r}]={value!r} has no effect on uniform sampling. "
                f"Remove it, or use type='Prioritized...' (for instance {_DEFAULT_TYPE!r})."
            )
        raise ValueError(
            f"replay_buffer_config[{key!r}]={value!r} is not supported; allowed keys: "
            f"{['type', *allowed]}.{_nearest(str(key), ['type', *allowed])}"
        )
    default = ReplayConfig()
    return ReplayConfig(
        capacity=_capacity(given.get("capacity", default.capacity)),
        prioritized=prioritized,
        alpha=_exponent("alpha", given.get("alpha", default.alpha)),
        beta=_exponent("beta", given.get("beta", default.beta)),
    )


def _type_name(type_: Any) -> str:
    """The bare class name of one of the four allowed types."""
    path = f"{type_.__module__}.{type_.__qualname__}" if isinstance(type_, type) else str(type_)
    for name, module in _MODULES.items():
        if path in (name, f"{_PACKAGE}.{name}", f"{_PACKAGE}.{module}.{name}"):
            return name
    raise ValueError(
        f"replay_buffer_config['type']={type_!r} is not supported; allowed: {list(_MODULES)}, "
        f"as names, dotted paths or classes.{_nearest(path.rpartition('.')[2], list(_MODULES))}"
    )


def _capacity(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not 2 <= int(value) < 2**31:
        raise ValueError(
            f"replay_buffer_config['capacity']={value!r} must be an integer from 2 (a "
            "transition takes two rows) to 2**31 - 1."
        )
    return int(value)


def _exponent(key: str, value: Any) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, Real)
        or not math.isfinite(value)
        or value < 0
    ):
        raise ValueError(
            f"replay_buffer_config[{key!r}]={value!r} must be a finite number of at least 0; "
            "usual values are 0.4 to 1."
        )
    return float(value)


def _nearest(word: str, allowed: list[str]) -> str:
    matches = difflib.get_close_matches(word, allowed, n=1, cutoff=0.5)
    return f" Did you mean {matches[0]!r}?" if matches else ""
