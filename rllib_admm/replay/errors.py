"""The error raised for data that must not enter a replay shard."""

from __future__ import annotations


class ReplayDataError(ValueError):
    """Data that would poison learning: non-finite, missing, or unlike what is stored.

    It survives pickling, so that it reaches the driver from a remote Learner as it is.

    Args:
        problem: What is wrong, and what would be right.
        column: The column that holds the value, for instance `obs['position']`.
        episode_id: The episode's `id_`; None where no episode is concerned.
        time_step: The time step within the whole episode; None as above.
        source: Who delivered the data, for instance `"EnvRunner 3"`.
    """

    def __init__(
        self,
        problem: str,
        column: str,
        episode_id: str | None = None,
        time_step: int | None = None,
        source: str | None = None,
    ) -> None:
        # Exceptions are pickled as type(self)(*self.args).
        super().__init__(problem, column, episode_id, time_step, source)
        self.problem = problem
        self.column = column
        self.episode_id = episode_id
        self.time_step = time_step
        self.source = source

    def __str__(self) -> str:
        where = [self.source] if self.source is not None else []
        if self.episode_id is not None:
            where.append(f"episode {self.episode_id!r}")
        if self.time_step is not None:
            where.append(f"time step {self.time_step}")
        where.append(f"column {self.column}")
        return f"{', '.join(where)}: {self.problem}"
