"""Bytes that crossed the wire, beside what fp32 ring all-reduce would have sent."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Traffic:
    """Byte counts of a group of learners.

    Ring all-reduce of P fp32 gradients sends and receives 2 (N - 1) / N * 4 P bytes each per
    learner and step; N of them cross the wire.

    Attributes:
        up: Message bytes from learners to the coordinator, summed over learners.
        down: Message bytes from the coordinator to learners, summed over learners.
        gradient_steps: Minibatch gradients, summed over learners.
        reference_nic: What one learner's network card would have sent and received under
            all-reduce for the same gradient steps.
        reference_wire: Likewise, of all learners, every byte counted once.
    """

    up: int = 0
    down: int = 0
    gradient_steps: int = 0
    reference_nic: float = 0.0
    reference_wire: float = 0.0

    def count_steps(self, gradient_steps: int, learners: int, parameters: int) -> None:
        """Books `gradient_steps` (over all learners) on `parameters` numbers."""
        self.gradient_steps += gradient_steps
        steps = gradient_steps / learners
        self.reference_nic += steps * 4 * (learners - 1) / learners * 4 * parameters
        self.reference_wire += steps * 2 * (learners - 1) * 4 * parameters

    def metrics(self, learners: int) -> dict[str, float]:
        """Returns the traffic's share of the `consensus` metrics."""
        sent = self.up + self.down
        return {
            "gradient_steps_lifetime": float(self.gradient_steps),
            "bytes_up_lifetime": float(self.up),
            "bytes_down_lifetime": float(self.down),
            "bytes_per_gradient_step": sent / max(1, self.gradient_steps),
            "compression_per_nic": self.reference_nic / (sent / learners) if sent else 0.0,
            "compression_wire": self.reference_wire / sent if sent else 0.0,
        }

    def get_state(self) -> dict[str, float]:
        """Returns all counts."""
        return asdict(self)
