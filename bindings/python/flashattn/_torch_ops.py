# SPDX-License-Identifier: Apache-2.0
"""The operators `flashattn::forward`, `flashattn::backward` and `flashattn::jvp` of PyTorch's dispatcher, which run on its current stream, and
the differentiable function made of them.

The kernels of the first two are those of the extension (torch_operators.cpp) where it can be loaded, else those of this file, which do the same
by ctypes.
The operators have no derivatives of their own; `call` has. Options that an operator is not given keep the defaults of its schema: PyTorch
hands a kernel in Python only what differs from them.
"""

import ctypes
import os
import threading
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _abi
from ._context import Context
from ._error import Error
from ._extension import FIND, Extension, address_in, find
from ._options import problem_of
from ._tensor import dtypes_of_torch
from ._torch_vmap import Mapped

#: Tensors of an attention problem besides q, k and v, those with gradients first.
TENSORS = (
    "bias",
    "sink",
    "alibi_slopes",
    "block_mask",
    "block_counts",
    "block_indices",
    "element_mask",
    "slices",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_q",
    "seqused_k",
    "seqstart_k",
    "page_table",
    "kv_indices",
    "q_descale",
    "k_descale",
    "v_descale",
    "dropout_seed",
)
#: Its numbers, as they stand in the schemas. `causal` is an fa_mask_kind; sides of the window without a limit are None.
_NUMBERS = (
    "int causal=0, int? window_left=None, int? window_right=None, float? scale=None, float softcap=0., float alibi_log_scale=0., "
    "float dropout_p=0., int block_size_q=0, int block_size_k=0, int max_seqlen_q=0, int max_seqlen_k=0, int num_splits=0, "
    "bool deterministic=False, bool batch_invariant=False, bool same_bits=False, "
    "bool fp32_products=False"
)
_OPTIONS = ", ".join(f"Tensor? {name}=None" for name in TENSORS) + ", " + _NUMBERS
_CAUSAL = {
    _abi.MASK_NONE: False,
    _abi.MASK_CAUSAL: "bottom_right",
    _abi.MASK_CAUSAL_TOP_LEFT: "top_left",
}
_DTYPES = dtypes_of_torch(torch)

_local = threading.local()


def _context(device: torch.device) -> Context:
    """This thread's context of a device, on the CPU with as many threads as PyTorch uses. The library takes no memory of a context before
    its first call.
    """
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    key = (device, threads)
    try:
        return _local.contexts[key]
    except AttributeError:
        _local.contexts = {}
    except KeyError:
        pass
    context = _local.contexts[key] = Context(
        device.type, device.index or 0, threads=threads
    )
    return context


def _stream(device: torch.device) -> Optional[int]:
    return (
        torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    )


