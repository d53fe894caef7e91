"""Named errors of the consensus mathematics."""


class ConsensusError(RuntimeError):
    """Base class of everything that can go wrong while learners agree."""


class MessageError(ConsensusError):
    """A message that must not be applied: broken, of another version, layout or round.

    The receiver's state is unchanged when this is raised.
    """


class NonFiniteError(ConsensusError):
    """A vector that holds NaN or infinity where only finite values may be averaged."""
