"""When a run ends: the file's `stop` criteria as a Tune stopper."""

from __future__ import annotations

from typing import Any

from ray.tune import Stopper
from ray.tune.utils.util import flatten_dict

from rllib_admm.cli.errors import did_you_mean

# Metrics that may be absent from the first result: no episode has ended, or the first evaluation
# comes later.
LATE_METRICS = frozenset(
    {
        "env_runners/episode_return_mean",
        "env_runners/episode_return_min",
        "env_runners/episode_return_max",
        "env_runners/episode_len_mean",
    }
)
LATE_PREFIXES = ("evaluation/", "env_runners/agent_", "env_runners/module_", "learners/")


class MetricStopper(Stopper):
    """Ends a trial as soon as one metric reaches its value.

    Tune's own dict of criteria never ends a run whose criterion is misspelt. This one ends the
    experiment at the first result then, and `error` says why.

    Args:
        stop: Metric (nested keys joined by ``/``) to the value at which the trial ends.
    """

    def __init__(self, stop: dict[str, float]) -> None:
        self._stop = stop
        self._checked = False
        self.error: str | None = None

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Returns whether this trial ends with this result."""
        flat = flatten_dict(result, delimiter="/")
        if not self._checked:
            self._checked = True
            self.error = self._unknown_metric(flat)
        if self.error:
            return True
        return any(name in flat and flat[name] >= value for name, value in self._stop.items())

    def stop_all(self) -> bool:
        """Returns whether the experiment ends."""
        return self.error is not None

    def _unknown_metric(self, flat: dict[str, Any]) -> str | None:
        metrics = {name for name in flat if not name.startswith("config/")} | LATE_METRICS
        for name in self._stop:
            if name not in metrics and not name.startswith(LATE_PREFIXES):
                hint = did_you_mean(name, metrics)
                return f"`stop` names `{name}`, which is no metric of this run{hint}"
        return None
