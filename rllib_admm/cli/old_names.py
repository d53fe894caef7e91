"""Names of RLlib's old command and old API stack, translated with one hint each.

Works on an experiment's raw mapping, before anything is checked, and knows nothing of Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

STOP_NAMES = {
    "episode_reward_mean": "env_runners/episode_return_mean",
    "sampler_results/episode_reward_mean": "env_runners/episode_return_mean",
    "env_runners/episode_reward_mean": "env_runners/episode_return_mean",
    "evaluation/episode_reward_mean": "evaluation/env_runners/episode_return_mean",
    "evaluation/sampler_results/episode_reward_mean": (
        "evaluation/env_runners/episode_return_mean"
    ),
    "timesteps_total": "num_env_steps_sampled_lifetime",
    "num_env_steps_sampled": "num_env_steps_sampled_lifetime",
}
"""Metrics of the old API stack, and what is meant by them."""

CONFIG_NAMES = {
    "num_workers": "num_env_runners",
    "num_rollout_workers": "num_env_runners",
    "num_envs_per_worker": "num_envs_per_env_runner",
    "num_cpus_per_worker": "num_cpus_per_env_runner",
    "num_gpus_per_worker": "num_gpus_per_env_runner",
    "num_cpus_for_driver": "num_cpus_for_main_process",
    "num_cpus_for_local_worker": "num_cpus_for_main_process",
    "evaluation_num_workers": "evaluation_num_env_runners",
    "evaluation_num_episodes": "evaluation_duration",
    "min_iter_time_s": "min_time_s_per_iteration",
    "min_time_s_per_reporting": "min_time_s_per_iteration",
    "min_sample_timesteps_per_reporting": "min_sample_timesteps_per_iteration",
    "timesteps_per_iteration": "min_sample_timesteps_per_iteration",
    "metrics_smoothing_episodes": "metrics_num_episodes_for_smoothing",
    "learning_starts": "num_steps_sampled_before_learning_starts",
    "recreate_failed_workers": "restart_failed_env_runners",
    "recreate_failed_env_runners": "restart_failed_env_runners",
    "ignore_worker_failures": "ignore_env_runner_failures",
    "sgd_minibatch_size": "minibatch_size",
    "num_sgd_iter": "num_epochs",
}
"""Settings of the old API stack that have another name now."""

_CHECKPOINT_NAMES = {
    "checkpoint_freq": "checkpoint_frequency",
    "checkpoint_at_end": "checkpoint_at_end",
    "keep_checkpoints_num": "num_to_keep",
    "checkpoint_score_attr": "checkpoint_score_attribute",
}
_REPLAY_TYPES = {
    "ReplayBuffer": "EpisodeReplayBuffer",
    "MultiAgentReplayBuffer": "EpisodeReplayBuffer",
    "PrioritizedReplayBuffer": "PrioritizedEpisodeReplayBuffer",
    "MultiAgentPrioritizedReplayBuffer": "PrioritizedEpisodeReplayBuffer",
}

Hint = Callable[[str], None]


def translate(body: Mapping[str, Any], hint: Hint) -> dict[str, Any]:
    """Returns an experiment's mapping with present names in place of old ones.

    What is given under both names is left alone, for the checks that follow to report.

    Args:
        body: `run`, `env`, `stop`, `config`, ... as they stand in the file.
        hint: Called with one sentence per translation.
    """
    new = dict(body)
    if "local_dir" in new and "storage_path" not in new:
        new["storage_path"] = new.pop("local_dir")
        hint("`local_dir` is now `storage_path`")
    for old, name in _CHECKPOINT_NAMES.items():
        if old in new and isinstance(new.get("checkpoint_config", {}), dict):
            settings = dict(new.get("checkpoint_config") or {})
            settings.setdefault(name, new.pop(old))
            new["checkpoint_config"] = settings
            hint(f"`{old}` is now `{name}` under `checkpoint_config`")
    if isinstance(new.get("stop"), dict):
        new["stop"] = _stop(new["stop"], hint)
    if isinstance(new.get("config"), dict):
        new["config"] = _config(new["config"], hint)
    return new


def _stop(stop: dict[Any, Any], hint: Hint, prefix: str = "") -> dict[Any, Any]:
    new: dict[Any, Any] = {}
    for key, value in stop.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            new[key] = _stop(value, hint, f"{path}/")
        elif path in STOP_NAMES and not prefix and STOP_NAMES[path] not in stop:
            new[STOP_NAMES[path]] = value
            hint(f"`{path}` is now `{STOP_NAMES[path]}`")
        else:
            new[key] = value
    return new


def _config(config: dict[Any, Any], hint: Hint) -> dict[Any, Any]:
    new: dict[Any, Any] = {}
    for key, value in config.items():
        name = CONFIG_NAMES.get(key, key)
        if name != key and name not in config:
            hint(f"`{key}` is now `{name}`")
            new[name] = value
        else:
            new[key] = value
    replay = new.get("replay_buffer_config")
    if isinstance(replay, dict):
        new["replay_buffer_config"] = _replay(replay, hint)
    if isinstance(new.get("exploration_config"), dict):
        _exploration(new, hint)
    return new


def _replay(replay: dict[Any, Any], hint: Hint) -> dict[Any, Any]:
    new = dict(replay)
    if new.get("type") in _REPLAY_TYPES:
        new["type"] = _REPLAY_TYPES[new["type"]]
        hint(f"replay buffer `{replay['type']}` is now `{new['type']}`")
    for old, name in (
        ("prioritized_replay_alpha", "alpha"),
        ("prioritized_replay_beta", "beta"),
    ):
        if old in new and name not in new:
            new[name] = new.pop(old)
            hint(f"`{old}` is now `{name}`")
    if new.pop("prioritized_replay_eps", None) is not None:
        hint("`prioritized_replay_eps` has no effect any more and is left out")
    return new


def _exploration(config: dict[Any, Any], hint: Hint) -> None:
    """Turns an epsilon-greedy `exploration_config` into `epsilon`."""
    exploration = config["exploration_config"]
    known = {"type", "initial_epsilon", "final_epsilon", "epsilon_timesteps", "warmup_timesteps"}
    epsilon_greedy = exploration.get("type", "EpsilonGreedy") == "EpsilonGreedy"
    if "epsilon" in config or not epsilon_greedy or set(exploration) - known:
        return
    first = exploration.get("initial_epsilon", 1.0)
    warmup = exploration.get("warmup_timesteps", 0)
    end = warmup + exploration.get("epsilon_timesteps", 10_000)
    schedule = [[0, first], [end, exploration.get("final_epsilon", 0.05)]]
    if warmup:
        schedule.insert(1, [warmup, first])
    config["epsilon"] = schedule
    del config["exploration_config"]
    hint(f"`exploration_config` is now `epsilon: {schedule}`")
