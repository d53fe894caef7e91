"""The replay shard against plain Python references and against RLlib's own buffers."""

import itertools
import pickle
import re
import time
from collections import deque

import gymnasium as gym
import numpy as np
import pytest
import tree
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.replay_buffers import EpisodeReplayBuffer, PrioritizedEpisodeReplayBuffer

from rllib_admm.replay import ReplayDataError, ReplayShard, SequenceSample

GAMMA = 0.9


def make_episode(rng, n, number=0, *, end="terminated", obs_dim=0, outputs=False):
    """A whole episode whose observations start with (episode number, time step)."""
    obs = rng.normal(size=(n + 1, 2 + obs_dim)).astype(np.float32)
    obs[:, 0], obs[:, 1] = number, np.arange(n + 1)
    state = {"h": rng.normal(size=(n, 3)).astype(np.float32)}
    return SingleAgentEpisode(
        id_=f"episode{number}",
        observations=list(obs),
        actions=list(rng.integers(0, 4, n)),
        rewards=list(rng.normal(size=n)),
        terminated=end == "terminated",
        truncated=end == "truncated",
        extra_model_outputs={"state_out": [{"h": h} for h in state["h"]]} if outputs else {},
        len_lookback_buffer=0,
    )


def cut(episode, at, lookback=0):
    """Chunks of an episode, cut before the time steps `at`, as EnvRunners return them."""
    edges = [0, *at, len(episode)]
    return [
        episode.slice(slice(a, b), len_lookback_buffer=lookback).to_numpy()
        for a, b in itertools.pairwise(edges)
    ]


def shard_of(episodes, capacity=1000, **kwargs):
    shard = ReplayShard(capacity, **{"prioritized": False, "seed": 0, **kwargs})
    shard.add([episode.to_numpy() for episode in episodes])
    return shard


def keys(obs):
    return [(int(number), int(t)) for number, t in obs[:, :2]]


def rows_by_key(shard, draws=4000):
    """Maps (episode number, time step) to the row: every drawable row, almost surely."""
    sample = shard.sample(draws, n_step=1, gamma=1.0)
    return dict(zip(keys(sample.obs), sample.indices.tolist(), strict=True))


class Reference:
    """What a shard must hold, kept in a deque and searched row by row."""

    def __init__(self, capacity):
        self.rows = deque(maxlen=capacity)
        self.known = {}  # episode number -> episode, steps added so far
        self.breaks = set()  # (number, t) stored anew: nothing links to it

    def add(self, number, episode, chunk):
        t = chunk.t_started
        if (number, t) not in self.rows:
            self.rows.append((number, t))
            self.breaks.add((number, t))
        for step in range(t + 1, chunk.t + 1):
            self.rows.append((number, step))
        self.known[number] = (episode, chunk.t)

    def drawable(self):
        return {(i, t) for i, t in self.rows if t < self.known[i][1] and self.linked(i, t)}

    def linked(self, number, t):
        return (number, t + 1) in self.rows and (number, t + 1) not in self.breaks

    def transition(self, number, t, n):
        episode, added = self.known[number]
        reward, steps = 0.0, 0
        while steps < n and t + steps < added:
            reward += GAMMA**steps * episode.get_rewards(t + steps)
            steps += 1
        at_end = t + steps == len(episode) == added
        return {
            "reward": reward,
            "steps": steps,
            "next_obs": episode.get_observations(t + steps),
            "action": episode.get_actions(t),
            "terminated": at_end and episode.is_terminated,
            "truncated": at_end and episode.is_truncated,
        }


