"""The columnar replay shard that one Learner owns.

Owns the rows, their links and their priorities. It may not know Ray actors, torch or the loss:
it takes RLlib episodes in and gives arrays (or, for connector pipelines, episodes) out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_admm.replay import rebuild
from rllib_admm.replay.columns import Column, ColumnProblem
from rllib_admm.replay.config import clip
from rllib_admm.replay.errors import ReplayDataError
from rllib_admm.replay.samples import Sample, SequenceSample
from rllib_admm.replay.sum_tree import SumTree

HAS_TRANSITION: Final = 1
TERMINATED: Final = 2
TRUNCATED: Final = 4

_STATE_VERSION: Final = 1
_SMALLEST_TD_ERROR: Final = 1e-12
"""RLlib's lower bound of a priority."""

_MAX_SEQUENCE_DRAWS: Final = 1000


@dataclass(slots=True)
class _Chunk:
    """The checked data of one episode chunk of n steps; arrays may be views of the episode."""

    id_: str
    t: int
    n: int
    obs: list[NDArray[Any]]  # leaves (n + 1, ...)
    actions: list[NDArray[Any]]  # leaves (n, ...)
    rewards: NDArray[np.float32]  # (n,)
    extra: dict[str, list[NDArray[Any]]]  # leaves (n, ...)
    end: int  # TERMINATED and TRUNCATED bits


