"""From the bins that a Q-network chose to the action that the environment expects."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.utils.annotations import override

from rllib_admm.rl_modules.action_grid import ActionGrid


class GridActions(ConnectorV2):
    """Module-to-env piece: writes ACTIONS_FOR_ENV; episodes keep the bins as ACTIONS.

    It stands where RLlib's pipeline has `NormalizeAndClipActions`: a grid's actions are within
    the bounds.

    Args:
        grid: The grid on which the RLModule acts.
    """

    def __init__(
        self,
        input_observation_space: gym.Space[Any] | None = None,
        input_action_space: gym.Space[Any] | None = None,
        *,
        grid: ActionGrid,
        **kwargs: Any,
    ) -> None:
        super().__init__(input_observation_space, input_action_space, **kwargs)
        self.grid = grid

    @override(ConnectorV2)
    def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Adds the environment's actions to a batch of single items."""
        batch[Columns.ACTIONS_FOR_ENV] = {
            key: [self.grid.to_env(choice) for choice in choices]
            for key, choices in batch[Columns.ACTIONS].items()
        }
        return batch
