"""What crosses the wire arrives as it was, or is refused by name and changes nothing."""

import random
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rllib_admm.consensus import (
    FORMAT_VERSION,
    SUPPORTED_BITS,
    Consensus,
    ConsensusError,
    ConsensusOptions,
    ConstantPenalty,
    Coordinator,
    Kind,
    LocalState,
    Message,
    MessageError,
    NonFiniteError,
    Reply,
    Snapshot,
    encode,
    pack,
    unpack,
)
from rllib_admm.consensus.message import _FRAME

P = 300
LAYOUT = "0123456789abcdef"
METADATA = {
    "kind": "difference",
    "sender": "a",
    "round": "1",
    "base_round": "1",
    "layout": LAYOUT,
    "weight": "2.0",
    "bits": "8",
    "count": str(P),
    "dtype": "float32",
}


def framed(body: bytes, version: int = FORMAT_VERSION, magic: bytes = b"ADMM") -> bytes:
    """A frame whose checksum fits `body`, whatever that is."""
    checksum = zlib.crc32(body, zlib.crc32(_FRAME.pack(magic, version, 0, len(body))))
    return _FRAME.pack(magic, version, checksum, len(body)) + body


def crafted(
    codes: Any = None, scales: Any = None, names: tuple[str, ...] = ("codes", "scale"), **meta: Any
) -> bytes:
    """A well-formed Arrow stream in a valid frame that says what the arguments say."""
    codes = pa.array([b"\1" * 256] * 2, pa.binary(256)) if codes is None else codes
    scales = pa.array([1.0, 1.0], pa.float32()) if scales is None else scales
    batch = pa.RecordBatch.from_arrays([codes, scales][: len(names)], names=list(names))
    said = {k: v for k, v in {**METADATA, **meta}.items() if v is not None}
    batch = batch.replace_schema_metadata(said)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return framed(sink.getvalue().to_pybytes())


class Ends:
    """A coordinator and learners 'a' and 'b' after one completed round, and their bits."""

    def __init__(self, momentum: float = 0.4) -> None:
        options = ConsensusOptions(outer_momentum=momentum, full_precision_every=3)
        g = torch.Generator().manual_seed(0)
        self.theta = torch.randn(P, generator=g)
        z = torch.randn(P, generator=g)
        self.coordinator = Coordinator(z, options, LAYOUT, ConstantPenalty(), ["a", "b"], 0.5)
        self.learner = LocalState("a", z, options, LAYOUT, 0.5)
        other = LocalState("b", z, options, LAYOUT, 0.5)
        self.coordinator.receive(self.learner.upload(self.theta, 2))
        self.coordinator.receive(other.upload(self.theta + 1, 1))
        reply = self.coordinator.close_round(0.5)
        self.learner.complete(reply, self.theta)
        other.complete(reply, self.theta + 1)
        self.other = other

    def bits(self) -> list[Any]:
        """Everything that the coordinator and learner 'a' hold."""
        c, state = self.learner.consensus, self.coordinator.get_state()
        return [
            *(t.clone() for t in (c.z, c.velocity, self.learner.u, self.learner.h)),
            *(state["h"].values()),
            *(state["duals"]["bases"].values()),
            *(state[k] for k in ("z", "velocity", "z_bar")),
            [state[k] for k in ("round", "rho", "weights")],
            [state["duals"][k] for k in ("base_of", "scales")],
            [c.round, self.learner.rho, self.learner.pending],
            set(self.coordinator._received),
        ]

    def refuses(self, call: Callable[[], Any], match: str, error: Any = MessageError) -> None:
        before = self.bits()
        with pytest.raises(error, match=match):
            call()
        for old, new in zip(before, self.bits(), strict=True):
            assert torch.equal(old, new) if isinstance(old, Tensor) else old == new


@pytest.fixture
def ends() -> Ends:
    return Ends()


