"""What result folders of Ray Tune say: curves, a table, and a page with both. No Ray in here."""

from rllib_admm.report.metrics import gradient_steps, lookup
from rllib_admm.report.page import write_report
from rllib_admm.report.runs import Run, read_runs, write_greedy_returns
from rllib_admm.report.statistics import Interval, interquartile_mean, interval
from rllib_admm.report.table import Row, rows

__all__ = [
    "Interval",
    "Row",
    "Run",
    "gradient_steps",
    "interquartile_mean",
    "interval",
    "lookup",
    "read_runs",
    "rows",
    "write_greedy_returns",
    "write_report",
]
