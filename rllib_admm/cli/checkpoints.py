"""Algorithm checkpoints: whose they are, and training that starts from one."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.utils.checkpoints import Checkpointable

from rllib_admm.cli.errors import CommandError, one_line


def checkpoint_class(path: Path) -> type[Algorithm]:
    """Returns the Algorithm that a checkpoint folder was written by.

    Raises:
        CommandError: If there is no such folder, or it is no Algorithm's checkpoint.
    """
    return _constructor(path)[0]


def checkpoint_config(path: Path) -> Any:
    """Returns the AlgorithmConfig of a checkpoint folder, not frozen.

    Raises:
        CommandError: If there is no such folder, or it is no Algorithm's checkpoint.
    """
    cls, (args, kwargs) = _constructor(path)
    config = kwargs.get("config", args[0] if args else None)
    if config is None:
        raise CommandError(f"{path}: the checkpoint names no configuration")
    if isinstance(config, dict):
        # What Tune hands to a trial.
        return cls.get_default_config().update_from_dict(config)
    return config.copy(copy_frozen=False)


def _constructor(path: Path) -> tuple[type[Algorithm], tuple[Any, dict[str, Any]]]:
    if not path.is_dir():
        raise CommandError(f"no such checkpoint folder: {path}")
    file = path / Checkpointable.CLASS_AND_CTOR_ARGS_FILE_NAME
    if not file.is_file():
        below = sorted(p.parent for p in path.glob(f"**/checkpoint_*/{file.name}"))
        hint = f"; the newest below it is {below[-1]}" if below else ""
        raise CommandError(f"{path} is no checkpoint of an Algorithm{hint}")
    try:
        # As RLlib does: checkpoints are pickles, to be loaded from trusted places only.
        with file.open("rb") as stream:
            read = pickle.load(stream)
        cls, arguments = read["class"], read["ctor_args_and_kwargs"]
    except Exception as error:
        raise CommandError(f"{file} cannot be read: {one_line(error)}") from error
    if not issubclass(cls, Algorithm):
        raise CommandError(f"{path} is a checkpoint of {cls.__name__}, which is no Algorithm")
    return cls, arguments


def check_checkpoint(path: Path, algorithm: type[Algorithm]) -> None:
    """Raises CommandError if `path` is not a checkpoint of `algorithm`."""
    cls = checkpoint_class(path)
    # A class that was made for `--restore` is named as the one that it extends.
    if cls.__name__ != algorithm.__name__:
        raise CommandError(f"{path} is a checkpoint of {cls.__name__}, not of {algorithm.__name__}")


def restoring(algorithm: type[Algorithm], path: str) -> type[Algorithm]:
    """Returns `algorithm` as one that starts from a checkpoint."""

    def setup(self: Any, config: Any) -> None:
        algorithm.setup(self, config)
        self.restore_from_path(path)

    return type(algorithm.__name__, (algorithm,), {"setup": setup})
