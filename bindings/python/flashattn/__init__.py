# SPDX-License-Identifier: Apache-2.0
"""Exact attention, forward and backward, through libflashattn.

    import flashattn
    out, lse = flashattn.forward(q, k, v, causal=True)
    dq, dk, dv, *_ = flashattn.backward(dout, q, k, v, out, lse, causal=True)

Arrays are read and written in place, whatever their strides: NumPy's, and anything with `__dlpack__`, `__cuda_array_interface__` or the
buffer protocol. The functions here use a CPU context of the calling thread; make a `Context` to choose threads, instruction set or a GPU.
`flashattn.torch`, `flashattn.jax`, `flashattn.transformers` and others are for these frameworks; each is imported when it is first named.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any, Tuple

from . import _abi
from ._abi import SLICE_BOTH_CAUSAL, SLICE_CAUSAL, SLICE_FULL, SLICE_INVERSE_CAUSAL
from ._array import Array
from ._context import Context, DeviceInfo, Gradients, Plan
from ._error import Error
from ._options import Bits, Options
from ._score import Score

__all__ = [
    "Array",
    "Bits",
    "Context",
    "DeviceInfo",
    "Error",
    "Gradients",
    "Options",
    "Plan",
    "SLICE_BOTH_CAUSAL",
    "SLICE_CAUSAL",
    "SLICE_FULL",
    "SLICE_INVERSE_CAUSAL",
    "Score",
    "append_kv",
    "backward",
    "build_info",
    "forward",
    "jvp",
    "merge",
    "query_append",
    "query_backward",
    "query_forward",
    "query_jvp",
    "query_merge",
    "score",
    "version",
]

_FRAMEWORKS = ("distributed", "jax", "sglang", "torch", "transformers", "vllm")


def __getattr__(name: str) -> Any:
    if name in _FRAMEWORKS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_local = threading.local()


def _context() -> Context:
    if not hasattr(_local, "context"):
        _local.context = Context("cpu")
    return _local.context


def forward(q: Any, k: Any, v: Any, **arguments: Any) -> Tuple[Any, Any]:
    """`Context.forward` on this thread's CPU context."""
    return _context().forward(q, k, v, **arguments)


def backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, **arguments: Any) -> Gradients:
    """`Context.backward` on this thread's CPU context."""
    return _context().backward(dout, q, k, v, out, lse, **arguments)


def jvp(q: Any, k: Any, v: Any, out: Any, lse: Any, **arguments: Any) -> Tuple[Any, Any]:
    """`Context.jvp` on this thread's CPU context."""
    return _context().jvp(q, k, v, out, lse, **arguments)


def append_kv(k: Any, k_cache: Any, v: Any = None, v_cache: Any = None, **arguments: Any) -> None:
    """`Context.append_kv` on this thread's CPU context."""
    _context().append_kv(k, k_cache, v, v_cache, **arguments)


def merge(outs: Any, lses: Any, **arguments: Any) -> Tuple[Any, Any]:
    """`Context.merge` on this thread's CPU context."""
    return _context().merge(outs, lses, **arguments)


def query_forward(q: Any, k: Any, v: Any, **arguments: Any) -> Plan:
    """`Context.query_forward` on this thread's CPU context."""
    return _context().query_forward(q, k, v, **arguments)


def query_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, **arguments: Any) -> Plan:
    """`Context.query_backward` on this thread's CPU context."""
    return _context().query_backward(dout, q, k, v, out, lse, **arguments)


def query_jvp(q: Any, k: Any, v: Any, out: Any, lse: Any, **arguments: Any) -> Plan:
    """`Context.query_jvp` on this thread's CPU context."""
    return _context().query_jvp(q, k, v, out, lse, **arguments)


def query_append(k: Any, k_cache: Any, v: Any = None, v_cache: Any = None, **arguments: Any) -> Plan:
    """`Context.query_append` on this thread's CPU context."""
    return _context().query_append(k, k_cache, v, v_cache, **arguments)


def query_merge(outs: Any, lses: Any) -> Plan:
    """`Context.query_merge` on this thread's CPU context."""
    return _context().query_merge(outs, lses)


def score(*functions: Any, **arguments: Any) -> Score:
    """`Context.score` on this thread's CPU context."""
    return _context().score(*functions, **arguments)


def version() -> str:
    """Version of the loaded library."""
    return _abi.lib.fa_version_string().decode()


def build_info() -> str:
    """What the loaded library contains, one key=value a line."""
    return _abi.lib.fa_build_info().decode()
