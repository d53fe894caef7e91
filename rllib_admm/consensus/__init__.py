"""Consensus ADMM as pure mathematics on flat tensors: no Ray, no RLlib."""

from rllib_admm.consensus.admm import (
    Consensus,
    ConsensusOptions,
    Coordinator,
    LocalNorms,
    LocalState,
    Reply,
    Snapshot,
)
from rllib_admm.consensus.errors import ConsensusError, MessageError, NonFiniteError
from rllib_admm.consensus.layout import Layout
from rllib_admm.consensus.message import FORMAT_VERSION, Kind, Message, pack, unpack
from rllib_admm.consensus.penalty import (
    PENALTY_SCHEDULES,
    ConstantPenalty,
    CosinePenalty,
    PenaltySchedule,
    ResidualBalancing,
    Residuals,
    make_schedule,
)
from rllib_admm.consensus.proximal import PROXIMAL_METRICS, adam_metric, pull
from rllib_admm.consensus.quantization import SUPPORTED_BITS, Encoded, decode, encode

__all__ = [
    "FORMAT_VERSION",
    "PENALTY_SCHEDULES",
    "PROXIMAL_METRICS",
    "SUPPORTED_BITS",
    "Consensus",
    "ConsensusError",
    "ConsensusOptions",
    "ConstantPenalty",
    "Coordinator",
    "CosinePenalty",
    "Encoded",
    "Kind",
    "Layout",
    "LocalNorms",
    "LocalState",
    "Message",
    "MessageError",
    "NonFiniteError",
    "PenaltySchedule",
    "Reply",
    "ResidualBalancing",
    "Residuals",
    "Snapshot",
    "adam_metric",
    "decode",
    "encode",
    "make_schedule",
    "pack",
    "pull",
    "unpack",
]
