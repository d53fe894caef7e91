"""Reads runs from result folders of Ray Tune. Only JSON is read: no code of theirs runs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rllib_admm.report import metrics

RESULTS_FILE = "result.json"
GREEDY_FILE = "greedy_returns.json"
_TIME_SUFFIX = re.compile(r"_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d$")
# Settings that make another run of the same thing, or say nothing about what is compared.
_NOT_SETTINGS = ("seed", "log_level")
_TUNE_PARAMS = "params.json"


@dataclass(frozen=True)
class Run:
    """One trial.

    Attributes:
        folder: Where it was read from.
        group: What it is a run of: runs of a group differ in their seed alone.
        env: Name of the environment.
        seed: Seed, if the settings have one.
        finished: Whether it ended by its stop condition.
        env_steps: ``(reports,)``, ascending.
        seconds: ``(reports,)`` since its start, without pauses.
        returns: ``(reports,)``; NaN where no episode had ended.
        gradient_steps: ``(reports,)``, summed over learners; NaN if not reported.
        bytes_sent: ``(reports,)``; NaN if the algorithm does not count them.
        evaluations: ``(reports,)``, returns of RLlib's evaluation; NaN between evaluations.
        greedy_return: Mean greedy return at its end, measured by `rllib train`; None if it was not.
        settings: Flat ``path: text`` of the configuration.
    """

    folder: Path
    group: str
    env: str
    seed: int | None
    finished: bool
    env_steps: NDArray[np.float64]
    seconds: NDArray[np.float64]
    returns: NDArray[np.float64]
    gradient_steps: NDArray[np.float64]
    bytes_sent: NDArray[np.float64]
    evaluations: NDArray[np.float64]
    greedy_return: float | None = None
    settings: dict[str, str] = field(default_factory=dict)


def read_runs(
    folders: Iterable[Path], metric: str = metrics.RETURN
) -> tuple[list[Run], dict[Path, str]]:
    """Reads all runs below some folders.

    Args:
        folders: Trials, experiments, or folders that hold several of those.
        metric: Path in a result of what counts as the return.

    Returns:
        The runs, and what is wrong with folders that could not be read, or only in part.
    """
    runs: list[Run] = []
    problems: dict[Path, str] = {}
    for folder in folders:
        if not folder.is_dir():
            problems[folder] = "no such folder"
            continue
        trials = _trial_folders(folder)
        if not trials:
            problems[folder] = "no results of Ray Tune in it"
        for trial in trials:
            try:
                run, remark = _read_run(trial, metric)
            except (OSError, ValueError) as error:
                problems[trial] = f"not readable: {error}"
                continue
            if remark:
                problems[trial] = remark
            if run is not None and all(run.folder != other.folder for other in runs):
                runs.append(run)
    return _named_by_difference(runs), problems


def write_greedy_returns(folder: Path, returns: Sequence[float]) -> None:
    """Keeps the greedy returns measured at a run's end beside its results.

    Args:
        folder: The trial's folder.
        returns: One per episode.
    """
    (folder / GREEDY_FILE).write_text(json.dumps({"returns": list(returns)}))


def _trial_folders(folder: Path) -> list[Path]:
    # A trial that never reported has its parameters only.
    found = {path.parent for name in (RESULTS_FILE, _TUNE_PARAMS) for path in folder.rglob(name)}
    return sorted(path.resolve() for path in found)


def _read_run(folder: Path, metric: str) -> tuple[Run | None, str]:
    """Returns the run and a remark; no run if nothing was reported.

    Raises:
        ValueError: If the results are not those of RLlib.
        OSError: If they can not be read.
    """
    path = folder / RESULTS_FILE
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    results: list[dict[str, Any]] = []
    remark = ""
    for number, line in enumerate(lines, 1):
        try:
            result = json.loads(line)
        except json.JSONDecodeError as error:
            # A run that was killed may leave half a line.
            remark = f"{RESULTS_FILE}, line {number}: not valid JSON ({error.msg}), left out"
            continue
        if not isinstance(result, dict):
            raise ValueError(f"{RESULTS_FILE}, line {number}: not an object")
        steps = metrics.lookup(result, metrics.ENV_STEPS)
        if steps is None:
            continue
        # A run that went on from a checkpoint reports again what came after it.
        while results and (metrics.lookup(results[-1], metrics.ENV_STEPS) or 0.0) >= steps:
            results.pop()
        results.append(result)
    if not results:
        reason = f"no result with `{metrics.ENV_STEPS}`" if lines else "no result yet"
        return None, remark or reason
    last = results[-1]

    def column(value: Callable[[dict[str, Any]], float | None]) -> NDArray[np.float64]:
        numbers = [value(result) for result in results]
        return np.array([math.nan if x is None else x for x in numbers])

    config = last.get("config") if isinstance(last.get("config"), dict) else {}
    assert isinstance(config, dict)
    seed = config.get("seed")
    finished = bool(last.get("done"))
    if not finished and not remark:
        remark = "not finished; read up to its last result"
    run = Run(
        folder=folder,
        group=_TIME_SUFFIX.sub("", folder.parent.name),
        env=str(config.get("env", "unknown environment")),
        seed=seed if isinstance(seed, int) else None,
        finished=finished,
        env_steps=column(lambda result: metrics.lookup(result, metrics.ENV_STEPS)),
        seconds=column(lambda result: metrics.lookup(result, metrics.SECONDS)),
        returns=column(lambda result: metrics.lookup(result, metric)),
        gradient_steps=column(metrics.gradient_steps),
        bytes_sent=column(metrics.bytes_sent),
        evaluations=column(lambda result: metrics.lookup(result, metrics.EVALUATION_RETURN)),
        greedy_return=_greedy_return(folder),
        settings=_flat(config),
    )
    return run, remark


def _greedy_return(folder: Path) -> float | None:
    try:
        returns = json.loads((folder / GREEDY_FILE).read_text())["returns"]
        return float(np.mean([float(x) for x in returns])) if returns else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in config.items():
        path = f"{prefix}{key}"
        if path in _NOT_SETTINGS or str(key).startswith("_"):
            continue
        if isinstance(value, dict):
            flat |= _flat(value, f"{path}/")
        else:
            flat[path] = json.dumps(value)
    return flat


def _named_by_difference(runs: list[Run]) -> list[Run]:
    """Names runs of one experiment by the settings in which they differ, the seed apart."""
    differing = {
        group: _differing([r for r in runs if r.group == group])
        for group in {run.group for run in runs}
    }
    return [
        replace(
            run,
            group=" ".join(
                [
                    run.group,
                    *(
                        f"{key.rpartition('/')[2]}={run.settings.get(key, '-')}"
                        for key in differing[run.group]
                    ),
                ]
            ),
        )
        for run in runs
    ]


def _differing(runs: list[Run]) -> list[str]:
    """Returns the settings in which some runs differ."""
    values: dict[str, set[str | None]] = {
        key: {run.settings.get(key) for run in runs} for run in runs for key in run.settings
    }
    return sorted(
        key
        for key, found in values.items()
        # Functions and objects print with their addresses, which always differ.
        if len(found) > 1 and not any(" at 0x" in text for text in found if text)
    )
