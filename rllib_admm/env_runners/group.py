"""The EnvRunnerGroup whose weights arrive as quantised broadcasts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import ray
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.annotations import override

from rllib_admm.connectors.quantized_broadcast import write_parameters
from rllib_admm.consensus import MessageError
from rllib_admm.env_runners.sampling import (
    SampleReply,
    SampleRequest,
    sample_fragments,
    take_broadcast,
)
from rllib_admm.learner import Broadcast, ConsensusLearnerGroup

_SAMPLE = "sample_fragments"


class ConsensusEnvRunnerGroup(EnvRunnerGroup):
    """Sends z through `QuantizedBroadcast`, knows which round each EnvRunner holds.

    `Algorithm.setup` names its group class itself, so the group that it made is adopted.
    """

    held_rounds: dict[int, int | None]
    bytes_broadcast: int
    num_broadcasts_rejected: int
    generation: int
    sampling: set[int]

    @classmethod
    def adopt(cls, group: EnvRunnerGroup) -> ConsensusEnvRunnerGroup:
        """Makes `group`, an instance of RLlib's class, one of this class."""
        group.__class__ = cls
        assert isinstance(group, cls)
        group.held_rounds = {}
        group.bytes_broadcast = 0
        group.num_broadcasts_rejected = 0
        group.generation = 0
        group.sampling = set()
        return group

    def forget(self, worker_id: int) -> None:
        """Notes that an EnvRunner (restarted, say) holds nothing: it gets a keyframe next."""
        self.held_rounds.pop(worker_id, None)

    def broadcast_for(
        self, worker_id: int, learner_group: ConsensusLearnerGroup
    ) -> Broadcast | None:
        """Returns what EnvRunner `worker_id` (0: local) lacks, and counts its bytes."""
        if self.generation != learner_group.generation:
            # The consensus started anew: the same round number means another z.
            self.held_rounds.clear()
            self.generation = learner_group.generation
        broadcast = learner_group.broadcast(self.held_rounds.get(worker_id))
        if broadcast is not None and worker_id > 0:
            self.bytes_broadcast += broadcast.nbytes
        return broadcast

    # ---- Sampling -------------------------------------------------------------------

    def idle_env_runner_ids(self) -> list[int]:
        """Returns the healthy remote EnvRunners that are not still busy with an old request."""
        healthy = self.healthy_env_runner_ids()
        self.sampling &= set(healthy)
        return [i for i in healthy if i not in self.sampling]

    def start_sampling(self, requests: dict[int, SampleRequest]) -> None:
        """Sets remote EnvRunners to work; `finish_sampling` collects."""
        if requests:
            self.sampling |= set(requests)
            self.foreach_env_runner_async(
                [partial(sample_fragments, request=r, remote=True) for r in requests.values()],
                tag=_SAMPLE,
                remote_worker_ids=list(requests),
            )

    def wait(self, others: Sequence[Any], timeout_s: float) -> None:
        """Waits until an EnvRunner has replied, one of `others` is ready, or the time is up."""
        references = [*self._worker_manager._in_flight_req_to_actor_id, *others]
        if references:
            ray.wait(references, num_returns=1, timeout=timeout_s)

    def finish_sampling(self, timeout_s: float | None) -> dict[int, SampleReply]:
        """Returns the replies that came within `timeout_s`, by worker ID, in their order."""
        replies = dict(self.fetch_ready_async_reqs(tags=_SAMPLE, timeout_seconds=timeout_s))
        self.sampling -= set(replies)
        for worker_id, reply in replies.items():
            self.held_rounds[worker_id] = reply.held_round
            self.num_broadcasts_rejected += reply.broken is not None
        return dict(sorted(replies.items()))

    def sample_locally(self, request: SampleRequest) -> SampleReply:
        """Samples on the local EnvRunner (num_env_runners=0)."""
        reply = sample_fragments(self.local_env_runner, request=request, remote=False)
        self.held_rounds[0] = reply.held_round
        return reply

    # ---- Weights --------------------------------------------------------------------

    def write_local(self, learner_group: ConsensusLearnerGroup) -> None:
        """Sets the local EnvRunner's module to z: what `algo.get_module()` returns.

        Its connectors never run while remote EnvRunners do the sampling, so z is written
        directly then.
        """
        runner = self.local_env_runner
        if runner is None or runner.module is None:
            return
        if runner.env is not None and not self.num_remote_env_runners():
            broadcast = self.broadcast_for(0, learner_group)
            self.held_rounds[0] = take_broadcast(runner, broadcast)
            return
        for module_id, layout in learner_group.layouts.items():
            module = runner.module
            part = module[module_id] if hasattr(module, "_rl_modules") else module
            write_parameters(part, layout, learner_group.z(module_id))

    @override(EnvRunnerGroup)
    def sync_weights(
        self,
        policies: Any = None,
        from_worker_or_learner_group: Any = None,
        to_worker_indices: list[int] | None = None,
        global_vars: dict[str, Any] | None = None,
        timeout_seconds: float | None = 0.0,
        inference_only: bool | None = False,
    ) -> None:
        """Brings EnvRunners to the consensus of a ConsensusLearnerGroup, through the connector.

        RLlib calls this before an evaluation and after a restore. Any other source of weights
        takes RLlib's own way.
        """
        source = from_worker_or_learner_group
        if not isinstance(source, ConsensusLearnerGroup):
            super().sync_weights(
                policies, source, to_worker_indices, global_vars, timeout_seconds, inference_only
            )
            return
        ids = to_worker_indices or self.healthy_env_runner_ids()
        self.deliver(source, ids)
        runner = self.local_env_runner
        if runner is not None and runner.module is not None:
            self.write_local(source)

    def deliver(self, learner_group: ConsensusLearnerGroup, worker_ids: list[int]) -> None:
        """Brings remote EnvRunners to z and waits until they hold it."""
        # A difference that does not fit there (a restart unnoticed) is followed by a keyframe.
        for _ in range(2):
            broadcasts = {i: self.broadcast_for(i, learner_group) for i in worker_ids}
            behind = {i: b for i, b in broadcasts.items() if b is not None}
            if not behind:
                return
            results = self._worker_manager.foreach_actor(
                [partial(_take, broadcast=b) for b in behind.values()],
                remote_actor_ids=list(behind),
                timeout_seconds=self._remote_config.env_runner_restore_timeout_s,
            )
            for result in results:
                self.held_rounds[result.actor_id] = result.get() if result.ok else None
                if not result.ok and not self._ignore_ray_errors_on_env_runners:
                    raise result.get()


def _take(env_runner: Any, *, broadcast: Broadcast) -> int | None:
    try:
        return take_broadcast(env_runner, broadcast)
    except MessageError:
        return None
