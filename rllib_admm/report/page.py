"""Writes a report: a picture, and a page that holds the picture and the table in one file."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from rllib_admm.report.runs import Run
from rllib_admm.report.table import LEARNING, SPEED, rows

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1500px; padding: 0 1rem;
       color: #222; background: #fff; }
img { width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; }
th, td { padding: .35rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
th { border-bottom: 2px solid #888; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
h2 { font-size: 1.05rem; margin: 1.5rem 0 .4rem; }
p, li { max-width: 60rem; }
"""
_NOTES = (
    "Lines and cells: interquartile mean over runs; bands and [low, high]: 90% bootstrap interval "
    "over runs. A line ends where its shortest run ends.",
    "Final return: mean of the reports of the last fifth of a run's env steps, exploration "
    "included; variance: of those reports, within a run. Greedy return: of the last weights.",
    "Steps to threshold: env steps at the first report at or above the threshold.",
    "Bytes: messages that learners sent and received, where the algorithm counts them. "
    "Gradient steps: summed over learners. Rates include the time of evaluations.",
)


def write_report(
    runs: Sequence[Run],
    folder: Path,
    *,
    threshold: float | None = None,
    metric: str = "return",
    problems: Mapping[Path, str] | None = None,
) -> tuple[Path, Path]:
    """Writes ``report.png`` and ``report.html``.

    Args:
        runs: At least one.
        folder: Where to; made if it is missing.
        threshold: Return that counts as solved; None: the environment's own, if it has one.
        metric: What the return is called in the picture.
        problems: Folders that could not be read, with the reason.

    Returns:
        Paths of the picture and of the page.
    """
    # Here, since `rllib train` imports this package and draws nothing.
    from rllib_admm.report.figure import draw

    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    draw(runs, metric).savefig(buffer, format="png", dpi=130)
    picture, page = folder / "report.png", folder / "report.html"
    picture.write_bytes(buffer.getvalue())
    image = base64.b64encode(buffer.getvalue()).decode()
    compared = rows(runs, threshold)
    tables = "".join(
        f"<h2>{escape(env)}: {columns.title}</h2>"
        + _table(columns.headings, [columns.texts(row) for row in compared if row.env == env])
        for env in dict.fromkeys(row.env for row in compared)
        for columns in (LEARNING, SPEED)
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in _NOTES)
    faults = "".join(
        f"<li><code>{escape(str(path))}</code>: {escape(reason)}</li>"
        for path, reason in (problems or {}).items()
    )
    page.write_text(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Runs</title>'
        f"<style>{_STYLE}</style></head><body><h1>{len(runs)} runs</h1>"
        f'<img alt="{escape(metric)} against env steps, wall-clock time and bytes sent" '
        f'src="data:image/png;base64,{image}">'
        f"{tables}<ul>{notes}</ul>"
        + (f"<h2>Left out, or read in part</h2><ul>{faults}</ul>" if faults else "")
        + "</body></html>"
    )
    return picture, page


def _table(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in cells
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
