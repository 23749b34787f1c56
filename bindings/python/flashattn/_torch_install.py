# SPDX-License-Identifier: Apache-2.0
"""The library under torch.nn.functional.scaled_dot_product_attention: kernels of the extension over those of PyTorch's operators behind it.

PyTorch goes on choosing the operator, and its own formulas for derivatives, tracing and the rest stay; so nothing in Python is on the way.
"""

import collections
import warnings
from typing import Any, Deque, Dict, List, NamedTuple, Tuple

import torch

from . import _abi
from ._torch_ops import extension

#: The name of this implementation in PyTorch's registry (torch.nn.attention).
NAME = "flashattn"
#: Operators with a kernel, by dispatch key, and the operators of this package that run the kernel that was there before.
OPERATORS = {
    "CPU": (
        ("_scaled_dot_product_flash_attention_for_cpu", "default_for_cpu"),
        (
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            "default_for_cpu_backward",
        ),
    ),
    "CUDA": (
        ("_scaled_dot_product_flash_attention", "default_for_flash"),
        ("_scaled_dot_product_flash_attention_backward", "default_for_flash_backward"),
        ("_scaled_dot_product_cudnn_attention", "default_for_cudnn"),
        ("_scaled_dot_product_cudnn_attention_backward", "default_for_cudnn_backward"),
        ("_scaled_dot_product_efficient_attention", "default_for_efficient"),
        ("_scaled_dot_product_efficient_attention_backward", "default_for_efficient_backward"),
    ),
}
#: Arguments and results of these operators, as the kernels take them.
SCHEMAS = (
    "aten::_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, "
    "Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor logsumexp, float dropout_p, bool is_causal, *, Tensor? attn_mask=None, float? scale=None) -> "
    "(Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    "aten::_scaled_dot_product_flash_attention(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, "
    "bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, "
    "SymInt max_q, SymInt max_k, Tensor rng_state, Tensor unused, Tensor debug_attn_mask)",
    "aten::_scaled_dot_product_flash_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
    "Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, Tensor philox_seed, "
    "Tensor philox_offset, *, float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    "aten::_scaled_dot_product_cudnn_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool compute_log_sumexp, "
    "float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, "
    "Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor philox_seed, Tensor philox_offset, Tensor debug_attn_mask)",
    "aten::_scaled_dot_product_cudnn_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, Tensor attn_bias, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, "
    "SymInt max_k, float dropout_p, bool is_causal, *, float? scale=None) -> (Tensor, Tensor, Tensor)",
    "aten::_scaled_dot_product_efficient_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool compute_log_sumexp, "
    "float dropout_p=0., bool is_causal=False, *, float? scale=None) -> (Tensor output, Tensor log_sumexp, Tensor philox_seed, "
    "Tensor philox_offset)",
    "aten::_scaled_dot_product_efficient_attention_backward(Tensor grad_out_, Tensor query, Tensor key, Tensor value, Tensor attn_bias, "
    "Tensor out, Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, float dropout_p, bool[4] grad_input_mask, "
    "bool is_causal=False, *, float? scale=None) -> (Tensor, Tensor, Tensor, Tensor)",
)


class Installation(NamedTuple):
    """What `install` did. `devices` are those whose scaled_dot_product_attention uses the library; `reason` says why others do not."""

    devices: Tuple[str, ...]
    reason: str


_fallbacks: Deque[str] = collections.deque(maxlen=64)
_definitions: Dict[str, Any] = {}  # by device, of the operators that run PyTorch's kernels
_handle: Any = None  # of an installation without PyTorch's registry


def fallbacks() -> List[str]:
    """Why calls since `install` went to PyTorch's own kernels, the newest last; the last 64 of them."""
    return list(_fallbacks)


def _missing(device: str) -> str:
    """Why a device cannot be served; empty if it can."""
    if not extension:
        return f"{device}: the extension is not loaded: {extension.reason}"
    if device == "cuda":
        if not torch.cuda.is_available():
            return "cuda: PyTorch finds no GPU"
        if "cuda_archs=none" in (_abi.lib.fa_build_info() or b"").decode():
            return "cuda: the library was built without CUDA"
    for name, _ in OPERATORS[device.upper()]:
        theirs = getattr(torch.ops.aten, name).default._schema
        if theirs not in map(torch._C.parse_schema, SCHEMAS):
            return f"{device}: PyTorch {torch.__version__} has an operator that this package does not know, {theirs}"
    return ""


def _define_defaults(device: str) -> None:
    """Operators that run the kernels which PyTorch has now for a device, and note why they do."""
    if device in _definitions:
        return
    definitions = _definitions[device] = torch.library.Library("flashattn", "FRAGMENT")
    for name, default in OPERATORS[device.upper()]:
        operator = getattr(torch.ops.aten, name).default
        _, arguments = str(operator._schema).split("(", 1)
        definitions.define(f"{default}(str reason, {arguments}")
        kernel = torch.library.get_kernel(operator, device.upper())

        def run(
            keys: Any,
            reason: str,
            *arguments: Any,
            kernel: Any = kernel,
            name: str = name,
            **options: Any,
        ) -> Any:
            _fallbacks.append(f"{name}: {reason}")
            return kernel.call_boxed(keys, *arguments, **options)

        definitions.impl(default, run, device.upper(), with_keyset=True)


class _Handle:
    """What PyTorch's registry holds while the kernels are in place."""

    def remove(self) -> None:
        extension.uninstall()


def _activate(devices: Tuple[str, ...], deterministic: bool) -> _Handle:
    # fp32 has kernels for tensor cores on Hopper alone. Those without are slower than PyTorch's, as measured on an H200.
    gpus = range(torch.cuda.device_count()) if "cuda" in devices else ()
    hopper = all(torch.cuda.get_device_capability(gpu) == (9, 0) for gpu in gpus)
    for device in devices:
        _define_defaults(device)
        extension.install(device.upper(), device == "cuda", deterministic, hopper)
    return _Handle()


def install(*, deterministic: bool = True) -> Installation:
    """Lets torch.nn.functional.scaled_dot_product_attention run on the library, on the CPU and, where there is one, on a GPU.

    PyTorch chooses among its operators as before: flash attention, on CUDA also cuDNN's and the efficient one, which serve masks and fp32.
    The library computes all of them, forward and backward. What it refuses, such as dropout, goes to PyTorch's own kernel, and
    `fallbacks()` says why. It takes fp32 on CUDA only where it has kernels for tensor cores: on Hopper, up to 256 columns, without a mask.
    The operators do not say whether deterministic algorithms are wanted: gradients are, unless deterministic=False.

    In PyTorch's registry of flash implementations (torch.nn.attention.list_flash_attention_impls) the name is "flashattn". Returns the
    devices that are served, and why others are not; warns of those that this machine has. `uninstall()` takes it back.
    """
    global _handle
    uninstall()
    reasons = {device: _missing(device) for device in ("cpu", "cuda")}
    devices = tuple(device for device, reason in reasons.items() if not reason)
    if devices:
        registry = torch.nn.attention
        if hasattr(registry, "register_flash_attention_impl"):
            registry.register_flash_attention_impl(NAME, register_fn=lambda: _activate(devices, deterministic))
            registry.activate_flash_attention_impl(NAME)
        else:
            _handle = _activate(devices, deterministic)
    missed = [reason for device, reason in reasons.items() if reason and (device == "cpu" or torch.cuda.is_available())]
    if missed:
        warnings.warn(
            f"flashattn.torch.install() leaves PyTorch its own attention: {'; '.join(missed)}",
            stacklevel=2,
        )
    return Installation(devices, "; ".join(reason for reason in reasons.values() if reason))


def uninstall() -> None:
    """Takes `install` back: scaled_dot_product_attention runs PyTorch's own kernels again."""
    global _handle
    registry = torch.nn.attention
    if _handle is not None:
        _handle.remove()
        _handle = None
    elif hasattr(registry, "current_flash_attention_impl") and registry.current_flash_attention_impl() == NAME:
        registry.restore_flash_attention_impl()
    _fallbacks.clear()
