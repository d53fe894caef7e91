"""Whether a run fits the Ray cluster, asked before it starts: Tune would wait for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import ray
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rllib_admm.cli.algorithm_config import algorithm_class
from rllib_admm.cli.experiment_file import Experiment

# Fractions of CPUs are sums of floats.
_TOLERANCE = 1e-6


def check_resources(config: AlgorithmConfig, experiment: Experiment) -> None:
    """Compares what a trial asks of the cluster with what the cluster has.

    Args:
        config: The trial's config.
        experiment: Where the config comes from.

    Raises:
        CommandError: If the trial can never be placed; says what is asked, what is there, and how
            to ask for less.
    """
    request = algorithm_class(config).default_resource_request(config.to_dict())
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    asked, short = shortage(request.bundles, nodes)
    if not short:
        return
    there: Counter[str] = Counter()
    for node in nodes:
        there.update({name: node.get(name, 0) for name in short})
    amounts = " and ".join(f"{asked[name]:g} {name}" for name in short)
    have = " and ".join(f"{there[name]:g}" for name in short)
    message = (
        f"the run asks for {amounts}, the Ray cluster has {have} ({_parts(config)}); "
        "ask for less, e.g. fewer `num_env_runners` or `num_learners`, or fractions such as "
        "`num_cpus_per_env_runner: 0.25`, `num_cpus_per_learner: 0.5`, "
        "`num_cpus_for_main_process: 0.25`"
    )
    if short == ["CPU"]:
        message += f"; or let Ray count more CPUs: --ray-num-cpus {-int(-asked['CPU'] // 1)}"
    raise experiment.error("config", message)


def shortage(
    bundles: list[dict[str, float]], nodes: list[Mapping[str, float]]
) -> tuple[dict[str, float], list[str]]:
    """Sums the bundles and names the resources of which there can never be enough.

    Args:
        bundles: What each actor (or group of actors on one node) asks.
        nodes: What each node has in total.

    Returns:
        The sum asked of each resource, and the names of those that are short: the cluster has
        less than the sum, or no single node has what one bundle asks.
    """
    asked: Counter[str] = Counter()
    short: set[str] = set()
    for bundle in bundles:
        for name, amount in bundle.items():
            asked[name] += amount  # type: ignore[assignment]  # Counter's values are not only int
            if amount > max((node.get(name, 0) for node in nodes), default=0) + _TOLERANCE:
                short.add(name)
    for name, amount in asked.items():
        if amount > sum(node.get(name, 0) for node in nodes) + _TOLERANCE:
            short.add(name)
    return dict(asked), sorted(short)


def _parts(config: AlgorithmConfig) -> str:
    """Describes who asks for the CPUs."""
    parts = [f"main process {config.num_cpus_for_main_process}"]
    for count, what, each in (
        (config.num_env_runners, "env runner", config.num_cpus_per_env_runner),
        (config.evaluation_num_env_runners, "evaluation runner", config.num_cpus_per_env_runner),
        (config.num_learners, "learner", config.num_cpus_per_learner),
    ):
        if count:
            each = 1 if each == "auto" else each
            parts.append(f"{count} {what}{'s' if count > 1 else ''} at {each}")
    return "CPUs: " + ", ".join(parts)