@given(
    st.sampled_from(list(Kind)),
    st.text(min_size=1, max_size=20).filter(str.isprintable),
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    st.floats(0, 2**53),
    st.sampled_from(SUPPORTED_BITS),
    st.sampled_from((torch.float32, torch.float64)),
    st.sampled_from((0, 1, 255, 256, 257, 700)),
)
@settings(max_examples=60, deadline=None)
def test_a_message_arrives_as_it_was(kind, sender, round_, base, weight, bits, dtype, size):
    encoded = None if kind is Kind.UNCHANGED else encode(torch.randn(size).to(dtype), bits)
    sent = Message(kind, sender, round_, base, LAYOUT, weight, encoded)
    got = unpack(pack(sent), layout_hash=LAYOUT)
    assert replace(got, encoded=None) == replace(sent, encoded=None)
    if encoded is not None:
        assert torch.equal(got.vector(), sent.vector())
        assert got.vector().dtype == dtype


def test_the_wire_bytes_are_those_of_the_codec_and_a_small_head():
    for bits in SUPPORTED_BITS:
        size = 64 * 256
        data = pack(
            Message(Kind.DIFFERENCE, "a", 1, 1, LAYOUT, 1.0, encode(torch.ones(size), bits))
        )
        assert len(data) < size * bits / 8 + 64 * 4 + 1500
    assert len(pack(Message(Kind.UNCHANGED, "a", 1, 1, LAYOUT))) < 1500


def test_a_decoded_message_does_not_alias_the_bytes_it_came_in():
    data = pack(Message(Kind.KEYFRAME, "a", 1, 1, LAYOUT, 1.0, encode(torch.ones(P), 32)))
    before = bytes(data)
    unpack(data).vector().add_(1.0)
    assert data == before and torch.equal(unpack(data).vector(), torch.ones(P))


def test_each_single_corrupted_byte_of_an_upload_is_named_and_changes_nothing(ends):
    data = ends.learner.upload(ends.theta, 2)
    before = ends.bits()
    for position in range(len(data)):
        broken = bytearray(data)
        broken[position] ^= 1 << position % 8
        with pytest.raises(MessageError, match=r"An upload (was corrupted|is|has)"):
            ends.coordinator.receive(bytes(broken))
    for old, new in zip(before, ends.bits(), strict=True):
        assert torch.equal(old, new) if isinstance(old, Tensor) else old == new
    ends.coordinator.receive(data)


def test_each_truncation_of_a_reply_is_named_and_changes_nothing(ends):
    ends.coordinator.receive(ends.learner.upload(ends.theta, 2))
    reply = ends.coordinator.close_round(0.5)
    before = ends.bits()
    for length in range(len(reply.message)):
        with pytest.raises(MessageError, match="is truncated"):
            ends.learner.complete(replace(reply, message=reply.message[:length]), ends.theta)
    for old, new in zip(before, ends.bits(), strict=True):
        assert torch.equal(old, new) if isinstance(old, Tensor) else old == new
    ends.refuses(
        lambda: ends.learner.complete(replace(reply, message=reply.message + b"\0"), ends.theta),
        "is truncated",
    )
    ends.learner.complete(reply, ends.theta)


def test_each_single_corrupted_byte_of_a_reply_or_snapshot_changes_nothing(ends):
    ends.coordinator.receive(ends.learner.upload(ends.theta, 2))
    reply = ends.coordinator.close_round(0.5)
    snapshot = ends.coordinator.consensus.snapshot(rho=0.5, dual=torch.ones(P))
    before = ends.bits()

    def corrupted(data: bytes, position: int) -> bytes:
        return data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :]

    for position in range(0, len(reply.message), 3):
        broken = replace(reply, message=corrupted(reply.message, position))
        with pytest.raises(MessageError):
            ends.learner.complete(broken, ends.theta)
    for part in ("z", "velocity", "dual"):
        data = getattr(snapshot, part)
        for position in range(0, len(data), 17):
            with pytest.raises(MessageError):
                ends.learner.load(replace(snapshot, **{part: corrupted(data, position)}))
    for old, new in zip(before, ends.bits(), strict=True):
        assert torch.equal(old, new) if isinstance(old, Tensor) else old == new


