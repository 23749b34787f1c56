# SPDX-License-Identifier: Apache-2.0
"""Contexts and the calls made with them."""

from __future__ import annotations

import ctypes
from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence, Tuple

from . import _abi, _tensor
from ._error import check
from ._options import View, choose, problem_of
from ._score import Function, Score
from ._tensor import Holds


class Gradients(NamedTuple):
    """Results of `backward`; None for those that were not computed."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsink: Any = None


class Plan(NamedTuple):
    """How a call would run."""

    kernel: str
    reason: str
    workspace_bytes: int
    flops: float
    bytes: float
    num_splits: int
    #: The number of the arithmetic of `same_bits`; 0 without that option.
    same_bits_contract: int


class DeviceInfo(NamedTuple):
    """The device of a context."""

    device: str
    device_index: int
    name: str
    memory_bytes: int
    num_threads: int
    cpu_isa: str
    compute_capability: int
    multiprocessors: int


_DEVICES = {"auto": _abi.DEVICE_AUTO, "cpu": _abi.DEVICE_CPU, "cuda": _abi.DEVICE_CUDA}
_APPEND_TENSORS = {name for name, kind in _abi.fields_of(_abi.fa_append) if kind is _abi.fa_tensor}


def _lse_shape(out: Tuple[int, ...]) -> Tuple[int, ...]:
    """(batch, heads, seqlen) of (batch, seqlen, heads, head_dim); (heads, total) of (total, heads, head_dim)."""
    return out[:-3] + (out[-2], out[-3])


class Context:
    """One device with its settings. Used by one thread at a time; contexts are independent of each other.

    device: "cpu", "cuda", or "auto" (CUDA if there is a usable GPU). threads: CPU threads, 0 = all. cpu_isa: "auto", "portable",
    "avx2", "avx512", "avx512_bf16", "amx", "neon", "neon_fhm", "neon_bf16" or "sve256". log(level, message) receives a line for each failure and warning.
    """

    def __init__(
        self,
        device: str = "cpu",
        index: int = 0,
        *,
        threads: int = 0,
        cpu_isa: str = "auto",
        log: Optional[Callable[[int, str], None]] = None,
    ) -> None:
        self._handle: Optional[ctypes.c_void_p] = ctypes.c_void_p()
        config = _abi.fa_config()
        check(_abi.lib.fa_config_init(ctypes.byref(config), ctypes.sizeof(config)))
        config.device_type = choose(_DEVICES, device, "device")
        _abi.assign(config, "device_index", index)
        _abi.assign(config, "num_threads", threads)
        config.cpu_isa = choose(_abi.CPU_ISAS, cpu_isa, "cpu_isa")
        if log is not None:
            config.log = _abi.LOG_FN(lambda _user, level, message: log(level, message.decode("utf-8", "replace")))
        self._log = config.log  # the library calls it for as long as the context lives
        check(_abi.lib.fa_create(ctypes.byref(self._handle), ctypes.byref(config)))
        self._device = {"cpu": _abi.DEVICE_CPU, "cuda": _abi.DEVICE_CUDA}[self.info.device]

    def close(self) -> None:
        """Ends the context and its threads. It cannot be used afterwards."""
        handle, self._handle = self._handle, None
        if handle:
            _abi.lib.fa_destroy(handle)

    def __enter__(self) -> "Context":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()

    def _open(self) -> ctypes.c_void_p:
        if self._handle is None:
            raise ValueError("the context is closed")
        return self._handle

    @property
    def info(self) -> DeviceInfo:
        """The device, and the part of it that calls use."""
        properties = _abi.fa_device_properties()
        check(_abi.lib.fa_device_properties_init(ctypes.byref(properties), ctypes.sizeof(properties)))
        check(_abi.lib.fa_device_info(self._open(), ctypes.byref(properties)), self._handle)
        isas = {number: name for name, number in _abi.CPU_ISAS.items() if number != 0}
        return DeviceInfo(
            {_abi.DEVICE_CPU: "cpu", _abi.DEVICE_CUDA: "cuda"}[properties.device_type],
            properties.device_index,
            properties.name.decode("utf-8", "replace"),
            properties.memory_bytes,
            properties.num_threads,
            isas.get(properties.cpu_isa, ""),
            properties.compute_capability,
            properties.multiprocessors,
        )

    def score(
        self,
        score: Function = None,
        derivative: Function = None,
        visible: Function = None,
        tile: Function = None,
        **others: Any,
    ) -> Score:
        """A score function for the option `score` of this context's calls.

        score(s, p) returns the new score of a pair, derivative(s, p) its derivative with respect to s (backward needs it), visible(p)
        whether the pair is visible, tile(p, queries, keys) 1 for a tile without visible pairs, 2 for one without masked pairs, else 0. p has b, h,
        i, j, s_q, s_k, start_q and start_k. Functions in Python are slow: they suit experiments. Instead of a function, the address of a
        compiled one may be given, such as Numba's `cfunc(...).address`; `run`, `run_backward` and `run_visible` take nothing else.
        flashattn.h (fa_score_source) documents them. `text` is for CUDA contexts.
        """
        return Score(self, score, derivative, visible, tile, **others)

    # ------------------------------------------------------------------------------------------------ problems

    def _viewer(self, holds: Holds, stream: Optional[int]) -> View:
        device = self._device
        return lambda obj, what, writable=False: _tensor.view(obj, what, device, holds, writable=writable, stream=stream)

    def _allocate(self, shape: Tuple[int, ...], dtype: int, what: str, like: Any, cu_seqlens: _abi.fa_tensor) -> Any:
        """Allocates a result. Rows between packed sequences are never written, so they are set to zero here."""
        return _tensor.allocate(shape, dtype, what, self._device, like, zeroed=cu_seqlens.ndim > 0)

    def _out_like(self, problem: _abi.fa_attention) -> Tuple[Tuple[int, ...], int]:
        """Shape and dtype of `out`, from q and v. The library refuses inputs that do not fit."""
        shape = _tensor.shape_of(problem.q)
        head_dim = _tensor.shape_of(problem.v)[-1:]
        return shape[:-1] + head_dim, problem.q.dtype

    def _forward_problem(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        options: Dict[str, Any],
        stream: Optional[int],
        holds: Holds,
        max_logit: Any = None,
    ) -> Tuple[_abi.fa_attention, Any, Any]:
        view = self._viewer(holds, stream)
        problem = problem_of(q, k, v, options, view, holds)
        if max_logit is not None:
            problem.max_logit = view(max_logit, "max_logit", writable=True)
        shape, dtype = self._out_like(problem)
        if len(shape) < 3:
            raise TypeError(
                f"q has {len(shape)} dimensions; it needs (batch, seqlen, heads, head_dim) or (total, heads, head_dim)"
            )
        if out is None:
            out = self._allocate(shape, dtype, "out", q, problem.cu_seqlens_q)
        if lse is None:
            lse = self._allocate(_lse_shape(shape), _abi.FLOAT32, "lse", q, problem.cu_seqlens_q)
        problem.out = view(out, "out", writable=True)
        if lse is not False:
            problem.lse = view(lse, "lse", writable=True)
        return problem, out, None if lse is False else lse

    def _backward_problem(
        self,
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        dlse: Any,
        results: Gradients,
        options: Dict[str, Any],
        stream: Optional[int],
        holds: Holds,
    ) -> Tuple[_abi.fa_attention, _abi.fa_gradients, Gradients]:
        view = self._viewer(holds, stream)
        problem = problem_of(q, k, v, options, view, holds)
        problem.out = view(out, "out")
        problem.lse = view(lse, "lse")
        gradients = _abi.fa_gradients(ctypes.sizeof(_abi.fa_gradients))
        gradients.dout = view(dout, "dout")
        gradients.dlse = view(dlse, "dlse")
        given = {}
        none = _abi.fa_tensor()
        for name, like, cu_seqlens in (
            ("dq", problem.q, problem.cu_seqlens_q),
            ("dk", problem.k, problem.cu_seqlens_k),
            ("dv", problem.v, problem.cu_seqlens_k),
            ("dbias", problem.bias, none),
            ("dsink", problem.sink, none),
        ):
            result = getattr(results, name)
            if result is None and (name in ("dq", "dk", "dv") or like.ndim > 0):
                result = self._allocate(_tensor.shape_of(like), like.dtype, name, q, cu_seqlens)
            if result is False:
                result = None
            given[name] = result
            if result is not None:
                setattr(gradients, name, view(result, name, writable=True))
        return problem, gradients, Gradients(**given)

    def _jvp_problem(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        tangents: Dict[str, Any],
        tout: Any,
        tlse: Any,
        options: Dict[str, Any],
        stream: Optional[int],
        holds: Holds,
    ) -> Tuple[_abi.fa_attention, _abi.fa_jvp, Any, Any]:
        view = self._viewer(holds, stream)
        problem = problem_of(q, k, v, options, view, holds)
        problem.out = view(out, "out")
        problem.lse = view(lse, "lse")
        jvp = _abi.fa_jvp(ctypes.sizeof(_abi.fa_jvp))
        for name, tangent in tangents.items():
            if tangent is not None:
                setattr(jvp, name, view(tangent, name))
        if tout is None:
            tout = self._allocate(_tensor.shape_of(problem.out), problem.q.dtype, "tout", q, problem.cu_seqlens_q)
        if tlse is None:
            tlse = self._allocate(_tensor.shape_of(problem.lse), _abi.FLOAT32, "tlse", q, problem.cu_seqlens_q)
        jvp.tout = view(tout, "tout", writable=True)
        if tlse is not False:
            jvp.tlse = view(tlse, "tlse", writable=True)
        return problem, jvp, tout, None if tlse is False else tlse

    def _merge_problem(
        self, outs: Sequence[Any], lses: Sequence[Any], out: Any, lse: Any, stream: Optional[int], holds: Holds
    ) -> Tuple[_abi.fa_merge_problem, Any, Any]:
        if len(outs) != len(lses) or not outs:
            raise ValueError(f"outs and lses must pair up; there are {len(outs)} and {len(lses)}")
        count = len(outs)
        view = self._viewer(holds, stream)
        out_views = (_abi.fa_tensor * count)(*[view(x, f"outs[{n}]") for n, x in enumerate(outs)])
        lse_views = (_abi.fa_tensor * count)(*[view(x, f"lses[{n}]") for n, x in enumerate(lses)])
        holds += [out_views, lse_views]
        if out is None:
            out = self._allocate(_tensor.shape_of(out_views[0]), out_views[0].dtype, "out", outs[0], _abi.fa_tensor())
        if lse is None:
            lse = self._allocate(_tensor.shape_of(lse_views[0]), _abi.FLOAT32, "lse", outs[0], _abi.fa_tensor())
        problem = _abi.fa_merge_problem()
        check(_abi.lib.fa_merge_problem_init(ctypes.byref(problem), ctypes.sizeof(problem)))
        problem.num_parts = count
        problem.out_parts = ctypes.addressof(out_views)
        problem.lse_parts = ctypes.addressof(lse_views)
        problem.out = view(out, "out", writable=True)
        problem.lse = view(lse, "lse", writable=True)
        return problem, out, lse

    def _append_problem(self, stream: Optional[int], holds: Holds, interleaved: bool = False, **tensors: Any) -> _abi.fa_append:
        """The tensors are those of fa_append, by name."""
        append = _abi.fa_append(ctypes.sizeof(_abi.fa_append))
        view = self._viewer(holds, stream)
        written = {"k_cache", "v_cache", "seqused_k", "q_out"}
        if tensors.get("q_out") is None:
            written.add("q")
        for name, tensor in tensors.items():
            if name not in _APPEND_TENSORS:
                raise TypeError(f"append_kv has no argument {name!r}")
            if tensor is None:
                continue
            seen = view(tensor, name, writable=name in written)
            # Descales per row and head (three dimensions) are outputs.
            if name in ("k_descale", "v_descale") and seen.ndim == 3:
                seen = view(tensor, name, writable=True)
            setattr(append, name, seen)
        if interleaved:
            append.flags |= _abi.APPEND_INTERLEAVED
        return append

    # --------------------------------------------------------------------------------------------------- calls

    def _run_forward(self, problem: _abi.fa_attention, stream: Optional[int]) -> None:
        check(_abi.lib.fa_forward(self._open(), ctypes.byref(problem), None, 0, stream), self._handle)

    def _run_backward(self, problem: _abi.fa_attention, gradients: _abi.fa_gradients, stream: Optional[int]) -> None:
        check(_abi.lib.fa_backward(self._open(), ctypes.byref(problem), ctypes.byref(gradients), None, 0, stream), self._handle)

    def _run_jvp(self, problem: _abi.fa_attention, jvp: _abi.fa_jvp, stream: Optional[int]) -> None:
        check(_abi.lib.fa_forward_jvp(self._open(), ctypes.byref(problem), ctypes.byref(jvp), None, 0, stream), self._handle)

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        out: Any = None,
        lse: Any = None,
        max_logit: Any = None,
        stream: Any = None,
        **options: Any,
    ) -> Tuple[Any, Any]:
        """Computes softmax(scale q k^T + ..., masked) v and the logarithm of the softmax denominator: returns (out, lse).

        q, k, v: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with `cu_seqlens`; read in place, any strides with the
        last one 1. Results are written to `out` and `lse` when given and otherwise allocated as q is (PyTorch, CuPy; NumPy for all
        others); lse=False leaves it out. `max_logit`, float32 (heads_q), gets the largest visible logit of each
        head. `stream` is a CUDA stream or its address. Options are the fields of `Options`.
        """
        holds: Holds = []
        stream = _tensor.stream_handle(stream)
        problem, out, lse = self._forward_problem(q, k, v, out, lse, options, stream, holds, max_logit)
        self._run_forward(problem, stream)
        if "score" in options and options["score"] is not None:
            options["score"]._raise_failure()
        return out, lse

    def backward(
        self,
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        *,
        dlse: Any = None,
        dq: Any = None,
        dk: Any = None,
        dv: Any = None,
        dbias: Any = None,
        dsink: Any = None,
        stream: Any = None,
        **options: Any,
    ) -> Gradients:
        """Gradients of `forward` for the gradients `dout` (and `dlse`) of its results; takes the same options.

        Results that are given are written in place. Others are allocated like q. False: the result is not computed.
        """
        holds: Holds = []
        stream = _tensor.stream_handle(stream)
        problem, gradients, results = self._backward_problem(
            dout, q, k, v, out, lse, dlse, Gradients(dq, dk, dv, dbias, dsink), options, stream, holds
        )
        self._run_backward(problem, gradients, stream)
        if "score" in options and options["score"] is not None:
            options["score"]._raise_failure()
        return results

    def jvp(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        *,
        tq: Any = None,
        tk: Any = None,
        tv: Any = None,
        tout: Any = None,
        tlse: Any = None,
        stream: Any = None,
        **options: Any,
    ) -> Tuple[Any, Any]:
        """Tangents of the results of `forward` for tangents `tq`, `tk` and `tv` of its inputs (None = zero): returns (tout, tlse).

        `out` and `lse` are the results of `forward` with the same options. Tangents are written to `tout` and `tlse` when given and
        otherwise allocated like q; tlse=False leaves it out. flashattn.h (fa_forward_jvp) says which options it takes, on the CPU and on Hopper
        GPUs.
        """
        holds: Holds = []
        stream = _tensor.stream_handle(stream)
        tangents = {"tq": tq, "tk": tk, "tv": tv}
        problem, jvp, tout, tlse = self._jvp_problem(q, k, v, out, lse, tangents, tout, tlse, options, stream, holds)
        self._run_jvp(problem, jvp, stream)
        return tout, tlse

    def merge(
        self, outs: Sequence[Any], lses: Sequence[Any], *, out: Any = None, lse: Any = None, stream: Any = None
    ) -> Tuple[Any, Any]:
        """Combines results over disjoint sets of keys into the result over all of them: returns (out, lse).

        Results are written to `out` and `lse` when given and otherwise allocated as the first part is.
        """
        holds: Holds = []
        stream = _tensor.stream_handle(stream)
        problem, out, lse = self._merge_problem(outs, lses, out, lse, stream, holds)
        check(_abi.lib.fa_merge(self._open(), ctypes.byref(problem), None, 0, stream), self._handle)
        return out, lse

    def append_kv(
        self,
        k: Any,
        k_cache: Any,
        v: Any = None,
        v_cache: Any = None,
        *,
        page_table: Any = None,
        offsets: Any = None,
        cu_seqlens: Any = None,
        seqused: Any = None,
        seqused_k: Any = None,
        q: Any = None,
        q_out: Any = None,
        rotary_cos: Any = None,
        rotary_sin: Any = None,
        rotary_positions: Any = None,
        k_descale: Any = None,
        v_descale: Any = None,
        interleaved: bool = False,
        stream: Any = None,
    ) -> None:
        """Writes new rows `k`, `v` into caches, behind the `offsets` rows that each sequence has there already, and rotates them and the
        queries on the way if there are tables.

        `seqused_k` receives the rows each sequence has afterwards; rotated queries go to `q_out`, or stay in `q`. Caches in int8 or fp8 have
        descales: `k_descale` and `v_descale` are read if there is one per sequence and head, written if one per row and head. flashattn.h
        (fa_append) documents shapes.
        """
        holds: Holds = []
        stream = _tensor.stream_handle(stream)
        append = self._append_problem(
            stream,
            holds,
            interleaved,
            k=k,
            k_cache=k_cache,
            v=v,
            v_cache=v_cache,
            page_table=page_table,
            offsets=offsets,
            cu_seqlens=cu_seqlens,
            seqused=seqused,
            seqused_k=seqused_k,
            q=q,
            q_out=q_out,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            rotary_positions=rotary_positions,
            k_descale=k_descale,
            v_descale=v_descale,
        )
        check(_abi.lib.fa_append_kv(self._open(), ctypes.byref(append), None, 0, stream), self._handle)

    # ------------------------------------------------------------------------------------------------- queries

    def _plan(self, ask: Callable[[Any], int]) -> Plan:
        info = _abi.fa_plan_info()
        check(_abi.lib.fa_plan_info_init(ctypes.byref(info), ctypes.sizeof(info)))
        check(ask(ctypes.byref(info)), self._handle)
        return Plan(
            info.kernel.decode(),
            info.reason.decode("utf-8", "replace"),
            info.workspace_bytes,
            info.flops,
            info.bytes,
            info.num_splits,
            info.same_bits_contract,
        )

    def query_forward(self, q: Any, k: Any, v: Any, **options: Any) -> Plan:
        """How `forward` would run; raises the `Error` it would raise. Reads no tensor data."""
        holds: Holds = []
        problem, _, _ = self._forward_problem(q, k, v, None, None, options, None, holds)
        return self._plan(lambda info: _abi.lib.fa_forward_query(self._open(), ctypes.byref(problem), info))

    def query_backward(
        self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, dlse: Any = None, **options: Any
    ) -> Plan:
        """How `backward` would run; raises the `Error` it would raise. Reads no tensor data."""
        holds: Holds = []
        problem, gradients, _ = self._backward_problem(
            dout, q, k, v, out, lse, dlse, Gradients(None, None, None), options, None, holds
        )
        return self._plan(
            lambda info: _abi.lib.fa_backward_query(self._open(), ctypes.byref(problem), ctypes.byref(gradients), info)
        )

    def query_jvp(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, *, tq: Any = None, tk: Any = None, tv: Any = None, **options: Any
    ) -> Plan:
        """How `jvp` would run; raises the `Error` it would raise. Reads no tensor data."""
        holds: Holds = []
        tangents = {"tq": tq, "tk": tk, "tv": tv}
        problem, jvp, _, _ = self._jvp_problem(q, k, v, out, lse, tangents, None, None, options, None, holds)
        return self._plan(lambda info: _abi.lib.fa_forward_jvp_query(self._open(), ctypes.byref(problem), ctypes.byref(jvp), info))

    def query_merge(self, outs: Sequence[Any], lses: Sequence[Any]) -> Plan:
        """How `merge` would run; raises the `Error` it would raise. Reads no tensor data."""
        holds: Holds = []
        problem, _, _ = self._merge_problem(outs, lses, None, None, None, holds)
        return self._plan(lambda info: _abi.lib.fa_merge_query(self._open(), ctypes.byref(problem), info))

    def query_append(self, k: Any, k_cache: Any, v: Any = None, v_cache: Any = None, **arguments: Any) -> Plan:
        """How `append_kv` would run with the same arguments; raises the `Error` it would raise. Reads no tensor data."""
        holds: Holds = []
        append = self._append_problem(None, holds, k=k, k_cache=k_cache, v=v, v_cache=v_cache, **arguments)
        return self._plan(lambda info: _abi.lib.fa_append_query(self._open(), ctypes.byref(append), info))
