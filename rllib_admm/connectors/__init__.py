"""Connectors of rllib_admm."""

from rllib_admm.connectors.grid_actions import GridActions
from rllib_admm.connectors.quantized_broadcast import QuantizedBroadcast

__all__ = ["GridActions", "QuantizedBroadcast"]
