"""Rebuilds RLlib episodes from sampled arrays, for custom learner connector pipelines.

Knows how RLlib's replay buffers lay out what they return, and nothing of rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tree  # type: ignore[import-untyped]  # dm_tree has no stubs
from numpy.typing import NDArray
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer

from rllib_admm.replay.samples import Sample


def transition_episodes(
    sample: Sample,
    *,
    t: NDArray[np.int32],
    ids: list[str] | None,
    observation_space: Any,
    action_space: Any,
) -> list[SingleAgentEpisode]:
    """Makes one episode of two observations per transition.

    Args:
        sample: The transitions, batch size B.
        t: Time step of each within its episode, shape (B,).
        ids: Episode ids, length B; None gives new ids, as RLlib's prioritized buffer does.
        observation_space: Space handed to the episodes.
        action_space: Space handed to the episodes.

    Returns:
        B episodes, not numpy'ized.
    """
    episodes = []
    rewards, weights = sample.rewards.tolist(), sample.weights.tolist()
    terminateds, truncateds = sample.terminateds.tolist(), sample.truncateds.tolist()
    for item, (steps, t_started) in enumerate(zip(sample.n_step, t.tolist(), strict=True)):
        outputs: dict[str, Any] = {"weights": [weights[item]], "n_step": [int(steps)]}
        if ids is not None:
            # RLlib's uniform buffer adds these two numpy'ized, though the rest are lists.
            outputs = {k: InfiniteLookbackBuffer(np.array(v)) for k, v in outputs.items()}
        outputs |= {key: [_item(value, item)] for key, value in sample.extra.items()}
        episodes.append(
            SingleAgentEpisode(
                id_=None if ids is None else ids[item],
                observations=[_item(sample.obs, item), _item(sample.next_obs, item)],
                observation_space=observation_space,
                actions=[_item(sample.actions, item)],
                action_space=action_space,
                rewards=[rewards[item]],
                terminated=terminateds[item],
                truncated=truncateds[item],
                extra_model_outputs=outputs,
                t_started=t_started,
                len_lookback_buffer=0,
            )
        )
    return episodes


def sequence_episode(
    *,
    id_: str | None,
    observations: Any,
    actions: Any,
    rewards: NDArray[np.float32],
    extra: dict[str, Any],
    end: tuple[bool, bool],
    weight: float,
    lookback: int,
    wanted_lookback: int,
    t_started: int,
    observation_space: Any,
    action_space: Any,
) -> SingleAgentEpisode:
    """Makes one numpy'ized episode of T steps behind `lookback` further ones.

    Args:
        id_: Episode id; None gives a new one.
        observations: Structure of arrays, leaves (lookback + T + 1, ...).
        actions: Structure of arrays, leaves (lookback + T, ...).
        rewards: Shape (lookback + T,).
        extra: Further model outputs, leaves (lookback + T, ...).
        end: Whether the last observation is terminal, and truncated.
        weight: Importance weight of every step.
        lookback: Steps that belong to the lookback buffers.
        wanted_lookback: Lookback that was asked for: RLlib pads `n_step` and `weights` to it.
        t_started: Time step of the first observation behind the lookback.
        observation_space: Space handed to the episode.
        action_space: Space handed to the episode.

    Returns:
        The episode.
    """
    padded = len(rewards) - lookback + wanted_lookback
    outputs = {key: InfiniteLookbackBuffer(value, lookback) for key, value in extra.items()}
    outputs["n_step"] = InfiniteLookbackBuffer(np.ones(padded, np.int64), wanted_lookback)
    outputs["weights"] = InfiniteLookbackBuffer(np.full(padded, weight), wanted_lookback)
    return SingleAgentEpisode(
        id_=id_,
        observations=InfiniteLookbackBuffer(observations, lookback, observation_space),
        observation_space=observation_space,
        infos=InfiniteLookbackBuffer([{} for _ in range(len(rewards) + 1)], lookback),
        actions=InfiniteLookbackBuffer(actions, lookback, action_space),
        action_space=action_space,
        rewards=InfiniteLookbackBuffer(rewards, lookback),
        terminated=end[0],
        truncated=end[1],
        extra_model_outputs=outputs,
        t_started=t_started,
    )


def _item(structure: Any, index: int) -> Any:
    if isinstance(structure, np.ndarray):
        return structure[index]
    return tree.map_structure(lambda leaf: leaf[index], structure)
