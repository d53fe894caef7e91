"""What is shown while a run goes on: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ray import tune
from ray.tune.experiment import Trial
from rich.console import Console
from rich.live import Live
from rich.table import Table

from rllib_admm.report.metrics import gradient_steps, lookup

# Reports that stay visible in the live table.
VISIBLE_REPORTS = 12


@dataclass(frozen=True)
class Column:
    """A column of the table; left out as long as no result has its value.

    Attributes:
        title: The heading.
        value: Path in the result, or a function of it.
        form: Format of the number.
    """

    title: str
    value: str | Callable[[dict[str, Any]], float | None]
    form: str

    def text(self, result: dict[str, Any]) -> str | None:
        """Returns the formatted value, or None if the result has none."""
        number = lookup(result, self.value) if isinstance(self.value, str) else self.value(result)
        return None if number is None else format(number, self.form)


COLUMNS = (
    Column("iter", "training_iteration", ".0f"),
    Column("env steps", "num_env_steps_sampled_lifetime", ",.0f"),
    Column("return", "env_runners/episode_return_mean", ".1f"),
    Column("eval return", "evaluation/env_runners/episode_return_mean", ".1f"),
    Column("grad steps", gradient_steps, ",.0f"),
    Column("round", "consensus/round", ",.0f"),
    Column("rho", "consensus/rho", ".3g"),
    Column("primal res.", "consensus/primal_residual", ".3g"),
    Column("bytes/step", "consensus/bytes_per_gradient_step", ",.0f"),
    Column("compression", "consensus/compression_per_nic", ",.0f"),
    Column("seconds", "time_total_s", ".0f"),
)


class ProgressReporter(tune.Callback):
    """Shows each result as it arrives; a context manager around `Tuner.fit`.

    Args:
        title: Heading of the table.
        console: Where to print. A live table if it is a terminal, else one line per result.
    """

    def __init__(self, title: str, console: Console) -> None:
        self._title = title
        self._console = console
        self._rows: deque[dict[str, str]] = deque(maxlen=VISIBLE_REPORTS)
        self._trials: list[str] = []
        self._live: Live | None = None

    def __enter__(self) -> ProgressReporter:
        if self._console.is_terminal:
            self._live = Live(self._table(), console=self._console, auto_refresh=False)
            self._live.start(refresh=True)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its callbacks with the experiment; a terminal cannot be restored from there.
        return {"title": self._title}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ProgressReporter.__init__(self, state["title"], Console())

    def on_trial_result(
        self,
        iteration: int,
        trials: list[Trial],
        trial: Trial,
        result: dict[str, Any],
        **info: Any,
    ) -> None:
        """Shows one result."""
        if trial.trial_id not in self._trials:
            self._trials.append(trial.trial_id)
        row = {
            column.title: text for column in COLUMNS if (text := column.text(result)) is not None
        }
        if len(trials) > 1:
            row = {"trial": str(self._trials.index(trial.trial_id) + 1), **row}
        self._rows.append(row)
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        else:
            print("  ".join(f"{title} {text}" for title, text in row.items()), flush=True)

    def _table(self) -> Table:
        table = Table(title=self._title, title_justify="left")
        shown = [
            title
            for title in ("trial", *(column.title for column in COLUMNS))
            if any(title in row for row in self._rows)
        ]
        for title in shown:
            table.add_column(title, justify="right")
        for row in self._rows:
            table.add_row(*(row.get(title, "-") for title in shown))
        if not self._rows:
            table.add_column("waiting for the first result")
        return table
