"""Learner processes: plain Ray actors in the Algorithm's placement group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rllib_admm.learner.errors import PlacementError


def actor_options(config: Any, placement_group: PlacementGroup | None) -> dict[str, Any]:
    """Returns the Ray options of one learner's actor."""
    cpus = config.num_cpus_per_learner
    if cpus == "auto":
        cpus = 1 if config.num_gpus_per_learner == 0 else 0
    options: dict[str, Any] = {
        "num_cpus": cpus,
        "num_gpus": max(0, config.num_gpus_per_learner),
        "resources": config.custom_resources_per_learner or None,
        # The group restarts learners itself, with a state that fits the consensus.
        "max_restarts": 0,
    }
    group = placement_group or ray.util.get_current_placement_group()
    if group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group)
    return options


def threads_per_learner(config: Any) -> int | None:
    """Returns torch's threads in a learner process; None leaves them alone.

    Small networks lose by more threads than cores: the default is one.
    """
    if config.num_learners == 0 or config.num_gpus_per_learner:
        return None
    cpus = config.num_cpus_per_learner
    return max(1, int(1 if cpus == "auto" else cpus))


def start_learner(
    config: Any, module_spec: Any, index: int, placement_group: PlacementGroup | None
) -> tuple[Any, Any]:
    """Starts one learner process; returns its handle and a reference to its readiness."""
    cls = ray.remote(**actor_options(config, placement_group))(config.learner_class)
    actor = cls.remote(config=config, module_spec=module_spec)
    actor._set_learner_index_and_placement_group.remote(
        learner_index=index, placement_group=placement_group
    )
    return actor, actor.build.remote()


def wait_until_built(
    started: Sequence[tuple[Any, Any]], config: Any, placement_group: PlacementGroup | None
) -> None:
    """Waits for all of `started` (handle, readiness).

    Raises:
        PlacementError: If they are not up within `placement_timeout_s`.
    """
    try:
        ray.get([ready for _, ready in started], timeout=config.placement_timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        for actor, _ in started:
            ray.kill(actor)
        options = actor_options(config, placement_group)
        asked = {key: value for key, value in options.items() if key.startswith("num_")}
        raise PlacementError(
            f"{len(started)} learners that ask for {asked} each were not up after "
            f"placement_timeout_s={config.placement_timeout_s:g} s; free in the cluster: "
            f"{ray.available_resources()}. Ask for fewer learners, or for fractions: "
            "config.learners(num_cpus_per_learner=0.5)."
        ) from error
