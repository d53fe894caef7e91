"""Checks of an ADMMDQNConfig: every message names option, value, what is allowed, the fix."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Collection, Iterable
from typing import Any

import gymnasium as gym
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn.dqn import DQNConfig
from ray.rllib.env.env_context import EnvContext
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.models.catalog import MODEL_DEFAULTS
from ray.tune.result import STDERR_FILE, STDOUT_FILE, TRIAL_INFO

from rllib_admm.consensus import PENALTY_SCHEDULES, PROXIMAL_METRICS, SUPPORTED_BITS
from rllib_admm.env_runners.wrapping import WrappingEnvRunner, make_env
from rllib_admm.replay import parse_replay_config, reward_bounds
from rllib_admm.rl_modules import ACTION_GRIDS

# Tune puts these into the dict that it hands to a trial.
_TUNES_OWN_KEYS = (TRIAL_INFO, STDOUT_FILE, STDERR_FILE)


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns " Did you mean '...'?" for the nearest of `known`, or an empty string."""
    match = difflib.get_close_matches(str(name), [str(k) for k in known], n=1, cutoff=0.6)
    return f" Did you mean {match[0]!r}?" if match else ""


def training_keywords(config_class: type[AlgorithmConfig]) -> set[str]:
    """Returns the keywords of `.training()` of a class and of all that it is built on."""
    names: set[str] = set()
    for cls in config_class.__mro__:
        if "training" not in vars(cls):
            continue
        for name, parameter in inspect.signature(vars(cls)["training"]).parameters.items():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                names.add(name)
    return names


def refuse_unknown_keywords(config_class: type[AlgorithmConfig], keywords: Collection[str]) -> None:
    """Raises ValueError if one of `keywords` is no keyword of `config_class.training()`."""
    known = training_keywords(config_class)
    for name in keywords:
        if name not in known:
            raise ValueError(f"training() has no option {name!r}.{nearest(name, known)}")


def _options(config: AlgorithmConfig) -> set[str]:
    attributes = {k for k in vars(config) if not k.startswith("_")}
    properties = {
        name
        for name, value in inspect.getmembers(type(config))
        if isinstance(value, property) and not name.startswith("_")
    }
    return attributes | properties


def refuse_unknown_key(config: AlgorithmConfig, key: str) -> None:
    """Raises ValueError if `key` is no option that `update_from_dict` could set."""
    name = config._translate_special_keys(key, warn_deprecated=False)
    if name in ("class", "multiagent", "_enable_new_api_stack", *_TUNES_OWN_KEYS):
        return
    if name.startswith("_") and hasattr(config, name):
        return
    known = _options(config)
    if name in known:
        return
    if callable(getattr(config, name, None)):
        raise ValueError(
            f"{key!r} is a method of the configuration, not an option. Give its arguments "
            f"directly, or call config.{name}(...)."
        )
    raise ValueError(f"The configuration has no option {key!r}.{nearest(key, known)}")


def refuse_unknown_attribute(config: AlgorithmConfig, key: str) -> None:
    """Raises AttributeError if `key` is new and looks like a misspelt option."""
    if hasattr(config, key):
        return
    match = difflib.get_close_matches(key, _options(config), n=1, cutoff=0.8)
    if match:
        raise AttributeError(f"The configuration has no option {key!r}. Did you mean {match[0]!r}?")


