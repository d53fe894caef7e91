"""The coordinator's side of the consensus: every learner's memory, and z from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rllib_admm.consensus.errors import ConsensusError, MessageError
from rllib_admm.consensus.local import LocalNorms
from rllib_admm.consensus.message import Kind, Message, pack, unpack
from rllib_admm.consensus.penalty import PenaltySchedule, Residuals
from rllib_admm.consensus.quantization import encode
from rllib_admm.consensus.shared import (
    COORDINATOR,
    Consensus,
    ConsensusOptions,
    Reply,
    Snapshot,
    finite,
    restored,
    vector_like,
)


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
            vector = vector_like(c.z, message, f"The upload of {name}")
            if message.kind is Kind.DIFFERENCE:
                vector.add_(self._h[name])
            self._h[name].copy_(finite(vector, f"The upload of {name}"))
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
        z = restored(c.z, state["z"], "z")
        velocity = torch.zeros_like(z)
        if state["velocity"] is not None:
            velocity = restored(z, state["velocity"], "velocity")
        z_bar = restored(z, state["z_bar"], "z_bar")
        memories = {name: restored(z, h, f"h of {name}") for name, h in state["h"].items()}
        duals = state["duals"]
        bases = {key: restored(z, b, "base of a dual") for key, b in duals["bases"].items()}
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
