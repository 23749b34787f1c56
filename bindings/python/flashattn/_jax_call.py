# SPDX-License-Identifier: Apache-2.0
"""Forward and backward as operations of JAX: by XLA's FFI where the extension can be loaded (on the CPU and on CUDA), else by a callback that
hands host arrays to the library. Both are mapped (vmap) by folding the mapped axis into the batch, and partitioned over batch and heads.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, Dict, List, Optional, Sequence, Tuple

import jax
import jax.numpy as jnp
import numpy
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

import flashattn

from . import _abi
from ._extension import FIND, Extension, find

Numbers = Tuple[Tuple[str, Any], ...]  # options of flashattn.forward that are no tensors, hashable


class JaxExtension(Extension):
    """The handlers of XLA's FFI (jax_handlers.cpp), registered for the CPU and for CUDA."""

    def _load(self, path: str) -> None:
        loaded = ctypes.CDLL(path)
        init = loaded.flashattn_jax_init
        init.restype, init.argtypes = ctypes.c_char_p, [FIND]
        problem = init(FIND(find))
        if problem is not None:
            raise ImportError(problem.decode())
        for platform, handler in (("cpu", loaded.flashattn_jax_cpu), ("CUDA", loaded.flashattn_jax_cuda)):
            jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(handler), platform=platform)
        self._loaded = loaded


TARGET = "flashattn"
extension = JaxExtension("jax")

# The dimensions of each tensor: batch, rows of queries (i) and of keys (j), KV heads (g) and the query heads of each (r), columns (d, e).
_FACTORS: Dict[str, Tuple[str, ...]] = {
    "q": ("b", "i", "gr", "d"),
    "k": ("b", "j", "g", "d"),
    "v": ("b", "j", "g", "e"),
    "out": ("b", "i", "gr", "e"),
    "lse": ("b", "gr", "i"),
    "bias": ("b", "gr", "i", "j"),
    "element_mask": ("b", "gr", "i", "j"),
    "sink": ("gr",),
    "seqused_q": ("b",),
    "seqused_k": ("b",),
}


def _factors(name: str) -> Tuple[str, ...]:
    return _FACTORS[name[1:] if name.startswith("d") else name]


def _results(names: Sequence[str]) -> List[str]:
    """What a call with these inputs gives: out and lse, or the gradients of what has any."""
    if "dout" not in names:
        return ["out", "lse"]
    return ["d" + name for name in ("q", "k", "v", "bias", "sink") if name in names]


def _shapes_of_results(names: Sequence[str], arrays: Dict[str, Any]) -> List[Any]:
    q, v = arrays["q"], arrays["v"]
    made = {
        "out": jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype),
        "lse": jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32),
    }
    return [made.get(name) or jax.ShapeDtypeStruct(arrays[name[1:]].shape, arrays[name[1:]].dtype) for name in _results(names)]


def _attributes(names: Sequence[str], numbers: Dict[str, Any]) -> Dict[str, Any]:
    """What jax_handlers.cpp reads."""
    left, right = numbers.get("window", (None, None))
    return {
        "inputs": " ".join(names),
        "results": " ".join(_results(names)),
        "mask": numpy.int64(_abi.MASK_CAUSAL_TOP_LEFT if numbers["causal"] else _abi.MASK_NONE),
        "window": numpy.int64((left is not None) * _abi.WINDOW_LEFT + (right is not None) * _abi.WINDOW_RIGHT),
        "window_left": numpy.int64(left or 0),
        "window_right": numpy.int64(right or 0),
        "scale": numpy.float64(numbers["scale"] or 0.0),
        "softcap": numpy.float64(numbers["softcap"]),
        "flags": numpy.int64(_abi.FLAG_DETERMINISTIC if numbers["deterministic"] else 0),
    }


def _on_host(names: Sequence[str], numbers: Dict[str, Any], *arrays: Any) -> Tuple[Any, ...]:
    tensors = {name: numpy.asarray(array) for name, array in zip(names, arrays)}
    if "dout" not in tensors:
        return tuple(flashattn.forward(**tensors, **numbers))
    gradients = flashattn.backward(**tensors, **numbers)
    return tuple(gradient for gradient in gradients if gradient is not None)


def _here(names: Sequence[str], numbers: Numbers, arrays: Sequence[Any]) -> List[Any]:
    """On one device."""
    shapes = _shapes_of_results(names, dict(zip(names, arrays)))
    if extension:
        return list(jax.ffi.ffi_call(TARGET, shapes)(*arrays, **_attributes(names, dict(numbers))))

    def on_host(*given: Any) -> Tuple[Any, ...]:
        return _on_host(names, dict(numbers), *given)

    return list(jax.pure_callback(on_host, shapes, *arrays, vmap_method="sequential"))


# ---------------------------------------------------------------------------------------------------------------- several devices


class _Axes:
    """How a tensor's dimensions lie on a mesh: axes of it for the batch and for the heads, nothing for the others."""

    def __init__(self, mesh: Any, spec: Any, kv_heads: int) -> None:
        batch, _, heads = (*tuple(spec), None, None, None)[:3]
        self.batch, self.heads = self._axes(batch), self._axes(heads)
        if kv_heads % math.prod(mesh.shape[axis] for axis in self.heads) != 0:
            self.heads = ()  # a KV head is not divided

    @staticmethod
    def _axes(entry: Any) -> Tuple[str, ...]:
        return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)

    def of(self, factor: str) -> Tuple[str, ...]:
        return self.batch if factor == "b" else self.heads if factor[0] == "g" else ()

    def sharding(self, mesh: Any, name: str, shape: Sequence[int]) -> NamedSharding:
        entries = (self.of(factor) if size > 1 else () for factor, size in zip(_factors(name), shape))
        return NamedSharding(mesh, PartitionSpec(*(entry or None for entry in entries)))


