"""The experiment file: classic RLlib YAML or JSON, read into typed `Experiment` objects.

Owns the form of the file and every error that can be found without Ray. Whether an algorithm
knows a `config` key is `algorithm_config`'s question.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from rllib_admm.cli.errors import CommandError, did_you_mean, one_line
from rllib_admm.cli.grid import combinations
from rllib_admm.cli.old_names import Hint, translate

EXPERIMENT_KEYS = (
    "run",
    "env",
    "stop",
    "config",
    "checkpoint_config",
    "num_samples",
    "storage_path",
)


@dataclass(frozen=True)
class Experiment:
    """One experiment of a file.

    Attributes:
        name: The experiment's key in the file; also names its result folder.
        run: Name of the algorithm.
        env: Name of the environment, or None for offline data without evaluation.
        stop: Metric (nested keys joined by ``/``) to the value at which training ends.
        config: The algorithm's settings, as they stand in the file.
        checkpoint_config: Settings of `ray.tune.CheckpointConfig`.
        num_samples: How many times the experiment is run.
        storage_path: Folder or URI for results, or None for the command's default.
        file: Where the experiment was read.
        lines: Key path (joined by ``/``) to its line in the file, from 1.
        built: The AlgorithmConfig, if a Python file made it; `config` is empty then.
    """

    name: str
    run: str
    env: str | None
    stop: dict[str, float]
    config: dict[str, Any]
    checkpoint_config: dict[str, Any] = field(default_factory=dict)
    num_samples: int = 1
    storage_path: str | None = None
    file: Path = Path()
    lines: Mapping[str, int] = field(default_factory=dict)
    built: Any = None

    def error(self, key_path: str, message: str) -> CommandError:
        """Returns an error that points at a key of this experiment.

        Args:
            key_path: The key below the experiment's name, e.g. ``config/lr``; "" for the name.
            message: What is wrong.
        """
        place = f"{self.name}/{key_path}".rstrip("/")
        # The key may be missing, which is the error: then the mapping it is missing in.
        while place not in self.lines and "/" in place:
            place = place.rpartition("/")[0]
        line = self.lines.get(place)
        where = f"{self.file}:{line}" if line else str(self.file)
        return CommandError(f"{where}: {message}")


class _Loader(yaml.SafeLoader):
    """SafeLoader that also reads ``1e-4`` as a number, as YAML 1.2 does and YAML 1.1 does not."""


# A copy, so that yaml.SafeLoader itself stays as it is.
_Loader.yaml_implicit_resolvers = {
    first: list(resolvers) for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def read_experiments(path: Path, hint: Hint = print) -> list[Experiment]:
    """Reads and checks an experiment file.

    Args:
        path: A YAML or JSON file of the form ``{name: {run, env, stop, config, ...}, ...}``.
            Each `grid_search` in a `config` makes an experiment of each of its values.
        hint: Called with a sentence for each old name that was translated.

    Returns:
        The experiments in the file's order, at least one.

    Raises:
        CommandError: If the file cannot be read or is not of that form; names file and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        siblings = (p.name for p in path.parent.glob("*.*"))
        raise CommandError(f"no such file: {path}{did_you_mean(path.name, siblings)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"cannot read {path}: {error}") from None

    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        lines = dict(_key_lines(node, path)) if node is not None else {}
        data = loader.construct_document(node) if node is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        context = f" {error.context}" if error.context else ""
        raise CommandError(f"{where}: not valid YAML: {error.problem}{context}") from None
    except yaml.YAMLError as error:
        raise CommandError(f"{path}: not valid YAML: {one_line(error)}") from None
    finally:
        loader.dispose()

    if not isinstance(data, dict) or not data:
        raise CommandError(
            f"{path}: expected `name: {{run: ..., env: ..., stop: ..., config: ...}}`, "
            f"found {_kind(data)}"
        )
    if "run" in data and not isinstance(data["run"], dict):
        raise CommandError(
            f"{path}:{lines['run']}: `run` stands at the top level; indent it under a name for "
            "the experiment"
        )
    return [
        experiment
        for name, body in data.items()
        for experiment in experiments(str(name), body, path, lines, hint)
    ]


def _key_lines(node: yaml.Node, path: Path, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yields every key path with its line; refuses keys that stand twice in a mapping."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        name = str(key.value)
        # PyYAML keeps the last of two equal keys, silently.
        if name in seen and name != "<<":
            raise CommandError(f"{path}:{line}: `{name}` stands already in line {seen[name]}")
        seen[name] = line
        yield f"{prefix}{name}", line
        # Experiment, section, key, sub-key: deeper paths are never reported, and an anchor may
        # refer to itself.
        if prefix.count("/") < 4:
            yield from _key_lines(value, path, f"{prefix}{name}/")


def experiments(
    name: str, body: Any, path: Path, lines: Mapping[str, int], hint: Hint
) -> list[Experiment]:
    """Reads one experiment's mapping; several experiments if its config has a `grid_search`.

    Raises:
        CommandError: If it is not of the form of an experiment.
    """
    if isinstance(body, dict):
        body = translate(body, hint)
    first = _experiment(name, body, path, lines)
    made = []
    for label, config in combinations(first.config):
        full = f"{name}[{label}]" if label else name
        # Errors look a place up by the experiment's name.
        own = {
            f"{full}{key.removeprefix(name)}": line
            for key, line in lines.items()
            if key == name or key.startswith(f"{name}/")
        }
        made.append(replace(first, name=full, config=config, lines=own))
    return made


def _experiment(name: str, body: Any, path: Path, lines: Mapping[str, int]) -> Experiment:
    # Carries the place for errors until everything is checked.
    at = Experiment(name=name, run="", env=None, stop={}, config={}, file=path, lines=lines)
    if not isinstance(body, dict):
        raise at.error("", f"experiment `{name}` must be a mapping, is {_kind(body)}")
    for key in body:
        if key not in EXPERIMENT_KEYS:
            raise at.error(
                str(key),
                f"unknown key `{key}` in experiment `{name}`"
                + (did_you_mean(str(key), EXPERIMENT_KEYS) or _belongs_in_config()),
            )

    run = _typed(at, body, "run", str)
    if run is None:
        raise at.error(
            "", f"experiment `{name}` has no `run`: name the algorithm, e.g. `run: ADMMDQN`"
        )
    config = _typed(at, body, "config", dict) or {}
    env = _typed(at, body, "env", str)
    if "env" in config:
        if env is not None:
            raise at.error("config/env", "`env` is given twice, also outside of `config`")
        env = _typed(at, config, "env", str, "config/")
    if env is None and not {"input_", "offline_data"} & config.keys():
        raise at.error("", f"experiment `{name}` has no `env`, e.g. `env: CartPole-v1`")
    num_samples = _typed(at, body, "num_samples", int)
    if num_samples is not None and num_samples < 1:
        raise at.error("num_samples", f"`num_samples` must be at least 1, is {num_samples}")
    for key in config:
        if not isinstance(key, str):
            raise at.error(f"config/{key}", f"`config` keys must be names, {key!r} is not")

    return Experiment(
        name=name,
        run=run,
        env=env,
        stop=_stop(at, _typed(at, body, "stop", dict) or {}),
        config={key: value for key, value in config.items() if key != "env"},
        checkpoint_config=_typed(at, body, "checkpoint_config", dict) or {},
        num_samples=num_samples or 1,
        storage_path=_typed(at, body, "storage_path", str),
        file=path,
        lines=lines,
    )


def _stop(at: Experiment, stop: dict[Any, Any]) -> dict[str, float]:
    """Flattens nested criteria and checks that each is a number."""
    if not stop:
        raise at.error(
            "stop",
            f"experiment `{at.name}` has no `stop` and would train for ever; give one, "
            "e.g. `stop: {num_env_steps_sampled_lifetime: 60000}`",
        )
    flat: dict[str, float] = {}

    def walk(mapping: dict[Any, Any], prefix: str) -> None:
        for key, value in mapping.items():
            name = f"{prefix}{key}"
            if isinstance(value, dict):
                walk(value, f"{name}/")
            elif isinstance(value, bool) or not isinstance(value, int | float):
                raise at.error(
                    f"stop/{name}", f"`stop` value of `{name}` must be a number, is {_kind(value)}"
                )
            elif math.isnan(value):
                raise at.error(f"stop/{name}", f"`stop` value of `{name}` is not a number (NaN)")
            else:
                flat[name] = value

    walk(stop, "")
    return flat


def _typed(at: Experiment, mapping: dict[str, Any], key: str, kind: type, prefix: str = "") -> Any:
    """Returns ``mapping[key]``, or None if absent or empty, after a check of its type."""
    value = mapping.get(key)
    if value is None:
        return None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        wanted = {str: "text", dict: "a mapping", int: "a whole number"}[kind]
        raise at.error(f"{prefix}{key}", f"`{key}` must be {wanted}, is {_kind(value)}")
    return value


def _belongs_in_config() -> str:
    return f"; allowed are {', '.join(EXPERIMENT_KEYS)}; an algorithm's option goes under `config`"


def _kind(value: object) -> str:
    """Describes a YAML value for an error message."""
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return f"{value!r}"
