"""A learner's side of the consensus: its dual, its memory, its pending message."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rllib_admm.consensus.errors import MessageError, NonFiniteError
from rllib_admm.consensus.message import Kind, Message, pack
from rllib_admm.consensus.quantization import decode, encode
from rllib_admm.consensus.shared import (
    Consensus,
    ConsensusOptions,
    Reply,
    Snapshot,
    check_rho,
    finite,
    restored,
)

COORDINATOR = "coordinator"


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
            finite(theta, f"The vector of parameters of {self.name}")
            x = self._x(theta)
            if o.is_keyframe(c.round):
                kind, encoded = Kind.KEYFRAME, encode(finite(x, f"x of {self.name}"), 32)
            else:
                x.sub_(self.h)
                encoded = encode(finite(x, f"The difference of {self.name}"), o.bits)
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
        check_rho(reply.rho, f"The reply to {self.name}")
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
            u = u - c.read_keyframe(reply.recentre, "The shift of the duals")[0]
        finite(u, f"The dual of {self.name} after the reply", MessageError)
        try:
            z, velocity = c.stepped(z_bar)
        except NonFiniteError as error:
            raise MessageError(f"The reply to {self.name} can not be followed: {error}") from error
        # From here on nothing can fail.
        self._pending = None
        if h is not None:
            self.h.copy_(h)
        self.u.copy_(u)
        self.rho = reply.rho
        c.commit(z, velocity)
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
        check_rho(snapshot.rho, "The snapshot")
        if snapshot.dual is not None and snapshot.rho > 0:
            dual, _ = c.read_keyframe(snapshot.dual, "The keyframe of the dual")
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
        u, h = restored(z, state["u"], "u"), restored(z, state["h"], "h")
        self.u.copy_(u)
        self.h.copy_(h)
        self.rho = float(state["rho"])
        self._pending = None
