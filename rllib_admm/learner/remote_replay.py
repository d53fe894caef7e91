"""A learner's view of replay shards in other processes: a bounded queue of minibatches."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import ray
import tree  # type: ignore[import-untyped]  # dm_tree has no stubs
from torch import Tensor

from rllib_admm.learner.replay import LearnerReplay
from rllib_admm.learner.replay_actor import Bundle
from rllib_admm.replay import Sample
from rllib_admm.replay.errors import ReplayDataError

# Seconds that a dead shard is left alone, while Ray starts it anew.
_RETRY_S = 1.0
# Seconds that a learner waits for a minibatch before it does without one.
_PATIENCE_S = 5.0


@dataclass
class _Open:
    """A bundle whose minibatches are being learned from."""

    actor: Any
    bundle: Bundle
    indices: dict[str, list[Any]] = field(default_factory=dict)
    errors: dict[str, list[Any]] = field(default_factory=dict)


class RemoteReplay(LearnerReplay):
    """Draws from replay actors in turn, a bounded number of requests ahead.

    Each request brings several minibatches, so that an actor's call is paid for once per
    bundle; their TD errors go back to the actor that they came from, in one call, which is
    not waited for. The shards have equal shares of the draws: as they are fed evenly, a
    transition is drawn as often as from one large prioritized replay, and its importance
    weight is right within its shard.

    An actor that died is asked again once Ray has restarted it, with an empty shard.

    Args:
        config: The ApexDQNConfig.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config, stateful=(), seed=None)
        self._actors: tuple[Any, ...] = ()
        self._retry_at: dict[int, float] = {}
        self._next_actor = 0
        self._requests: dict[Any, int] = {}
        self._minibatches: deque[tuple[_Open, dict[str, Sample]]] = deque()
        self._open: _Open | None = None
        self._updates: deque[Any] = deque()
        self.counters = {"wait_s": 0.0, "bytes": 0.0, "stale": 0.0, "failed_requests": 0.0}

    def connect(self, actors: Sequence[Any]) -> None:
        """Names the replay actors; requests to others are forgotten."""
        if tuple(actors) == self._actors:
            return
        self._actors = tuple(actors)
        self._requests.clear()
        self._retry_at.clear()

    def take_counters(self) -> dict[str, float]:
        """Returns and resets the counters.

        Seconds waited for minibatches (`wait_s`), bytes received (`bytes`), priorities that
        came too late (`stale`), requests that failed (`failed_requests`).
        """
        while self._updates:
            ready, _ = ray.wait([self._updates[0]], timeout=0)
            if not ready:
                break
            try:
                self.counters["stale"] += ray.get(self._updates.popleft())
            except ray.exceptions.RayActorError:
                # The shard died, and the priorities' transitions with it.
                self.counters["failed_requests"] += 1
        taken = dict(self.counters)
        self.counters = dict.fromkeys(self.counters, 0.0)
        return taken

    # ---- Drawing ----------------------------------------------------------------------

    def sample(self, module_ids: Iterable[str], minibatches: int = 1) -> dict[str, Sample]:
        """Returns the next minibatch; nothing if none came within some seconds."""
        if not self._minibatches:
            self._receive(list(module_ids))
        if not self._minibatches:
            return {}
        source, samples = self._minibatches.popleft()
        if self._open is not source:
            self._return_priorities()
            self._open = source
        return samples

    def _request(self, module_ids: list[str]) -> None:
        """Fills the queue of requests, with the actors in turn."""
        now = time.monotonic()
        for _ in range(len(self._actors) * self._config.sample_queue_size):
            if len(self._requests) >= self._config.sample_queue_size:
                return
            index = self._next_actor
            self._next_actor = (index + 1) % len(self._actors)
            if self._retry_at.get(index, 0.0) <= now:
                reference = self._actors[index].sample.remote(
                    module_ids, self._config.minibatches_per_request
                )
                self._requests[reference] = index

    def _receive(self, module_ids: list[str]) -> None:
        began = time.monotonic()
        while not self._minibatches and time.monotonic() - began < _PATIENCE_S:
            self._request(module_ids)
            if not self._requests:
                time.sleep(0.05)
                continue
            ready, _ = ray.wait(list(self._requests), num_returns=1, timeout=_PATIENCE_S)
            for reference in ready:
                index = self._requests.pop(reference)
                try:
                    self._take(self._actors[index], ray.get(reference))
                except ray.exceptions.RayActorError:
                    self.counters["failed_requests"] += 1
                    self._retry_at[index] = time.monotonic() + _RETRY_S
            if ready and not self._minibatches:
                # Every shard that answered is empty.
                time.sleep(0.01)
        self.counters["wait_s"] += time.monotonic() - began
        # The next ones are drawn while these are learned from.
        self._request(module_ids)

    def _take(self, actor: Any, bundle: Bundle) -> None:
        source = _Open(actor, bundle)
        for i in range(self._config.minibatches_per_request if bundle.samples else 0):
            samples = {}
            for module_id, sample in bundle.samples.items():
                config = self._config.get_config_for_module(module_id)
                size = config.train_batch_size_per_learner
                samples[module_id] = _part(sample, i * size, (i + 1) * size)
            self._minibatches.append((source, samples))
        self.counters["bytes"] += sum(_nbytes(sample) for sample in bundle.samples.values())

    # ---- Priorities -------------------------------------------------------------------

    def update_priorities(self, module_id: str, sample: Sample, td_errors: Tensor) -> None:
        """Keeps the TD errors, shape (B,), until the whole bundle's go back to its shard.

        Raises:
            ReplayDataError: A TD error is not finite.
        """
        if not self._settings.prioritized or self._open is None:
            return
        errors = td_errors.reshape(-1).cpu().numpy()
        if not np.isfinite(errors).all():
            raise ReplayDataError("a value is not finite.", "td_error")
        self._open.indices.setdefault(module_id, []).append(sample.indices)
        self._open.errors.setdefault(module_id, []).append(errors)

    def _return_priorities(self) -> None:
        source, self._open = self._open, None
        if source is None:
            return
        for module_id, errors in source.errors.items():
            self._updates.append(
                source.actor.update_priorities.remote(
                    module_id,
                    np.concatenate(source.indices[module_id]),
                    np.concatenate(errors),
                    source.bundle.drawn_at[module_id],
                )
            )

    # ---- State ------------------------------------------------------------------------

    def get_state(self, *, with_rows: bool) -> dict[str, Any]:
        """Returns the shards' states, if the rows are wanted."""
        if not with_rows:
            return {}
        states = ray.get([actor.get_state.remote() for actor in self._actors])
        return {str(i): state for i, state in enumerate(states)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `get_state` returned, onto the same number of shards.

        Raises:
            ValueError: If their number is another.
        """
        if not state:
            return
        if len(state) != len(self._actors):
            raise ValueError(
                f"num_replay_shards={len(self._actors)} differs from the checkpoint's "
                f"{len(state)}: restore with the saved number."
            )
        self._minibatches.clear()
        self._requests.clear()
        self._open = None
        ray.get([a.set_state.remote(state[str(i)]) for i, a in enumerate(self._actors)])


def _part(sample: Sample, start: int, stop: int) -> Sample:
    """Returns rows [start, stop) as arrays that may be written to."""

    def cut(array: Any) -> Any:
        return np.array(array[start:stop])

    return Sample(
        **{f.name: tree.map_structure(cut, getattr(sample, f.name)) for f in fields(Sample)}
    )


def _nbytes(sample: Sample) -> int:
    leaves = tree.flatten([getattr(sample, f.name) for f in fields(Sample)])
    return int(sum(leaf.nbytes for leaf in leaves))
