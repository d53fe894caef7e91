"""From an `Experiment` to a validated `AlgorithmConfig`.

RLlib's own `update_from_dict` takes any key, so a misspelt option would pass in silence. Here each
key is looked up first, in the config's attributes and in the signatures of its methods, and each
plain value is compared with the method's annotation.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import importlib
import inspect
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal

import gymnasium
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.registry import ALGORITHMS
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.tune.registry import ENV_CREATOR, _global_registry, get_trainable_cls
from ray.tune.registry import TRAINABLE_CLASS as TRAINABLE

import rllib_admm
from rllib_admm.cli.errors import CommandError, did_you_mean, one_line
from rllib_admm.cli.experiment_file import Experiment

# The methods by which RLlib groups a config's settings; each is also a key of the file.
SECTIONS = (
    "api_stack",
    "callbacks",
    "checkpointing",
    "debugging",
    "env_runners",
    "environment",
    "evaluation",
    "experimental",
    "fault_tolerance",
    "framework",
    "learners",
    "multi_agent",
    "offline_data",
    "python_environment",
    "reporting",
    "resources",
    "rl_module",
    "training",
)

# Classic settings that have the name of a section: `framework: torch`, `callbacks: a.b.Class`.
SETTINGS_NAMED_AS_SECTIONS = ("callbacks", "framework")

# RLlib annotates some of these as `int` and takes fractions all the same.
FRACTIONAL = re.compile(r"num_[cg]pus(_|$)")

NEW_STACK_SWITCHES = ("enable_rl_module_and_learner", "enable_env_runner_and_connector_v2")

# What `ray._common.deprecation` gives to arguments that only exist to be refused.
_DEPRECATED_DEFAULT = -1

_YAML_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
}


def build_config(experiment: Experiment) -> AlgorithmConfig:
    """Makes the config object of an experiment.

    Args:
        experiment: Its `run` names the algorithm, its `config` the settings.

    Returns:
        The algorithm's default config with the settings applied, on the new API stack, validated.

    Raises:
        CommandError: If the algorithm, a key, a value or the environment is wrong.
    """
    config = experiment.built or _default_config(experiment)
    if experiment.env is not None:
        config.environment(experiment.env)
    for key, value in experiment.config.items():
        _apply(config, key, value, experiment)

    if not all(getattr(config, switch) for switch in NEW_STACK_SWITCHES):
        raise experiment.error("config", f"`{experiment.run}` does not run on the new API stack")
    if config.framework_str != "torch":
        raise experiment.error("config/framework", "the new API stack is PyTorch: `torch` only")
    _check_env(config, experiment)
    try:
        config.copy(copy_frozen=False).validate()
    except (ValueError, TypeError, NotImplementedError) as error:
        # RLlib adds advice about switching its checks off, in a paragraph of its own.
        reason = one_line(str(error).split("\nTo suppress all validation errors")[0])
        raise experiment.error(
            "config", f"{experiment.run} refuses the config: {reason}"
        ) from error
    return config


def _default_config(experiment: Experiment) -> AlgorithmConfig:
    run = experiment.run
    # Adds this package's algorithms to those of RLlib.
    rllib_admm.register()
    if run in ALGORITHMS:
        # Not get_trainable_cls(): for an unregistered name it imports every algorithm.
        return ALGORITHMS[run]()[1]
    if _global_registry.contains(TRAINABLE, run):
        cls: Any = get_trainable_cls(run)
        if Algorithm not in getattr(cls, "__mro__", ()):
            raise experiment.error("run", f"`{run}` is registered, but is no RLlib Algorithm")
        return cls.get_default_config()
    if ":" in run:
        cls = import_name(run, experiment, "run")
        if Algorithm not in getattr(cls, "__mro__", ()):
            raise experiment.error("run", f"`{run}` is no RLlib Algorithm")
        return cls.get_default_config()
    hint = did_you_mean(run, ALGORITHMS) or did_you_mean(run.upper(), ALGORITHMS)
    raise experiment.error(
        "run", f"unknown algorithm `{run}`{hint or '; known are ' + ', '.join(sorted(ALGORITHMS))}"
    )


def _apply(config: AlgorithmConfig, key: str, value: Any, experiment: Experiment) -> None:
    """Applies one key of the file's `config` to the config object."""
    path = f"config/{key}"
    if key in ("model", "model_config"):
        other = "model_config" if key == "model" else "model"
        if other in experiment.config:
            raise experiment.error(path, "`model` is the old name of `model_config`: give one")
        _apply_model_config(config, value, path, experiment)
    elif key in SECTIONS and (isinstance(value, dict) or key not in SETTINGS_NAMED_AS_SECTIONS):
        _apply_section(config, key, value, experiment)
    elif key in NEW_STACK_SWITCHES and value is not True:
        raise experiment.error(path, f"everything runs on the new API stack: leave `{key}` out")
    else:
        attribute = AlgorithmConfig._translate_special_keys(key, warn_deprecated=False)
        parameter = _find_parameter(config, key) or _find_parameter(config, attribute)
        if not _is_setting(config, attribute) and parameter is None:
            raise experiment.error(
                path,
                f"{experiment.run} has no setting `{key}`"
                + did_you_mean(key, [*_setting_names(config), *SECTIONS, "model_config"]),
            )
        if parameter is not None:
            value = _checked(parameter, key, value, path, experiment)
        try:
            if _is_setting(config, attribute):
                config.update_from_dict({key: value})
            else:
                assert parameter is not None
                getattr(config, parameter.section)(**{key: value})
        except (ValueError, TypeError, AttributeError, ImportError, KeyError) as error:
            raise experiment.error(path, f"`{key}`: {one_line(error)}") from error


