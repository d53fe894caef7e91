"""Whether the cluster has room for an algorithm's actors, before any of them starts."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Any

import ray

from rllib_admm.learner.errors import PlacementError

logger = logging.getLogger(__name__)


def wait_for_room(config: Any, algorithm: type) -> None:
    """Waits until the cluster could hold what `config` asks for, or raises.

    Does nothing inside a placement group (a Tune trial): its bundles are reserved already.

    Args:
        config: A validated AlgorithmConfig.
        algorithm: The Algorithm class.

    Raises:
        PlacementError: If there is no room after `placement_timeout_s`.
    """
    if not ray.is_initialized():
        # What Ray does at the first remote call anyway; after it the resources are known.
        ray.init()
    if ray.util.get_current_placement_group() is not None:
        return
    asked = requested_resources(config, algorithm)
    deadline = time.monotonic() + config.placement_timeout_s
    warned = False
    while True:
        offered = ray.cluster_resources()
        short = {k: v for k, v in asked.items() if v > offered.get(k, 0.0) + 1e-6}
        if not short:
            return
        if time.monotonic() >= deadline:
            raise PlacementError(
                f"The cluster offers {_text(offered, short)}, this configuration asks for "
                f"{_text(asked, short)}, and that has not changed in placement_timeout_s="
                f"{config.placement_timeout_s:g} s. Ask for fewer learners or EnvRunners, or for "
                "fractions: config.learners(num_cpus_per_learner=0.5), "
                "config.env_runners(num_cpus_per_env_runner=0.25)."
            )
        if not warned:
            warned = True
            logger.warning(
                "The cluster offers %s, this configuration asks for %s: waiting up to %g s for it "
                "to grow.",
                _text(offered, short),
                _text(asked, short),
                config.placement_timeout_s,
            )
        time.sleep(min(0.5, max(0.01, deadline - time.monotonic())))


def requested_resources(config: Any, algorithm: Any) -> dict[str, float]:
    """Returns the sum of all actors' resources, without the main process."""
    factory = algorithm.default_resource_request(config.copy(copy_frozen=False))
    total: Counter[str] = Counter()
    for bundle in factory.bundles[1:]:
        for name, amount in bundle.items():
            if amount:
                total[name] += amount
    return dict(total)


def _text(resources: dict[str, float], names: dict[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0.0):g} {name}" for name in names)
