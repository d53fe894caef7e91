"""The group of learners that agree by consensus ADMM."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch
from ray.rllib.core import COMPONENT_LEARNER, COMPONENT_RL_MODULE
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.utils.actor_manager import FaultTolerantActorManager
from ray.rllib.utils.annotations import override
from ray.rllib.utils.checkpoints import Checkpointable
from ray.util.placement_group import PlacementGroup

from rllib_admm.consensus import (
    ConsensusOptions,
    Coordinator,
    Layout,
    LocalNorms,
    MessageError,
    NonFiniteError,
    Reply,
    make_schedule,
)
from rllib_admm.learner.actors import start_learner, threads_per_learner, wait_until_built
from rllib_admm.learner.broadcast import Broadcast
from rllib_admm.learner.ddp import mean_gradients
from rllib_admm.learner.errors import LearnerFailure
from rllib_admm.learner.members import Member, PendingRound, RoundSummary
from rllib_admm.learner.round import RoundRequest, RoundResult
from rllib_admm.learner.traffic import Traffic

logger = logging.getLogger(__name__)

COMPONENT_CONSENSUS = "consensus"
COMPONENT_LOCAL_STATES = "local_states"


class ConsensusLearnerGroup(LearnerGroup):
    """N Learners, each with its own shard, and the coordinator that they agree through.

    The group's weights (`get_weights`, `get_state`, checkpoints, evaluation) are z, which
    the coordinator holds in this process. Learners are plain Ray actors: no torch process
    group, no DDP wrapper, so none of them can block the others.

    What the death of a learner costs, by moment: before or during its local steps, its shard
    and this round's work of that learner; while uploading, the same (an upload is counted
    whole or not at all); between rounds, its shard. In all cases the survivors finish the
    round, and a replacement starts from z with the dual that `on_learner_failure` names, as
    soon as its process is up. Fragments that it had not confirmed are delivered again.

    With one learner nothing has to agree: z is its theta, there is no pull and no dual.
    """

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

    # ---- Rounds ---------------------------------------------------------------------

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

    def deliver(self, fragments: Mapping[int, Sequence[tuple[str, Any]]]) -> None:
        """Addresses data to learners' shards; it travels with their next round.

        Args:
            fragments: Per learner index (source, reference to a list of episodes).
        """
        for index, parts in fragments.items():
            self._members[index].fragments.extend(parts)

    def start_round(self, *, env_steps: int, local_steps: int) -> PendingRound:
        """Sets all learners to work on one round.

        Args:
            env_steps: Env steps sampled so far, for schedules.
            local_steps: K; 0 settles the last round and takes in data only.
        """
        self._env_steps = env_steps
        self._let_restarted_join()
        requests, references = {}, {}
        for member in self._members:
            if member.building is not None:
                continue
            request = RoundRequest(
                env_steps, local_steps, member.replies, member.snapshots, list(member.fragments)
            )
            if self.is_remote:
                self.traffic.down += sum(len(r.message) for r in member.replies.values())
                self.traffic.down += sum(s.nbytes for s in member.snapshots.values())
            requests[member.index] = request
            if member.actor is not None:
                method = "ddp_begin" if self._is_ddp(local_steps) else "run_round"
                references[member.index] = self._call(member, method, request)
        return PendingRound(requests, references, local_steps, time.perf_counter())

    def finish_round(self, pending: PendingRound) -> RoundSummary:
        """Waits for the learners, forms the new z, and returns what happened.

        Raises:
            LearnerFailure: If no learner is left, or one was restarted too often.
        """
        if self._is_ddp(pending.local_steps):
            results = self._finish_ddp(pending)
        elif self.is_local:
            results = {0: self._z_learner.run_round(pending.requests[0])}
        else:
            results = self._collect(pending.references)
        for index, result in results.items():
            self._confirm(self._members[index], pending.requests[index], result)
        if self._learner_error is not None:
            error, self._learner_error = self._learner_error, None
            raise error
        if not results:
            self._wait_for_a_replacement(pending)
            return RoundSummary()
        with self._lock:
            return self._close(pending, results)

    def _is_ddp(self, local_steps: int) -> bool:
        return self.config.weight_sync == "ddp" and local_steps > 0

    def _confirm(self, member: Member, request: RoundRequest, result: RoundResult) -> None:
        member.replies, member.snapshots = {}, {}
        member.fragments = member.fragments[len(request.fragments) :]
        member.norms = result.norms or member.norms
        member.metric_scale = result.metric_scale or member.metric_scale
        self.num_fragments_lost += result.fragments_lost
        self._lr.update(result.lr)
        if result.non_finite:
            self.num_non_finite += 1
            logger.warning(
                "The parameters of %s (%s) were not finite: it was left out of the round and "
                "starts again from z.",
                member.name,
                ", ".join(result.non_finite),
            )
        self._last_target_update.update(result.last_target_update)
        member.rejected = list(result.rejected)
        for reason in result.rejected.values():
            self.num_messages_rejected += 1
            logger.warning("%s could not apply a reply: %s", member.name, reason)

    def _readmit(self, member: Member, module_id: str) -> None:
        """Lets a learner that lost the thread start anew from z, keeping its dual."""
        coordinator = self._coordinators[module_id]
        dual = coordinator.dual(member.name)
        coordinator.remove(member.name)
        member.snapshots[module_id] = coordinator.add(member.name, dual)

    def _collect(self, references: Mapping[int, Any]) -> dict[int, RoundResult]:
        """Resolves the learners' answers within `round_timeout_s`; replaces the dead."""
        results: dict[int, RoundResult] = {}
        waiting = {reference: index for index, reference in references.items()}
        deadline = time.monotonic() + self.config.round_timeout_s
        while waiting:
            ready, _ = ray.wait(
                list(waiting), num_returns=1, timeout=max(0.0, deadline - time.monotonic())
            )
            if not ready:
                break
            index = waiting.pop(ready[0])
            try:
                results[index] = ray.get(ready[0])
            except ray.exceptions.RayActorError as error:
                self._replace(self._members[index], f"died: {error.__class__.__name__}")
            except ray.exceptions.RayTaskError as error:
                # Raised once the others have been heard, so that their state is known.
                self._learner_error = error
        for index in waiting.values():
            timeout = self.config.round_timeout_s
            self._replace(self._members[index], f"did not answer within {timeout:g} s")
        return dict(sorted(results.items()))

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

    # ---- Closing a round ------------------------------------------------------------

    def _close(self, pending: PendingRound, results: dict[int, RoundResult]) -> RoundSummary:
        summary = RoundSummary([r.metrics for r in results.values() if r.metrics is not None])
        if not pending.local_steps:
            for index in results:
                for module_id in self._members[index].rejected:
                    self._readmit(self._members[index], module_id)
            summary.consensus = self._metrics({mid: [] for mid in self._coordinators}, len(results))
            return summary
        summary.gradient_steps = sum(r.gradient_steps for r in results.values())
        parameters = sum(layout.size for layout in self.layouts.values())
        self.traffic.count_steps(summary.gradient_steps, len(self._members), parameters)
        self._update_rho_scale()
        norms: dict[str, list[LocalNorms]] = {}
        for module_id, coordinator in self._coordinators.items():
            for index, result in results.items():
                name = self._members[index].name
                # Who could not follow the last round has nothing to say in this one.
                if module_id in self._members[index].rejected:
                    continue
                if module_id in result.uploads and name in coordinator.learners:
                    self._receive(coordinator, result.uploads[module_id], name)
            norms[module_id] = [m.norms[module_id] for m in self._members if module_id in m.norms]
            reply = coordinator.close_round(self._rho0(module_id), norms[module_id])
            self._last_replies[module_id] = reply
            for index in results:
                if module_id in self._members[index].rejected:
                    self._readmit(self._members[index], module_id)
                else:
                    self._members[index].replies[module_id] = reply
        summary.consensus = self._metrics(norms, len(results))
        return summary

    def _receive(self, coordinator: Coordinator, upload: bytes, name: str) -> None:
        if self.is_remote:
            self.traffic.up += len(upload)
        try:
            coordinator.receive(upload)
        except (MessageError, NonFiniteError) as error:
            self.num_messages_rejected += 1
            logger.warning("The upload of %s was not counted: %s", name, error)

    def _update_rho_scale(self) -> None:
        for module_id in self._rho_scale:
            scales = [m.metric_scale.get(module_id, 0.0) for m in self._members]
            known = [s for s in scales if s > 0 and math.isfinite(s)]
            if known:
                self._rho_scale[module_id] = sum(known) / len(known)

    def _metrics(self, norms: Mapping[str, Sequence[LocalNorms]], active: int) -> dict[str, float]:
        def total(values: list[float]) -> float:
            return math.sqrt(sum(v * v for v in values))

        primal, dual, dual_norm = [], [], []
        for module_id, coordinator in self._coordinators.items():
            residuals = coordinator.residuals(norms[module_id])
            if residuals is not None:
                primal.append(residuals.primal)
                dual.append(residuals.dual)
            duals = [n.dual for n in norms[module_id]]
            if duals:
                dual_norm.append(math.sqrt(sum(d * d for d in duals) / len(duals)))
        rhos = [c.rho for c in self._coordinators.values()]
        return {
            "round": float(self.round),
            "rho": sum(rhos) / max(1, len(rhos)),
            "primal_residual": total(primal),
            "dual_residual": total(dual),
            "dual_norm": total(dual_norm),
            "num_learners_active": float(active),
            **self.traffic.metrics(len(self._members)),
            "num_learner_restarts": float(self.num_restarts),
            "num_messages_rejected": float(self.num_messages_rejected),
            "num_fragments_lost": float(self.num_fragments_lost),
            "num_non_finite": float(self.num_non_finite),
        }

    # ---- weight_sync="ddp" ----------------------------------------------------------

    def _finish_ddp(self, pending: PendingRound) -> dict[int, RoundResult]:
        """K synchronous steps: every learner's gradient, their mean, applied by all."""
        if self.is_local:
            begun = {0: self._z_learner.ddp_begin(pending.requests[0])}
        else:
            begun = self._collect(pending.references)
        members = [self._members[i] for i in begun]
        mean: Any = None
        vector_bytes = 4 * sum(layout.size for layout in self.layouts.values())
        for step in range(pending.local_steps):
            last = step + 1 == pending.local_steps
            gradients = self._get_synchronously(
                members, [self._call(m, "ddp_step", mean, last) for m in members]
            )
            averaged = mean_gradients(gradients)
            mean = averaged if self.is_local else ray.put(averaged)
            if len(members) > 1:
                self.traffic.up += vector_bytes * sum(bool(g) for g in gradients)
                self.traffic.down += vector_bytes * len(members)
        results = self._get_synchronously(
            members,
            [self._call(m, "ddp_end", mean, pending.requests[m.index]) for m in members],
        )
        for member, result in zip(members, results, strict=True):
            result.norms = begun[member.index].norms
            result.rejected = begun[member.index].rejected
            result.fragments_lost = begun[member.index].fragments_lost
        return {m.index: r for m, r in zip(members, results, strict=True)}

    def _get_synchronously(self, members: Sequence[Member], values: Sequence[Any]) -> list[Any]:
        try:
            return self._get(values)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            names = ", ".join(member.name for member in members)
            raise LearnerFailure(
                f"One of {names} did not answer ({error.__class__.__name__}). weight_sync='ddp' "
                "is synchronous and ends with it; weight_sync='admm' would have replaced it."
            ) from error

    # ---- EnvRunners -----------------------------------------------------------------

    def broadcast(self, held_round: int | None) -> Broadcast | None:
        """Returns what brings an EnvRunner that holds `held_round` up to date.

        Args:
            held_round: The round that it holds; None if it holds nothing yet.

        Returns:
            A difference if it is one round behind, a keyframe if more, None if up to date.
        """
        with self._lock:
            return self._broadcast(held_round)

    def _broadcast(self, held_round: int | None) -> Broadcast | None:
        now = self.round
        if held_round == now:
            return None
        if held_round is not None and held_round == now - 1 and self._last_replies:
            moves = {mid: reply.message for mid, reply in self._last_replies.items()}
            return Broadcast(now, held_round, moves)
        return Broadcast(
            now,
            None,
            snapshots={mid: c.consensus.snapshot() for mid, c in self._coordinators.items()},
            layouts=self.layouts,
            options=self.options,
        )

    # ---- State ----------------------------------------------------------------------

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

    def settle(self) -> None:
        """Tells all learners the end of the last round, so that nothing is pending."""
        self.finish_round(self.start_round(env_steps=self._env_steps, local_steps=0))

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

    @override(LearnerGroup)
    def __len__(self) -> int:
        """Number of remote learners, as in RLlib (0 for a local one)."""
        return len(self._members) if self.is_remote else 0

    @property
    def num_shards(self) -> int:
        """Number of replay shards, one per learner."""
        return len(self._members)

    def get_consensus_states(self, module_id: str) -> list[dict[str, np.ndarray]]:
        """Returns theta, u, h and z of every learner, each of shape (P,)."""
        return self._get([self._call(m, "consensus_state", module_id) for m in self._members])

    def get_pids(self) -> list[int]:
        """Returns the learners' process IDs."""
        return self._get([self._call(m, "pid") for m in self._members])

    @override(LearnerGroup)
    def update(self, **kwargs: Any) -> list[Any]:
        """Refused: learners learn from their own shards.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "ConsensusLearnerGroup has no update(batch): its learners own their data. Use "
            "deliver(), start_round() and finish_round()."
        )

    @override(LearnerGroup)
    def shutdown(self) -> None:
        """Ends all learners' processes."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        for member in self._members:
            if member.actor is not None:
                ray.kill(member.actor)


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


def _pack_vector(coordinator: Coordinator, vector: torch.Tensor) -> bytes:
    snapshot = coordinator.consensus.snapshot(dual=vector).dual
    assert snapshot is not None
    return snapshot
