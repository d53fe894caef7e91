"""What crosses the wire: one message is one Arrow IPC record batch in a checked frame.

The batch has a row per block (`codes`: the block's bytes, `scale`); everything else is
schema metadata. The frame in front (magic, format version, CRC-32, length) is checked
before Arrow sees a byte, so that a broken message has a name and no effect.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from rllib_admm.consensus.errors import MessageError
from rllib_admm.consensus.quantization import (
    BLOCK,
    SUPPORTED_BITS,
    Encoded,
    block_bytes,
    decode,
)

FORMAT_VERSION = 1
_MAX_WEIGHT = 2.0**53  # beyond, counting local steps in a float is no longer exact
_MAGIC = b"ADMM"
_FRAME = struct.Struct("<4sHIQ")
_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_SCALES = {torch.float32: pa.float32(), torch.float64: pa.float64()}
# What Arrow, numpy and the conversions raise at nonsense behind a valid checksum.
_UNREADABLE = (
    pa.ArrowException,
    LookupError,
    MemoryError,
    OSError,
    OverflowError,
    StopIteration,
    TypeError,
    ValueError,
)


class Kind(Enum):
    """What a message's vector is.

    KEYFRAME: the value itself, uncompressed; needs no base.
    DIFFERENCE: what to add to the value that the receiver holds of `base_round`.
    UNCHANGED: no vector at all; the receiver keeps what it holds.
    """

    KEYFRAME = "keyframe"
    DIFFERENCE = "difference"
    UNCHANGED = "unchanged"


@dataclass(frozen=True)
class Message:
    """One vector on its way between a learner and the coordinator, or to the runners.

    Attributes:
        kind: See `Kind`.
        sender: Name of the sending end ("learner-0", "coordinator").
        round: The round that the message belongs to (0 is the first).
        base_round: The number of rounds that the receiver must have completed for a
            difference to make sense; equals `round` for what is sent inside a round.
        layout_hash: `Layout.hash` of the vector.
        weight: w_i, the local steps done with data behind an upload; 0 elsewhere.
        encoded: Codes and scales; None if `kind` is UNCHANGED.
    """

    kind: Kind
    sender: str
    round: int
    base_round: int
    layout_hash: str
    weight: float = 0.0
    encoded: Encoded | None = None

    def vector(self) -> Tensor:
        """Returns the decoded vector, shape (P,).

        Raises:
            MessageError: If the message carries none (`Kind.UNCHANGED`).
        """
        if self.encoded is None:
            raise MessageError(f"An 'unchanged' message of {self.sender} carries no vector.")
        return decode(self.encoded)


def pack(message: Message) -> bytes:
    """Returns `message` as bytes for the wire."""
    e = message.encoded
    metadata = {
        "kind": message.kind.value,
        "sender": message.sender,
        "round": str(message.round),
        "base_round": str(message.base_round),
        "layout": message.layout_hash,
        "weight": repr(float(message.weight)),
    }
    if e is None:
        codes, scales = np.empty((0, 1), np.uint8), np.empty(0, np.float32)
    else:
        codes, scales = np.ascontiguousarray(e.codes), np.asarray(e.scales)
        metadata |= {
            "bits": str(e.bits),
            "count": str(e.count),
            "dtype": str(e.dtype).removeprefix("torch."),
        }
    columns = [
        pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(codes.shape[1]), codes.shape[0], [None, pa.py_buffer(codes)]
        ),
        pa.array(scales),
    ]
    batch = pa.RecordBatch.from_arrays(columns, names=["codes", "scale"])
    batch = batch.replace_schema_metadata(metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    body: bytes = sink.getvalue().to_pybytes()
    head = _FRAME.pack(_MAGIC, FORMAT_VERSION, 0, len(body))
    return _FRAME.pack(_MAGIC, FORMAT_VERSION, zlib.crc32(body, zlib.crc32(head)), len(body)) + body


def unpack(data: bytes, *, layout_hash: str | None = None, origin: str = "a message") -> Message:
    """Reads a message from the wire.

    Args:
        data: What `pack` made.
        layout_hash: If given, the layout that the receiver holds.
        origin: Who the bytes came from, for the error's text.

    Raises:
        MessageError: If the bytes are broken, of another format version or layout.
    """
    if len(data) < _FRAME.size:
        raise MessageError(f"{origin} is truncated: {len(data)} bytes, a frame has {_FRAME.size}.")
    magic, version, checksum, length = _FRAME.unpack_from(data)
    if magic != _MAGIC:
        raise MessageError(f"{origin} is not a consensus message (it starts with {magic!r}).")
    if version != FORMAT_VERSION:
        raise MessageError(
            f"{origin} has format version {version}; this end reads version {FORMAT_VERSION}. "
            "Install the same rllib-admm on all nodes."
        )
    body = memoryview(data)[_FRAME.size :]
    if len(body) != length:
        raise MessageError(f"{origin} is truncated: {len(body)} of {length} bytes.")
    head = _FRAME.pack(magic, version, 0, length)
    if zlib.crc32(body, zlib.crc32(head)) != checksum:
        raise MessageError(f"{origin} was corrupted on its way: its checksum does not match.")
    try:
        message = _parse(body)
    except _UNREADABLE as error:
        detail = f"{type(error).__name__}: {error}"
        raise MessageError(f"{origin} can not be read ({detail}).") from error
    if layout_hash is not None and message.layout_hash != layout_hash:
        raise MessageError(
            f"{origin} has module layout {message.layout_hash}, this end holds {layout_hash}: "
            "sender and receiver build different networks."
        )
    return message


def _parse(body: memoryview) -> Message:
    with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
        batch = reader.read_next_batch()
        # IPC only checks that buffers lie inside the body, not that they suit their types.
        batch.validate()
        meta = {k.decode(): v.decode() for k, v in (reader.schema.metadata or {}).items()}
    kind, encoded = Kind(meta["kind"]), None
    round_, base_round, weight = int(meta["round"]), int(meta["base_round"]), float(meta["weight"])
    if round_ < 0 or base_round < 0:
        raise ValueError(f"round {round_} on base round {base_round}")
    if not 0 <= weight <= _MAX_WEIGHT:
        raise ValueError(f"a weight of {weight}")
    if kind is not Kind.UNCHANGED:
        bits, count, dtype = int(meta["bits"]), int(meta["count"]), _DTYPES[meta["dtype"]]
        if bits not in SUPPORTED_BITS:
            raise ValueError(f"a codec of {bits} bits")
        if count < 0:
            raise ValueError(f"{count} values")
        # Nothing is allocated by `count` before it is seen to agree with what is there.
        width, rows = block_bytes(bits, dtype), -(-count // BLOCK)
        codes, scales = batch.column("codes"), batch.column("scale")
        types, expected = (codes.type, scales.type), (pa.binary(width), _SCALES[dtype])
        if types != expected or batch.num_rows != rows:
            raise ValueError(f"{batch.num_rows} rows of {types} for {count} values of {bits} bits")
        if codes.null_count or scales.null_count:
            raise ValueError("null blocks")
        steps = scales.to_numpy()
        if (steps < 0).any():
            raise ValueError("a negative scale")
        buffer = np.frombuffer(codes.buffers()[1], np.uint8, rows * width, codes.offset * width)
        encoded = Encoded(buffer.reshape(rows, width), steps, count, bits, dtype)
    return Message(
        kind=kind,
        sender=meta["sender"],
        round=round_,
        base_round=base_round,
        layout_hash=meta["layout"],
        weight=weight,
        encoded=encoded,
    )