class ReplayShard:
    """A ring of rows, one per observation, linked to episodes by successor row numbers.

    Each row holds an observation and, once the step from it is known, the action, the reward
    and the number of its successor's row. The observation after a step is thus stored once,
    not twice. An episode's last row, and the newest row of an ongoing episode, hold no
    transition: they link to themselves with reward 0, so that following links past an end
    neither moves nor adds reward, and n-step sums need no masks.

    Rows are written in ring order and the oldest is overwritten first. Links point from older
    to newer rows, so the successor of a live row is live.

    Chunks of one episode may come in any number of `add` calls, interleaved with other
    episodes. If a chunk in between is lost, or the newest row of the episode was overwritten
    meanwhile, the next chunk starts an unconnected piece.

    Not thread-safe. Calls are made one after another by the Learner that owns the shard. If
    rows are overwritten by an `add` between `sample` and `update_priorities`, the latter
    must be told `drawn_at`: otherwise the new transitions in those rows get the old ones'
    priority until they are drawn themselves. Rows without a transition stay undrawable.

    Args:
        capacity: Number of rows, at least 2. Larger: older data and more memory. An episode
            of n steps takes n + 1 rows.
        prioritized: Draw in proportion to `priority ** alpha` instead of uniformly.
        alpha: 0 is uniform, 1 fully proportional (usual: 0.5 to 1; default as in RLlib's DQN,
            from Schaul et al. 2016, https://arxiv.org/abs/1511.05952).
        beta: Strength of the importance weights: 0 none, 1 full correction (usual: 0.4 to 1;
            default as above). Used where `sample` is called without its own.
        seed: Seed of the draws; None takes one from the operating system.
        extra_columns: Keys of the episodes' `extra_model_outputs` to store with each
            transition, for instance `("state_out",)` for a stateful module.
        clip_rewards: Range to which rewards are clipped as they come in, or "sign".
        observation_space: Given to rebuilt episodes. Default: that of the first chunk.
        action_space: As above.
    """

    def __init__(
        self,
        capacity: int,
        *,
        prioritized: bool,
        alpha: float = 0.6,
        beta: float = 0.4,
        seed: int | None,
        extra_columns: Sequence[str] = (),
        clip_rewards: tuple[float, float] | str | None = None,
        observation_space: Any = None,
        action_space: Any = None,
    ) -> None:
        if not 2 <= capacity < 2**31:
            raise ValueError(
                f"ReplayShard: capacity={capacity} must be in [2, 2**31): one transition takes "
                "two rows."
            )
        if not (0 <= alpha < np.inf and 0 <= beta < np.inf):
            raise ValueError(
                f"ReplayShard: alpha={alpha} and beta={beta} must be finite and not negative."
            )
        self.capacity = capacity
        self.alpha = alpha
        self.beta = beta
        self._clip_rewards = clip_rewards
        self.observation_space = observation_space
        self.action_space = action_space
        self._rng = np.random.default_rng(seed)
        self._obs = Column("obs")
        self._actions = Column("action", narrow_integers=True)
        self._extra = {key: Column(key) for key in extra_columns}
        self._rewards: NDArray[np.float32] = np.zeros(capacity, np.float32)
        self._flags: NDArray[np.uint8] = np.zeros(capacity, np.uint8)
        self._next: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self._t: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self._tree = SumTree(capacity) if prioritized else None
        # `priority ** alpha` of the largest priority so far: that of new transitions.
        self._new_leaf = 1.0
        # RLlib's uniform buffer returns episodes under their own ids, its prioritized one
        # under new ids: only the former pays 4 bytes per row for them.
        self._episode: NDArray[np.int32] | None = (
            None if prioritized else np.zeros(capacity, np.int32)
        )
        self._episode_ids: dict[int, str] = {}
        self._num_episodes_seen = 0
        self._next_id_sweep = 1024
        # Predecessor rows; built at the first request for sequences and kept up from there.
        self._prev: NDArray[np.int32] | None = None
        self._num_rows_written = 0
        self._num_transitions = 0
        self._num_env_steps_added = 0
        # Episode id -> (how many rows had been written before its newest row, episode number);
        # in the order of writing, so that overwritten ones are in front.
        self._open: dict[str, tuple[int, int]] = {}

    def __len__(self) -> int:
        return self._num_transitions

    @property
    def prioritized(self) -> bool:
        """Whether draws are proportional to priorities."""
        return self._tree is not None

    @property
    def num_env_steps_added(self) -> int:
        """Environment steps added over the shard's life, those overwritten included."""
        return self._num_env_steps_added

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays at full capacity, priorities included."""
        columns = (self._obs, self._actions, *self._extra.values())
        sized: list[Any] = [*columns, self._rewards, self._flags, self._next, self._t]
        sized += [self._episode, self._prev, self._tree]
        return sum(int(each.nbytes) for each in sized if each is not None)

    @property
    def bytes_per_transition(self) -> float:
        """Bytes of the rows in use, per transition in them; 0 while empty."""
        if not self._num_transitions:
            return 0.0
        return self.nbytes / self.capacity * self._size / self._num_transitions

    @property
    def _size(self) -> int:
        """Rows in use."""
        return min(self._num_rows_written, self.capacity)

    @property
    def num_rows_written(self) -> int:
        """Rows written over the shard's life: a clock for `update_priorities`."""
        return self._num_rows_written

    def add(
        self,
        episodes: Iterable[SingleAgentEpisode],
        *,
        source: str | None = None,
        td_errors: Sequence[ArrayLike] | None = None,
    ) -> int:
        """Stores episode chunks as `EnvRunner.sample()` returns them.

        Lookback buffers are ignored. Chunks without a step are skipped. The episodes are not
        changed, and no reference to their arrays is kept.

        Args:
            episodes: Chunks, numpy'ized or not; those of one episode in the order of time.
            source: Who delivered them, for error messages.
            td_errors: Per chunk the TD errors of its transitions, shape (n,): their first
                priorities. Default: the largest priority so far.

        Returns:
            The number of environment steps added.

        Raises:
            ReplayDataError: A reward, observation, action or extra column is non-finite or
                missing, or its shape or dtype differs from what is stored. Nothing of this
                call is stored then.
        """
        try:
            chunks = [self._check(episode, source) for episode in episodes]
        except ReplayDataError:
            for column in (self._obs, self._actions, *self._extra.values()):
                column.forget()
            raise
        written = [None if chunk is None else self._write(chunk) for chunk in chunks]
        touched = [rows for rows in written if rows is not None]
        if self._tree is not None and touched:
            rows = np.concatenate([np.concatenate((r, holders[:1])) for r, holders in touched])
            drawable = (self._flags[rows] & HAS_TRANSITION) != 0
            self._tree.update(rows, np.where(drawable, self._new_leaf, 0.0))
            for each, errors in zip(written, td_errors or (), strict=bool(td_errors)):
                if each is not None:
                    holders = each[1]
                    self.update_priorities(holders, np.asarray(errors)[-len(holders) :])
        if self._episode is not None:
            self._sweep_episode_ids()
        return sum(chunk.n for chunk in chunks if chunk is not None)

    def sample(
        self,
        batch_size: int,
        *,
        n_step: int | tuple[int, int],
        gamma: float,
        beta: float | None = None,
    ) -> Sample:
        """Draws transitions with replacement.

        Unlike RLlib's buffers, which redraw (prioritized) or mislabel (uniform) rows closer
        than n steps to the end, the n-step sum is shortened there: see `Sample.n_step`.

        Args:
            batch_size: Number of transitions B.
            n_step: Steps to sum rewards over, at least 1; or (lo, hi) to draw it per
                transition from lo, ..., hi - 1, as RLlib does.
            gamma: Discount per step.
            beta: Overrides the constructor's `beta`.

        Returns:
            The batch, see `Sample`.

        Raises:
            ValueError: There is no transition to draw, or an argument is out of range.
        """
        rows = self._draw(batch_size)
        weights = self._weights(rows, self.beta if beta is None else beta)
        return self.transitions(rows, n_step=n_step, gamma=gamma, weights=weights)

    def transitions(
        self,
        rows: NDArray[np.int64],
        *,
        n_step: int | tuple[int, int] = 1,
        gamma: float = 1.0,
        weights: NDArray[np.float32] | None = None,
    ) -> Sample:
        """Reads the n-step transitions that start in given rows.

        Args:
            rows: Row numbers of any shape S, for instance (B,) or (B, T). Rows without a
                transition give reward 0, `n_step` 0 and themselves as the row reached.
            n_step: As in `sample`.
            gamma: As in `sample`.
            weights: Passed through, shape S; default ones.

        Returns:
            As `Sample`, with S in place of (B,).
        """
        rewards = self._rewards.take(rows)
        reached: NDArray[np.integer] = self._next.take(rows)
        if n_step == 1:
            steps = (self._flags.take(rows) & HAS_TRANSITION).astype(np.float32)
        else:
            reached, rewards, steps = self._walk(rows, reached, rewards, n_step, gamma)
        end = self._flags.take(reached)
        return Sample(
            obs=self._obs.take(rows),
            next_obs=self._obs.take(reached),
            actions=self._actions.take(rows),
            rewards=rewards,
            terminateds=(end & TERMINATED) != 0,
            truncateds=(end & TRUNCATED) != 0,
            weights=np.ones(rows.shape, np.float32) if weights is None else weights,
            n_step=steps,
            indices=rows,
            extra={key: column.take(rows) for key, column in self._extra.items()},
        )

    def update_priorities(
        self, indices: NDArray[np.int64], td_errors: ArrayLike, *, drawn_at: int | None = None
    ) -> int:
        """Sets the priorities of rows to |TD error|; does nothing on a uniform shard.

        Args:
            indices: `Sample.indices`, shape (B,). Where a row occurs twice, the last counts.
            td_errors: TD errors of any sign, shape (B,).
            drawn_at: `num_rows_written` when they were drawn: rows that were overwritten
                since then are left alone. Default: none was.

        Returns:
            The number of rows left alone.

        Raises:
            ReplayDataError: A TD error is not finite, or their number is not B. No priority
                is changed then.
        """
        if self._tree is None:
            return 0
        priorities = np.abs(np.asarray(td_errors, np.float64))
        if priorities.shape != indices.shape:
            raise ReplayDataError(
                f"shape {priorities.shape} for indices of shape {indices.shape}.", "td_error"
            )
        if not np.isfinite(priorities).all():
            item = int(np.isfinite(priorities).argmin())
            raise ReplayDataError(
                f"value {priorities[item]} at item {item} (row {indices[item]}) is not finite. "
                "The loss has diverged: lower the learning rate or clip gradients.",
                "td_error",
            )
        stale = 0
        if drawn_at is not None:
            # The newest write to each row that came before the draw.
            position = drawn_at - 1 - (drawn_at - 1 - indices) % self.capacity
            kept = position >= self._num_rows_written - self.capacity
            stale = int(len(kept) - np.count_nonzero(kept))
            if stale:
                indices, priorities = indices[kept], priorities[kept]
        if not priorities.size:
            return stale
        np.maximum(priorities, _SMALLEST_TD_ERROR, out=priorities)
        with np.errstate(over="ignore"):  # the tree keeps leaves finite
            leaves = priorities**self.alpha
        self._new_leaf = max(self._new_leaf, float(leaves.max()))
        drawable = (self._flags.take(indices) & HAS_TRANSITION) != 0
        if not drawable.all():
            indices, leaves = indices[drawable], leaves[drawable]
        self._tree.update(indices, leaves)
        return stale

    def sample_sequences(
        self,
        batch_size: int,
        *,
        length: int,
        lookback: int = 1,
        min_length: int = 0,
        beta: float | None = None,
    ) -> SequenceSample:
        """Draws sequences of successive transitions of one episode each.

        Args:
            batch_size: Number of sequences B. (RLlib's buffer counts time steps instead.)
            length: Longest length T; sequences are shorter at an episode's end.
            lookback: Number L of rows before the sequence to name as well. If positive, a
                sequence starts at an episode's first step or behind a row still stored, so
                that the state of a stateful module at its start is known.
            min_length: Draw only starts from which more than this many transitions follow in
                the episode, as RLlib does with the burn-in.
            beta: Overrides the constructor's `beta`.

        Returns:
            Row numbers and masks, see `SequenceSample`.

        Raises:
            ValueError: There is nothing to draw, or (after 1,000 draws each) no sequence
                longer than `min_length`.
        """
        if length < 1 or lookback < 0 or min_length < 0:
            raise ValueError(
                f"sample_sequences: length={length} must be at least 1, lookback={lookback} and "
                f"min_length={min_length} at least 0."
            )
        starts = self._draw(batch_size)
        for _ in range(_MAX_SEQUENCE_DRAWS):
            refused = np.flatnonzero(~self._may_start(starts, lookback, min_length))
            if not refused.size:
                break
            starts[refused] = self._draw(refused.size)
        else:
            raise ValueError(
                f"sample_sequences: found no sequence longer than min_length={min_length} with "
                f"lookback={lookback} among {len(self)} transitions. Episodes are shorter than "
                "the burn-in; lower it or wait for longer episodes."
            )

        rows = np.empty((batch_size, length), np.int64)
        rows[:, 0] = starts
        for step in range(1, length):
            rows[:, step] = self._next.take(rows[:, step - 1])
        before = np.empty((batch_size, lookback), np.int64)
        known = np.empty((batch_size, lookback), np.bool_)
        current = starts
        for step in range(lookback - 1, -1, -1):
            before[:, step], known[:, step] = self._predecessors(current)
            current = before[:, step]
        return SequenceSample(
            rows=rows,
            mask=(self._flags.take(rows) & HAS_TRANSITION) != 0,
            lookback_rows=before,
            lookback_mask=known,
            weights=self._weights(starts, self.beta if beta is None else beta),
            indices=starts,
        )

    def to_episodes(self, sample: Sample) -> list[SingleAgentEpisode]:
        """Rebuilds a sample as RLlib's own buffers return it, for learner connectors.

        Must be called before the next `add`, which may overwrite the rows. The episodes are
        those of `PrioritizedEpisodeReplayBuffer.sample()` on a prioritized shard and of
        `EpisodeReplayBuffer.sample(sample_episodes=True)` on a uniform one, except that
        infos are empty, `n_step` is the number of steps really taken, and extra columns are
        included.

        Args:
            sample: What `sample` returned.

        Returns:
            B episodes of one transition each.
        """
        return rebuild.transition_episodes(
            sample,
            t=self._t.take(sample.indices),
            ids=self._ids(sample.indices),
            observation_space=self.observation_space,
            action_space=self.action_space,
        )

    def sequences_to_episodes(self, sample: SequenceSample) -> list[SingleAgentEpisode]:
        """Rebuilds sequences as `EpisodeReplayBuffer` returns them for stateful modules.

        Must be called before the next `add`, which may overwrite the rows.

        Args:
            sample: What `sample_sequences` returned.

        Returns:
            B numpy'ized episodes of at most T steps with at most L steps of lookback; `n_step`
            is 1.
        """
        ids = self._ids(sample.indices)
        return [
            self._sequence_episode(sample, item, ids[item] if ids else None)
            for item in range(len(sample.indices))
        ]

    def get_state(self) -> dict[str, Any]:
        """Returns the live rows and everything that determines later samples.

        Returns:
            Nested dicts (tuples for Tuple spaces) of numpy arrays, Python scalars and strings.
            Spaces are not included: they come with the next chunk, or from the constructor.
        """
        size = self._size
        state: dict[str, Any] = {
            "version": _STATE_VERSION,
            "capacity": self.capacity,
            "prioritized": self.prioritized,
            "alpha": self.alpha,
            "obs": self._obs.get_state(size),
            "actions": self._actions.get_state(size),
            "extra": {key: column.get_state(size) for key, column in self._extra.items()},
            "rewards": self._rewards[:size].copy(),
            "flags": self._flags[:size].copy(),
            "next": self._next[:size].copy(),
            "t": self._t[:size].copy(),
            "num_rows_written": self._num_rows_written,
            "num_env_steps_added": self._num_env_steps_added,
            "open": {id_: list(entry) for id_, entry in self._open.items()},
            "rng": self._rng.bit_generator.state,
        }
        if self._tree is not None:
            state["priorities"] = self._tree.leaves[:size].copy()
            state["new_priority"] = self._new_leaf
        if self._episode is not None:
            state["episode"] = self._episode[:size].copy()
            state["episode_ids"] = dict(self._episode_ids)
            state["num_episodes_seen"] = self._num_episodes_seen
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; sampling goes on as it would have there.

        Args:
            state: From a shard of the same capacity, kind, alpha and extra columns.

        Raises:
            ValueError: One of these differs. Nothing is changed then.
        """
        mine = {
            "version": _STATE_VERSION,
            "capacity": self.capacity,
            "prioritized": self.prioritized,
            "alpha": self.alpha,
        }
        for key, value in mine.items():
            if state[key] != value:
                raise ValueError(
                    f"ReplayShard.set_state: the saved shard has {key}={state[key]!r}, this one "
                    f"{value!r}; they must be equal. Restore with the saved setting."
                )
        if state["extra"].keys() != self._extra.keys():
            raise ValueError(
                f"ReplayShard.set_state: the saved shard has extra_columns="
                f"{sorted(state['extra'])}, this one {sorted(self._extra)}; they must be equal."
            )
        self._obs.set_state(state["obs"], self.capacity)
        self._actions.set_state(state["actions"], self.capacity)
        for key, column in self._extra.items():
            column.set_state(state["extra"][key], self.capacity)
        self._num_rows_written = int(state["num_rows_written"])
        self._num_env_steps_added = int(state["num_env_steps_added"])
        size = self._size
        self._rewards[:size] = state["rewards"]
        self._flags[:size] = state["flags"]
        self._flags[size:] = 0
        self._next[:size] = state["next"]
        self._t[:size] = state["t"]
        self._num_transitions = int(np.count_nonzero(self._flags[:size] & HAS_TRANSITION))
        self._open = {id_: (int(row), int(number)) for id_, (row, number) in state["open"].items()}
        self._rng.bit_generator.state = state["rng"]
        self._prev = None
        if self._tree is not None:
            self._tree = SumTree(self.capacity)
            self._tree.update(np.arange(size), state["priorities"])
            self._new_leaf = float(state["new_priority"])
        if self._episode is not None:
            self._episode[:size] = state["episode"]
            self._episode_ids = {int(number): id_ for number, id_ in state["episode_ids"].items()}
            self._num_episodes_seen = int(state["num_episodes_seen"])
            self._next_id_sweep = 2 * len(self._episode_ids) + 1024

    def _check(self, episode: SingleAgentEpisode, source: str | None) -> _Chunk | None:
        """Reads and validates one chunk; None if it has no step."""
        n = max(len(episode.observations) - 1, len(episode.actions), len(episode.rewards))
        if n == 0:
            return None
        t = int(episode.t_started)
        try:
            obs = self._obs.check(episode.observations, n + 1)
            actions = self._actions.check(episode.actions, n)
            rewards = clip(_check_rewards(episode.rewards, n), self._clip_rewards)
            outputs = episode.extra_model_outputs
            extra = {key: col.check(outputs.get(key), n) for key, col in self._extra.items()}
        except ColumnProblem as bad:
            raise ReplayDataError(
                f"{bad.problem} Nothing of this call was stored.",
                bad.column,
                str(episode.id_),
                t + bad.step,
                source,
            ) from None
        if self.observation_space is None:
            self.observation_space = episode.observation_space
        if self.action_space is None:
            self.action_space = episode.action_space
        end = TERMINATED * bool(episode.is_terminated) | TRUNCATED * bool(episode.is_truncated)
        return _Chunk(str(episode.id_), t, n, obs, actions, rewards, extra, end)

    def _write(self, chunk: _Chunk) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Writes a chunk.

        Returns:
            The rows written, and the rows that hold the chunk's transitions; of the latter
            the first may be an older row. The newest transitions are kept if not all fit.
        """
        written, capacity, n = self._num_rows_written, self.capacity, chunk.n
        tail, number = self._open.pop(chunk.id_, (-1, -1))
        tail_row = tail % capacity
        linked = tail >= max(0, written - capacity) and self._t[tail_row] == chunk.t

        # Rows are needed for observations `first:`; of a chunk longer than the ring only the
        # newest part can stay.
        first = max(int(linked), n + 1 - capacity)
        count = n + 1 - first
        rows = np.arange(written, written + count) % capacity
        self._num_rows_written = written + count
        # Transitions `step:` are stored, in `holders`. The tail takes the first one unless
        # this very chunk needs the tail's row.
        if linked and tail >= written + count - capacity:
            step, holders = 0, np.concatenate(([tail_row], rows[:-1]))
        else:
            step, holders = first, rows[:-1]
        successors = rows[count - len(holders) :]

        self._num_transitions += len(holders)
        self._num_transitions -= int(np.count_nonzero(self._flags[rows] & HAS_TRANSITION))
        self._obs.put(rows, chunk.obs, first, capacity)
        self._t[rows] = np.arange(chunk.t + first, chunk.t + n + 1)
        self._flags[rows] = 0
        self._rewards[rows] = 0.0
        self._next[rows] = rows
        self._actions.put(holders, chunk.actions, step, capacity)
        for key, column in self._extra.items():
            column.put(holders, chunk.extra[key], step, capacity)
        self._rewards[holders] = chunk.rewards[step:]
        self._flags[holders] = HAS_TRANSITION
        self._next[holders] = successors
        self._flags[rows[-1]] = chunk.end
        if self._prev is not None:
            self._prev[successors] = holders

        if self._episode is not None:
            if not linked:
                number = self._num_episodes_seen
                self._num_episodes_seen += 1
                self._episode_ids[number] = chunk.id_
            self._episode[rows] = number
        self._num_env_steps_added += n
        if not chunk.end:
            self._open[chunk.id_] = (written + count - 1, number)
        self._forget_overwritten_tails()
        return rows, holders

    def _forget_overwritten_tails(self) -> None:
        oldest = self._num_rows_written - self.capacity
        while self._open:
            id_ = next(iter(self._open))
            if self._open[id_][0] >= oldest:
                return
            del self._open[id_]

    def _sweep_episode_ids(self) -> None:
        """Drops the ids of episodes without a row, at amortised constant cost per episode."""
        if len(self._episode_ids) <= self._next_id_sweep or self._episode is None:
            return
        live = np.unique(self._episode[: self._size]).tolist()
        self._episode_ids = {number: self._episode_ids[number] for number in live}
        self._next_id_sweep = 2 * len(live) + 1024

    def _draw(self, count: int) -> NDArray[np.int64]:
        """Draws rows that hold a transition, with replacement, shape (count,)."""
        if not self._num_transitions:
            raise ValueError("ReplayShard: there is no transition to draw; add episodes first.")
        if self._tree is not None:
            return self._tree.find(self._rng.random(count) * self._tree.total)
        # All rows in use hold a transition but one per episode (piece).
        rows = self._rng.integers(self._size, size=count)
        refused = np.flatnonzero((self._flags.take(rows) & HAS_TRANSITION) == 0)
        while refused.size:
            rows[refused] = self._rng.integers(self._size, size=refused.size)
            drawable = self._flags.take(rows.take(refused)) & HAS_TRANSITION
            refused = refused[drawable == 0]
        return rows

    def _weights(self, rows: NDArray[np.int64], beta: float) -> NDArray[np.float32]:
        """Importance weights of drawn rows, relative to the largest possible one.

        RLlib's `(n * p_i / sum) ** -beta / (n * p_min / sum) ** -beta` with n and sum
        cancelled.
        """
        if not 0 <= beta < np.inf:
            raise ValueError(f"ReplayShard: beta={beta} must be finite and not negative.")
        if self._tree is None:
            return np.ones(len(rows), np.float32)
        relative = np.float32(self._tree.minimum()) / self._tree.get(rows)
        weights: NDArray[np.float32] = np.power(relative, np.float32(beta))
        return weights

    def _walk(
        self,
        rows: NDArray[np.int64],
        reached: NDArray[np.integer],
        rewards: NDArray[np.float32],
        n_step: int | tuple[int, int],
        gamma: float,
    ) -> tuple[NDArray[np.integer], NDArray[np.float32], NDArray[np.float32]]:
        """Goes on from the first step of `rows`: rows reached, reward sums, steps taken."""
        low, high = n_step if isinstance(n_step, tuple) else (n_step, n_step + 1)
        if not 1 <= low < high:
            raise ValueError(
                f"ReplayShard: n_step={n_step!r} must be at least 1, or a pair (lo, hi) with "
                "1 <= lo < hi; hi itself is not drawn."
            )
        wanted = self._rng.integers(low, high, size=rows.shape) if high - low > 1 else None
        steps = (self._flags.take(rows) & HAS_TRANSITION).astype(np.float32)
        discount = 1.0
        for step in range(1, high - 1):
            discount *= gamma
            gain = self._rewards.take(reached) * np.float32(discount)
            taken = self._flags.take(reached) & HAS_TRANSITION
            after = self._next.take(reached)
            if wanted is not None and step >= low:
                going = wanted > step
                gain *= going
                taken *= going
                after = np.where(going, after, reached)
            rewards += gain
            steps += taken
            reached = after
        return reached, rewards, steps

    def _may_start(
        self, rows: NDArray[np.int64], lookback: int, min_length: int
    ) -> NDArray[np.bool_]:
        """Which rows may start a sequence, shape (B,); see `sample_sequences`."""
        allowed = np.ones(len(rows), np.bool_)
        if lookback:
            allowed = self._predecessors(rows)[1] | (self._t.take(rows) == 0)
        current: NDArray[np.integer] = rows
        for _ in range(min_length):
            current = self._next.take(current)
        allowed &= (self._flags.take(current) & HAS_TRANSITION) != 0
        return allowed

    def _predecessors(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The rows before `rows`, and whether they exist; a row without one stands for itself."""
        if self._prev is None:
            self._prev = np.arange(self.capacity, dtype=np.int32)
            holders = np.flatnonzero(self._flags & HAS_TRANSITION)
            self._prev[self._next[holders]] = holders
        before = self._prev.take(rows)
        # An entry may be left over from overwritten rows; only a true predecessor links here.
        known = (before != rows) & (self._next.take(before) == rows)
        return np.where(known, before, rows).astype(np.int64), known

    def _ids(self, rows: NDArray[np.int64]) -> list[str] | None:
        if self._episode is None:
            return None
        return [self._episode_ids[number] for number in self._episode.take(rows).tolist()]

    def _sequence_episode(
        self, sample: SequenceSample, item: int, id_: str | None
    ) -> SingleAgentEpisode:
        before = sample.lookback_rows[item][sample.lookback_mask[item]]
        steps = np.concatenate((before, sample.rows[item][sample.mask[item]]))
        last = self._next[steps[-1]]
        return rebuild.sequence_episode(
            id_=id_,
            observations=self._obs.take(np.append(steps, last)),
            actions=self._actions.take(steps),
            rewards=self._rewards.take(steps),
            extra={key: column.take(steps) for key, column in self._extra.items()},
            end=(bool(self._flags[last] & TERMINATED), bool(self._flags[last] & TRUNCATED)),
            weight=float(sample.weights[item]),
            lookback=len(before),
            wanted_lookback=sample.lookback_rows.shape[1],
            t_started=int(self._t[sample.indices[item]]),
            observation_space=self.observation_space,
            action_space=self.action_space,
        )


def _check_rewards(buffer: Any, count: int) -> NDArray[np.float32]:
    """An episode's rewards without lookback as float32, shape (count,)."""
    rewards = np.asarray(buffer.data[buffer.lookback :])
    if len(rewards) != count:
        raise ColumnProblem(
            f"missing: {len(rewards)} items for {count} expected.",
            "reward",
            min(len(rewards), count),
        )
    if rewards.ndim != 1 or rewards.dtype.kind not in "biuf":
        raise ColumnProblem(
            f"shape {rewards.shape[1:]}, dtype {rewards.dtype}; one real number per step is "
            "needed.",
            "reward",
            0,
        )
    with np.errstate(over="ignore"):  # reported below, with its place
        stored = rewards.astype(np.float32)
    if not np.isfinite(stored).all():
        step = int(np.isfinite(stored).argmin())
        raise ColumnProblem(f"value {rewards[step]} is not finite in float32.", "reward", step)
    return stored
