"""The group's state: z in a single learner's format, the consensus, every learner's own part."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import ray
import torch
from ray.rllib.core import COMPONENT_LEARNER
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.utils.annotations import override
from ray.rllib.utils.checkpoints import Checkpointable

from rllib_admm.learner.rounds import Rounds
from rllib_admm.learner.traffic import Traffic

logger = logging.getLogger(__name__)

COMPONENT_CONSENSUS = "consensus"
COMPONENT_LOCAL_STATES = "local_states"


class GroupState(Rounds):
    """State of a `ConsensusLearnerGroup`, for checkpoints and weight access."""

    @override(LearnerGroup)
    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Returns z under `learner`, and (for checkpoints) the state of consensus and learners.

        Args:
            components: As in RLlib; additionally "consensus" and "local_states".
            not_components: As in RLlib.
            **kwargs: Passed on; `inference_only=True` leaves out target networks.
        """
        state: dict[str, Any] = {}
        whole = any(
            self._check_component(part, components, not_components)
            for part in (COMPONENT_CONSENSUS, COMPONENT_LOCAL_STATES)
        )
        if whole:
            self.settle()
        if self._check_component(COMPONENT_LEARNER, components, not_components):
            self._sync_z_learner(full=not kwargs.get("inference_only", False))
            state[COMPONENT_LEARNER] = self._z_learner.get_state(
                components=self._get_subcomponents(COMPONENT_LEARNER, components),
                not_components=self._get_subcomponents(COMPONENT_LEARNER, not_components),
                **kwargs,
            )
        if self._check_component(COMPONENT_CONSENSUS, components, not_components):
            state[COMPONENT_CONSENSUS] = {
                "coordinators": {
                    mid: _to_numpy(c.get_state()) for mid, c in self._coordinators.items()
                },
                "counters": {key: getattr(self, key) for key in _COUNTERS},
                "traffic": self.traffic.get_state(),
                "lr": dict(self._lr),
                "rho_scale": dict(self._rho_scale),
                "last_target_update": dict(self._last_target_update),
            }
        if self._check_component(COMPONENT_LOCAL_STATES, components, not_components):
            state[COMPONENT_LOCAL_STATES] = self._local_states()
        return state

    def _local_states(self) -> dict[str, Any]:
        with_replay = bool(self.config.store_buffer_in_checkpoints)
        members = [m for m in self._members if m.building is None]
        references = [self._call(m, "get_local_state", with_replay) for m in members]
        states = {}
        for member, reference in zip(members, references, strict=True):
            try:
                states[member.name] = self._get([reference])[0]
            except ray.exceptions.RayError as error:
                # What it alone held is lost; z and the others are not.
                logger.warning("%s is missing in this checkpoint: %s", member.name, error)
        return states

    @override(LearnerGroup)
    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned, onto the same or another number of learners.

        With another number of learners (or without their states), all start from z with
        zero duals and fresh optimizers.
        """
        if COMPONENT_LEARNER in state:
            self._z_learner.set_state(state[COMPONENT_LEARNER])
        self._start_consensus()
        consensus = state.get(COMPONENT_CONSENSUS)
        if consensus is None:
            return
        for key in _COUNTERS:
            setattr(self, key, consensus["counters"][key])
        self.traffic = Traffic(**consensus["traffic"])
        self._lr.update(consensus["lr"])
        self._rho_scale.update(consensus["rho_scale"])
        locals_ = state.get(COMPONENT_LOCAL_STATES, {})
        names = {m.name for m in self._members}
        self._last_target_update.update(consensus["last_target_update"])
        same = set(locals_) == names and all(
            set(saved["h"]) == (names if self.config.weight_sync == "admm" else {"learner-0"})
            for saved in consensus["coordinators"].values()
        )
        self.replay_restored = same and any(state["replay"] for state in locals_.values())
        for module_id, coordinator in self._coordinators.items():
            saved = consensus["coordinators"].get(module_id)
            if saved is None:
                continue
            if same:
                coordinator.set_state(saved)
                continue
            fresh = coordinator.get_state()
            coordinator.set_state(
                {
                    **saved,
                    "rho": saved["rho"] if self._agrees else 0.0,
                    "z_bar": saved["z"],
                    "h": dict.fromkeys(fresh["h"], saved["z"]),
                    "weights": fresh["weights"],
                    "duals": fresh["duals"],
                }
            )
        for member in self._members:
            member.snapshots = {
                mid: c.consensus.snapshot(rho=c.rho) for mid, c in self._coordinators.items()
            }
        self.settle()
        schedule = (self._last_target_update, self._env_steps)
        self._get([self._call(m, "set_schedule", *schedule) for m in self._members])
        if same:
            self._get([self._call(m, "set_local_state", locals_[m.name]) for m in self._members])
        self._sync_z_learner(full=False)

    @override(Checkpointable)
    def restore_from_path(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Restores from a checkpoint folder; a mere RLModule starts the consensus anew."""
        super().restore_from_path(path, *args, **kwargs)
        if kwargs.get("component") is not None:
            self._start_consensus()

    @override(LearnerGroup)
    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        """The learner component of a checkpoint is z, in a single learner's format."""
        return [(COMPONENT_LEARNER, self._z_learner)]


_COUNTERS = (
    "_env_steps",
    "num_restarts",
    "num_messages_rejected",
    "num_fragments_lost",
    "num_non_finite",
)


def _to_numpy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numpy().copy()
    if isinstance(value, dict):
        return {key: _to_numpy(item) for key, item in value.items()}
    return value
