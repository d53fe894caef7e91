"""z as every end of every link holds it: learners, coordinator, EnvRunners.

Also what they must share to hold the same: the constants, replies, snapshots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rllib_admm.consensus.errors import ConsensusError, MessageError, NonFiniteError
from rllib_admm.consensus.message import Kind, Message, pack, unpack
from rllib_admm.consensus.quantization import SUPPORTED_BITS, encode

COORDINATOR = "coordinator"


def finite(vector: Tensor, what: str, error: type[ConsensusError] = NonFiniteError) -> Tensor:
    """Returns `vector`, or raises `error` if it is not finite."""
    if not torch.isfinite(vector).all():
        raise error(f"{what} holds non-finite values.")
    return vector


def vector_like(z: Tensor, message: Message, what: str) -> Tensor:
    """Returns the vector of `message`, shape (P,), or raises MessageError if z is another."""
    # The length is known before anything is decoded.
    e = message.encoded
    if e is not None and (e.count != z.numel() or e.dtype != z.dtype):
        raise MessageError(
            f"{what} carries {e.count} {e.dtype} values, this end holds {z.numel()} {z.dtype}."
        )
    return message.vector()


def restored(z: Tensor, saved: Any, what: str) -> Tensor:
    """Returns a copy of `saved`, shape (P,), or raises ConsensusError if z is another."""
    vector = torch.as_tensor(saved)
    if vector.shape != z.shape or vector.dtype != z.dtype:
        raise ConsensusError(
            f"The saved {what} is {tuple(vector.shape)} {vector.dtype}, this end holds "
            f"{tuple(z.shape)} {z.dtype}."
        )
    return vector.clone()


def check_rho(rho: float, what: str) -> None:
    """Raises MessageError if `rho` is no penalty."""
    if not 0 <= rho < math.inf:
        raise MessageError(f"{what} names rho={rho}, which must be finite and not negative.")


@dataclass(frozen=True)
class ConsensusOptions:
    """The constants that both ends of every link must share.

    Attributes:
        over_relaxation: alpha in (0, 2); above 1 lets agreement move further per round. In
            force only together with a dual (rho > 0 and `dual_updates`).
        outer_momentum: mu in [0, 1) of the Nesterov outer step on z; 0 means none.
        outer_lr: Step size of the outer step; 1 means z <- z_bar.
        dual_updates: Whether duals are kept at all (False: proximal averaging).
        bits: Bits per element of a difference, one of 32, 16, 8, 4.
        full_precision_every: Every that many rounds both directions carry the values
            themselves, uncompressed; 1 means always, 0 never.

    Raises:
        ValueError: If an option is out of its range.
    """

    over_relaxation: float = 1.0
    outer_momentum: float = 0.0
    outer_lr: float = 1.0
    dual_updates: bool = True
    bits: int = 8
    full_precision_every: int = 5

    def __post_init__(self) -> None:
        for name, allowed, text in (
            ("over_relaxation", 0 < self.over_relaxation < 2, "in (0, 2)"),
            ("outer_momentum", 0 <= self.outer_momentum < 1, "in [0, 1)"),
            ("outer_lr", 0 < self.outer_lr < math.inf, "positive and finite"),
            ("bits", self.bits in SUPPORTED_BITS, f"one of {SUPPORTED_BITS}"),
            ("full_precision_every", self.full_precision_every >= 0, "0 or more"),
        ):
            if not allowed:
                raise ValueError(f"{name} must be {text}, not {getattr(self, name)!r}.")

    def is_keyframe(self, round_: int) -> bool:
        """Returns whether round `round_` (0 is the first) goes uncompressed."""
        return self.full_precision_every > 0 and round_ % self.full_precision_every == 0

    @classmethod
    def plain(cls) -> ConsensusOptions:
        """Returns the options under which z is exactly the learners' mean."""
        return cls(bits=32, full_precision_every=1)


@dataclass(frozen=True)
class Reply:
    """What the coordinator tells every learner at the end of a round.

    Attributes:
        message: The packed move of z.
        included: Names of the learners whose uploads of this round were counted.
        rho: The penalty in force from here on; 0 means no pull and no dual.
        recentre: A packed keyframe to subtract from every dual, or None; like
            `Coordinator.dual` after the round, scaled by `rho`.
    """

    message: bytes
    included: frozenset[str]
    rho: float
    recentre: bytes | None = None


@dataclass(frozen=True)
class Snapshot:
    """Everything that an end without history needs to hold the consensus.

    Attributes:
        z: Packed keyframe of z.
        velocity: Packed keyframe of the outer step's velocity, or None without momentum.
        dual: Packed keyframe of the dual to start from, or None for zero.
        rho: The penalty in force.
    """

    z: bytes
    velocity: bytes | None
    dual: bytes | None
    rho: float

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return sum(len(part) for part in (self.z, self.velocity, self.dual) if part is not None)