class _Checker:
    """Collects the checks' common wording."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def fail(self, name: str, allowed: str, fix: str) -> None:
        value = getattr(self.config, name)
        raise ValueError(f"{name}={value!r} is not allowed: it must be {allowed}. {fix}")

    def integer(self, name: str, least: int, fix: str) -> None:
        value = getattr(self.config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.fail(name, f"an integer >= {least}", fix)

    def number(
        self, name: str, low: float, high: float, interval: str, fix: str, *, closed: str = ""
    ) -> None:
        value = getattr(self.config, name)
        good = not isinstance(value, bool) and isinstance(value, (int, float))
        if good:
            good = math.isfinite(value)
            good = good and (value >= low if "low" in closed else value > low)
            good = good and (value <= high if "high" in closed else value < high)
        if not good:
            self.fail(name, f"a number in {interval}", fix)

    def choice(self, name: str, choices: Collection[Any], fix: str = "") -> None:
        value = getattr(self.config, name)
        if isinstance(value, bool) != any(isinstance(c, bool) for c in choices) or (
            value not in choices
        ):
            listed = ", ".join(repr(c) for c in choices)
            hint = nearest(value, [c for c in choices if isinstance(c, str)]).strip()
            if not hint and isinstance(value, (int, float)) and not isinstance(value, bool):
                numbers = [c for c in choices if isinstance(c, int)]
                closest = min(numbers, key=lambda c: abs(c - value)) if numbers else None
                hint = f"The nearest is {closest}." if closest is not None else ""
            self.fail(name, f"one of {listed}", hint or fix)


def refuse_old_api_stack(config: Any) -> None:
    """Raises ValueError if `config` is set to RLlib's old API stack."""
    if not config.enable_rl_module_and_learner or not config.enable_env_runner_and_connector_v2:
        raise ValueError(
            "api_stack: ADMMDQN runs on RLlib's new API stack only. Remove the call of "
            "config.api_stack(...)."
        )


def validate_shared_options(config: Any) -> None:
    """Raises ValueError for the first option of a ShardedDQNConfig that can not work."""
    check = _Checker(config)
    check.integer("local_steps", 1, "Use local_steps=1 for a round after every gradient step.")
    check.integer("max_learner_restarts", 0, "0 ends the run at the first death.")
    check.number("round_timeout_s", 0, math.inf, "(0, inf)", "It is in seconds.")
    check.number("placement_timeout_s", 0, math.inf, "(0, inf)", "It is in seconds.")
    check.integer("num_learners", 0, "0 trains in the main process.")
    _validate_dqn(config, check)
    _validate_refused(config)
    parse_replay_config(config.replay_buffer_config)
    _validate_learner_class(config)


def validate_consensus_options(config: Any) -> None:
    """Raises ValueError for the first option of an ADMMDQNConfig that can not work."""
    check = _Checker(config)
    rho = config.rho
    if not (rho == "auto" or _is_number(rho)) or (_is_number(rho) and not 0 <= rho < math.inf):
        check.fail("rho", "'auto', 0, or a positive number", "Use rho='auto', or 0 for averaging.")
    inf = math.inf
    check.number("rho_strength", 0, inf, "(0, inf)", "Use rho=0 to switch the pull off.")
    check.choice("rho_schedule", PENALTY_SCHEDULES)
    check.integer("rho_decay_rounds", 1, "It is the number of rounds of the cosine.")
    check.number("rho_final_fraction", 0, 1, "(0, 1]", "Use 1 for no decay.", closed="high")
    check.choice("proximal_metric", PROXIMAL_METRICS)
    check.choice("local_start", ("theta", "z"))
    check.number("over_relaxation", 0, 2, "(0, 2)", "1 means none; 1.5 is usual.")
    check.number("outer_momentum", 0, 1, "[0, 1)", "0 means none.", closed="low")
    check.number("outer_lr", 0, inf, "(0, inf)", "1 moves z all the way to the mean.")
    check.choice("dual_updates", (True, False))
    check.choice("quantization_bits", SUPPORTED_BITS)
    check.integer("full_precision_every", 0, "1 means always, 0 never.")
    check.choice("weight_sync", ("admm", "ddp"))
    check.choice("on_learner_failure", ("mean_dual", "recentre"))


def validate_apex_options(config: Any) -> None:
    """Raises ValueError for the first option of an ApexDQNConfig that can not work."""
    check = _Checker(config)
    check.integer("num_replay_shards", 1, "2 is usual.")
    check.integer("sample_queue_size", 1, "4 is usual.")
    check.integer("minibatches_per_request", 1, "8 is usual.")
    check.integer("broadcast_interval", 1, "It is in env steps of one EnvRunner.")
    if config.num_learners != 1:
        check.fail("num_learners", "1", "Ape-X has one learner; ADMMDQN has several.")
    ladder = config.epsilon_ladder
    if ladder is not None:
        good = isinstance(ladder, (tuple, list)) and len(ladder) == 2
        if not (good and 0 < ladder[0] < 1 and 0 <= ladder[1] < math.inf):
            check.fail(
                "epsilon_ladder",
                "None or (base, exponent) with 0 < base < 1 and exponent >= 0",
                "Use (0.4, 7), as published.",
            )
        if config.epsilon != DQNConfig().epsilon:
            check.fail(
                "epsilon", "left alone where epsilon_ladder is given", "Use epsilon_ladder=None."
            )
    if config._learner_connector is not None:
        raise ValueError(
            "learner_connector is not supported by ApexDQN: minibatches come as columns from "
            "the replay shards. Use an env-to-module connector, or ADMMDQN."
        )


