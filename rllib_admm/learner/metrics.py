"""Stand-ins for RLlib's MetricsLogger on the hot path: one record per round, not per step."""

from __future__ import annotations

import contextlib
from typing import Any

from ray.rllib.utils.metrics import TD_ERROR_KEY
from torch import Tensor


class MutedMetrics:
    """Stands in for the MetricsLogger on all but a round's last step: one record per round."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def log_value(self, *args: Any, **kwargs: Any) -> None:
        """Logs nothing."""

    log_dict = log_value

    def log_time(self, *args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
        """Times nothing."""
        return contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:
        """Hands on what does not log, such as `peek`."""
        return getattr(self._logger, name)


class CapturingMetrics:
    """Hands everything on to a logger but keeps the TD errors that DQN's loss logs."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self.td_errors: dict[str, Tensor] = {}

    def log_value(self, key: Any, value: Any, **kwargs: Any) -> None:
        """Keeps a TD error, shape (B,); hands anything else on."""
        if isinstance(key, tuple) and key[-1] == TD_ERROR_KEY:
            self.td_errors[key[0]] = value.detach()
        else:
            self._logger.log_value(key, value, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)
