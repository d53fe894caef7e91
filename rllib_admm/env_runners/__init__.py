"""EnvRunners: RLlib's own, with z arriving as quantised broadcasts."""

from rllib_admm.env_runners.group import ConsensusEnvRunnerGroup
from rllib_admm.env_runners.sampling import SampleReply, SampleRequest
from rllib_admm.env_runners.wrapping import WrappingEnvRunner

__all__ = ["ConsensusEnvRunnerGroup", "SampleReply", "SampleRequest", "WrappingEnvRunner"]