@st.composite
def histories(draw):
    """Episodes, and an interleaved order in which their chunks reach the shard."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    queues = {}
    for number in range(draw(st.integers(1, 6))):
        n = draw(st.integers(1, 14))
        end = draw(st.sampled_from(["terminated", "truncated", "ongoing"]))
        episode = make_episode(rng, n, number, end=end)
        at = sorted(draw(st.sets(st.integers(1, n - 1), max_size=4))) if n > 1 else []
        queues[number] = [(episode, chunk) for chunk in cut(episode, at, draw(st.integers(0, 3)))]
    order = []
    while queues:
        number = draw(st.sampled_from(sorted(queues)))
        order.append((number, *queues[number].pop(0)))
        if not queues[number]:
            del queues[number]
    return order


@settings(max_examples=80, deadline=None)
@given(
    histories(),
    st.integers(2, 40),
    st.sampled_from([1, 2, 3, 5, (1, 4), (2, 6)]),
    st.booleans(),
    st.booleans(),
)
def test_n_step_equals_a_walk_through_the_episodes(order, capacity, n_step, prioritized, at_once):
    shard = ReplayShard(capacity, prioritized=prioritized, seed=1)
    reference = Reference(capacity)
    for number, episode, chunk in order:
        reference.add(number, episode, chunk)
        if not at_once:
            assert shard.add([chunk]) == len(chunk)
    if at_once:
        shard.add([chunk for _, _, chunk in order])
    assert shard.num_env_steps_added == sum(len(chunk) for _, _, chunk in order)
    assert len(shard) == len(reference.drawable())
    if not len(shard):
        return

    sample = shard.sample(1000, n_step=n_step, gamma=GAMMA)
    assert set(keys(sample.obs)) == reference.drawable()
    low, high = n_step if isinstance(n_step, tuple) else (n_step, n_step + 1)
    for item, key in enumerate(keys(sample.obs)):
        steps = int(sample.n_step[item])
        assert steps <= high - 1
        expected = reference.transition(*key, max(low, steps))
        assert steps == expected["steps"]
        np.testing.assert_allclose(sample.rewards[item], expected["reward"], atol=1e-5)
        np.testing.assert_array_equal(sample.next_obs[item], expected["next_obs"])
        assert sample.actions[item] == expected["action"]
        assert sample.terminateds[item] == expected["terminated"]
        assert sample.truncateds[item] == expected["truncated"]


def test_a_drawn_n_step_covers_lo_to_hi_minus_one_evenly():
    shard = shard_of([make_episode(np.random.default_rng(0), 900)])
    inner = shard.sample(6000, n_step=(2, 5), gamma=GAMMA)
    far = inner.obs[:, 1] < 890
    counts = np.bincount(inner.n_step[far].astype(int), minlength=6)
    assert set(np.flatnonzero(counts)) == {2, 3, 4}
    assert counts[2:5].min() > 0.9 * counts.sum() / 3


@pytest.mark.parametrize("n_step", [0, (0, 3), (3, 3)])
def test_an_impossible_n_step_is_refused(n_step):
    shard = shard_of([make_episode(np.random.default_rng(0), 5)])
    with pytest.raises(ValueError, match=re.escape(f"n_step={n_step!r} must be")):
        shard.sample(4, n_step=n_step, gamma=GAMMA)


def test_a_lost_chunk_is_not_bridged():
    chunks = cut(make_episode(np.random.default_rng(0), 9), [3, 6])
    shard = ReplayShard(100, prioritized=False, seed=0)
    shard.add([chunks[0], chunks[2]])
    sample = shard.sample(300, n_step=9, gamma=GAMMA)
    assert {t for _, t in keys(sample.obs)} == {0, 1, 2, 6, 7, 8}
    reached = dict(zip(sample.obs[:, 1], sample.next_obs[:, 1], strict=True))
    assert reached == {0: 3, 1: 3, 2: 3, 6: 9, 7: 9, 8: 9}


def test_uniform_draws_are_uniform_over_transitions():
    rng = np.random.default_rng(0)
    shard = shard_of([make_episode(rng, n, number) for number, n in enumerate((1, 2, 7))])
    counts = np.bincount(shard.sample(20_000, n_step=1, gamma=1.0).indices)
    counts = counts[counts > 0]
    assert len(counts) == 10
    assert np.abs(counts / 2000 - 1).max() < 0.1  # 4.7 standard deviations


def test_prioritized_draws_and_weights_are_proportional():
    rng = np.random.default_rng(0)
    shard = shard_of([make_episode(rng, 6)], prioritized=True, alpha=0.5, beta=0.7)
    rows = np.array(sorted(rows_by_key(shard).values()))
    td_errors = np.array([0.5, -1.0, 2.0, -4.0, 8.0, 1.0])
    shard.update_priorities(rows, td_errors)
    p = np.sqrt(np.abs(td_errors))
    p /= p.sum()

    sample = shard.sample(40_000, n_step=1, gamma=1.0)
    frequencies = np.array([(sample.indices == row).mean() for row in rows])
    # Five standard deviations of a binomial.
    assert (np.abs(frequencies - p) < 5 * np.sqrt(p * (1 - p) / 40_000)).all()
    expected = (p * 6) ** -0.7 / (p.min() * 6) ** -0.7
    np.testing.assert_allclose(
        sample.weights, expected[np.searchsorted(rows, sample.indices)], rtol=1e-5
    )
    np.testing.assert_array_equal(shard.sample(9, n_step=1, gamma=1, beta=0.0).weights, 1.0)


def test_a_new_transition_gets_the_largest_priority_so_far():
    rng = np.random.default_rng(0)
    shard = shard_of([make_episode(rng, 3, 0)], prioritized=True, alpha=1.0, beta=1.0)
    rows = np.array(sorted(rows_by_key(shard).values()))
    shard.update_priorities(rows, np.array([9.0, 0.1, 0.1]))
    shard.update_priorities(rows, np.array([0.1, 0.1, 0.1]))
    shard.add([make_episode(rng, 1, 1).to_numpy()])
    sample = shard.sample(3000, n_step=1, gamma=1.0)
    assert (sample.obs[:, 0] == 1).mean() == pytest.approx(9.0 / 9.3, abs=0.02)


def test_a_late_priority_cannot_make_a_row_without_transition_drawable():
    rng = np.random.default_rng(0)
    shard = shard_of([make_episode(rng, 9, 0)], capacity=10, prioritized=True)
    old = shard.sample(200, n_step=1, gamma=1.0).indices
    shard.add([make_episode(rng, 4, 1).to_numpy(), make_episode(rng, 3, 2).to_numpy()])
    shard.update_priorities(old, np.full(200, 50.0))
    sample = shard.sample(2000, n_step=1, gamma=1.0)
    assert set(keys(sample.obs)) == {(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (2, 2)}
    assert (sample.n_step == 1).all()


def test_a_uniform_shard_has_weights_of_one_and_ignores_priorities():
    shard = shard_of([make_episode(np.random.default_rng(0), 9)])
    shard.update_priorities(np.array([0]), np.array([1e9]))
    sample = shard.sample(500, n_step=1, gamma=1.0, beta=1.0)
    assert (sample.weights == 1).all()
    assert (sample.indices == 0).mean() < 0.3


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_td_error_changes_no_priority(bad):
    shard = shard_of([make_episode(np.random.default_rng(0), 4)], prioritized=True)
    before = shard.get_state()["priorities"]
    with pytest.raises(ReplayDataError, match=r"td_error: value (nan|inf) at item 1 \(row 2\)"):
        shard.update_priorities(np.array([0, 2]), np.array([5.0, bad]))
    np.testing.assert_array_equal(shard.get_state()["priorities"], before)


def spoil_obs(chunk):
    chunk.observations.data[2 + chunk.observations.lookback, 1] = np.inf


def spoil_reward(chunk):
    chunk.rewards.data[1 + chunk.rewards.lookback] = np.nan


def overflow_reward(chunk):
    chunk.rewards.data[0 + chunk.rewards.lookback] = 1e300


def lose_action(chunk):
    chunk.actions.data = chunk.actions.data[:-1]


def lose_all_actions(chunk):
    chunk.actions.data, chunk.actions.finalized = [], False


def overflow_action(chunk):
    chunk.actions.data[1 + chunk.actions.lookback] = 2**31


def widen_obs(chunk):
    chunk.observations.data = np.pad(chunk.observations.data, ((0, 0), (0, 1)))


def retype_obs(chunk):
    chunk.observations.data = chunk.observations.data.astype(np.float64)


def nest_obs(chunk):
    chunk.observations.data = {"a": chunk.observations.data}


def object_obs(chunk):
    chunk.observations.data = chunk.observations.data.astype(object)


def float_actions(chunk):
    chunk.actions.data = chunk.actions.data.astype(np.float32)


def lose_state(chunk):
    del chunk.extra_model_outputs["state_out"]


def spoil_state(chunk):
    chunk.extra_model_outputs["state_out"].data["h"][-1] = np.nan


@pytest.mark.parametrize(
    ("spoil", "step", "column", "problem"),
    [
        (spoil_obs, 6, "obs", "value inf is not finite"),
        (spoil_reward, 5, "reward", "value nan is not finite"),
        (overflow_reward, 4, "reward", "value 1e+300 is not finite in float32"),
        (lose_action, 8, "action", "missing: 4 items for 5 expected"),
        (lose_all_actions, 4, "action", "missing: 0 items for 5 expected"),
        (overflow_action, 5, "action", "value 2147483648 does not fit int32"),
        (widen_obs, 4, "obs", "shape (3,), dtype float32; stored are shape (2,)"),
        (retype_obs, 4, "obs", "shape (2,), dtype float64; stored are shape (2,), dtype float32"),
        (nest_obs, 4, "obs", "its parts are obs['a']; stored are obs."),
        (object_obs, 4, "obs", "dtype object cannot be stored"),
        (float_actions, 4, "action", "shape (), dtype float32; stored are shape (), dtype int32"),
        (lose_state, 4, "state_out", "missing: 0 items"),
        (spoil_state, 8, "state_out['h']", "value nan is not finite"),
    ],
)
@pytest.mark.parametrize("lookback", [0, 2])
def test_bad_data_is_named_and_nothing_is_stored(spoil, step, column, problem, lookback):
    rng = np.random.default_rng(0)
    shard = shard_of([make_episode(rng, 6, 0, outputs=True)], extra_columns=("state_out",))
    good, bad = cut(make_episode(rng, 9, 1, outputs=True), [4], lookback)
    spoil(bad)
    before = pickle.dumps(shard.get_state())
    message = f"EnvRunner 3, episode 'episode1', time step {step}, column {column}: {problem}"
    with pytest.raises(ReplayDataError, match=re.escape(message)) as caught:
        shard.add([good, bad], source="EnvRunner 3")
    assert pickle.dumps(shard.get_state()) == before

    error = pickle.loads(pickle.dumps(caught.value))  # as it comes from a remote Learner
    assert str(error) == str(caught.value)
    assert (error.episode_id, error.time_step, error.column) == ("episode1", step, column)
    assert shard.add([good]) == 4


def test_a_refused_first_chunk_leaves_no_shape_behind():
    rng = np.random.default_rng(0)
    chunk = make_episode(rng, 5, obs_dim=3).to_numpy()
    spoil_reward(chunk)
    shard = ReplayShard(100, prioritized=True, seed=0)
    with pytest.raises(ReplayDataError, match="column reward"):
        shard.add([chunk])
    assert shard.add([make_episode(rng, 5, obs_dim=1).to_numpy()]) == 5


@pytest.mark.parametrize("prioritized", [False, True])
def test_an_empty_shard_says_so(prioritized):
    shard = ReplayShard(10, prioritized=prioritized, seed=0)
    assert (len(shard), shard.bytes_per_transition) == (0, 0.0)
    with pytest.raises(ValueError, match="there is no transition to draw"):
        shard.sample(4, n_step=1, gamma=1.0)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"capacity": 1}, "capacity=1 must be in [2, 2**31)"),
        ({"alpha": -1.0}, "alpha=-1.0 and beta=0.4 must be finite"),
        ({"beta": np.nan}, "alpha=0.6 and beta=nan must be finite"),
    ],
)
def test_bad_constructor_arguments_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ReplayShard(**{"capacity": 9, "prioritized": True, "seed": 0, **kwargs})


def test_nested_spaces_keep_their_structure_and_types():
    obs_space = gym.spaces.Dict(
        {
            "image": gym.spaces.Box(0, 255, (4, 4), np.uint8),
            "pair": gym.spaces.Tuple([gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (2,))]),
        }
    )
    action_space = gym.spaces.Dict(
        {"grip": gym.spaces.MultiDiscrete([3, 4]), "move": gym.spaces.Box(-1, 1, (2,))}
    )
    obs_space.seed(0)
    action_space.seed(0)
    observations = [obs_space.sample() for _ in range(8)]
    actions = [action_space.sample() for _ in range(7)]
    episode = SingleAgentEpisode(
        observations=observations,
        actions=actions,
        rewards=list(range(7)),
        observation_space=obs_space,
        action_space=action_space,
        len_lookback_buffer=0,
    )
    shard = shard_of(cut(episode, [3]), prioritized=True)
    sample = shard.sample(20, n_step=1, gamma=1.0)
    assert sample.obs["image"].dtype == np.uint8
    for item, t in enumerate(sample.rewards.astype(int)):
        for stored, original in [
            (sample.obs, observations[t]),
            (sample.next_obs, observations[t + 1]),
            (sample.actions, actions[t]),
        ]:
            tree.map_structure(
                lambda s, o, i=item: np.testing.assert_array_equal(s[i], o), stored, original
            )
    for rebuilt in shard.to_episodes(sample):
        assert obs_space.contains(rebuilt.get_observations(0))
        assert rebuilt.observation_space is obs_space
    twin = ReplayShard(1000, prioritized=True, seed=5)
    twin.set_state(shard.get_state())
    again = twin.sample(20, n_step=1, gamma=1.0)
    np.testing.assert_array_equal(
        again.obs["pair"][1], shard.sample(20, n_step=1, gamma=1.0).obs["pair"][1]
    )


def test_python_lists_are_taken_as_well_and_the_episode_is_left_alone():
    episode = make_episode(np.random.default_rng(0), 5)
    shard = ReplayShard(100, prioritized=False, seed=0)
    shard.add([episode])
    assert not episode.is_numpy
    chunk = episode.to_numpy()
    chunk.observations.data[:] = -1.0
    assert (shard.sample(50, n_step=1, gamma=1.0).obs[:, 0] == 0).all()


def data_of(buffer):
    """All items of an InfiniteLookbackBuffer with its lookback, lists and arrays alike."""
    data = buffer.data
    if isinstance(data, list):
        data = tree.map_structure(lambda *items: np.array(items), *data)
    return data


def assert_same_episode(ours, stock, *, rtol=1e-6, same_id=True):
    if same_id:
        assert ours.id_ == stock.id_
    for name in ("t_started", "t", "is_terminated", "is_truncated", "is_numpy"):
        assert getattr(ours, name) == getattr(stock, name), name
    assert ours.extra_model_outputs.keys() == stock.extra_model_outputs.keys()
    pairs = [(getattr(ours, c), getattr(stock, c)) for c in ("observations", "actions", "rewards")]
    pairs += [(v, stock.extra_model_outputs[k]) for k, v in ours.extra_model_outputs.items()]
    for mine, theirs in pairs:
        assert (mine.lookback, len(mine), mine.finalized) == (
            theirs.lookback,
            len(theirs),
            theirs.finalized,
        )
        tree.map_structure(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6),
            data_of(mine),
            data_of(theirs),
        )
    ours.validate()


def some_episodes(rng, **kwargs):
    ends = ["terminated", "truncated", "ongoing"] * 3
    return [make_episode(rng, 2 + 3 * i, i, end=end, **kwargs) for i, end in enumerate(ends)]


@pytest.mark.parametrize("n_step", [1, 3])
def test_transitions_are_rebuilt_as_the_prioritized_buffer_returns_them(n_step):
    episodes = some_episodes(np.random.default_rng(0))
    stock = PrioritizedEpisodeReplayBuffer(1000, alpha=0.6)
    stock.rng = np.random.default_rng(0)
    stock.add([episode.to_numpy() for episode in episodes])
    shard = shard_of(episodes, prioritized=True)
    rows = rows_by_key(shard)
    assert len(rows) == len(shard) == stock.get_num_timesteps()

    for round_ in range(3):
        theirs = stock.sample(num_items=60, n_step=n_step, gamma=GAMMA, beta=0.4)
        indices = np.array(
            [rows[key] for key in keys(np.array([e.get_observations(0) for e in theirs]))]
        )
        weights = shard._weights(indices, 0.4)
        ours = shard.to_episodes(
            shard.transitions(indices, n_step=n_step, gamma=GAMMA, weights=weights)
        )
        for mine, their in zip(ours, theirs, strict=True):
            assert_same_episode(mine, their, same_id=False, rtol=1e-5)
        assert len({episode.id_ for episode in ours}) == 60
        if round_:
            assert weights.min() < 0.9, "the control: weights must differ by now"
        td_errors = np.random.default_rng(round_).exponential(size=60)
        stock.update_priorities(td_errors)
        shard.update_priorities(indices, -td_errors)


def test_transitions_are_rebuilt_as_the_uniform_buffer_returns_them():
    episodes = some_episodes(np.random.default_rng(0))
    stock = EpisodeReplayBuffer(1000)
    stock.rng = np.random.default_rng(0)
    stock.add([episode.to_numpy() for episode in episodes])
    shard = shard_of(episodes)
    rows = rows_by_key(shard)
    compared = 0
    for n_step in (1, 3):
        theirs = stock.sample(200, n_step=n_step, gamma=GAMMA, sample_episodes=True)
        indices = np.array(
            [rows[key] for key in keys(np.array([e.get_observations(0) for e in theirs]))]
        )
        sample = shard.transitions(indices, n_step=n_step, gamma=GAMMA)
        for mine, their, steps in zip(
            shard.to_episodes(sample), theirs, sample.n_step, strict=True
        ):
            # Closer to the end RLlib shortens too, but reports n_step steps and no end.
            if steps == n_step:
                assert_same_episode(mine, their)
                compared += 1
    assert compared > 300


@pytest.mark.parametrize(("lookback", "min_length"), [(1, 0), (1, 3), (0, 0)])
def test_sequences_are_rebuilt_as_the_uniform_buffer_returns_them(lookback, min_length):
    episodes = some_episodes(np.random.default_rng(0), outputs=True)
    stock = EpisodeReplayBuffer(1000)
    stock.rng = np.random.default_rng(0)
    stock.add([episode.to_numpy() for episode in episodes])
    shard = shard_of(episodes, extra_columns=("state_out",))
    options = {"lookback": lookback}
    sample = shard.sample_sequences(2000, length=5, min_length=min_length, **options)
    ours = {(e.id_, e.t_started): e for e in shard.sequences_to_episodes(sample)}
    theirs = stock.sample(
        12_000,  # time steps; about 2,000 sequences
        batch_length_T=5,
        n_step=1,
        sample_episodes=True,
        min_batch_length_T=min_length,
        **options,
    )
    assert ours.keys() == {(e.id_, e.t_started) for e in theirs}
    assert min(len(e) for e in theirs) == min_length + 1
    for their in theirs:
        assert_same_episode(ours[their.id_, their.t_started], their)


def test_sequences_follow_one_episode_and_stop_at_its_end():
    rng = np.random.default_rng(0)
    chunks = [cut(make_episode(rng, 7, i), [2, 5]) for i in range(4)]
    shard = ReplayShard(1000, prioritized=True, seed=0)
    shard.add([episode[0] for episode in chunks])
    shard.sample_sequences(1, length=2)  # from here on predecessors are kept up
    for part in (1, 2):
        shard.add([episode[part] for episode in chunks])
    sample = shard.sample_sequences(400, length=4, lookback=2)
    read = shard.transitions(sample.rows)
    before = shard.transitions(sample.lookback_rows)
    assert read.obs.shape == (400, 4, 2)
    for item in range(400):
        number, start = keys(read.obs[item])[0]
        expected = [(number, t) for t in range(start, min(start + 4, 7))]
        assert [
            k for k, m in zip(keys(read.obs[item]), sample.mask[item], strict=True) if m
        ] == expected
        expected = [(number, t) for t in range(max(start - 2, 0), start)]
        assert [
            k for k, m in zip(keys(before.obs[item]), sample.lookback_mask[item], strict=True) if m
        ] == expected


@pytest.mark.parametrize("early", [False, True])
def test_a_sequence_starts_only_where_its_state_is_known(early):
    shard = ReplayShard(11, prioritized=False, seed=0)
    for chunk in cut(make_episode(np.random.default_rng(0), 30), [9, 16, 24]):
        shard.add([chunk])
        if early:  # predecessors are kept up from here on, while rows are overwritten
            shard.sample_sequences(1, length=1)
    starts = {}
    for lookback in (0, 1):
        sample = shard.sample_sequences(500, length=3, lookback=lookback)
        starts[lookback] = set(shard.transitions(sample.indices).obs[:, 1])
        assert sample.lookback_mask.all()
    # The ring keeps time steps 20 to 30; what came before step 20 is not known.
    assert starts == {0: set(range(20, 30)), 1: set(range(21, 30))}


def test_a_burn_in_longer_than_every_episode_is_an_error_and_not_a_hang():
    shard = shard_of(some_episodes(np.random.default_rng(0))[:2])
    with pytest.raises(ValueError, match="no sequence longer than min_length=9"):
        shard.sample_sequences(4, length=12, min_length=9)


@pytest.mark.parametrize("lstm", [False, True])
def test_rllibs_learner_connectors_read_rebuilt_episodes(lstm):
    config = DQNConfig().environment("CartPole-v1").env_runners(num_env_runners=0)
    if lstm:
        config.rl_module(model_config={"use_lstm": True, "max_seq_len": 6, "lstm_cell_size": 8})
        config.training(replay_buffer_config={"type": "EpisodeReplayBuffer", "capacity": 1000})
    runner = SingleAgentEnvRunner(config=config)
    shard = ReplayShard(
        500, prioritized=not lstm, seed=0, extra_columns=("state_out",) if lstm else ()
    )
    for _ in range(10):
        shard.add(runner.sample(num_timesteps=16))
    if lstm:
        drawn = shard.sample_sequences(8, length=6)
        expected, episodes = shard.transitions(drawn.rows), shard.sequences_to_episodes(drawn)
        mask = drawn.mask
    else:
        expected = shard.sample(8, n_step=3, gamma=GAMMA)
        episodes = shard.to_episodes(expected)
        mask = np.ones(8, bool)
    pipeline = config.build_learner_connector(
        runner.env.single_observation_space, runner.env.single_action_space
    )
    module = config.get_multi_rl_module_spec(spaces=runner.get_spaces()).build()
    batch = pipeline(rl_module=module, batch={}, episodes=episodes, shared_data={})
    batch = batch["default_policy"]
    for key in ("obs", "actions", "rewards", "n_step"):
        np.testing.assert_allclose(
            batch[key].numpy()[mask], getattr(expected, key)[mask], rtol=1e-6, err_msg=key
        )
    runner.stop()
    if lstm:
        # The state that enters a sequence is the one that left the step before it.
        known = drawn.lookback_mask[:, 0]
        assert known.any()
        state = shard.transitions(drawn.lookback_rows[:, 0]).extra["state_out"]["h"]
        entered = batch["state_in"]["h"].numpy().reshape(8, -1)
        np.testing.assert_allclose(entered[known], state.reshape(8, -1)[known], rtol=1e-6)
        assert (entered[~known] == 0).all()


def busy_shard(seed, prioritized, steps=12, shard=None, start=0):
    rng = np.random.default_rng(7)
    if shard is None:
        shard = ReplayShard(60, prioritized=prioritized, seed=seed, extra_columns=("state_out",))
    samples = []
    chunks = [cut(make_episode(rng, 9, i, outputs=True), [4], 1) for i in range(steps + 1)]
    for i in range(start, steps):
        shard.add([chunks[i][1], chunks[i + 1][0]])
        sample = shard.sample(16, n_step=(1, 4), gamma=GAMMA)
        shard.update_priorities(sample.indices, sample.rewards)
        samples.append(sample)
        samples.append(shard.sample_sequences(5, length=3))
    return shard, samples


def assert_equal_samples(left, right):
    assert len(left) == len(right) > 0
    for a, b in zip(left, right, strict=True):
        assert type(a) is type(b)
        for field in type(a).__slots__:
            tree.map_structure(np.testing.assert_array_equal, getattr(a, field), getattr(b, field))


@pytest.mark.parametrize("prioritized", [False, True])
def test_the_same_seed_and_calls_give_the_same_samples(prioritized):
    first = busy_shard(3, prioritized)[1]
    assert_equal_samples(first, busy_shard(3, prioritized)[1])
    with pytest.raises(AssertionError):  # the control
        assert_equal_samples(first, busy_shard(4, prioritized)[1])


def plain(state):
    if isinstance(state, dict):
        return all(type(k) in (str, int) and plain(v) for k, v in state.items())
    if isinstance(state, (list, tuple)):
        return all(plain(item) for item in state)
    if isinstance(state, np.ndarray):
        return state.dtype.kind in "biuf"
    return type(state) in (int, float, bool, str, type(None))


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("steps", [0, 3, 10])
def test_a_restored_shard_goes_on_identically(prioritized, steps):
    shard, _ = busy_shard(3, prioritized, steps)
    state = shard.get_state()
    assert plain(state)
    assert len(state["rewards"]) == (min(60, 10 * steps + 1) if steps else 0)

    saved = pickle.dumps(state)
    # A used shard: what it held before must not shine through.
    twin, _ = busy_shard(99, prioritized, 9)
    twin.set_state(pickle.loads(saved))
    assert (len(twin), twin.num_env_steps_added) == (len(shard), shard.num_env_steps_added)
    _, ours = busy_shard(0, prioritized, steps + 9, twin, steps)
    _, theirs = busy_shard(0, prioritized, steps + 9, shard, steps)
    assert_equal_samples(ours, theirs)
    assert pickle.dumps(state) == saved, "a state must not follow the shard"
    assert len(twin) == len(shard)
    last = [s for s in ours if isinstance(s, SequenceSample)][-1]
    for mine, their in zip(
        twin.sequences_to_episodes(last), shard.sequences_to_episodes(last), strict=True
    ):
        assert_same_episode(mine, their, same_id=not prioritized)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"capacity": 61}, "has capacity=60, this one 61"),
        ({"prioritized": False}, "has prioritized=True, this one False"),
        ({"alpha": 0.7}, "has alpha=0.6, this one 0.7"),
        ({"extra_columns": ()}, "extra_columns=['state_out'], this one []"),
    ],
)
def test_a_state_of_another_kind_is_refused(kwargs, message):
    options = {"capacity": 60, "prioritized": True, "seed": 0, "extra_columns": ("state_out",)}
    with pytest.raises(ValueError, match=re.escape(message)):
        ReplayShard(**{**options, **kwargs}).set_state(busy_shard(3, True, 2)[0].get_state())


@pytest.mark.parametrize("prioritized", [False, True])
def test_it_takes_at_most_a_fifth_more_memory_than_the_raw_arrays(prioritized):
    """Shapes of LunarLander-v3 as its EnvRunner returns them (actions int32 at the least)."""
    rng = np.random.default_rng(0)
    episodes = []
    for number in range(60):
        episode = make_episode(rng, 100, number, obs_dim=6).to_numpy()
        episode.actions.data = episode.actions.data.astype(np.int32)
        episodes.append(episode)
    raw_per_step = (
        sum(
            array.itemsize * int(np.prod(array.shape[1:]))
            for array in (
                e.data for e in (episodes[0].observations, episodes[0].actions, episodes[0].rewards)
            )
        )
        + 2
    )  # terminated, truncated
    assert raw_per_step == 46
    shard = shard_of(episodes, capacity=5000, prioritized=prioritized)
    assert len(shard) > 4900
    assert shard.bytes_per_transition == pytest.approx(shard.nbytes / len(shard))
    assert shard.bytes_per_transition <= 1.2 * raw_per_step


def test_ids_and_open_ends_of_overwritten_episodes_are_forgotten():
    rng = np.random.default_rng(0)
    shard = ReplayShard(50, prioritized=False, seed=0)
    for number in range(3000):
        shard.add([make_episode(rng, 1, number, end="ongoing").to_numpy()])
    state = shard.get_state()
    assert len(state["open"]) == 25
    assert len(state["episode_ids"]) < 2200


def test_sampling_does_not_loop_over_rows_in_python():
    rng = np.random.default_rng(0)
    shard = shard_of(
        [make_episode(rng, 400, i, obs_dim=6) for i in range(50)], 20_000, prioritized=True
    )

    def best(batch):
        times = []
        for _ in range(30):
            start = time.perf_counter()
            sample = shard.sample(batch, n_step=3, gamma=GAMMA)
            shard.update_priorities(sample.indices, sample.rewards)
            times.append(time.perf_counter() - start)
        return min(times)

    # A Python loop costs 64 times as much for 64 times the rows, and microseconds for each.
    assert best(2048) < 1.5e-6 * 2048 + 1e-3