def test_nonsense_behind_a_valid_checksum_never_raises_anything_else():
    body = pack(Message(Kind.DIFFERENCE, "a", 1, 1, LAYOUT, 2.0, encode(torch.ones(P), 8)))[
        _FRAME.size :
    ]
    rng = random.Random(0)
    variants = [bytearray(body) for _ in range(2 * len(body) + 2000)]
    for index, broken in enumerate(variants):
        position, number = index % len(body), index // len(body)
        if number < 2:
            broken[position] ^= (0xFF, 1)[number]
            continue
        for _ in range(rng.randint(2, 4)):
            value = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
            broken[rng.randrange(len(body))] = value
        if rng.random() < 0.1:
            del broken[rng.randrange(len(body)) :]
    refused = []
    for broken in variants:
        try:
            message = unpack(framed(bytes(broken)), layout_hash=LAYOUT)
            if message.encoded is not None:
                message.vector()
        except MessageError as error:
            refused.append(str(error))
    assert len(refused) > 1000
    # Among them buffers that are shorter than their rows, which Arrow by itself lets pass.
    assert any("In column 1" in text for text in refused)


def test_crafted_frames_are_refused_by_name(ends):
    float64 = pa.array([1.0, 1.0], pa.float64())
    short, wide = pa.array([b"\1" * 128] * 2, pa.binary(128)), pa.array([b"\1" * 256] * 2)
    null = pa.array([b"\1" * 256, None], pa.binary(256))
    for frame, match in (
        (crafted(count=str(10**18)), f"2 rows of .* for {10**18} values"),
        (crafted(count="9" * 5000), "can not be read"),
        (crafted(count="-5"), "-5 values"),
        (crafted(count="600"), "2 rows of .* for 600 values"),
        (crafted(count="299"), "carries 299 .* this end holds 300"),
        (crafted(count="x"), "can not be read"),
        (crafted(bits="7"), "a codec of 7 bits"),
        (crafted(bits="16"), "rows of"),
        (crafted(dtype="float16"), "KeyError: 'float16'"),
        (crafted(dtype="float64"), "rows of"),
        (crafted(dtype="float64", scales=float64), "torch.float64 values, this end holds"),
        (crafted(scales=float64), "rows of"),
        (crafted(scales=pa.array(["1", "1"])), "rows of"),
        (crafted(scales=pa.array([1.0, None], pa.float32())), "null blocks"),
        (crafted(scales=pa.array([1.0, -1.0], pa.float32())), "a negative scale"),
        (crafted(codes=short), "rows of"),
        (crafted(codes=wide), "rows of"),
        (crafted(codes=null), "null blocks"),
        (crafted(names=("codes",)), "scale"),
        (crafted(names=("scale", "codes")), "rows of"),
        (crafted(names=("codes", "codes")), "codes"),
        (crafted(round="-1", base_round="-1"), "round -1 on base round -1"),
        (crafted(round="0"), "is of round 0 .* round 1 is open"),
        (crafted(round="2"), "is of round 2 .* round 1 is open"),
        (crafted(base_round="0"), r"is of round 1 \(on 0\)"),
        (crafted(round="1.5"), "can not be read"),
        (crafted(weight="nan"), "a weight of nan"),
        (crafted(weight="inf"), "a weight of inf"),
        (crafted(weight="-1"), "a weight of -1"),
        (crafted(weight="1e300"), "a weight of 1e"),
        (crafted(kind="gossip"), "'gossip' is not a valid Kind"),
        (crafted(sender="c"), "comes from 'c', who is none of"),
        (crafted(layout="feedfeedfeedfeed"), "layout feedfeedfeedfeed, this end holds"),
        (framed(b""), "can not be read"),
        (framed(b"not Arrow at all"), "can not be read"),
        (framed(pa.schema([]).serialize().to_pybytes()), "StopIteration"),
        (framed(b"", version=2), "format version 2; this end reads version 1"),
        (framed(b"", magic=b"HTTP"), "not a consensus message"),
        (b"", "truncated: 0 bytes"),
        *((crafted(**{key: None}), f"KeyError: '{key}'") for key in METADATA),
    ):
        ends.refuses(lambda frame=frame: ends.coordinator.receive(frame), match)
    assert ends.coordinator.receive(crafted()).sender == "a"


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 3e38])
def test_a_vector_that_is_not_finite_or_overflows_h_is_refused(ends, scale):
    scales = pa.array([1.0, scale], pa.float32())
    ends.coordinator.memory("a").fill_(2e38)
    codes = pa.array([b"\x7f" * 256] * 2, pa.binary(256))
    bad = crafted(codes=codes, scales=scales)
    ends.refuses(lambda: ends.coordinator.receive(bad), "upload of a .*finite", NonFiniteError)
    move = crafted(codes=codes, scales=scales, sender="coordinator", weight="0.0")
    ends.refuses(lambda: ends.learner.consensus.read(move), "non-finite")
    reply = Reply(move, frozenset(), 0.5)
    ends.refuses(lambda: ends.learner.complete(reply, ends.theta), "non-finite")


