"""Who takes part: learners' processes, the consensus they start from, replacement of the dead."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import ray
import torch
from ray.rllib.core import COMPONENT_RL_MODULE
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.utils.actor_manager import FaultTolerantActorManager
from ray.util.placement_group import PlacementGroup

from rllib_admm.consensus import (
    ConsensusOptions,
    Coordinator,
    Layout,
    Reply,
    make_schedule,
)
from rllib_admm.learner.actors import start_learner, threads_per_learner, wait_until_built
from rllib_admm.learner.errors import LearnerFailure
from rllib_admm.learner.members import Member, PendingRound
from rllib_admm.learner.traffic import Traffic

logger = logging.getLogger(__name__)


class Membership(LearnerGroup):
    """The members of a `ConsensusLearnerGroup`, their start-up and their replacement."""

    def __init__(
        self,
        *,
        config: Any,
        module_spec: Any = None,
        placement_group: PlacementGroup | None = None,
    ) -> None:
        # LearnerGroup's constructor starts a torch process group and wraps modules in DDP,
        # which is what this class exists to do without.
        self.config = config.copy(copy_frozen=False)
        self._module_spec = module_spec or self.config.get_multi_rl_module_spec()
        self._placement_group = placement_group
        self._is_shut_down = False
        # Evaluation may ask for z from another thread than the one that trains.
        self._lock = threading.RLock()
        self._members: list[Member] = []
        self._ts_dropped = 0
        self._worker_manager = None
        self._workers: list[Any] | None = None
        self.num_restarts = 0
        self.num_messages_rejected = 0
        self.num_fragments_lost = 0
        self.num_non_finite = 0
        self.traffic = Traffic()
        # Grows whenever the consensus starts anew: round numbers are counted again then.
        self.generation = 0
        self.replay_restored = False
        self._env_steps = 0
        # Named in every request, so that a restarted learner knows them too.
        self.replay_actors: tuple[Any, ...] = ()
        self._last_target_update: dict[str, int] = {}
        self._learner_error: Exception | None = None

        # Holds z in this process; with num_learners=0 it is also the one that learns.
        self._z_learner = self._build_learner()
        self._learner = self._z_learner if self.is_local else None
        self.layouts: dict[str, Layout] = self._z_learner.layouts
        self._lr = {mid: self._z_learner_lr(mid) for mid in self.layouts}
        self._rho_scale = dict.fromkeys(
            self.layouts, 0.0 if self.config.proximal_metric == "adam" else 1.0
        )
        self.options = self._make_options()
        self._members = [Member(i) for i in range(max(1, self.config.num_learners))]
        if self.is_remote:
            self._start_actors()
        self._coordinators: dict[str, Coordinator] = {}
        self._last_replies: dict[str, Reply] = {}
        self._start_consensus()
        if len(self._members) == 1 and self.config.weight_sync == "admm":
            logger.info("One learner: nothing has to agree, this is plain DQN on its own shard.")

    # ---- Start-up -------------------------------------------------------------------

    def _build_learner(self) -> Any:
        config = self.config.copy(copy_frozen=False)
        if self.is_remote:
            # It only holds z; the GPUs are the remote learners'.
            config.num_gpus_per_learner = 0
        learner = config.learner_class(config=config, module_spec=self._module_spec)
        learner.build()
        return learner

    def _z_learner_lr(self, module_id: str) -> float:
        return float(self._z_learner._get_optimizer_lr(self._z_learner._optimizer(module_id)))

    @property
    def _agrees(self) -> bool:
        return bool(self.config.num_learners > 1 and self.config.weight_sync == "admm")

    def _make_options(self) -> ConsensusOptions:
        c = self.config
        if not self._agrees:
            return ConsensusOptions.plain()
        return ConsensusOptions(
            over_relaxation=c.over_relaxation,
            outer_momentum=c.outer_momentum,
            outer_lr=c.outer_lr,
            dual_updates=c.dual_updates,
            bits=c.quantization_bits,
            full_precision_every=c.full_precision_every,
        )

    def _rho0(self, module_id: str) -> float:
        """Returns the penalty that the schedule's fraction multiplies."""
        c = self.config
        if not self._agrees:
            return 0.0
        scale = self._rho_scale[module_id]
        if c.rho == "auto":
            return float(c.rho_strength / (self._lr[module_id] * c.local_steps) * scale)
        return float(c.rho)

    def _make_actor(self, index: int) -> tuple[Any, Any]:
        return start_learner(self.config, self._module_spec, index, self._placement_group)

    def _start_actors(self) -> None:
        started = [self._make_actor(member.index) for member in self._members]
        for member, (actor, _) in zip(self._members, started, strict=True):
            member.actor = actor
        wait_until_built(started, self.config, self._placement_group)
        self._refresh_manager()

    def _refresh_manager(self) -> None:
        self._workers = [m.actor for m in self._members if m.actor is not None]
        self._worker_manager = FaultTolerantActorManager(self._workers)

    def _call(self, member: Member, method: str, *args: Any) -> Any:
        """Calls a method of a learner; returns a reference (remote) or the value (local)."""
        if member.actor is None:
            return getattr(self._z_learner, method)(*args)
        return getattr(member.actor, method).remote(*args)

    def _get(self, values: Sequence[Any]) -> list[Any]:
        """Resolves what `_call` returned, within `round_timeout_s`."""
        if self.is_local:
            return list(values)
        return list(ray.get(list(values), timeout=self.config.round_timeout_s))

    def _start_consensus(self) -> None:
        """(Re)starts the consensus on all learners from the weights of `_z_learner`."""
        c = self.config
        self.generation += 1
        for member in self._members:
            if member.building is not None:
                ray.get(member.building, timeout=c.placement_timeout_s)
                member.building = None
            member.fragments = []
        self._coordinators = {}
        names = [m.name for m in self._members]
        if c.weight_sync == "ddp":
            # Replicas are bit-equal, so one upload says it all.
            names = names[:1]
        for module_id, layout in self.layouts.items():
            schedule = make_schedule(
                c.rho_schedule,
                decay_rounds=c.rho_decay_rounds,
                final_fraction=c.rho_final_fraction,
            )
            z = self._z_learner.theta(module_id)
            rho = self._rho0(module_id) * schedule.fraction
            self._coordinators[module_id] = Coordinator(
                z, self.options, layout.hash, schedule, names, rho
            )
        self._last_replies = {}
        if self.is_remote:
            state = ray.put(
                self._z_learner.get_state(components=COMPONENT_RL_MODULE)[COMPONENT_RL_MODULE]
            )
            self._get([self._call(m, "set_module_state", state) for m in self._members])
        rho0 = next(iter(self._coordinators.values())).rho if self._coordinators else 0.0
        self._get(
            [
                self._call(m, "join", m.name, rho0, self.options, threads_per_learner(self.config))
                for m in self._members
            ]
        )
        for member in self._members:
            member.replies, member.snapshots, member.norms = {}, {}, {}
            member.metric_scale, member.rejected = {}, []

    # ---- What is agreed on ----------------------------------------------------------

    @property
    def round(self) -> int:
        """Rounds completed."""
        return min((c.consensus.round for c in self._coordinators.values()), default=0)

    @property
    def num_active(self) -> int:
        """Learners that take part in the next round."""
        return sum(m.building is None for m in self._members)

    def z(self, module_id: str) -> torch.Tensor:
        """Returns a copy of the consensus, shape (P,)."""
        with self._lock:
            return self._coordinators[module_id].consensus.z.clone()

    def _sync_z_learner(self, *, full: bool) -> Any:
        """Writes z into this process' learner; `full` also fetches the target networks."""
        found = not (self.is_remote and full)
        for member in self._members if not found else []:
            if member.building is not None:
                continue
            try:
                state = ray.get(
                    member.actor.get_state.remote(components=COMPONENT_RL_MODULE),
                    timeout=self.config.round_timeout_s,
                )
            except ray.exceptions.RayError:
                continue
            self._z_learner.module.set_state(state[COMPONENT_RL_MODULE])
            found = True
            break
        for module_id, coordinator in self._coordinators.items():
            self._z_learner.write_theta(module_id, coordinator.consensus.z)
        if not found:
            # The target networks died with the learners: they start again from z.
            self._z_learner.copy_targets()
        return self._z_learner.module.get_state() if full else None

    # ---- Replacement ----------------------------------------------------------------

    def _wait_for_a_replacement(self, pending: PendingRound) -> None:
        """Nobody answered: waits until a replacement is up, which then starts from z."""
        building = [m.building for m in self._members if m.building is not None]
        if not building or not pending.requests:
            return
        timeout = self.config.placement_timeout_s
        if not ray.wait(building, timeout=timeout)[0]:
            raise LearnerFailure(
                f"No learner survived round {self.round}, and no replacement was up after "
                f"placement_timeout_s={timeout:g} s."
            )

    def _replace(self, member: Member, reason: str) -> None:
        if self.config.weight_sync == "ddp":
            raise LearnerFailure(
                f"{member.name} {reason}. weight_sync='ddp' is synchronous and ends with it; "
                "weight_sync='admm' would have replaced it."
            )
        member.restarts += 1
        self.num_restarts += 1
        if member.restarts > self.config.max_learner_restarts:
            raise LearnerFailure(
                f"{member.name} {reason}; it was restarted "
                f"max_learner_restarts={self.config.max_learner_restarts} times already."
            )
        logger.warning(
            "%s %s in round %d; its shard is lost, the others go on. Restart %d of %d.",
            member.name,
            reason,
            self.round,
            member.restarts,
            self.config.max_learner_restarts,
        )
        ray.kill(member.actor)
        for coordinator in self._coordinators.values():
            coordinator.remove(member.name)
        member.actor, member.building = self._make_actor(member.index)
        member.replies, member.snapshots, member.norms = {}, {}, {}
        member.metric_scale, member.rejected = {}, []

    def _let_restarted_join(self) -> None:
        joined = False
        for member in self._members:
            if member.building is None:
                continue
            ready, _ = ray.wait([member.building], timeout=0)
            if not ready:
                continue
            try:
                ray.get(ready[0])
                self._admit(member)
            except ray.exceptions.RayActorError as error:
                self._replace(member, f"died while starting: {error.__class__.__name__}")
                continue
            member.building = None
            joined = True
        if joined:
            self._refresh_manager()

    def _admit(self, member: Member) -> None:
        """Brings a new process up to the consensus; its first round starts from z."""
        survivors = [m.name for m in self._members if m.building is None]
        state = self._sync_z_learner(full=True)
        ray.get(
            [
                self._call(member, "set_module_state", ray.put(state)),
                self._call(
                    member, "join", member.name, 0.0, self.options, threads_per_learner(self.config)
                ),
            ],
            timeout=self.config.round_timeout_s,
        )
        for module_id, coordinator in self._coordinators.items():
            mean = coordinator.mean_dual(survivors)
            if self.config.on_learner_failure == "mean_dual":
                member.snapshots[module_id] = coordinator.add(member.name, mean)
            else:
                member.snapshots[module_id] = coordinator.add(member.name, None)
                packed = _pack_vector(coordinator, mean)
                for other in self._members:
                    reply = other.replies.get(module_id)
                    if other is not member and reply is not None:
                        other.replies[module_id] = Reply(
                            reply.message, reply.included, reply.rho, packed
                        )

    def _readmit(self, member: Member, module_id: str) -> None:
        """Lets a learner that lost the thread start anew from z, keeping its dual."""
        coordinator = self._coordinators[module_id]
        dual = coordinator.dual(member.name)
        coordinator.remove(member.name)
        member.snapshots[module_id] = coordinator.add(member.name, dual)


def _pack_vector(coordinator: Coordinator, vector: torch.Tensor) -> bytes:
    snapshot = coordinator.consensus.snapshot(dual=vector).dual
    assert snapshot is not None
    return snapshot