def _validate_dqn(config: Any, check: _Checker) -> None:
    inf = math.inf
    if config.training_intensity is not None:
        check.number("training_intensity", 0, inf, "(0, inf)", "Use None for the native ratio.")
    check.integer("train_batch_size_per_learner", 1, "32 and 64 are usual.")
    check.number("tau", 0, 1, "(0, 1]", "1 copies z to the target network.", closed="high")
    check.integer("target_network_update_freq", 1, "It is in env steps.")
    n_step = config.n_step
    steps = n_step if isinstance(n_step, (tuple, list)) else (n_step, n_step + 1)
    if (
        len(steps) != 2
        or not all(isinstance(n, int) for n in steps)
        or not 1 <= steps[0] < steps[1]
    ):
        check.fail("n_step", "an integer >= 1 or (low, high) with 1 <= low < high", "")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _validate_refused(config: Any) -> None:
    """Refuses what would be accepted and ignored."""
    defaults = DQNConfig()
    unsupported = {
        "noisy": "Noisy layers do not exist on RLlib's new API stack; use epsilon.",
        "sigma0": "It belongs to noisy layers, which RLlib's new API stack does not have.",
        "hiddens": "Use config.rl_module(model_config={'head_fcnet_hiddens': [...]}).",
        "before_learn_on_batch": "Use a learner connector, or override the Learner.",
        "categorical_distribution_temperature": "RLlib's new API stack ignores it.",
        "num_epochs": "Each local step draws a fresh minibatch; raise local_steps.",
        "minibatch_size": "Use train_batch_size_per_learner.",
        "shuffle_batch_per_epoch": "Minibatches are random draws.",
        "num_aggregator_actors_per_learner": "Fragments go straight to the learners.",
        "use_env_runner_state_server": "z travels through QuantizedBroadcast.",
        "torch_compile_learner": "The learner's short path is as fast without it.",
        "count_steps_by": "Schedules count env steps.",
        "burn_in_len": "Stateful modules are not supported yet.",
        "_torch_grad_scaler_class": "The local steps run in full precision.",
        "optimizer": "Override configure_optimizers_for_module of ADMMDQNTorchLearner.",
    }
    for name, fix in unsupported.items():
        value = getattr(config, name, None)
        if value != getattr(defaults, name, None):
            raise ValueError(
                f"{name}={value!r} is not supported by {config.algo_class.__name__}. {fix}"
            )
    changed = {
        k for k, v in config.model.items() if k in MODEL_DEFAULTS and v != MODEL_DEFAULTS[k]
    } - {"vf_share_layers"}
    if changed:
        raise ValueError(
            f"model={{{', '.join(sorted(changed))}: ...}} belongs to RLlib's old API stack and "
            "would be ignored. Use config.rl_module(model_config={...})."
        )
    if config.framework_str != "torch":
        raise ValueError(f"framework={config.framework_str!r} is not supported. Use 'torch'.")
    if config.is_offline:
        raise ValueError(f"input_={config.input_!r}: ADMMDQN learns online. Use 'sampler'.")
    if config.model_config.get("use_lstm"):
        raise ValueError(
            "model_config['use_lstm']=True is not supported by ADMMDQN yet: its replay shards "
            "serve transitions. Use a stateless encoder, with an environment wrapper that stacks "
            "frames."
        )
    if config.is_multi_agent:
        raise ValueError(
            "multi_agent(...) is not supported by ADMMDQN yet: remove the policies, or use "
            "RLlib's DQN."
        )


