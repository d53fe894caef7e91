"""Python experiment files: a module that makes a `config` object."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rllib_admm.cli.errors import CommandError, one_line
from rllib_admm.cli.experiment_file import EXPERIMENT_KEYS, Experiment, experiments
from rllib_admm.cli.old_names import Hint


def read_python_file(path: Path, hint: Hint = print) -> list[Experiment]:
    """Runs a Python file and reads its experiment.

    Args:
        path: A file that defines `config` (an AlgorithmConfig) and `stop`, and optionally
            `checkpoint_config`, `num_samples`, `storage_path`.
        hint: Called with a sentence for each old name that was translated.

    Returns:
        One experiment, named as the file is.

    Raises:
        CommandError: If the file cannot be run or defines no `config`.
    """
    if not path.is_file():
        raise CommandError(f"no such file: {path}")
    spec = importlib.util.spec_from_file_location(path.stem.replace("-", "_"), path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise CommandError(f"{path}: {type(error).__name__}: {one_line(error)}") from error
    config: Any = getattr(module, "config", None)
    if not isinstance(config, AlgorithmConfig):
        raise CommandError(f"{path}: no `config` that is an AlgorithmConfig, found {config!r}")
    body = {
        key: getattr(module, key)
        for key in EXPERIMENT_KEYS
        if hasattr(module, key) and key not in ("run", "env", "config")
    }
    body |= {"run": type(config).__name__, "env": str(config.env), "config": {}}
    if not body.get("stop"):
        raise CommandError(
            f"{path}: no `stop` and would train for ever; define one, "
            "e.g. stop = {'num_env_steps_sampled_lifetime': 60000}"
        )
    (read,) = experiments(path.stem, body, path, {}, hint)
    # The environment is the config's own, which need not have a name.
    return [
        Experiment(
            name=read.name,
            run=read.run,
            env=None,
            stop=read.stop,
            config={},
            checkpoint_config=read.checkpoint_config,
            num_samples=read.num_samples,
            storage_path=read.storage_path,
            file=path,
            built=config,
        )
    ]
