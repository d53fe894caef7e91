"""How the named tensors of one RLModule lie in one flat vector.

Owns names, shapes, offsets and their hash. Knows nothing of what the tensors mean.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Order, shapes and offsets of P numbers that learners agree on.

    Two ends understand each other's vectors exactly if their layouts have the same
    `hash`; it travels in every message.

    Attributes:
        names: Tensor names, in the order in which they lie in the vector.
        shapes: One shape per name.
        dtype: The dtype shared by all tensors.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    offsets: tuple[int, ...] = field(init=False)
    size: int = field(init=False)
    hash: str = field(init=False)

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shapes):
            raise ValueError(f"{len(self.names)} names have {len(self.shapes)} shapes.")
        offsets, size = [], 0
        for shape in self.shapes:
            offsets.append(size)
            size += torch.Size(shape).numel()
        text = repr((self.names, self.shapes, str(self.dtype)))
        object.__setattr__(self, "offsets", tuple(offsets))
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "hash", hashlib.sha256(text.encode()).hexdigest()[:16])

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """Returns the layout of `tensors`, in their own order.

        Raises:
            ValueError: If the tensors are not all of one dtype.
        """
        dtypes = {t.dtype for t in tensors.values()}
        if len(dtypes) > 1:
            raise ValueError(
                f"A layout holds tensors of one dtype, not of {sorted(map(str, dtypes))}."
            )
        return cls(
            names=tuple(tensors),
            shapes=tuple(tuple(t.shape) for t in tensors.values()),
            dtype=dtypes.pop() if dtypes else torch.float32,
        )

    def flatten(self, tensors: Iterable[Tensor], out: Tensor | None = None) -> Tensor:
        """Copies `tensors` (in layout order) into one vector, shape (P,), on the CPU.

        Raises:
            ValueError: If a tensor's shape is not the layout's (nothing is broadcast).
        """
        flat = torch.empty(self.size, dtype=self.dtype) if out is None else out
        for view, tensor in zip(self.views(flat), tensors, strict=True):
            _check_shape(tensor, view)
            view.copy_(tensor.detach())
        return flat

    def views(self, flat: Tensor) -> list[Tensor]:
        """Returns one view into `flat`, shape (P,), per name, each in its own shape."""
        return [
            flat[offset : offset + torch.Size(shape).numel()].view(shape)
            for offset, shape in zip(self.offsets, self.shapes, strict=True)
        ]

    @torch.no_grad()
    def write(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copies the vector `flat`, shape (P,), into `tensors` (in layout order), in place.

        Raises:
            ValueError: If a tensor's shape is not the layout's (nothing is broadcast).
        """
        for view, tensor in zip(self.views(flat), tensors, strict=True):
            _check_shape(tensor, view)
            tensor.copy_(view)


def _check_shape(tensor: Tensor, view: Tensor) -> None:
    if tensor.shape != view.shape:
        raise ValueError(
            f"A tensor of shape {tuple(tensor.shape)} lies where the layout has "
            f"{tuple(view.shape)}."
        )
