"""`rllib report`: compares the runs in result folders."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rllib_admm.cli.errors import CommandError
from rllib_admm.report import metrics, read_runs, rows, write_report
from rllib_admm.report.table import LEARNING, SPEED


def write(
    folders: list[Path],
    *,
    out: Path,
    threshold: float | None = None,
    metric: str = metrics.RETURN,
) -> None:
    """Prints a table of the runs below `folders` and writes it with curves to files.

    Args:
        folders: Result folders: trials, experiments, or folders of those.
        out: Folder for the picture and the page.
        threshold: Return that counts as solved; None: the environment's own, if it has one.
        metric: Path in a result of what counts as the return.

    Raises:
        CommandError: If there is no run to report, or none has that metric.
    """
    runs, problems = read_runs(folders, metric)
    for path, reason in problems.items():
        print(f"rllib: hint: {path}: {reason}", file=sys.stderr)
    if not runs:
        raise CommandError(f"no run in {', '.join(str(folder) for folder in folders)}")
    if all((run.returns != run.returns).all() for run in runs):
        raise CommandError(f"no run has a number at `{metric}`")
    picture, page = write_report(runs, out, threshold=threshold, metric=metric, problems=problems)
    # On a terminal the columns share its width; in a file they need no less than they need.
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    compared = rows(runs, threshold)
    for env in dict.fromkeys(row.env for row in compared):
        for columns in (LEARNING, SPEED):
            table = Table(title=f"{env}: {columns.title}", title_justify="left")
            for heading in columns.headings:
                table.add_column(heading, justify="right" if table.columns else "left")
            for row in compared:
                if row.env == env:
                    table.add_row(*columns.texts(row))
            console.print(table)
    print(f"picture: {picture}")
    print(f"page:    {page}", flush=True)
