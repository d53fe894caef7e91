"""Where a train result of RLlib holds what is compared."""

from __future__ import annotations

import math
from typing import Any

ENV_STEPS = "num_env_steps_sampled_lifetime"
SECONDS = "time_total_s"
RETURN = "env_runners/episode_return_mean"
EVALUATION_RETURN = "evaluation/env_runners/episode_return_mean"

_BYTES = ("bytes_up_lifetime", "bytes_down_lifetime")


def lookup(result: dict[str, Any], path: str) -> float | None:
    """Returns the number at a ``/``-joined path of a nested result, or None."""
    value: Any = result
    for key in path.split("/"):
        if not isinstance(value, dict) or key not in value:
            return None
        value = value[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return None if math.isnan(value) else float(value)


def gradient_steps(result: dict[str, Any]) -> float | None:
    """Returns the gradient steps so far, summed over learners.

    ADMMDQN and Ape-X report them. RLlib's own algorithms report trained steps, of which the mean
    batch size makes up one gradient step.
    """
    for key in ("consensus/gradient_steps_lifetime", "apex/gradient_steps_lifetime"):
        reported = lookup(result, key)
        if reported is not None:
            return reported
    trained = lookup(result, "learners/__all_modules__/num_module_steps_trained_lifetime")
    batch = lookup(result, "learners/default_policy/module_train_batch_size_mean")
    return trained / batch if trained is not None and batch else None


def bytes_sent(result: dict[str, Any]) -> float | None:
    """Returns the message bytes that learners sent and received so far; None if not counted.

    As in `consensus/bytes_per_gradient_step`, without the broadcasts to EnvRunners.
    """
    counts = [lookup(result, f"consensus/{key}") for key in _BYTES]
    return None if counts[0] is None else sum(count or 0.0 for count in counts)