def _rule(names: Sequence[str], shapes: Dict[str, Sequence[int]]) -> Tuple[str, Dict[str, Any]]:
    """For Shardy: which dimensions are the same, that rows and columns are whole on each device, and that a KV head is not divided."""
    kv_heads = shapes["k"][2]
    groups = shapes["q"][2] // max(kv_heads, 1)
    query_heads = "g" if groups <= 1 else "r" if kv_heads == 1 else "(g r)"
    alone: List[str] = []  # dimensions of one element, which may stand for many

    def dimension(factor: str, size: int) -> str:
        if size == 1:
            alone.append(f"one{len(alone)}")
            return alone[-1]
        return query_heads if factor == "gr" else factor

    def tensor(name: str) -> str:
        return " ".join(dimension(factor, size) for factor, size in zip(_factors(name), shapes[name]))

    rule = ", ".join(map(tensor, names)) + " -> " + ", ".join(map(tensor, _results(names)))
    used = rule.replace("(", "").replace(")", "").replace(",", "").split()
    sizes = {"r": groups} if query_heads == "(g r)" and query_heads in rule else {}
    whole = tuple(
        dict.fromkeys(factor for factor in used if factor in ("i", "j", "d", "e", "r"))
    )  # Shardy wants them in this order
    return rule, {"need_replication_factors": whole, **sizes}


def _partitioned(names: Sequence[str], numbers: Numbers, arrays: Sequence[Any]) -> List[Any]:
    results = _results(names)
    shapes = {name: array.shape for name, array in zip(names, arrays)}
    shapes.update({name: x.shape for name, x in zip(results, _shapes_of_results(names, dict(zip(names, arrays))))})
    q = list(names).index("q")

    @custom_partitioning
    def call(*given: Any) -> List[Any]:
        return _here(names, numbers, given)

    def axes_of(mesh: Any, given: Sequence[Any]) -> _Axes:
        return _Axes(mesh, given[q].sharding.spec, shapes["k"][2])

    def infer(mesh: Any, given: Sequence[Any], _: Any) -> List[Any]:
        axes = axes_of(mesh, given)
        return [axes.sharding(mesh, name, shapes[name]) for name in results]

    def partition(mesh: Any, given: Sequence[Any], _: Any) -> Any:
        if not extension:  # callbacks of several devices wait for each other
            raise NotImplementedError(f"attention over several devices needs the extension, and {extension.reason}")
        axes = axes_of(mesh, given)

        def local(*parts: Any) -> List[Any]:
            made = _here(names, numbers, parts)
            for n, name in enumerate(results):
                if name not in ("dbias", "dsink"):
                    continue
                # A device has summed over its own sequences and heads.
                kept = [factor for factor, size in zip(_factors(name), shapes[name]) if size > 1]
                summed = [axis for factor in ("b", "gr") if factor not in kept for axis in axes.of(factor)]
                if summed:
                    made[n] = jax.lax.psum(made[n], tuple(summed))
            return made

        outputs = [axes.sharding(mesh, name, shapes[name]) for name in results]
        return mesh, local, outputs, tuple(axes.sharding(mesh, name, shapes[name]) for name in names)

    rule, sizes = _rule(names, shapes)
    call.def_partition(partition, infer_sharding_from_operands=infer, sharding_rule=rule, **sizes)
    return call(*arrays)


# -------------------------------------------------------------------------------------------------------------------------- vmap


def _folded(name: str, array: Any, mapped: bool, count: int, batch: int, backward: bool) -> Optional[Any]:
    """The array with the mapped axis, its first, in the batch; None where the library could not tell the samples apart."""
    if name == "sink":
        return None if mapped or backward else array
    own = array.shape[1 if mapped else 0]  # a bias or a mask may have one sequence for all
    if own != batch or (batch == 1 and not mapped and name in ("bias", "element_mask")):
        shared = not mapped and not (backward and name == "bias")
        return array if shared and own == 1 else None
    if not mapped:
        array = jnp.broadcast_to(array[None], (count, *array.shape))
    return array.reshape(count * batch, *array.shape[2:])


def call(names: Sequence[str], numbers: Numbers, arrays: Sequence[Any]) -> List[Any]:
    """(out, lse), or with "dout" among the names the gradients of q, k, v and of a bias and a sink. Tensors are as in flashattn.h."""

    @custom_vmap
    def mapped_call(*given: Any) -> List[Any]:
        return _partitioned(names, numbers, given)

    @mapped_call.def_vmap
    def rule(count: int, mapped: Sequence[bool], *given: Any) -> Any:
        q = list(names).index("q")
        batch = given[q].shape[1 if mapped[q] else 0]
        backward = "dout" in names
        folded = [_folded(name, x, m, count, batch, backward) for name, x, m in zip(names, given, mapped)]
        if all(x is not None for x in folded):
            made = call(names, numbers, folded)
            made = [x.reshape(count, x.shape[0] // count, *x.shape[1:]) for x in made]
        else:
            whole = [x for x, m in zip(given, mapped) if m]

            def one(parts: Sequence[Any]) -> List[Any]:
                rest = iter(parts)
                return call(names, numbers, [next(rest) if m else x for x, m in zip(given, mapped)])

            made = jax.lax.map(one, whole)
        return made, [True] * len(made)

    return list(mapped_call(*arrays))
