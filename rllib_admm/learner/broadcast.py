"""What the group hands to EnvRunners: z as a difference, or as a keyframe.

A plain value that `rllib_admm.connectors.QuantizedBroadcast` takes as its state.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rllib_admm.consensus import ConsensusOptions, Layout, Snapshot


@dataclass(frozen=True)
class Broadcast:
    """z on its way to an EnvRunner.

    Attributes:
        round: The round that the receiver holds afterwards.
        base_round: The round that the receiver must hold before; None for a keyframe.
        moves: Per ModuleID the packed move of z (a difference).
        snapshots: Per ModuleID z itself (a keyframe).
        layouts: Per ModuleID the layout; with keyframes only.
        options: The consensus' constants; with keyframes only.
    """

    round: int
    base_round: int | None = None
    moves: dict[str, bytes] = field(default_factory=dict)
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    options: ConsensusOptions | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the packed vectors."""
        moves = sum(len(move) for move in self.moves.values())
        return moves + sum(snapshot.nbytes for snapshot in self.snapshots.values())
