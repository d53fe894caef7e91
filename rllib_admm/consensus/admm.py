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

Knows no networks, no optimizers beyond a per-element step size, no Ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rllib_admm.consensus.errors import ConsensusError, MessageError, NonFiniteError
from rllib_admm.consensus.message import Kind, Message, pack, unpack
from rllib_admm.consensus.penalty import PenaltySchedule, Residuals
from rllib_admm.consensus.quantization import decode, encode

COORDINATOR = "coordinator"


@dataclass(frozen=True)
class ConsensusOptions:
    """The constants that both ends of every link must share.

    Attributes:
        over_relaxation: alpha in (0, 2); above 1 lets agreement move further per round. In
            force only together with a dual (rho > 0).
        outer_momentum: mu in [0, 1) of the Nesterov outer step on z; 0 means none.
        outer_lr: Step size of the outer step; 1 means z <- z_bar.
        dual_updates: Whether duals are kept at all (False: proximal averaging).
        bits: Bits per element of a difference, one of 32, 16, 8, 4.
        full_precision_every: Every that many rounds both directions carry the values
            themselves, uncompressed; 1 means always, 0 never.
    """

    over_relaxation: float = 1.0
    outer_momentum: float = 0.0
    outer_lr: float = 1.0
    dual_updates: bool = True
    bits: int = 8
    full_precision_every: int = 5

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
        recentre: A packed vector to subtract from every dual, or None.
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

        Raises:
            MessageError: If the message is broken or does not follow on this state, which
                is unchanged then.
        """
        message = unpack(data, layout_hash=self.layout_hash, origin="The consensus message")
        if message.kind is not Kind.KEYFRAME and message.base_round != self.round:
            raise MessageError(
                f"The consensus message of round {message.round} continues round "
                f"{message.base_round}, but this end holds round {self.round}: it needs a keyframe."
            )
        if message.kind is Kind.UNCHANGED:
            return self.z.clone()
        vector = message.vector()
        if vector.numel() != self.z.numel() or vector.dtype != self.z.dtype:
            raise MessageError(
                f"The consensus message carries {vector.numel()} {vector.dtype} values, "
                f"this end holds {self.z.numel()} {self.z.dtype}."
            )
        if not torch.isfinite(vector).all():
            raise MessageError("The consensus message holds non-finite values.")
        return vector if message.kind is Kind.KEYFRAME else vector.add_(self.z)

    def advance(self, z_bar: Tensor) -> None:
        """Takes the outer step towards `z_bar`, shape (P,) (Nesterov, as in DiLoCo).

            v <- mu v + d;   z <- z + eta (d + mu v)   with d = z_bar - z
        """
        o = self.options
        if self.velocity is None and o.outer_lr == 1.0:
            self.z.copy_(z_bar)
        else:
            step = z_bar - self.z
            if self.velocity is not None:
                self.velocity.mul_(o.outer_momentum).add_(step)
                step.add_(self.velocity, alpha=o.outer_momentum)
            self.z.add_(step, alpha=o.outer_lr)
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
            MessageError: If it is broken or of another layout; the state is unchanged then.
        """
        z = unpack(snapshot.z, layout_hash=self.layout_hash, origin="The keyframe of z")
        vector = z.vector()
        if vector.shape != self.z.shape or not torch.isfinite(vector).all():
            raise MessageError("The keyframe of z has the wrong length or non-finite values.")
        if self.velocity is not None and snapshot.velocity is not None:
            self.velocity.copy_(unpack(snapshot.velocity, layout_hash=self.layout_hash).vector())
        self.z.copy_(vector)
        self.round = z.round

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


@dataclass(frozen=True)
class LocalNorms:
    """Norms of one learner at the end of a round, for metrics and residual balancing.

    Attributes:
        primal: |theta_i - z_bar|.
        dual: |u_i|.
        theta: |theta_i|.
        weight: w_i of the round.
    """

    primal: float
    dual: float
    theta: float
    weight: float