def _apply_section(
    config: AlgorithmConfig, section: str, value: Any, experiment: Experiment
) -> None:
    """Calls the config's method of that name with the mapping below it."""
    path = f"config/{section}"
    if not isinstance(value, dict):
        raise experiment.error(path, f"`{section}` must be a mapping, is {value!r}")
    parameters = _parameters(config, section)
    arguments = dict(value)
    for key, argument in value.items():
        if key in NEW_STACK_SWITCHES and argument is not True:
            raise experiment.error(
                f"{path}/{key}", f"everything runs on the new API stack: leave `{key}` out"
            )
        if (section, key) in (("rl_module", "model_config"), ("training", "model")):
            _apply_model_config(config, arguments.pop(key), f"{path}/{key}", experiment)
        elif key not in parameters:
            hint = did_you_mean(str(key), parameters)
            owner = _find_parameter(config, str(key))
            if owner is not None:
                hint = f"; it belongs under `{owner.section}`"
            raise experiment.error(f"{path}/{key}", f"`{section}` has no setting `{key}`{hint}")
        else:
            place = f"{path}/{key}"
            arguments[key] = _checked(parameters[key], key, argument, place, experiment)
    try:
        getattr(config, section)(**arguments)
    except (ValueError, TypeError, AttributeError, ImportError, KeyError) as error:
        raise experiment.error(path, f"`{section}`: {one_line(error)}") from error


def _apply_model_config(
    config: AlgorithmConfig, value: Any, path: str, experiment: Experiment
) -> None:
    """Sets keys of the RLModules' model config; the ones not named keep their values."""
    if not isinstance(value, dict):
        raise experiment.error(path, f"`{path.rsplit('/')[-1]}` must be a mapping, is {value!r}")
    hints = typing.get_type_hints(DefaultModelConfig)
    # `config.model_config` also holds what the algorithm adds by itself (dueling, num_atoms, ...).
    known = {*hints, *config.model_config}
    entries = dict(value)
    for key, entry in value.items():
        if key not in known:
            raise experiment.error(
                f"{path}/{key}", f"`model_config` has no key `{key}`{did_you_mean(str(key), known)}"
            )
        if key in hints:
            parameter = _Parameter("rl_module", hints[key])
            entries[key] = _checked(parameter, key, entry, f"{path}/{key}", experiment)
    current = config._model_config
    if dataclasses.is_dataclass(current) and not isinstance(current, type):
        current = dataclasses.asdict(current)
    config.rl_module(model_config={**(current or {}), **entries})


@dataclasses.dataclass(frozen=True)
class _Parameter:
    """A keyword of one of the config's methods.

    Attributes:
        section: The method's name.
        hint: Its annotation; `Any` if there is none or it cannot be evaluated.
        default: The value of the config's attribute of that name, or None.
    """

    section: str
    hint: Any
    default: Any = None


def _parameters(config: AlgorithmConfig, section: str) -> dict[str, _Parameter]:
    """Returns the keywords a method takes, those of the methods it overrides included."""
    found: dict[str, _Parameter] = {}
    for cls in type(config).__mro__:
        method = vars(cls).get(section)
        # RLlib's algorithms override `training(*, x=NotProvided, **kwargs)` and pass kwargs on.
        if not inspect.isfunction(method):
            continue
        for name, parameter in inspect.signature(method).parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD or name == "self":
                continue
            if _is_deprecated(parameter.default):
                continue
            hint = _hint(parameter.annotation, method)
            found.setdefault(name, _Parameter(section, hint, vars(config).get(name)))
    return found


def _is_deprecated(default: object) -> bool:
    return isinstance(default, int) and default == _DEPRECATED_DEFAULT


def _hint(annotation: Any, method: Callable[..., Any]) -> Any:
    if annotation is inspect.Parameter.empty:
        return Any
    if isinstance(annotation, str):
        try:
            return eval(annotation, method.__globals__)
        except Exception:
            # A name that is imported for type checkers only.
            return Any
    return annotation


def _find_parameter(config: AlgorithmConfig, name: str) -> _Parameter | None:
    for section in SECTIONS:
        if (parameter := _parameters(config, section).get(name)) is not None:
            return parameter
    return None