def _validate_learner_class(config: Any) -> None:
    from rllib_admm.learner import ADMMDQNTorchLearner

    if not issubclass(config.learner_class, ADMMDQNTorchLearner):
        raise ValueError(
            f"learner_class={config.learner_class.__name__} is not allowed: it must be a subclass "
            "of rllib_admm.learner.ADMMDQNTorchLearner, which owns the replay shard."
        )
    if overrides_gradients(config.learner_class):
        raise ValueError(
            f"learner_class={config.learner_class.__name__} overrides compute_gradients, which "
            "ADMMDQN does not call. Override postprocess_gradients_for_module instead."
        )


def overrides_gradients(learner_class: Any) -> bool:
    """Returns whether a Learner class has a `compute_gradients` of its own."""
    from ray.rllib.core.learner.torch.torch_learner import TorchLearner

    own: Any = inspect.unwrap(learner_class.compute_gradients)
    return own is not inspect.unwrap(TorchLearner.compute_gradients)


def validate_discretization(config: Any) -> None:
    """Raises ValueError for the first option of a DiscretizedDQNConfig that can not work."""
    check = _Checker(config)
    check.integer("action_bins", 2, "3 is bang-off-bang.")
    check.choice("action_grid", ACTION_GRIDS)
    check.choice("clipped_double_q", (True, False))
    check.choice("layer_norm", (True, False))
    check.integer("action_repeat", 1, "1 means none.")
    check.integer("frame_stack", 1, "1 means none.")
    try:
        reward_bounds(config.clip_rewards)
    except (TypeError, ValueError):
        check.fail(
            "clip_rewards",
            "None, a bool, a number > 0, or (low, high) with low < high",
            "Use (-10, inf) to clip below only.",
        )
    if config.terminal_reward is not None and not _is_number(config.terminal_reward):
        check.fail("terminal_reward", "None or a number", "-100 is BipedalWalker's.")
    runner = config.env_runner_cls
    if config.wraps_env and runner is not None and not issubclass(runner, WrappingEnvRunner):
        raise ValueError(
            f"env_runner_cls={config.env_runner_cls.__name__} would ignore action_repeat, "
            "frame_stack and terminal_reward: it must be a subclass of "
            "rllib_admm.env_runners.WrappingEnvRunner."
        )
    if config.env is None or config.is_multi_agent:
        return
    spaces = _spaces(config)
    space = config.action_space if config.action_space is not None else spaces[1]
    if space is None:
        return
    try:
        grid = config.grid_of(space)
    except ValueError as error:
        raise ValueError(f"env={config.env!r}: {error}") from None
    if grid is None:
        return
    branches = not isinstance(grid.module_space, gym.spaces.Discrete) or config.uses_critics
    if branches and config.num_atoms > 1:
        raise ValueError(
            f"num_atoms={config.num_atoms} is not supported with action_grid="
            f"{config.action_grid!r}, clipped_double_q={config.clipped_double_q} and "
            f"layer_norm={config.layer_norm}: it must be 1. Use action_grid='joint' without the "
            "other two to learn distributions."
        )
    observations = spaces[0]
    if config.layer_norm and not (
        isinstance(observations, gym.spaces.Box) and len(observations.shape) == 1
    ):
        raise ValueError(
            f"layer_norm=True is not allowed: observations must be vectors, not {observations}. "
            "Use layer_norm=False."
        )


_SPACES: dict[str, tuple[gym.Space[Any] | None, gym.Space[Any] | None]] = {}


def _spaces(config: Any) -> tuple[gym.Space[Any] | None, gym.Space[Any] | None]:
    """Looks at one instance of the environment, once per process and env_config."""
    key = f"{config.env!r} {config.env_config!r}"
    if key not in _SPACES:
        context = EnvContext(dict(config.env_config), worker_index=0, num_workers=0)
        try:
            env = make_env(config.env, context)
        except Exception:
            # What is wrong with the environment, the EnvRunners say better.
            return None, None
        multi = isinstance(env, MultiAgentEnv)
        _SPACES[key] = (None, None) if multi else (env.observation_space, env.action_space)
        env.close()
    return _SPACES[key]