def test_an_upload_counts_once_and_in_its_own_round(ends):
    data = ends.learner.upload(ends.theta, 2)
    ends.coordinator.receive(data)
    ends.refuses(lambda: ends.coordinator.receive(data), "a uploaded twice in round 1")
    ends.coordinator.close_round(0.5)
    ends.refuses(lambda: ends.coordinator.receive(data), "is of round 1 .* round 2 is open")


def test_a_reply_is_followed_once_and_in_its_own_round(ends):
    ends.coordinator.receive(ends.learner.upload(ends.theta, 2))
    replies = [ends.coordinator.close_round(0.5) for _ in range(3)]
    assert unpack(replies[2].message).kind is Kind.KEYFRAME
    ends.refuses(lambda: ends.learner.complete(replies[1], ends.theta), "needs a keyframe")
    ends.refuses(lambda: ends.learner.complete(replies[2], ends.theta), "needs a keyframe")
    ends.learner.complete(replies[0], ends.theta)
    ends.refuses(lambda: ends.learner.complete(replies[0], ends.theta), "none is pending")
    late = replace(replies[0], included=frozenset())
    ends.refuses(lambda: ends.learner.complete(late, ends.theta), "continues round 1")


def test_a_reply_that_counts_what_was_never_sent_is_refused(ends):
    reply = ends.coordinator.close_round(0.5)
    lie = replace(reply, included=frozenset({"a"}))
    ends.refuses(lambda: ends.learner.complete(lie, ends.theta), "none is pending")
    ends.learner.complete(reply, ends.theta)


@pytest.mark.parametrize("rho", [-1.0, float("nan"), float("inf")])
def test_a_rho_that_makes_no_sense_is_refused(ends, rho):
    ends.refuses(lambda: ends.coordinator.close_round(rho), "rho0 must be", ValueError)
    reply = replace(ends.coordinator.close_round(0.5), rho=rho)
    ends.refuses(lambda: ends.learner.complete(reply, ends.theta), "names rho=")
    snapshot = replace(ends.coordinator.consensus.snapshot(), rho=rho)
    ends.refuses(lambda: ends.learner.load(snapshot), "names rho=")


def test_a_reply_that_would_make_the_dual_or_z_overflow_changes_nothing(ends):
    reply = ends.coordinator.close_round(0.5)
    ends.learner.u.fill_(1e38)
    tiny = replace(reply, rho=1e-6)
    ends.refuses(lambda: ends.learner.complete(tiny, ends.theta), "dual of a .* non-finite")
    ends.learner.consensus.velocity.fill_(3e38)
    ends.learner.consensus.z.fill_(3e38)
    ends.refuses(lambda: ends.learner.complete(reply, ends.theta), "after the outer step")


def test_a_coordinator_whose_z_would_overflow_keeps_the_round_open(ends):
    ends.coordinator.consensus.velocity.fill_(3e38)
    ends.coordinator.consensus.z.fill_(3e38)
    ends.coordinator.receive(ends.learner.upload(ends.theta, 2))
    ends.refuses(lambda: ends.coordinator.close_round(0.5), "finite", ConsensusError)


