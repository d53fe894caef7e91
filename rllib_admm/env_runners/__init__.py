"""EnvRunners: RLlib's own, with z arriving as quantised broadcasts."""

from rllib_admm.env_runners.group import ConsensusEnvRunnerGroup
from rllib_admm.env_runners.sampling import ApexRequest, SampleReply, SampleRequest
from rllib_admm.env_runners.wrapping import WrappingEnvRunner

__all__ = [
    "ApexRequest",
    "ConsensusEnvRunnerGroup",
    "SampleReply",
    "SampleRequest",
    "WrappingEnvRunner",
]