def _is_setting(config: AlgorithmConfig, name: str) -> bool:
    """Whether `name` is a public attribute that can be set, old names with their own error too."""
    if name.startswith("_"):
        return False
    class_attribute = inspect.getattr_static(type(config), name, None)
    if isinstance(class_attribute, property):
        return class_attribute.fset is not None
    return name in vars(config)


def _setting_names(config: AlgorithmConfig) -> Iterator[str]:
    yield from (name for name in vars(config) if not name.startswith("_"))
    for section in SECTIONS:
        yield from _parameters(config, section)


def _checked(parameter: _Parameter, key: str, value: Any, path: str, experiment: Experiment) -> Any:
    """Returns the value for a parameter, after a check of its YAML type against the annotation."""
    allowed = _yaml_kinds(parameter.hint)
    if allowed is not None:
        # RLlib's annotations are not always right, its defaults are.
        allowed |= {type(parameter.default)} & _YAML_KINDS.keys()
        if FRACTIONAL.match(key):
            allowed |= {float, int}
    if allowed is not None and type(value) not in allowed:
        # "a number" says it for both.
        named = allowed - {int} if float in allowed else allowed
        wanted = " or ".join(text for kind, text in _YAML_KINDS.items() if kind in named)
        raise experiment.error(path, f"`{key}` must be {wanted}, is {value!r}")
    if isinstance(value, list) and _wants_tuple(parameter.hint):
        return tuple(value)
    return value


def _wants_tuple(hint: Any) -> bool:
    """Whether the annotation allows a tuple and no list: YAML has only lists."""
    members = typing.get_args(hint) if _is_union(hint) else (hint,)
    origins = {typing.get_origin(member) or member for member in members}
    return tuple in origins and list not in origins


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _yaml_kinds(hint: Any) -> set[type] | None:
    """Returns the YAML types an annotation allows, or None if it allows any.

    Classes, callables and type variables allow anything: RLlib takes class paths for many of them.
    """
    simple: dict[Any, set[type]] = {
        bool: {bool},
        int: {int},
        float: {float, int},
        str: {str},
        None: {type(None)},
        type(None): {type(None)},
    }
    if hint in simple:
        return simple[hint]
    origin = typing.get_origin(hint) or hint
    if _is_union(hint):
        members = [_yaml_kinds(member) for member in typing.get_args(hint)]
        if None in members:
            return None
        return set().union(*(member for member in members if member is not None))
    if origin is Literal:
        return {type(choice) for choice in typing.get_args(hint)}
    if isinstance(origin, type):
        if issubclass(origin, collections.abc.Mapping) or dataclasses.is_dataclass(origin):
            return {dict}
        if origin in (list, tuple, set) or origin is collections.abc.Sequence:
            return {list}
    return None


def _check_env(config: AlgorithmConfig, experiment: Experiment) -> None:
    """Makes the environment once, so that a wrong name is found before any actor starts."""
    env = config.env
    if not isinstance(env, str) or _global_registry.contains(ENV_CREATOR, env):
        return
    if "." in env and ":" not in env and env not in gymnasium.registry:
        # RLlib resolves class paths itself, but not for multi-agent environments.
        config.environment(_import_class(env, experiment))
        return
    make: Callable[..., Any] = gymnasium.make
    try:
        make(env, **config.env_config).close()
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise experiment.error("env", _missing_package(env, error)) from error
    except (gymnasium.error.Error, TypeError, ValueError, AssertionError) as error:
        raise experiment.error("env", f"environment `{env}`: {one_line(error)}") from error


def import_name(path: str, experiment: Experiment, key: str) -> Any:
    """Imports ``package.module:Name``; the present folder counts as a place for modules.

    Raises:
        CommandError: If there is no such module or name.
    """
    module_name, _, name = path.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise experiment.error(key, f"`{path}`: {one_line(error)}") from error
    if not hasattr(module, name):
        raise experiment.error(
            key, f"`{module_name}` has no `{name}`{did_you_mean(name, vars(module))}"
        )
    return getattr(module, name)


def _import_class(path: str, experiment: Experiment) -> type:
    module_name, _, class_name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise experiment.error("env", f"environment `{path}`: {one_line(error)}") from error
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        classes = (name for name, value in vars(module).items() if inspect.isclass(value))
        hint = did_you_mean(class_name, classes)
        raise experiment.error("env", f"`{module_name}` has no class `{class_name}`{hint}")
    return found


def _missing_package(env: str, error: Exception) -> str:
    message = f"environment `{env}` needs a package that is missing: {one_line(error)}"
    if "box2d" in message.lower() or "pygame" in message.lower():
        message += "; install the extra: pip install 'rllib-admm[box2d]'"
    return message


def algorithm_class(config: AlgorithmConfig) -> type[Algorithm]:
    """Returns the Algorithm a config belongs to.

    Raises:
        CommandError: If the config names none.
    """
    cls: type[Algorithm] | str | None = config.algo_class
    if isinstance(cls, str):
        cls = get_trainable_cls(cls)
    if not inspect.isclass(cls):
        raise CommandError(f"{type(config).__name__} names no Algorithm")
    return cls
