"""Makes the algorithms known to RLlib and Tune by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.rllib.algorithms import registry
from ray.tune.registry import register_trainable

from rllib_admm.admm_dqn import ADMMDQN, ADMMDQNConfig
from rllib_admm.apex_dqn import ApexDQN, ApexDQNConfig


def _load_admm_dqn() -> tuple[type, Any]:
    return ADMMDQN, ADMMDQNConfig()


def _load_apex_dqn() -> tuple[type, Any]:
    return ApexDQN, ApexDQNConfig()


_ALGORITHMS: dict[str, tuple[Callable[[], tuple[type, Any]], type]] = {
    "ADMMDQN": (_load_admm_dqn, ADMMDQN),
    "APEX": (_load_apex_dqn, ApexDQN),
}


def register() -> None:
    """Registers "ADMMDQN" and "APEX" with RLlib and Tune.

    Importing `rllib_admm` calls it. Idempotent. Ray's trainable registry lives as long as one
    connection to a cluster; the entry in RLlib's own table makes Tune find the name again
    after `ray.shutdown(); ray.init()`.
    """
    for name, (loader, cls) in _ALGORITHMS.items():
        registry.ALGORITHMS[name] = loader
        registry.ALGORITHMS_CLASS_TO_NAME[cls.__name__] = name
        register_trainable(name, cls)


def _register_again() -> None:
    # Spares Tune a look-up that would import every algorithm of RLlib.
    for name, (_, cls) in _ALGORITHMS.items():
        register_trainable(name, cls)


def register_on_every_connection() -> None:
    """Registers again whenever Ray connects to a cluster, if this Ray offers the hook."""
    hooks = getattr(ray._private.worker, "_post_init_hooks", None)
    if hooks is not None and _register_again not in hooks:
        hooks.append(_register_again)