def _viewer(device: torch.device) -> Any:
    """Tensors of a device as the library sees them. Calls run on PyTorch's current stream, so nobody has to wait for anybody."""

    def view(tensor: Tensor, what: str) -> _abi.fa_tensor:
        if tensor.device != device:
            raise TypeError(
                f"{what} is on {tensor.device}; it must be on {device}, where q is"
            )
        if tensor.dim() > 4:
            raise TypeError(
                f"{what} has {tensor.dim()} dimensions; at most 4 are possible"
            )
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None:
            raise TypeError(
                f"{what} has dtype {tensor.dtype}, which the library does not know"
            )
        return _abi.make_tensor(tensor.data_ptr(), tensor.shape, tensor.stride(), dtype)

    return view


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with a last stride of 1, which the library wants."""
    return (
        tensor
        if tensor.stride(-1) == 1 or tensor.size(-1) == 1
        else tensor.contiguous()
    )


def _options(given: Dict[str, Any]) -> Dict[str, Any]:
    """Arguments of an operator as options of a Context."""
    if "causal" in given:
        given["causal"] = _CAUSAL[given["causal"]]
    if "window_left" in given or "window_right" in given:
        given["window"] = (
            given.pop("window_left", None),
            given.pop("window_right", None),
        )
    if "block_size_q" in given or "block_size_k" in given:
        given["block_size"] = (
            given.pop("block_size_q", 0),
            given.pop("block_size_k", 0),
        )
    return given


def _new(
    shape: Sequence[int], like: Tensor, dtype: torch.dtype, cu_seqlens: Optional[Tensor]
) -> Tensor:
    """Memory of a result. Rows between packed sequences are never written, so they are set to zero here."""
    return (
        like.new_empty(shape, dtype=dtype)
        if cu_seqlens is None
        else like.new_zeros(shape, dtype=dtype)
    )


def _result_dtype(q: Tensor) -> torch.dtype:
    """Of out: that of q, and bfloat16 for float8 queries."""
    return q.dtype if q.dtype.itemsize > 1 else torch.bfloat16


def _forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tuple[Tensor, Tensor]:
    device = q.device
    view = _viewer(device)
    q, k, v = _rows(q), _rows(k), _rows(v)
    if q.dim() < 3:
        raise TypeError(
            f"q has {q.dim()} dimensions; it needs (batch, seqlen, heads, head_dim) or (total, heads, head_dim)"
        )
    problem = problem_of(q, k, v, _options(options), view, [])
    packed = options.get("cu_seqlens_q")
    shape = q.shape
    out = _new((*shape[:-1], v.shape[-1]), q, _result_dtype(q), packed)
    lse = _new((*shape[:-3], shape[-2], shape[-3]), q, torch.float32, packed)
    problem.out, problem.lse = view(out, "out"), view(lse, "lse")
    _context(device)._run_forward(problem, _stream(device))
    return out, lse


def _backward(
    dout: Tensor,
    dlse: Optional[Tensor],
    out: Tensor,
    lse: Tensor,
    needed: List[bool],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    **options: Any,
) -> List[Tensor]:
    device = q.device
    view = _viewer(device)
    q, k, v, dout, out = _rows(q), _rows(k), _rows(v), _rows(dout), _rows(out)
    problem = problem_of(q, k, v, _options(options), view, [])
    problem.out, problem.lse = view(out, "out"), view(lse, "lse")
    gradients = _abi.fa_gradients(ctypes.sizeof(_abi.fa_gradients))
    gradients.dout = view(dout, "dout")
    if dlse is not None:
        gradients.dlse = view(dlse, "dlse")
    packed_q, packed_k = options.get("cu_seqlens_q"), options.get("cu_seqlens_k")
    inputs: Any = (q, k, v, options.get("bias"), options.get("sink"))
    results = []
    for name, like, packed, wanted in zip(
        ("dq", "dk", "dv", "dbias", "dsink"),
        inputs,
        (packed_q, packed_k, packed_k, None, None),
        needed,
    ):
        if wanted:
            result = _new(like.shape, like, like.dtype, packed)
            setattr(gradients, name, view(result, name))
            results.append(result)
    _context(device)._run_backward(problem, gradients, _stream(device))
    return results


def _jvp(
    tq: Optional[Tensor],
    tk: Optional[Tensor],
    tv: Optional[Tensor],
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    **options: Any,
) -> Tuple[Tensor, Tensor]:
    device = q.device
    view = _viewer(device)
    q, k, v, out = _rows(q), _rows(k), _rows(v), _rows(out)
    problem = problem_of(q, k, v, _options(options), view, [])
    problem.out, problem.lse = view(out, "out"), view(lse, "lse")
    jvp = _abi.fa_jvp(ctypes.sizeof(_abi.fa_jvp))
    given = [
        (name, _rows(tangent))
        for name, tangent in (("tq", tq), ("tk", tk), ("tv", tv))
        if tangent is not None
    ]
    for name, tangent in given:
        setattr(jvp, name, view(tangent, name))
    packed = options.get("cu_seqlens_q")
    tout, tlse = (_new(x.shape, x, x.dtype, packed) for x in (out, lse))
    jvp.tout, jvp.tlse = view(tout, "tout"), view(tlse, "tlse")
    _context(device)._run_jvp(problem, jvp, _stream(device))
    return tout, tlse


def _forward_shapes(q, k, v, **_):
    out = q.new_empty([*q.shape[:-1], v.shape[-1]], dtype=_result_dtype(q))
    return out, q.new_empty(
        [*q.shape[:-3], q.shape[-2], q.shape[-3]], dtype=torch.float32
    )


def _backward_shapes(dout, dlse, out, lse, needed, q, k, v, **options):
    given = (q, k, v, options.get("bias"), options.get("sink"))
    return [like.new_empty(like.shape) for like, wanted in zip(given, needed) if wanted]


def _jvp_shapes(tq, tk, tv, out, lse, q, k, v, **_):
    return out.new_empty(out.shape), lse.new_empty(lse.shape)


def _find(name: bytes) -> Optional[int]:
    """The address of a function of libflashattn, or of the part of PyTorch for CUDA."""
    if name.startswith(b"fa_"):
        return find(name)
    try:
        return address_in(ctypes.CDLL("libtorch_cuda.so", os.RTLD_LAZY | os.RTLD_NOLOAD), name)
    except OSError:
        return None


#: What the extension has beside the library's statuses.
_EXCEPTIONS = {-1: TypeError, -2: ValueError, -3: OverflowError}


class TorchExtension(Extension):
    """The extension for PyTorch (torch_operators.cpp)."""

    def _load(self, path: str) -> None:
        loaded = ctypes.CDLL(path)
        options, register, install, failure = (
            getattr(loaded, f"flashattn_torch_{name}")
            for name in ("options", "register", "install", "failure")
        )
        options.restype = register.restype = install.restype = ctypes.c_char_p
        register.argtypes, install.argtypes = [FIND], [
            ctypes.c_char_p,
            ctypes.c_int32,
            ctypes.c_int32,
            ctypes.c_int32,
        ]
        failure.restype, failure.argtypes = ctypes.c_int32, [
            ctypes.POINTER(ctypes.c_char_p)
        ]
        if options().decode() != _OPTIONS:
            raise ImportError(
                "it takes other options than this package gives; build it again"
            )
        problem = register(FIND(_find))
        if problem is not None:
            raise ImportError(problem.decode())
        self._loaded = loaded

    def install(self, key: str, of_cuda: bool, deterministic: bool, fp32: bool) -> None:
        """Puts kernels over those of PyTorch's operators of the CPU or of CUDA, for a dispatch key. `fp32`: that of CUDA is fast on every GPU."""
        assert self._loaded is not None
        problem = self._loaded.flashattn_torch_install(
            key.encode(), of_cuda, deterministic, fp32
        )
        if problem is not None:
            raise RuntimeError(problem.decode())

    def uninstall(self) -> None:
        """Takes them away."""
        assert self._loaded is not None
        self._loaded.flashattn_torch_uninstall()

    def fill_results(self, on: bool) -> None:
        """Whether results are NaN until the library writes them; for tests."""
        assert self._loaded is not None
        self._loaded.flashattn_torch_fill_results(on)

    def exception(self, error: RuntimeError) -> Exception:
        """What the kernels of this file would have raised: PyTorch makes a RuntimeError of every failure in C++."""
        if self._loaded is None:
            return error
        text = ctypes.c_char_p()
        status = self._loaded.flashattn_torch_failure(ctypes.byref(text))
        sentence = (text.value or b"").decode("utf-8", "replace")
        if not sentence or sentence not in str(error):  # a failure of PyTorch's own
            return error
        return (
            _EXCEPTIONS[status](sentence)
            if status in _EXCEPTIONS
            else Error(status, sentence)
        )


