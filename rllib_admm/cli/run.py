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
from typing import Any

import ray
from ray import tune
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.tune import Result
from ray.tune.schedulers import create_scheduler
from rich.console import Console

from rllib_admm.cli.algorithm_config import algorithm_class, build_config
from rllib_admm.cli.checkpoints import check_checkpoint, restoring
from rllib_admm.cli.errors import CommandError, did_you_mean, one_line
from rllib_admm.cli.experiment_file import Experiment
from rllib_admm.cli.greedy import greedy_return
from rllib_admm.cli.progress import ProgressReporter
from rllib_admm.cli.resources import check_resources
from rllib_admm.cli.stopping import MetricStopper
from rllib_admm.report.runs import write_greedy_returns

DEFAULT_STORAGE_PATH = "results"
GREEDY_EPISODES = 20
# What schedulers compare, where their own arguments do not say.
_WATCHED = "env_runners/episode_return_mean"
_SCHEDULERS = ("fifo", "asha", "async_hyperband", "hyperband", "median_stopping_rule", "pbt", "pb2")


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What the command line says about running, beside the experiments.

    Attributes:
        storage_path: Folder or URI for results; None: the file's, or `results/`.
        ray_num_cpus: CPUs of the Ray cluster that is started; None: all of this machine.
        ray_num_gpus: Likewise, GPUs.
        ray_address: A running cluster to connect to instead; None: none.
        restore: Checkpoint folder of an algorithm to start from.
        resume: Result folder of an interrupted run of the experiment to go on with.
        scheduler: Name of a Tune scheduler ("asha", "pbt", ...); None: every trial runs on.
        scheduler_config: Its arguments.
        verbosity: 0 hides the logs of Ray, 1 shows them, 2 shows tracebacks as well.
    """

    storage_path: str | None = None
    ray_num_cpus: int | None = None
    ray_num_gpus: int | None = None
    ray_address: str | None = None
    restore: str | None = None
    resume: str | None = None
    scheduler: str | None = None
    scheduler_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    verbosity: int = 0


def run_experiments(experiments: list[Experiment], options: RunOptions) -> None:
    """Trains experiments one after the other and prints what came of each.

    Args:
        experiments: As read from a file, or from the command line.
        options: See `RunOptions`.

    Raises:
        CommandError: If something is wrong with an experiment or a run fails.
    """
    set_up_logs(options.verbosity)
    # All are checked before the first one starts.
    configs = [build_config(experiment) for experiment in experiments]
    checkpoints = [_checkpoint_config(experiment) for experiment in experiments]
    if options.resume is not None and len(experiments) > 1:
        raise CommandError("--resume goes on with one experiment, the file has several")
    if options.restore is not None:
        for config in configs:
            check_checkpoint(Path(options.restore), algorithm_class(config))
    _scheduler(options)

    started = not ray.is_initialized()
    if started:
        quiet = options.verbosity == 0
        own_cluster = {
            "num_cpus": options.ray_num_cpus,
            "num_gpus": options.ray_num_gpus,
            "include_dashboard": False,
        }
        ray.init(
            address=options.ray_address,
            log_to_driver=not quiet,
            logging_level=logging.ERROR if quiet else logging.INFO,
            **({} if options.ray_address else own_cluster),
        )
    try:
        for experiment, config in zip(experiments, configs, strict=True):
            check_resources(config, experiment)
        for experiment, config, checkpoint in zip(experiments, configs, checkpoints, strict=True):
            _run(experiment, config, checkpoint, options)
    finally:
        if started:
            ray.shutdown()


def _run(
    experiment: Experiment,
    config: AlgorithmConfig,
    checkpoint_config: tune.CheckpointConfig,
    options: RunOptions,
) -> None:
    stopper = MetricStopper(experiment.stop)
    progress = ProgressReporter(f"{experiment.name} ({experiment.run})", Console())
    trainable: Any = algorithm_class(config)
    if options.restore is not None:
        trainable = restoring(trainable, _absolute(options.restore))
    if options.resume is not None:
        tuner = _resumed(options.resume, trainable, config, experiment)
        # What a restored Tuner has of its own is not what is watched here.
        run_config = tuner._local_tuner._run_config
        run_config.stop, run_config.callbacks = stopper, [progress]
    else:
        scheduler = _scheduler(options)
        watched = scheduler is not None and not {"metric", "mode"} & set(options.scheduler_config)
        tuner = tune.Tuner(
            trainable,
            param_space=config,
            tune_config=tune.TuneConfig(
                num_samples=experiment.num_samples,
                scheduler=scheduler,
                metric=_WATCHED if watched else None,
                mode="max" if watched else None,
            ),
            run_config=tune.RunConfig(
                # With the time, so that two runs of a file never share a folder.
                name=f"{experiment.name}_{time.strftime('%Y-%m-%d_%H-%M-%S')}",
                storage_path=_absolute(
                    options.storage_path or experiment.storage_path or DEFAULT_STORAGE_PATH
                ),
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


def _scheduler(options: RunOptions) -> Any:
    if options.scheduler is None:
        return None
    known = list(_SCHEDULERS)
    if options.scheduler not in known:
        hint = did_you_mean(options.scheduler, known) or f"; known are {', '.join(known)}"
        raise CommandError(f"unknown scheduler `{options.scheduler}`{hint}")
    try:
        return create_scheduler(options.scheduler, **options.scheduler_config)
    except (TypeError, ValueError, AssertionError) as error:
        raise CommandError(f"scheduler `{options.scheduler}`: {one_line(error)}") from error


def _resumed(
    folder: str, trainable: Any, config: AlgorithmConfig, experiment: Experiment
) -> tune.Tuner:
    path = _absolute(folder)
    if not tune.Tuner.can_restore(path):
        raise CommandError(f"--resume: no experiment of Ray Tune in {folder}")
    return tune.Tuner.restore(
        path, trainable=trainable, param_space=config, resume_unfinished=True, resume_errored=True
    )


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
    if Path(result.path).is_dir():
        write_greedy_returns(Path(result.path), returns.returns)


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


def set_up_logs(verbosity: int) -> None:
    """Hides what Ray, Tune and pygame print, according to `verbosity`."""
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
