"""Rounds: what the group asks of its members, and how their answers become the next z."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from rllib_admm.consensus import (
    Coordinator,
    LocalNorms,
    MessageError,
    NonFiniteError,
)
from rllib_admm.learner.ddp import mean_gradients
from rllib_admm.learner.errors import LearnerFailure
from rllib_admm.learner.members import Member, PendingRound, RoundSummary
from rllib_admm.learner.membership import Membership
from rllib_admm.learner.round import RoundRequest, RoundResult

logger = logging.getLogger(__name__)


class Rounds(Membership):
    """The rounds of a `ConsensusLearnerGroup`."""

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
                env_steps,
                local_steps,
                member.replies,
                member.snapshots,
                list(member.fragments),
                self.replay_actors,
            )
            if self.is_remote:
                self.traffic.down += sum(len(r.message) for r in member.replies.values())
                self.traffic.down += sum(s.nbytes for s in member.snapshots.values())
            requests[member.index] = request
            if member.actor is not None:
                method = "ddp_begin" if self._is_ddp(local_steps) else "run_round"
                references[member.index] = self._call(member, method, request)
        return PendingRound(requests, references, local_steps, time.perf_counter())

    @staticmethod
    def is_ready(pending: PendingRound) -> bool:
        """Returns whether `finish_round` would not have to wait."""
        references = list(pending.references.values())
        if not references:
            return True
        ready, _ = ray.wait(references, num_returns=len(references), timeout=0)
        return len(ready) == len(references)

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

    def settle(self) -> None:
        """Tells all learners the end of the last round, so that nothing is pending."""
        self.finish_round(self.start_round(env_steps=self._env_steps, local_steps=0))

    # ---- Closing a round ------------------------------------------------------------

    def _close(self, pending: PendingRound, results: dict[int, RoundResult]) -> RoundSummary:
        summary = RoundSummary([r.metrics for r in results.values() if r.metrics is not None])
        summary.busy_s = sum(r.busy_s for r in results.values())
        summary.replay = [r.replay for r in results.values()]
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