_library = torch.library.Library("flashattn", "DEF")


def _define(name: str, arguments: str, results: str, shapes: Any) -> Any:
    _library.define(
        f"{name}({arguments}, *, {_OPTIONS}) -> {results}",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    torch.library.register_fake(f"flashattn::{name}", shapes, lib=_library)
    return getattr(torch.ops.flashattn, name).default


_forward_op = _define(
    "forward", "Tensor q, Tensor k, Tensor v", "(Tensor, Tensor)", _forward_shapes
)
_backward_op = _define(
    "backward",
    "Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool[] needed, Tensor q, Tensor k, Tensor v",
    "Tensor[]",
    _backward_shapes,
)

_jvp_op = _define(
    "jvp",
    "Tensor? tq, Tensor? tk, Tensor? tv, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v",
    "(Tensor, Tensor)",
    _jvp_shapes,
)

extension = TorchExtension("torch")
for _device in ("CPU", "CUDA"):
    _library.impl("jvp", _jvp, _device)
    if not extension:
        _library.impl("forward", _forward, _device)
        _library.impl("backward", _backward, _device)

# What follows takes the names of the tensors that are given besides q, k and v, and the numbers as pairs of name and value.
Names = Tuple[str, ...]
Numbers = Tuple[Tuple[str, Any], ...]
_DIFFERENTIABLE = ("q", "k", "v", "bias", "sink")
_NO_GRADIENT = "{0} requires a gradient, but flashattn has none for it; give {0}.detach()"
_NO_TANGENT = "flashattn has no forward-mode derivative (torch.func.jvp, jacfwd, dual numbers) {}; use reverse mode (torch.func.vjp, jacrev)"
_NO_SECOND = "flashattn has no second derivative; its gradients and tangents cannot be differentiated again"


@torch._dynamo.assume_constant_result  # torch.compile compiles again where the transforms differ
def _is_transformed() -> bool:
    """Whether this runs under a transform of torch.func."""
    return torch._C._are_functorch_transforms_active()


@torch._dynamo.assume_constant_result
def _has_tangents() -> bool:
    """Whether the transforms of torch.func, if this runs under any, have forward mode among them."""
    from torch._C._functorch import TransformType
    from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

    transforms = retrieve_all_functorch_interpreters()
    return not transforms or any(x.key() == TransformType.Jvp for x in transforms)


def _run(
    names: Names, numbers: Numbers, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor
) -> Tuple[Tensor, Tensor]:
    try:
        if not names and not numbers:
            return _forward_op(q, k, v)
        return _forward_op(q, k, v, **dict(zip(names, tensors)), **dict(numbers))
    except RuntimeError as error:
        raise extension.exception(error) from None


def _wants_bias_and_sink(names: Names, wanted: Sequence[bool]) -> Tuple[bool, bool]:
    """Which gradients are wanted of the tensors that `names` lists."""
    of = [name for name, is_wanted in zip(names, wanted) if is_wanted]
    for name in of:
        if name not in _DIFFERENTIABLE:
            raise NotImplementedError(_NO_GRADIENT.format(name))
    return "bias" in of, "sink" in of


def _gradients(ctx: Any, dout: Optional[Tensor], dlse: Optional[Tensor]) -> Any:
    names, numbers = ctx.names, ctx.numbers
    out, lse, *tensors = ctx.saved_tensors
    if dout is None:
        if dlse is None:
            return (None,) * (2 + len(tensors))
        dout = torch.zeros_like(out)
    wanted = ctx.needs_input_grad[2:]
    others = _wants_bias_and_sink(names, wanted[3:]) if names else (False, False)
    needed = (*wanted[:3], *others)
    # Under torch.compile the operator itself is traced, and PyTorch refuses second derivatives.
    if (torch.is_grad_enabled() or _is_transformed()) and not torch.compiler.is_compiling():
        results = _Gradients.apply(names, numbers, needed, dout, dlse, out, lse, *tensors)
    else:
        results = _run_gradients(names, numbers, needed, (dout, dlse, out, lse), tensors)
    if len(results) == len(wanted):
        return (None, None, *results)
    given = iter(results)
    return (None, None, *[next(given) if is_wanted else None for is_wanted in wanted])


class _Attention(torch.autograd.Function):
    """(out, lse) of q, k, v and the tensors that `names` lists."""

    @staticmethod
    def forward(
        ctx: Any, names: Names, numbers: Numbers, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor
    ) -> Tuple[Tensor, Tensor]:
        out, lse = _run(names, numbers, q, k, v, *tensors)
        ctx.names, ctx.numbers = names, numbers
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, q, k, v, *tensors)
        return out, lse

    backward = staticmethod(_gradients)