class LocalState:
    """A learner's side of the consensus: z, u, h and at most one pending message.

    Attributes:
        name: The learner's name in messages.
        consensus: z, shape (P,).
        u: Scaled dual, shape (P,).
        h: The memory that the coordinator shares, shape (P,).
        rho: The penalty in force, under which u is scaled.
    """

    def __init__(
        self, name: str, z: Tensor, options: ConsensusOptions, layout_hash: str, rho: float
    ) -> None:
        self.name = name
        self.consensus = Consensus(z.clone(), options, layout_hash)
        self.u = torch.zeros_like(z)
        self.h = z.clone()
        self.rho = rho
        self._pending: Message | None = None

    @property
    def pending(self) -> Message | None:
        """The upload that no reply has settled yet."""
        return self._pending

    @property
    def nbytes(self) -> int:
        """Bytes held between calls."""
        tensors = [self.consensus.z, self.u, self.h]
        if self.consensus.velocity is not None:
            tensors.append(self.consensus.velocity)
        size = sum(t.nbytes for t in tensors)
        if self._pending is not None and self._pending.encoded is not None:
            size += self._pending.encoded.codes.nbytes + self._pending.encoded.scales.nbytes
        return size

    def anchor(self) -> Tensor:
        """Returns z - u, shape (P,), towards which the local steps are pulled."""
        return self.consensus.z - self.u

    def _x(self, theta: Tensor) -> Tensor:
        # Without a dual the relaxed point would only be a second outer learning rate.
        alpha = self.consensus.options.over_relaxation if self.rho > 0 else 1.0
        if alpha == 1.0:
            return theta + self.u
        return torch.lerp(self.consensus.z, theta, alpha).add_(self.u)

    def upload(self, theta: Tensor, weight: float) -> bytes:
        """Encodes what this learner says in this round and keeps it pending.

        Args:
            theta: The learner's parameters, shape (P,).
            weight: w_i, local steps done with data; 0 sends 'unchanged'.

        Raises:
            NonFiniteError: If `theta` is not finite; nothing is pending then.
        """
        c, o = self.consensus, self.consensus.options
        kind, encoded = Kind.UNCHANGED, None
        if weight > 0:
            if not torch.isfinite(theta).all():
                raise NonFiniteError(f"The parameters of {self.name} are not finite.")
            x = self._x(theta)
            if o.is_keyframe(c.round):
                kind, encoded = Kind.KEYFRAME, encode(x, 32)
            else:
                kind, encoded = Kind.DIFFERENCE, encode(x.sub_(self.h), o.bits)
        message = Message(kind, self.name, c.round, c.round, c.layout_hash, weight, encoded)
        self._pending = message
        return pack(message)

    def complete(self, reply: Reply, theta: Tensor) -> LocalNorms:
        """Settles the round: moves z, and h and u if this learner was included.

        Args:
            reply: The coordinator's reply.
            theta: The parameters given to `upload`, unchanged since, shape (P,).

        Raises:
            MessageError: If the reply is broken or of another round; the state is unchanged.
        """
        c = self.consensus
        z_bar = c.read(reply.message)
        shift = None
        if reply.recentre is not None:
            shift = unpack(reply.recentre, layout_hash=c.layout_hash).vector()
        pending, self._pending = self._pending, None
        weight = 0.0
        if pending is not None and pending.encoded is not None and self.name in reply.included:
            weight = pending.weight
            x = self._x(theta)
            update = decode(pending.encoded)
            if pending.kind is Kind.KEYFRAME:
                self.h.copy_(update)
            else:
                self.h.add_(update)
            if self.rho > 0 and c.options.dual_updates:
                torch.sub(x, z_bar, out=self.u)
        if shift is not None:
            self.u.sub_(shift)
        primal = float(torch.linalg.vector_norm(theta - z_bar))
        c.advance(z_bar)
        self._rescale(reply.rho)
        return LocalNorms(
            primal=primal,
            dual=float(torch.linalg.vector_norm(self.u)),
            theta=float(torch.linalg.vector_norm(theta)),
            weight=weight,
        )

    def load(self, snapshot: Snapshot) -> None:
        """Starts anew from `snapshot`: h = z, u as given there, nothing pending."""
        self.consensus.load(snapshot)
        self._pending = None
        self.h.copy_(self.consensus.z)
        self.rho = snapshot.rho
        self.u.zero_()
        if snapshot.dual is not None:
            hash_ = self.consensus.layout_hash
            self.u.copy_(unpack(snapshot.dual, layout_hash=hash_).vector())

    def _rescale(self, rho: float) -> None:
        # u is the scaled dual: rho * u is what must not change when rho does.
        if rho <= 0:
            self.u.zero_()
        elif self.rho > 0 and rho != self.rho:
            self.u.mul_(self.rho / rho)
        self.rho = rho

    def get_state(self) -> dict[str, Any]:
        """Returns u, h, rho and the round (z is the coordinator's to save)."""
        return {"u": self.u.clone(), "h": self.h.clone(), "rho": self.rho}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; nothing is pending afterwards."""
        self.u.copy_(torch.as_tensor(state["u"]))
        self.h.copy_(torch.as_tensor(state["h"]))
        self.rho = float(state["rho"])
        self._pending = None


class Coordinator:
    """Forms z from the learners' uploads; a plain object that needs no process of its own.

    Attributes:
        consensus: z, shape (P,), as every end holds it.
        schedule: The schedule of rho.
        rho: The penalty in force.
    """

    def __init__(
        self,
        z: Tensor,
        options: ConsensusOptions,
        layout_hash: str,
        schedule: PenaltySchedule,
        learners: Iterable[str],
        rho: float,
    ) -> None:
        self.consensus = Consensus(z.clone(), options, layout_hash)
        self.schedule = schedule
        self.rho = rho
        self._z_bar = self.consensus.z.clone()
        # How much the duals were rescaled since they were formed as h_i - z_bar.
        self._dual_scale = 1.0
        self._h: dict[str, Tensor] = {name: self.consensus.z.clone() for name in learners}
        self._weights: dict[str, float] = dict.fromkeys(self._h, 0.0)
        self._received: set[str] = set()
        self._moved = 0.0

    @property
    def learners(self) -> tuple[str, ...]:
        """Names of the learners that take part."""
        return tuple(self._h)

    def memory(self, name: str) -> Tensor:
        """Returns h, shape (P,), of learner `name`."""
        return self._h[name]

    def receive(self, data: bytes) -> Message:
        """Counts one learner's upload in, in the round in progress.

        Raises:
            MessageError: If it is broken, of an unknown sender, of another round or twice
                there; the coordinator's state is unchanged.
            NonFiniteError: If it holds non-finite values; likewise.
        """
        c = self.consensus
        message = unpack(data, layout_hash=c.layout_hash, origin="An upload")
        name = message.sender
        if name not in self._h:
            raise MessageError(f"An upload comes from {name!r}, who is none of {self.learners}.")
        if message.round != c.round:
            raise MessageError(
                f"The upload of {name} is of round {message.round}, round {c.round} is open."
            )
        if name in self._received:
            raise MessageError(f"{name} uploaded twice in round {c.round}.")
        if message.kind is not Kind.UNCHANGED:
            vector = message.vector()
            if vector.numel() != c.z.numel() or vector.dtype != c.z.dtype:
                raise MessageError(
                    f"The upload of {name} carries {vector.numel()} {vector.dtype} values, not "
                    f"{c.z.numel()} {c.z.dtype}."
                )
            if not torch.isfinite(vector).all():
                raise NonFiniteError(f"The upload of {name} holds non-finite values.")
            if message.kind is Kind.KEYFRAME:
                self._h[name].copy_(vector)
            else:
                self._h[name].add_(vector)
            self._weights[name] = message.weight
        self._received.add(name)
        return message

    def close_round(self, rho0: float, norms: Sequence[LocalNorms] = ()) -> Reply:
        """Ends the round: forms z_bar, moves z, and says so.

        Every memory counts with its newest weight, also that of a learner left out of this
        round: what it last said stays the best guess of what it holds.

        Args:
            rho0: The penalty that the schedule's fraction multiplies.
            norms: The learners' norms of the last completed round, for the schedule.
        """
        c, o = self.consensus, self.consensus.options
        total = sum(self._weights.values())
        if total > 0:
            mean = torch.zeros_like(c.z)
            for name, h in self._h.items():
                if self._weights[name] > 0:
                    mean.add_(h, alpha=self._weights[name] / total)
            if o.is_keyframe(c.round):
                message = self._message(Kind.KEYFRAME, mean, 32)
            else:
                message = self._message(Kind.DIFFERENCE, mean.sub_(c.z), o.bits)
        else:
            message = self._message(Kind.UNCHANGED, None, 32)
        included = frozenset(self._received)
        self._received.clear()
        z_bar = c.read(message)
        self._moved = float(torch.linalg.vector_norm(z_bar - self._z_bar))
        self._z_bar = z_bar
        c.advance(z_bar)
        self.schedule.advance(self.residuals(norms))
        active = sum(weight > 0 for weight in self._weights.values())
        rho = rho0 * self.schedule.fraction if active > 1 else 0.0
        self._dual_scale = self.rho / rho if rho > 0 and self.rho > 0 else 1.0
        self.rho = rho
        return Reply(message, included, rho)

    def _message(self, kind: Kind, vector: Tensor | None, bits: int) -> bytes:
        c = self.consensus
        encoded = None if vector is None else encode(vector, bits)
        return pack(Message(kind, COORDINATOR, c.round, c.round, c.layout_hash, 0.0, encoded))

    def residuals(self, norms: Sequence[LocalNorms]) -> Residuals | None:
        """Returns the residuals of the last completed round, or None if no norms are known."""
        total = sum(n.weight for n in norms)
        if total <= 0:
            return None

        def rms(values: Iterable[float]) -> float:
            pairs = zip(values, norms, strict=True)
            return float(sum(v * v * n.weight for v, n in pairs) / total) ** 0.5

        z_norm = float(torch.linalg.vector_norm(self._z_bar))
        return Residuals(
            primal=rms(n.primal for n in norms),
            dual=self.rho * self._moved,
            primal_scale=max(rms(n.theta for n in norms), z_norm),
            dual_scale=self.rho * rms(n.dual for n in norms),
        )

    def dual(self, name: str) -> Tensor:
        """Returns u of learner `name` up to quantisation, shape (P,): h - z_bar, rescaled."""
        if self.rho <= 0 or not self.consensus.options.dual_updates:
            return torch.zeros_like(self.consensus.z)
        return (self._h[name] - self._z_bar).mul_(self._dual_scale)

    def mean_dual(self, names: Sequence[str]) -> Tensor:
        """Returns the mean of the duals of `names`, shape (P,); zero if there are none."""
        mean = torch.zeros_like(self.consensus.z)
        for name in names:
            mean.add_(self.dual(name), alpha=1.0 / len(names))
        return mean

    def remove(self, name: str) -> None:
        """Forgets a learner; its last word no longer counts."""
        self._h.pop(name, None)
        self._weights.pop(name, None)
        self._received.discard(name)

    def add(self, name: str, dual: Tensor | None = None) -> Snapshot:
        """Lets a learner without history take part, between rounds.

        Args:
            name: Its name.
            dual: The dual that it starts from, shape (P,); None means zero.

        Returns:
            What the new learner must `LocalState.load`.

        Raises:
            ConsensusError: If a learner of that name takes part already.
        """
        if name in self._h:
            raise ConsensusError(f"{name} takes part already.")
        self._h[name] = self.consensus.z.clone()
        self._weights[name] = 0.0
        return self.consensus.snapshot(rho=self.rho, dual=dual)

    def get_state(self) -> dict[str, Any]:
        """Returns all that a restart needs, as tensors and scalars."""
        c = self.consensus
        return {
            "z": c.z.clone(),
            "velocity": None if c.velocity is None else c.velocity.clone(),
            "round": c.round,
            "z_bar": self._z_bar.clone(),
            "rho": self.rho,
            "dual_scale": self._dual_scale,
            "schedule": self.schedule.get_state(),
            "h": {name: h.clone() for name, h in self._h.items()},
            "weights": dict(self._weights),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned, for the learners named there."""
        c = self.consensus
        c.z.copy_(torch.as_tensor(state["z"]))
        if c.velocity is not None and state["velocity"] is not None:
            c.velocity.copy_(torch.as_tensor(state["velocity"]))
        c.round = int(state["round"])
        self._z_bar = torch.as_tensor(state["z_bar"]).clone()
        self.rho = float(state["rho"])
        self._dual_scale = float(state["dual_scale"])
        self.schedule.set_state(state["schedule"])
        self._h = {name: torch.as_tensor(h).clone() for name, h in state["h"].items()}
        self._weights = {name: float(w) for name, w in state["weights"].items()}
        self._received.clear()
