"""The RLlib side of the consensus: Learner and LearnerGroup."""

from rllib_admm.learner.broadcast import Broadcast
from rllib_admm.learner.errors import LearnerFailure, PlacementError
from rllib_admm.learner.learner_group import ConsensusLearnerGroup
from rllib_admm.learner.members import RoundSummary
from rllib_admm.learner.torch_learner import ADMMDQNTorchLearner

__all__ = [
    "ADMMDQNTorchLearner",
    "Broadcast",
    "ConsensusLearnerGroup",
    "LearnerFailure",
    "PlacementError",
    "RoundSummary",
]