class _Transformed(torch.autograd.Function):
    """The same under the transforms of torch.func and with dual numbers, which want the two halves of forward apart; that takes PyTorch 20 us
    more per call.
    """

    forward = staticmethod(_run)
    backward = staticmethod(_gradients)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.names, ctx.numbers, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output, *tensors)
        ctx.save_for_forward(*output, *tensors)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        out, lse, *tensors = ctx.saved_tensors
        _, _, tq, tk, tv, *others = tangents
        for name, tangent in zip(ctx.names, others):
            if tangent is not None:
                raise NotImplementedError(_NO_TANGENT.format(f"with respect to {name}"))
        if out.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(_NO_TANGENT.format(f"on {out.device.type}"))
        return _Tangents.apply(ctx.names, ctx.numbers, tq, tk, tv, out, lse, *tensors)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, names: Names, numbers: Numbers, *tensors: Tensor
    ) -> Any:
        mapped = Mapped(info.batch_size, ("q", "k", "v", *names), in_dims[2:], tensors)
        if mapped.folds():
            return mapped.unfold(_Transformed.apply(names, numbers, *mapped.fold()))
        return mapped.stack(
            [_Transformed.apply(names, numbers, *one) for one in mapped.samples()]
        )


def _run_gradients(
    names: Names,
    numbers: Numbers,
    needed: Sequence[bool],
    outputs: Sequence[Optional[Tensor]],
    tensors: Sequence[Tensor],
) -> Any:
    """The gradients that `needed` asks for. `outputs` is dout, dlse, out and lse; `tensors` is q, k, v and those that `names` lists."""
    try:
        if not names and not numbers:
            return _backward_op(*outputs, needed, *tensors)
        options = {**dict(zip(names, tensors[3:])), **dict(numbers)}
        return _backward_op(*outputs, needed, *tensors[:3], **options)
    except RuntimeError as error:
        raise extension.exception(error) from None


