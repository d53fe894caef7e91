"""The curves of a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from rllib_admm.report.runs import Run
from rllib_admm.report.statistics import bootstrap

# Okabe and Ito's colours, which the colour-blind can tell apart; beyond them, other dashes.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_DASHES = ("-", "--", ":", "-.")
_POINTS = 150
_AXES = (
    ("env_steps", "env steps"),
    ("seconds", "wall-clock time (s)"),
    ("bytes_sent", "bytes sent"),
)


def draw(runs: Sequence[Run], ylabel: str = "return") -> Figure:
    """Draws the return against env steps, wall-clock time and bytes sent.

    A line is the interquartile mean over a group's runs, interpolated linearly between reports and
    drawn as far as its shortest run goes; the band is the 90% bootstrap interval over runs.

    Args:
        runs: Runs of one or more environments, each of which gets a row of panels.
        ylabel: What the return is called.
    """
    envs = list(dict.fromkeys(run.env for run in runs))
    figure = Figure(figsize=(15, 4.6 * len(envs)), layout="constrained")
    panels: Any = figure.subplots(len(envs), len(_AXES), squeeze=False, sharey="row")
    groups = list(dict.fromkeys(run.group for run in runs))
    styles = {
        group: (
            _COLOURS[i % len(_COLOURS)],
            _DASHES[i // len(_COLOURS) % len(_DASHES)],
        )
        for i, group in enumerate(groups)
    }
    for row, env in zip(panels, envs, strict=True):
        for panel, (attribute, xlabel) in zip(row, _AXES, strict=True):
            missing = []
            for group in groups:
                members = [run for run in runs if run.env == env and run.group == group]
                if not members:
                    continue
                curve = _curve(members, attribute)
                if curve is None:
                    missing.append(group)
                    continue
                x, (centre, low, high) = curve
                colour, dash = styles[group]
                label = f"{group} ({len(members)})"
                marker = "" if x[-1] > x[0] else "o"
                panel.plot(x, centre, dash + marker, color=colour, label=label, linewidth=1.8)
                if len(members) > 1:
                    panel.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
            if attribute == "bytes_sent" and panel.lines:
                panel.set_xscale("log")
            if missing:
                panel.set_title("no numbers: " + ", ".join(missing), fontsize=8, color="0.4")
            panel.set_xlabel(xlabel)
            panel.grid(alpha=0.25)
            panel.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel(f"{env}\n{ylabel}")
        handles, labels = row[0].get_legend_handles_labels()
        if handles:
            row[0].legend(handles, labels, fontsize=8, frameon=False, loc="best")
    return figure


def _curve(
    runs: list[Run], attribute: str
) -> tuple[NDArray[np.float64], tuple[NDArray[np.float64], ...]] | None:
    """Returns x and (centre, low, high); None if some run has no such x or no return."""
    curves = []
    for run in runs:
        x, y = getattr(run, attribute), run.returns
        known = ~(np.isnan(x) | np.isnan(y))
        if not known.any() or not np.any(x[known] > 0):
            return None
        curves.append((x[known], y[known]))
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = np.linspace(first, max(first, last), _POINTS)
    if attribute == "bytes_sent" and first > 0:
        grid = np.geomspace(first, max(first, last), _POINTS)
    return grid, bootstrap([np.interp(grid, x, y) for x, y in curves], draws=500)
