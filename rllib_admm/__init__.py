"""rllib_admm: value-based agents on many machines, agreeing by consensus ADMM."""

from rllib_admm.admm_dqn import ADMMDQN, ADMMDQNConfig
from rllib_admm.apex_dqn import ApexDQN, ApexDQNConfig
from rllib_admm.registration import register, register_on_every_connection

__version__ = "0.1.0"

register()
register_on_every_connection()

__all__ = ["ADMMDQN", "ADMMDQNConfig", "ApexDQN", "ApexDQNConfig", "register"]