class Consensus:
    """z as every end holds it: learners, coordinator, EnvRunners.

    Attributes:
        z: float32 or float64, shape (P,).
        velocity: Like z, or None if there is no outer momentum.
        round: Rounds completed, which is also the number of the round in progress.
    """

    def __init__(self, z: Tensor, options: ConsensusOptions, layout_hash: str) -> None:
        self.z = z
        self.options = options
        self.layout_hash = layout_hash
        self.velocity = torch.zeros_like(z) if options.outer_momentum > 0 else None
        self.round = 0

    def read(self, data: bytes) -> Tensor:
        """Returns the z_bar, shape (P,), that a packed move of this round leads to.

        A keyframe must be of this round as well: an end that missed a round also missed the
        outer step's velocity, and needs a `Snapshot`.

        Raises:
            MessageError: If the message is broken, does not follow on this state, or leads
                to a z_bar that is not finite. The state is unchanged then.
        """
        message = unpack(data, layout_hash=self.layout_hash, origin="The consensus message")
        if message.round != self.round or message.base_round != self.round:
            raise MessageError(
                f"The consensus message of round {message.round} continues round "
                f"{message.base_round}, but this end holds round {self.round}: it needs a keyframe "
                "(Consensus.snapshot)."
            )
        if message.kind is Kind.UNCHANGED:
            return self.z.clone()
        vector = vector_like(self.z, message, "The consensus message")
        if message.kind is Kind.DIFFERENCE:
            vector.add_(self.z)
        return finite(vector, "The consensus message", MessageError)

    def advance(self, z_bar: Tensor) -> None:
        """Takes the outer step towards `z_bar`, shape (P,) (Nesterov, as in DiLoCo).

        v <- mu v + d;   z <- z + eta (d + mu v)   with d = z_bar - z

        Raises:
            NonFiniteError: If z or v would overflow; the state is unchanged then.
        """
        self.commit(*self.stepped(z_bar))

    def stepped(self, z_bar: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns z and velocity, (P,) each, after the outer step towards `z_bar`; see `advance`.

        Apart from `commit`, so that what must move together with z can be checked before.
        """
        o = self.options
        if self.velocity is None and o.outer_lr == 1.0:
            return z_bar, None
        step, velocity = z_bar - self.z, None
        if self.velocity is not None:
            velocity = (self.velocity * o.outer_momentum).add_(step)
            step.add_(velocity, alpha=o.outer_momentum)
            finite(velocity, "The outer step's velocity")
        return finite(self.z.add(step, alpha=o.outer_lr), "z after the outer step"), velocity

    def commit(self, z: Tensor, velocity: Tensor | None) -> None:
        """Takes over what `stepped` returned, which ends the round."""
        self.z.copy_(z)
        if self.velocity is not None and velocity is not None:
            self.velocity.copy_(velocity)
        self.round += 1

    def snapshot(self, *, rho: float = 0.0, dual: Tensor | None = None) -> Snapshot:
        """Returns this state for an end without history."""
        return Snapshot(
            z=self._keyframe(self.z),
            velocity=None if self.velocity is None else self._keyframe(self.velocity),
            dual=None if dual is None else self._keyframe(dual),
            rho=rho,
        )

    def load(self, snapshot: Snapshot) -> None:
        """Takes over `snapshot`.

        Raises:
            MessageError: If it is broken, of another layout or not finite; the state is
                unchanged then.
        """
        z, round_ = self.read_keyframe(snapshot.z, "The keyframe of z")
        velocity = None
        if self.velocity is not None and snapshot.velocity is not None:
            velocity, _ = self.read_keyframe(snapshot.velocity, "The keyframe of the velocity")
        self.z.copy_(z)
        if self.velocity is not None:
            if velocity is None:
                self.velocity.zero_()
            else:
                self.velocity.copy_(velocity)
        self.round = round_

    def read_keyframe(self, data: bytes, origin: str) -> tuple[Tensor, int]:
        """Returns vector, shape (P,), and round of a packed keyframe, or raises MessageError."""
        message = unpack(data, layout_hash=self.layout_hash, origin=origin)
        if message.kind is not Kind.KEYFRAME:
            raise MessageError(f"{origin} is of the kind {message.kind.value!r}, not 'keyframe'.")
        vector = vector_like(self.z, message, origin)
        return finite(vector, origin, MessageError), message.round

    def _keyframe(self, vector: Tensor) -> bytes:
        return pack(
            Message(
                Kind.KEYFRAME,
                COORDINATOR,
                self.round,
                self.round,
                self.layout_hash,
                encoded=encode(vector, 32),
            )
        )
