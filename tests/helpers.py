"""Real data for tests."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode


def has_learned(result: dict[str, Any]) -> bool:
    """Returns whether a train result tells of gradient steps."""
    return bool(result["consensus"]["gradient_steps_lifetime"] > 0)


def random_episodes(env: gym.Env[Any, Any], *, steps: int, seed: int) -> list[SingleAgentEpisode]:
    """Returns whole episodes of a random policy with at least `steps` env steps in all."""
    rng = np.random.default_rng(seed)
    episodes: list[SingleAgentEpisode] = []
    total = 0
    while total < steps:
        episode = SingleAgentEpisode()
        obs, info = env.reset(seed=int(rng.integers(2**31)))
        episode.add_env_reset(obs, info)
        while not episode.is_done:
            action = int(rng.integers(env.action_space.n))  # type: ignore[attr-defined]
            obs, reward, terminated, truncated, info = env.step(action)
            episode.add_env_step(
                obs, action, float(reward), info, terminated=terminated, truncated=truncated
            )
        total += len(episode)
        episodes.append(episode.to_numpy())
    return episodes


def in_process_rounds(
    config: Any, env: gym.Env[Any, Any], *, rounds: int = 6, learners: int = 2
) -> tuple[np.ndarray, list[Any]]:
    """Runs a config's learners and coordinator in this process, as the group does.

    Returns:
        z, shape (P,), after `rounds` rounds on fixed data, and the learners.
    """
    import torch

    from rllib_admm.consensus import ConsensusOptions, Coordinator, make_schedule
    from rllib_admm.learner.round import RoundRequest

    c = config.copy(copy_frozen=False)
    c.validate()
    options = ConsensusOptions(
        over_relaxation=c.over_relaxation,
        outer_momentum=c.outer_momentum,
        outer_lr=c.outer_lr,
        dual_updates=c.dual_updates,
        bits=c.quantization_bits,
        full_precision_every=c.full_precision_every,
    )
    torch.manual_seed(0)
    members = [c.copy(copy_frozen=False).build_learner(env=env) for _ in range(learners)]
    layout = members[0].layouts["default_policy"]
    schedule = make_schedule(
        c.rho_schedule, decay_rounds=c.rho_decay_rounds, final_fraction=c.rho_final_fraction
    )
    lr = c.lr if isinstance(c.lr, float) else c.lr[0][1]

    def rho0(scale: float) -> float:
        return c.rho_strength / (lr * c.local_steps) * scale if c.rho == "auto" else float(c.rho)

    scale = 0.0 if c.proximal_metric == "adam" else 1.0
    names = [f"learner-{i}" for i in range(learners)]
    coordinator = Coordinator(
        members[0].theta("default_policy"), options, layout.hash, schedule, names, rho0(scale)
    )
    for name, member in zip(names, members, strict=True):
        member.module.set_state(members[0].module.get_state())
        member.join(name, coordinator.rho, options)
    replies: dict[str, Any] = {}
    for round_ in range(rounds):
        results = []
        for i, member in enumerate(members):
            data = random_episodes(env, steps=150, seed=100 * i) if round_ == 0 else []
            fragments = [(f"EnvRunner {i + 1}", data)] if data else []
            request = RoundRequest(150 * (round_ + 1), c.local_steps, replies, {}, fragments)
            results.append(member.run_round(request))
        for result in results:
            coordinator.receive(result.uploads["default_policy"])
        scale = float(np.mean([r.metric_scale["default_policy"] for r in results]))
        norms = [r.norms["default_policy"] for r in results if r.norms]
        replies = {"default_policy": coordinator.close_round(rho0(scale), norms)}
    return coordinator.consensus.z.numpy().copy(), members
