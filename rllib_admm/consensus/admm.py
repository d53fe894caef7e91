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

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rllib_admm.consensus.errors import ConsensusError, MessageError, NonFiniteError
from rllib_admm.consensus.message import Kind, Message, pack, unpack
from rllib_admm.consensus.penalty import PenaltySchedule, Residuals
from rllib_admm.consensus.quantization import SUPPORTED_BITS, decode, encode

COORDINATOR = "coordinator"


def _finite(vector: Tensor, what: str, error: type[ConsensusError] = NonFiniteError) -> Tensor:
    if not torch.isfinite(vector).all():
        raise error(f"{what} holds non-finite values.")
    return vector


def _vector_like(z: Tensor, message: Message, what: str) -> Tensor:
    # The length is known before anything is decoded.
    e = message.encoded
    if e is not None and (e.count != z.numel() or e.dtype != z.dtype):
        raise MessageError(
            f"{what} carries {e.count} {e.dtype} values, this end holds {z.numel()} {z.dtype}."
        )
    return message.vector()


def _restored(z: Tensor, saved: Any, what: str) -> Tensor:
    vector = torch.as_tensor(saved)
    if vector.shape != z.shape or vector.dtype != z.dtype:
        raise ConsensusError(
            f"The saved {what} is {tuple(vector.shape)} {vector.dtype}, this end holds "
            f"{tuple(z.shape)} {z.dtype}."
        )
    return vector.clone()