@pytest.mark.parametrize("part", ["z", "velocity", "dual"])
def test_a_snapshot_is_taken_over_whole_or_not_at_all(ends, part):
    def keyframe(x: Tensor, kind: Kind = Kind.KEYFRAME, layout: str = LAYOUT) -> bytes:
        return pack(Message(kind, "coordinator", 7, 7, layout, 0.0, encode(x, 32)))

    good = Snapshot(keyframe(torch.ones(P)), keyframe(torch.ones(P)), keyframe(torch.ones(P)), 0.5)
    for bad, match in (
        (keyframe(torch.ones(P), Kind.DIFFERENCE), "of the kind 'difference'"),
        (pack(Message(Kind.UNCHANGED, "coordinator", 7, 7, LAYOUT)), "of the kind 'unchanged'"),
        (keyframe(torch.ones(P - 1)), "carries 299"),
        (keyframe(torch.ones(P).double()), "torch.float64"),
        (keyframe(torch.full((P,), torch.nan)), "non-finite"),
        (keyframe(torch.ones(P), layout="ffff"), "layout ffff"),
        (b"", "truncated"),
    ):
        snapshot = replace(good, **{part: bad})
        ends.refuses(lambda snapshot=snapshot: ends.learner.load(snapshot), match)
    ends.learner.load(good)
    assert ends.learner.consensus.round == 7
    for t in (ends.learner.consensus.velocity, ends.learner.u, ends.learner.h):
        assert torch.equal(t, torch.ones(P))


def test_a_snapshot_without_velocity_or_dual_leaves_nothing_of_the_old_ones(ends):
    ends.learner.load(replace(ends.coordinator.consensus.snapshot(rho=0.5), velocity=None))
    assert not ends.learner.u.any() and not ends.learner.consensus.velocity.any()
    dual = ends.coordinator.consensus.snapshot(rho=0.0, dual=torch.ones(P))
    ends.learner.load(dual)
    assert not ends.learner.u.any()  # at rho = 0 there is no dual


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_parameters_that_are_not_finite_are_not_uploaded(ends, bad):
    theta = ends.theta.clone()
    theta[5] = bad
    ends.refuses(lambda: ends.learner.upload(theta, 2), "parameters of a holds", NonFiniteError)
    assert ends.learner.pending is None
    ends.learner.upload(theta, 0)  # 'unchanged' says nothing about theta


def test_a_difference_that_overflows_is_not_uploaded(ends):
    ends.learner.h.fill_(-3e38)
    theta = torch.full((P,), 3e38)
    ends.refuses(lambda: ends.learner.upload(theta, 2), "difference of a", NonFiniteError)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_makes_no_sense_is_not_uploaded(ends, weight):
    ends.refuses(lambda: ends.learner.upload(ends.theta, weight), "weight of a", ValueError)


def test_theta_of_another_shape_or_dtype_is_not_broadcast(ends):
    for theta in (torch.ones(1), torch.ones(P).double()):
        ends.refuses(lambda t=theta: ends.learner.upload(t, 2), "theta of a is", ValueError)


def test_a_state_of_another_network_is_refused_whole(ends):
    state = ends.learner.get_state()
    for bad in (torch.ones(1), torch.ones(P).double()):
        ends.refuses(
            lambda b=bad: ends.learner.set_state({**state, "h": b}), "saved h is", ConsensusError
        )
    saved = ends.coordinator.get_state()
    for key in ("z", "velocity", "z_bar"):
        wrong = {**saved, key: np.ones(1, np.float32)}
        ends.refuses(
            lambda w=wrong: ends.coordinator.set_state(w), f"saved {key} is", ConsensusError
        )


def test_an_end_that_holds_another_layout_is_told_so():
    here = Consensus(torch.zeros(P), ConsensusOptions(), "aaaa")
    there = Consensus(torch.zeros(P), ConsensusOptions(), "bbbb")
    with pytest.raises(MessageError, match="layout bbbb, this end holds aaaa"):
        here.load(there.snapshot())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("over_relaxation", 0.0),
        ("over_relaxation", 2.0),
        ("over_relaxation", float("nan")),
        ("outer_momentum", 1.0),
        ("outer_momentum", -0.1),
        ("outer_lr", 0.0),
        ("outer_lr", float("inf")),
        ("bits", 7),
        ("full_precision_every", -1),
    ],
)
def test_an_option_out_of_range_is_named(option, value):
    with pytest.raises(ValueError, match=f"{option} must be .*not {value}"):
        ConsensusOptions(**{option: value})
