"""Named errors of learners and their placement."""


class LearnerFailure(RuntimeError):
    """No learner is left, or one failed more often than allowed."""


class PlacementError(RuntimeError):
    """The cluster has no room for the actors that a configuration asks for."""