def _check_rho(rho: float, what: str) -> None:
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
        vector = _vector_like(self.z, message, "The consensus message")
        if message.kind is Kind.DIFFERENCE:
            vector.add_(self.z)
        return _finite(vector, "The consensus message", MessageError)

    def advance(self, z_bar: Tensor) -> None:
        """Takes the outer step towards `z_bar`, shape (P,) (Nesterov, as in DiLoCo).

        v <- mu v + d;   z <- z + eta (d + mu v)   with d = z_bar - z

        Raises:
            NonFiniteError: If z or v would overflow; the state is unchanged then.
        """
        self._commit(*self._stepped(z_bar))

    def _stepped(self, z_bar: Tensor) -> tuple[Tensor, Tensor | None]:
        # Apart from _commit, so that what must move together with z can be checked before.
        o = self.options
        if self.velocity is None and o.outer_lr == 1.0:
            return z_bar, None
        step, velocity = z_bar - self.z, None
        if self.velocity is not None:
            velocity = (self.velocity * o.outer_momentum).add_(step)
            step.add_(velocity, alpha=o.outer_momentum)
            _finite(velocity, "The outer step's velocity")
        return _finite(self.z.add(step, alpha=o.outer_lr), "z after the outer step"), velocity

    def _commit(self, z: Tensor, velocity: Tensor | None) -> None:
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
        z, round_ = self._read_keyframe(snapshot.z, "The keyframe of z")
        velocity = None
        if self.velocity is not None and snapshot.velocity is not None:
            velocity, _ = self._read_keyframe(snapshot.velocity, "The keyframe of the velocity")
        self.z.copy_(z)
        if self.velocity is not None:
            if velocity is None:
                self.velocity.zero_()
            else:
                self.velocity.copy_(velocity)
        self.round = round_

    def _read_keyframe(self, data: bytes, origin: str) -> tuple[Tensor, int]:
        message = unpack(data, layout_hash=self.layout_hash, origin=origin)
        if message.kind is not Kind.KEYFRAME:
            raise MessageError(f"{origin} is of the kind {message.kind.value!r}, not 'keyframe'.")
        vector = _vector_like(self.z, message, origin)
        return _finite(vector, origin, MessageError), message.round

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

    @property
    def _has_dual(self) -> bool:
        return self.rho > 0 and self.consensus.options.dual_updates

    def _x(self, theta: Tensor) -> Tensor:
        # Without a dual the relaxed point would only be a second outer learning rate.
        alpha = self.consensus.options.over_relaxation if self._has_dual else 1.0
        if alpha == 1.0:
            return theta + self.u
        return torch.lerp(self.consensus.z, theta, alpha).add_(self.u)

    def upload(self, theta: Tensor, weight: float) -> bytes:
        """Encodes what this learner says in this round and keeps it pending.

        A second call in the same round replaces what is pending, so it is only allowed if
        the first upload can not have been received.

        Args:
            theta: The learner's parameters, shape (P,).
            weight: w_i, local steps done with data; 0 sends 'unchanged'.

        Raises:
            NonFiniteError: If `theta` is not finite, or what has to be said of it overflows;
                nothing is pending then.
            ValueError: If `theta` has another shape or dtype than z, or `weight` is negative
                or not finite; likewise.
        """
        c, o = self.consensus, self.consensus.options
        self._pending = None
        self._check_theta(theta)
        if not 0 <= weight < math.inf:
            raise ValueError(f"The weight of {self.name} must be finite and >= 0, not {weight}.")
        kind, encoded = Kind.UNCHANGED, None
        if weight > 0:
            _finite(theta, f"The vector of parameters of {self.name}")
            x = self._x(theta)
            if o.is_keyframe(c.round):
                kind, encoded = Kind.KEYFRAME, encode(_finite(x, f"x of {self.name}"), 32)
            else:
                x.sub_(self.h)
                encoded = encode(_finite(x, f"The difference of {self.name}"), o.bits)
                kind = Kind.DIFFERENCE
        message = Message(kind, self.name, c.round, c.round, c.layout_hash, weight, encoded)
        self._pending = message
        return pack(message)

    def complete(self, reply: Reply, theta: Tensor) -> LocalNorms:
        """Settles the round: moves z, and h and u if this learner was included.

        Args:
            reply: The coordinator's reply.
            theta: The parameters given to `upload`, unchanged since, shape (P,).

        Raises:
            MessageError: If the reply is broken, of another round, counts an upload that is
                not pending here, or would make z or u non-finite; the state is unchanged.
            ValueError: If `theta` has another shape or dtype than z; likewise.
        """
        c, pending = self.consensus, self._pending
        self._check_theta(theta)
        _check_rho(reply.rho, f"The reply to {self.name}")
        if self.name in reply.included and pending is None:
            raise MessageError(
                f"The reply counts an upload of {self.name} in round {c.round}, where none is "
                "pending: h would differ at the two ends. It needs a snapshot (LocalState.load)."
            )
        z_bar = c.read(reply.message)
        h, u, weight = None, self.u, 0.0
        if pending is not None and pending.encoded is not None and self.name in reply.included:
            weight = pending.weight
            h = decode(pending.encoded)
            if pending.kind is Kind.DIFFERENCE:
                h.add_(self.h)
            if self._has_dual:
                u = self._x(theta).sub_(z_bar)
        u = self._rescaled(u, reply.rho)
        if reply.recentre is not None and reply.rho > 0:
            u = u - c._read_keyframe(reply.recentre, "The shift of the duals")[0]
        _finite(u, f"The dual of {self.name} after the reply", MessageError)
        try:
            z, velocity = c._stepped(z_bar)
        except NonFiniteError as error:
            raise MessageError(f"The reply to {self.name} can not be followed: {error}") from error
        # From here on nothing can fail.
        self._pending = None
        if h is not None:
            self.h.copy_(h)
        self.u.copy_(u)
        self.rho = reply.rho
        c._commit(z, velocity)
        return LocalNorms(
            primal=float(torch.linalg.vector_norm(theta - z_bar)),
            dual=float(torch.linalg.vector_norm(self.u)),
            theta=float(torch.linalg.vector_norm(theta)),
            weight=weight,
        )

    def load(self, snapshot: Snapshot) -> None:
        """Starts anew from `snapshot`: h = z, u as given there, nothing pending.

        At rho = 0 there is no dual, whatever `snapshot` says.

        Raises:
            MessageError: If it is broken, of another layout or not finite; the state is
                unchanged then.
        """
        c, dual = self.consensus, None
        _check_rho(snapshot.rho, "The snapshot")
        if snapshot.dual is not None and snapshot.rho > 0:
            dual, _ = c._read_keyframe(snapshot.dual, "The keyframe of the dual")
        c.load(snapshot)
        self._pending = None
        self.h.copy_(c.z)
        self.rho = snapshot.rho
        if dual is None:
            self.u.zero_()
        else:
            self.u.copy_(dual)

    def _check_theta(self, theta: Tensor) -> None:
        z = self.consensus.z
        if theta.shape != z.shape or theta.dtype != z.dtype:
            raise ValueError(
                f"theta of {self.name} is {tuple(theta.shape)} {theta.dtype}, z is "
                f"{tuple(z.shape)} {z.dtype}."
            )

    def _rescaled(self, u: Tensor, rho: float) -> Tensor:
        # u is the scaled dual: rho * u is what must not change when rho does.
        if rho == 0:
            return torch.zeros_like(u)
        return u * (self.rho / rho) if self.rho > 0 and rho != self.rho else u

    def get_state(self) -> dict[str, Any]:
        """Returns u, h and rho, between rounds (z is the coordinator's to save)."""
        return {"u": self.u.clone(), "h": self.h.clone(), "rho": self.rho}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; nothing is pending afterwards.

        z and the round come from the coordinator: `load` its snapshot first.

        Raises:
            ConsensusError: If the state is of another network; nothing is changed then.
        """
        z = self.consensus.z
        u, h = _restored(z, state["u"], "u"), _restored(z, state["h"], "h")
        self.u.copy_(u)
        self.h.copy_(h)
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
        self._h: dict[str, Tensor] = {name: self.consensus.z.clone() for name in learners}
        self._weights: dict[str, float] = dict.fromkeys(self._h, 0.0)
        # u_i = scale_i (h_i - base_i): z_bar of the round in which i was last included, and
        # how much rho's moves have rescaled u_i since (0: no dual). Learners of one round
        # share one base.
        self._bases: dict[str, Tensor] = dict.fromkeys(self._h, self._z_bar)
        self._scales: dict[str, float] = dict.fromkeys(self._h, 0.0)
        self._received: set[str] = set()
        self._spoke: set[str] = set()
        self._dual_residual = 0.0

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
        if message.round != c.round or message.base_round != c.round:
            raise MessageError(
                f"The upload of {name} is of round {message.round} (on {message.base_round}), "
                f"round {c.round} is open."
            )
        if name in self._received:
            raise MessageError(f"{name} uploaded twice in round {c.round}.")
        if message.kind is not Kind.UNCHANGED:
            vector = _vector_like(c.z, message, f"The upload of {name}")
            if message.kind is Kind.DIFFERENCE:
                vector.add_(self._h[name])
            self._h[name].copy_(_finite(vector, f"The upload of {name}"))
            self._weights[name] = message.weight
            self._spoke.add(name)
        self._received.add(name)
        return message

    def close_round(self, rho0: float, norms: Sequence[LocalNorms] = ()) -> Reply:
        """Ends the round: forms z_bar, moves z, and says so.

        Every memory counts with its newest weight, also that of a learner left out of this
        round: what it last said stays the best guess of what it holds.

        Args:
            rho0: The penalty that the schedule's fraction multiplies.
            norms: The learners' norms of the last completed round, for the schedule.

        Raises:
            ValueError: If `rho0` is negative or not finite; the round stays open.
            NonFiniteError: If z would not be finite; likewise.
        """
        c, o = self.consensus, self.consensus.options
        if not 0 <= rho0 < math.inf:
            raise ValueError(f"rho0 must be finite and not negative, not {rho0}.")
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
        z_bar = c.read(message)
        c.advance(z_bar)
        included = frozenset(self._received)
        for name in self._spoke:
            self._bases[name], self._scales[name] = z_bar, 1.0
        self._received.clear()
        self._spoke.clear()
        self.schedule.advance(self.residuals(norms))
        self._dual_residual = self.rho * float(torch.linalg.vector_norm(z_bar - self._z_bar))
        self._z_bar = z_bar
        active = sum(weight > 0 for weight in self._weights.values())
        rho = rho0 * self.schedule.fraction if active > 1 else 0.0
        rescale = self.rho / rho if rho > 0 else 0.0
        for name in self._scales:
            self._scales[name] *= rescale
        self.rho = rho
        return Reply(message, included, rho)

    def _message(self, kind: Kind, vector: Tensor | None, bits: int) -> bytes:
        c = self.consensus
        encoded = None if vector is None else encode(vector, bits)
        return pack(Message(kind, COORDINATOR, c.round, c.round, c.layout_hash, 0.0, encoded))

    def residuals(self, norms: Sequence[LocalNorms]) -> Residuals | None:
        """Returns the residuals of the last completed round, or None if no norms are known."""
        heard = [n for n in norms if n.weight > 0]
        if not heard:
            return None
        total = sum(n.weight for n in heard)

        def rms(values: Iterable[float]) -> float:
            pairs = zip(values, heard, strict=True)
            return math.sqrt(sum(v * v * n.weight for v, n in pairs) / total)

        z_norm = float(torch.linalg.vector_norm(self._z_bar))
        return Residuals(
            primal=rms(n.primal for n in heard),
            dual=self._dual_residual,
            primal_scale=max(rms(n.theta for n in heard), z_norm),
            dual_scale=self.rho * rms(n.dual for n in heard),
        )

    def dual(self, name: str) -> Tensor:
        """Returns u of learner `name` up to quantisation, shape (P,), between rounds.

        That is h - z_bar, both of the round in which it was last included, rescaled.
        """
        scale = self._scales[name] if self.consensus.options.dual_updates else 0.0
        if scale == 0:
            return torch.zeros_like(self.consensus.z)
        return (self._h[name] - self._bases[name]).mul_(scale)

    def mean_dual(self, names: Sequence[str]) -> Tensor:
        """Returns the mean of the duals of `names`, shape (P,); zero if there are none."""
        mean = torch.zeros_like(self.consensus.z)
        for name in names:
            mean.add_(self.dual(name), alpha=1.0 / len(names))
        return mean

    def remove(self, name: str) -> None:
        """Forgets a learner; its last word no longer counts."""
        for known in (self._h, self._weights, self._bases, self._scales):
            known.pop(name, None)
        self._received.discard(name)
        self._spoke.discard(name)

    def add(self, name: str, dual: Tensor | None = None) -> Snapshot:
        """Lets a learner without history take part, between rounds.

        Args:
            name: Its name.
            dual: The dual that it starts from, shape (P,), scaled by the rho in force; None
                means zero, and so does rho = 0.

        Returns:
            What the new learner must `LocalState.load`.

        Raises:
            ConsensusError: If a learner of that name takes part already.
        """
        if name in self._h:
            raise ConsensusError(f"{name} takes part already.")
        z = self.consensus.z
        if self.rho <= 0 or not self.consensus.options.dual_updates:
            dual = None
        self._h[name] = z.clone()
        self._weights[name] = 0.0
        self._bases[name] = self._z_bar if dual is None else z - dual
        self._scales[name] = 0.0 if dual is None else 1.0
        return self.consensus.snapshot(rho=self.rho, dual=dual)

    def get_state(self) -> dict[str, Any]:
        """Returns all that a restart needs, as tensors and scalars, between rounds."""
        c = self.consensus
        # Bases are shared by whole rounds, and are saved once each.
        bases = {id(base): base for base in self._bases.values()}
        keys = {key: str(index) for index, key in enumerate(bases)}
        return {
            "z": c.z.clone(),
            "velocity": None if c.velocity is None else c.velocity.clone(),
            "round": c.round,
            "z_bar": self._z_bar.clone(),
            "rho": self.rho,
            "dual_residual": self._dual_residual,
            "duals": {
                "bases": {keys[key]: base.clone() for key, base in bases.items()},
                "base_of": {name: keys[id(base)] for name, base in self._bases.items()},
                "scales": dict(self._scales),
            },
            "schedule": self.schedule.get_state(),
            "h": {name: h.clone() for name, h in self._h.items()},
            "weights": dict(self._weights),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned, for the learners named under "h" there.

        A learner that "duals" does not know has no dual.

        Raises:
            ConsensusError: If the state is of another network; nothing is changed then.
        """
        c = self.consensus
        z = _restored(c.z, state["z"], "z")
        velocity = torch.zeros_like(z)
        if state["velocity"] is not None:
            velocity = _restored(z, state["velocity"], "velocity")
        z_bar = _restored(z, state["z_bar"], "z_bar")
        memories = {name: _restored(z, h, f"h of {name}") for name, h in state["h"].items()}
        duals = state["duals"]
        bases = {key: _restored(z, b, "base of a dual") for key, b in duals["bases"].items()}
        base_of, scales = duals["base_of"], duals["scales"]
        self.schedule.set_state(state["schedule"])
        c.z.copy_(z)
        if c.velocity is not None:
            c.velocity.copy_(velocity)
        c.round = int(state["round"])
        self.rho = float(state["rho"])
        self._z_bar, self._h = z_bar, memories
        self._bases = {n: bases[base_of[n]] if n in base_of else z_bar for n in memories}
        self._scales = {n: float(scales.get(n, 0.0)) for n in memories}
        self._dual_residual = float(state["dual_residual"])
        self._weights = {name: float(w) for name, w in state["weights"].items()}
        self._received.clear()
        self._spoke.clear()
