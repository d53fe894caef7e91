"""Consensus ADMM on flat vectors: what a learner holds, what the coordinator holds.

Scaled form (Boyd et al. 2011, 7.1) with over-relaxation (3.4.3), a weighted mean, memories
h that both ends of a link share so that only quantised *differences* travel (as in
DIANA/EF21-type methods), and a deterministic outer step:

    learner i:    x_i = alpha theta_i + (1 - alpha) z + u_i;   sends m_i = Q(x_i - h_i)
    coordinator:  h_i += m_i;   d = Q(sum_i w_i h_i / W - z);   sends d and who was included
    every end:    z_bar = z + d;   z <- outer_step(z, d)
    learner i:    included: h_i += m_i, u_i <- x_i - z_bar;     not included: only z moves

The dual is *assigned* from the un-accelerated z_bar and never incremented, which is what
keeps momentum and over-relaxation stable. A sent difference stays pending until the reply
says whether it was included, so h never differs at the two ends.

Knows no networks, no optimizers beyond a per-element step size, no Ray, no RLlib.
"""

from rllib_admm.consensus.coordinator import Coordinator
from rllib_admm.consensus.errors import ConsensusError, MessageError, NonFiniteError
from rllib_admm.consensus.layout import Layout
from rllib_admm.consensus.local import LocalNorms, LocalState
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
from rllib_admm.consensus.shared import Consensus, ConsensusOptions, Reply, Snapshot

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