class _Gradients(torch.autograd.Function):
    """The gradients that `needed` asks for, as a function that can be mapped and cannot be differentiated."""

    @staticmethod
    def forward(names: Names, numbers: Numbers, needed: Sequence[bool], *tensors: Any) -> Any:
        return tuple(_run_gradients(names, numbers, needed, tensors[:4], tensors[4:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(_NO_SECOND)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(_NO_SECOND)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        names: Names,
        numbers: Numbers,
        needed: Sequence[bool],
        *tensors: Tensor,
    ) -> Any:
        every_name = ("dout", "dlse", "out", "lse", "q", "k", "v", *names)
        mapped = Mapped(info.batch_size, every_name, in_dims[3:], tensors)
        wanted = [name for name, is_needed in zip(_DIFFERENTIABLE, needed) if is_needed]
        if mapped.folds(wanted):
            return mapped.unfold(
                _Gradients.apply(names, numbers, needed, *mapped.fold(wanted)), wanted
            )
        return mapped.stack(
            [_Gradients.apply(names, numbers, needed, *one) for one in mapped.samples()]
        )


class _Tangents(torch.autograd.Function):
    """The tangents of (out, lse), as a function that can be mapped and cannot be differentiated."""

    @staticmethod
    def forward(
        names: Names,
        numbers: Numbers,
        tq: Optional[Tensor],
        tk: Optional[Tensor],
        tv: Optional[Tensor],
        out: Tensor,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *tensors: Tensor,
    ) -> Any:
        options = {**dict(zip(names, tensors)), **dict(numbers)}
        return _jvp_op(tq, tk, tv, out, lse, q, k, v, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(_NO_SECOND)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(_NO_SECOND)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, names: Names, numbers: Numbers, *tensors: Tensor
    ) -> Any:
        every_name = ("tq", "tk", "tv", "out", "lse", "q", "k", "v", *names)
        mapped = Mapped(info.batch_size, every_name, in_dims[2:], tensors)
        if mapped.folds():
            return mapped.unfold(_Tangents.apply(names, numbers, *mapped.fold()))
        return mapped.stack(
            [_Tangents.apply(names, numbers, *one) for one in mapped.samples()]
        )


@torch.compiler.disable
def _run_with_tangents(*inputs: Any) -> Tuple[Tensor, Tensor]:
    """For torch.compile, which takes forward without jvp where no input requires a gradient: the tangent would be zero."""
    return _Transformed.apply(*inputs)


def call(
    tensors: Dict[str, Optional[Tensor]], numbers: Dict[str, Any]
) -> Tuple[Tensor, Tensor]:
    """(out, lse), differentiable. `tensors` has q, k, v and what is given of TENSORS, `numbers` what differs from the operators' defaults."""
    given: Sequence[Any] = tuple(tensors.values())
    names: Names = ()
    if len(given) > 3:
        given = [tensor for tensor in given if tensor is not None]
        names = tuple(name for name, tensor in tensors.items() if tensor is not None)[3:]
    inputs: Any = (names, tuple(numbers.items()), *given)
    if _is_transformed() or (
        forward_ad._current_level >= 0
        and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in given)
    ):
        if torch.compiler.is_compiling() and _has_tangents():
            return _run_with_tangents(*inputs)
        return _Transformed.apply(*inputs)
    if torch.is_grad_enabled():
        for tensor in given:
            if tensor.requires_grad:
                return _Attention.apply(*inputs)
    return _run(*inputs)
