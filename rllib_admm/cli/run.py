"""Runs experiments through Ray Tune, from the start of Ray to the last lines printed."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import time
import warnings
from pathlib import Path
from textwrap import shorten

import ray
from ray import tune
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.tune import Result
from rich.console import Console

from rllib_admm.cli.algorithm_config import algorithm_class, build_config
from rllib_admm.cli.errors import CommandError, did_you_mean
from rllib_admm.cli.experiment_file import Experiment
from rllib_admm.cli.greedy import greedy_return
from rllib_admm.cli.progress import ProgressReporter
from rllib_admm.cli.resources import check_resources
from rllib_admm.cli.stopping import MetricStopper, check_stop_names

DEFAULT_STORAGE_PATH = "results"
GREEDY_EPISODES = 20


def run_experiments(
    experiments: list[Experiment],
    *,
    storage_path: str | None = None,
    ray_num_cpus: int | None = None,
    verbosity: int = 0,
) -> None:
    """Trains experiments one after the other and prints what came of each.

    Args:
        experiments: As read from a file.
        storage_path: Folder or URI for results; None: the file's, or `results/`.
        ray_num_cpus: CPUs of the Ray cluster that is started; None: all of this machine.
        verbosity: 0 hides the logs of Ray, 1 shows them, 2 shows tracebacks as well.

    Raises:
        CommandError: If something is wrong with an experiment or a run fails.
    """
    _set_up_logs(verbosity)
    # All are checked before the first one starts.
    configs = [build_config(experiment) for experiment in experiments]
    checkpoints = [_checkpoint_config(experiment) for experiment in experiments]
    for experiment in experiments:
        check_stop_names(experiment.stop)

    started = not ray.is_initialized()
    if started:
        ray.init(
            num_cpus=ray_num_cpus,
            include_dashboard=False,
            log_to_driver=verbosity > 0,
            logging_level=logging.INFO if verbosity else logging.ERROR,
        )
    try:
        for experiment, config in zip(experiments, configs, strict=True):
            check_resources(config, experiment)
        for experiment, config, checkpoint in zip(experiments, configs, checkpoints, strict=True):
            storage = storage_path or experiment.storage_path or DEFAULT_STORAGE_PATH
            _run(experiment, config, checkpoint, _absolute(storage))
    finally:
        if started:
            ray.shutdown()


def _run(
    experiment: Experiment,
    config: AlgorithmConfig,
    checkpoint_config: tune.CheckpointConfig,
    storage_path: str,
) -> None:
    stopper = MetricStopper(experiment.stop)
    progress = ProgressReporter(f"{experiment.name} ({experiment.run})", Console())
    tuner = tune.Tuner(
        algorithm_class(config),
        param_space=config,
        tune_config=tune.TuneConfig(num_samples=experiment.num_samples),
        run_config=tune.RunConfig(
            # With the time, so that two runs of a file never share a folder.
            name=f"{experiment.name}_{time.strftime('%Y-%m-%d_%H-%M-%S')}",
            storage_path=storage_path,
            stop=stopper,
            checkpoint_config=checkpoint_config,
            callbacks=[progress],
            verbose=0,
        ),
    )
    with progress:
        results = tuner.fit()
    if stopper.error:
        raise experiment.error("stop", stopper.error)
    for result in results:
        _print_summary(experiment, config, result)


def _print_summary(experiment: Experiment, config: AlgorithmConfig, result: Result) -> None:
    if result.error is not None:
        raise CommandError(
            f"{experiment.name}: the run failed: {_last_exception(result.error)} "
            f"(the whole error: {result.path}/error.txt)"
        )
    if not (result.metrics or {}).get("done"):
        # Tune ends on the first Ctrl-C without an error and without a last checkpoint.
        raise KeyboardInterrupt(f"{experiment.name}: interrupted; results so far: {result.path}")
    if result.checkpoint is None:
        raise CommandError(f"{experiment.name}: the run ended without a checkpoint: {result.path}")
    print(f"result folder:     {result.path}")
    print(f"checkpoint folder: {result.checkpoint.path}", flush=True)
    with result.checkpoint.as_directory() as folder:
        returns = greedy_return(config, Path(folder), GREEDY_EPISODES)
    print(f"greedy return:     {returns}", flush=True)


def _last_exception(error: BaseException) -> str:
    """Returns type and message of what went wrong in an actor, without the traceback."""
    cause = getattr(error, "cause", None)
    text = f"{type(cause).__name__}: {cause}" if cause else str(error)
    # RLlib's clean-up after an error in a constructor fails as well and would hide the error.
    text = text.partition("\nDuring handling of the above exception")[0]
    # The text of Ray's own errors holds tracebacks; the last `SomeError: ...` says what happened.
    starts = list(re.finditer(r"^[\w.]+: ", text, re.MULTILINE))
    return shorten(text[starts[-1].start() :] if starts else text, 300, placeholder=" ...")


def _checkpoint_config(experiment: Experiment) -> tune.CheckpointConfig:
    known = [field.name for field in dataclasses.fields(tune.CheckpointConfig)]
    for key in experiment.checkpoint_config:
        if key not in known:
            raise experiment.error(
                f"checkpoint_config/{key}",
                f"`checkpoint_config` has no key `{key}`{did_you_mean(str(key), known)}",
            )
    if experiment.checkpoint_config.get("checkpoint_at_end") is False:
        raise experiment.error(
            "checkpoint_config/checkpoint_at_end",
            "`checkpoint_at_end` cannot be false: the greedy return is that of the last checkpoint",
        )
    try:
        return tune.CheckpointConfig(**{**experiment.checkpoint_config, "checkpoint_at_end": True})
    except (ValueError, TypeError) as error:
        raise experiment.error("checkpoint_config", f"`checkpoint_config`: {error}") from error


def _absolute(storage_path: str) -> str:
    if "://" in storage_path:
        return storage_path
    return str(Path(storage_path).expanduser().resolve())


def _set_up_logs(verbosity: int) -> None:
    # Tune's newer output prints boxes and hints even when told to be silent.
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    if verbosity < 2:
        # Tune logs the traceback of a failed trial, which is also in the trial's error.txt.
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    if verbosity == 0:
        logging.getLogger("ray").setLevel(logging.ERROR)
        logging.getLogger("ray.rllib").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
