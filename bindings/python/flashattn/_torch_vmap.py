# SPDX-License-Identifier: Apache-2.0
"""torch.vmap of an attention problem: the mapped dimension joins the batch where the library can say that, else sample by sample."""

from typing import Any, Collection, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

# Tensors whose first dimension is the batch. In those of the second line a size of 1 serves every sequence.
_BATCHED = {
    "q",
    "k",
    "v",
    "dout",
    "dlse",
    "out",
    "lse",
    "tq",
    "tk",
    "tv",
    "seqused_q",
    "seqused_k",
    "seqstart_k",
    "kv_indices",
    "q_descale",
    "k_descale",
    "v_descale",
}
_BROADCAST = {"bias", "block_mask", "block_counts", "block_indices", "element_mask"}


class Mapped:
    """Tensors by name, and where each has the mapped dimension (None: it is the same for every sample)."""

    def __init__(
        self, size: int, names: Sequence[str], dims: Sequence[Optional[int]], tensors: Sequence[Optional[Tensor]]
    ) -> None:
        self.size = size
        self.names = names
        self.tensors: List[Any] = [
            tensor if tensor is None or dim is None else tensor.movedim(dim, 0) for tensor, dim in zip(tensors, dims)
        ]
        self.is_mapped = [tensor is not None and dim is not None for tensor, dim in zip(tensors, dims)]
        q = names.index("q")
        self.batch = self.tensors[q].shape[1 if self.is_mapped[q] else 0]

    def folds(self, wanted: Collection[str] = ()) -> bool:
        """Whether samples can be sequences of one call. Packed and paged tensors have no dimension to join; sinks and slices are those of all
        sequences, and the gradient of a sink is the sum over them; random bits depend on the number of the sequence.
        """
        for name, mapped in zip(self.names, self.is_mapped):
            if name in ("cu_seqlens_q", "cu_seqlens_k", "page_table", "dropout_seed") or mapped and name in ("sink", "slices"):
                return False
        return "sink" not in wanted

    def fold(self, wanted: Collection[str] = ()) -> List[Optional[Tensor]]:
        """The tensors of one call. A bias whose gradient is wanted gets one for every sequence."""
        return [
            None if tensor is None else self._fold(name, tensor, mapped, name in wanted)
            for name, tensor, mapped in zip(self.names, self.tensors, self.is_mapped)
        ]

    def _fold(self, name: str, tensor: Tensor, mapped: bool, every_sequence: bool) -> Tensor:
        if name == "alibi_slopes" and tensor.dim() == (2 if mapped else 1):  # (heads)
            if not mapped:
                return tensor
            tensor = tensor.unsqueeze(1)
        elif name not in _BATCHED and name not in _BROADCAST and name != "alibi_slopes":
            return tensor
        if not mapped:
            if name in _BROADCAST and tensor.shape[0] == 1 and not every_sequence:
                return tensor
            tensor = tensor.unsqueeze(0)
        return tensor.expand(self.size, self.batch, *tensor.shape[2:]).flatten(0, 1)

    def unfold(self, results: Sequence[Tensor], wanted: Sequence[str] = ()) -> Tuple[Any, Any]:
        """Results of one call by sample, and where they have the mapped dimension. Those of backward are called as `wanted` says."""
        split = [result.unflatten(0, (self.size, self.batch)) for result in results]
        if "bias" in wanted:
            bias = self.names.index("bias")
            at = wanted.index("bias")
            if self.tensors[bias].shape[1 if self.is_mapped[bias] else 0] != self.batch:
                split[at] = split[at].sum(1, keepdim=True)
        return tuple(split), (0,) * len(split)

    def samples(self) -> Iterator[List[Optional[Tensor]]]:
        for n in range(self.size):
            yield [tensor[n] if mapped else tensor for tensor, mapped in zip(self.tensors, self.is_mapped)]

    def stack(self, results: Sequence[Sequence[Tensor]]) -> Tuple[Any, Any]:
        stacked = tuple(torch.stack(parts) for parts in zip(*results))
        return stacked, (0,) * len(stacked)
