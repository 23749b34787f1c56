# SPDX-License-Identifier: Apache-2.0
"""Context parallelism for PyTorch: sequences whose rows are spread over the ranks of a process group of torch.distributed.

    from flashattn.distributed import Plan, Ranks
    plan = Plan([total], heads_q=32, heads_k=8, head_dim=128, num_ranks=dist.get_world_size(), dtype=torch.bfloat16, causal=True)
    ranks = Ranks()                                  # of the default group; keep it
    tokens = plan.scatter(tokens, rank)              # and position ids: once a batch, for all layers
    out = ranks.attention(plan, q, k, v)             # (rows of the rank, heads, head_dim), in every layer; differentiable

Every rank makes the same calls in the same order. Messages of an NCCL group travel over its communicator, those of any other group by isend
and irecv, in host memory. docs/distributed.md says what the ways are and what travels.
"""

from __future__ import annotations

import ctypes
import weakref
from datetime import timedelta
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

import torch
import torch.distributed
from torch import Tensor

from . import _abi, _abi_dist, _tensor
from ._context import Context
from ._error import Error, check
from ._options import problem_of
from ._torch_ops import _rows, _stream, _viewer

__all__ = ["Piece", "Plan", "Ranks"]

lib = _abi.lib


class Piece(NamedTuple):
    """Consecutive rows of a document on one rank; rows and keys count within the document."""

    document: int
    row_begin: int
    row_end: int
    key_begin: int
    key_end: int
    local_row: int
    rank: int
    whole: bool


class Plan:
    """Which rank has which rows of a batch of documents. Without communication: every rank computes the same plan.

    lengths: rows of each document. causal and window are the mask of every call with this plan. way: "auto", "gather", "ring" or "all_to_all".
    contiguous: neighbouring rows for each rank, for programs that cannot permute them.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        heads_q: int,
        heads_k: int,
        head_dim: int,
        num_ranks: int,
        dtype: torch.dtype = torch.float32,
        head_dim_v: Optional[int] = None,
        causal: bool = False,
        window: Tuple[Optional[int], Optional[int]] = (None, None),
        way: str = "auto",
        num_stages: int = 0,
        contiguous: bool = False,
    ) -> None:
        self._handle: Optional[ctypes.c_void_p] = None
        if way not in _abi_dist.WAYS:
            raise ValueError(f"way is {way!r}; it must be one of {', '.join(map(repr, _abi_dist.WAYS))}")
        known = _tensor.dtypes_of_torch(torch)
        if dtype not in known:
            raise ValueError(f"dtype is {dtype}, which the library does not know")
        problem = _abi_dist.fa_dist_problem()
        check(lib.fa_dist_problem_init(ctypes.byref(problem), ctypes.sizeof(problem)))
        rows = (ctypes.c_int64 * len(lengths))(*lengths)
        problem.flags = _abi_dist.CONTIGUOUS if contiguous else 0
        problem.lengths = ctypes.addressof(rows)
        problem.mask = _abi.MASK_CAUSAL if causal else _abi.MASK_NONE
        problem.dtype = known[dtype]
        problem.way = _abi_dist.WAYS[way]
        for name, value in (
            ("num_documents", len(lengths)),
            ("heads_q", heads_q),
            ("heads_k", heads_k),
            ("head_dim", head_dim),
            ("head_dim_v", head_dim if head_dim_v is None else head_dim_v),
            ("num_ranks", num_ranks),
            ("num_stages", num_stages),
        ):
            _abi.assign(problem, name, value)
        for bit, name, side in ((_abi.WINDOW_LEFT, "window_left", window[0]), (_abi.WINDOW_RIGHT, "window_right", window[1])):
            if side is not None:
                problem.window |= bit
                _abi.assign(problem, name, side)
        handle = ctypes.c_void_p()
        check(lib.fa_dist_plan(ctypes.byref(problem), ctypes.byref(handle)))
        self._handle = handle
        self._mask = {"causal": causal, "window": window}
        info = _abi_dist.fa_dist_layout_info()
        check(lib.fa_dist_layout_info_init(ctypes.byref(info), ctypes.sizeof(info)))
        check(lib.fa_dist_layout_describe(handle, ctypes.byref(info)))
        self.num_ranks: int = info.num_ranks
        self.total_rows: int = info.total_rows
        self.way = next(name for name, number in _abi_dist.WAYS.items() if number == info.way)
        self.num_stages: int = info.num_stages
        self.imbalance: float = info.imbalance
        self.reason = info.reason.decode("utf-8", "replace")
        self.rank_offsets: List[int] = info.rank_offsets[: num_ranks + 1]
        #: The global row at each position: rank r has positions rank_offsets[r] to rank_offsets[r + 1] - 1.
        self.permutation = torch.tensor(info.permutation[: self.total_rows], dtype=torch.int64)
        #: The position of each global row.
        self.inverse = torch.tensor(info.inverse[: self.total_rows], dtype=torch.int64)
        self.pieces = [
            Piece(p.document, p.row_begin, p.row_end, p.key_begin, p.key_end, p.local_row, p.rank, bool(p.whole))
            for p in info.pieces[: info.num_pieces]
        ]
        self.work: List[int] = info.work[:num_ranks]
        self.forward_bytes: List[int] = info.forward_bytes[:num_ranks]
        self.backward_bytes: List[int] = info.backward_bytes[:num_ranks]

    def __del__(self) -> None:
        if self._handle:
            lib.fa_dist_layout_destroy(self._handle)

    def rows(self, rank: int) -> Tensor:
        """The global rows of a rank, in the order of its tensors."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank is {rank}; the plan has {self.num_ranks} ranks")
        return self.permutation[self.rank_offsets[rank] : self.rank_offsets[rank + 1]]

    def scatter(self, whole: Tensor, rank: int, dim: int = 0) -> Tensor:
        """A rank's rows of a tensor that has all rows in dimension `dim`. Differentiable; no communication."""
        if whole.shape[dim] != self.total_rows:
            raise ValueError(f"whole has {whole.shape[dim]} rows in dimension {dim}; the plan has {self.total_rows}")
        return whole.index_select(dim, self.rows(rank).to(whole.device))

    def gather(self, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
        """The tensor with all rows in order, from those of every rank, which come from all_gather for example. Differentiable."""
        rows = [part.shape[dim] for part in parts]
        expected = [self.rank_offsets[r + 1] - self.rank_offsets[r] for r in range(self.num_ranks)]
        if rows != expected:
            raise ValueError(f"parts have {rows} rows in dimension {dim}; the plan has {expected}")
        return torch.cat(list(parts), dim).index_select(dim, self.inverse.to(parts[0].device))


class _Messages:
    """The table of functions of a process group that is not NCCL's: messages in host memory, by isend and irecv."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._pending: List[Any] = []
        self._aborted = False
        self.error: Optional[BaseException] = None  # what PyTorch said about the failure
        self.table = _abi_dist.fa_dist_transport()
        check(lib.fa_dist_transport_init(ctypes.byref(self.table), ctypes.sizeof(self.table)))
        self.table.rank = torch.distributed.get_rank(group)
        self.table.num_ranks = torch.distributed.get_world_size(group)
        self.table.exchange = _abi_dist.EXCHANGE_FN(self._exchange)
        self.table.wait = _abi_dist.WAIT_FN(self._wait)
        self.table.abort = _abi_dist.ABORT_FN(self._abort)
        self.table.status = _abi_dist.STATUS_FN(self._status)

    def _guarded(self, body: Any) -> int:
        if self._aborted:
            return _abi_dist.ERROR_TRANSPORT
        try:
            body()
            return _abi.OK
        except BaseException as error:  # nothing may be raised through C
            self.error = error
            return _abi_dist.ERROR_TRANSPORT

    def _exchange(self, _user: Any, messages: Any, count: int, _stream: Any) -> int:
        def start() -> None:
            for message in messages[:count]:
                memory = (ctypes.c_uint8 * message.bytes).from_address(message.data)
                peer = torch.distributed.get_global_rank(self._group, message.peer)
                move = torch.distributed.irecv if message.receive else torch.distributed.isend
                self._pending.append(move(torch.frombuffer(memory, dtype=torch.uint8), peer, group=self._group))

        return self._guarded(start)

    def _wait(self, _user: Any, timeout_ms: int) -> int:
        def finish() -> None:
            while self._pending:
                self._pending[0].wait(timedelta(milliseconds=timeout_ms))
                self._pending.pop(0)

        return self._guarded(finish)

    def _abort(self, _user: Any) -> None:
        self._aborted = True

    def _status(self, _user: Any) -> int:
        return _abi_dist.ERROR_TRANSPORT if self._aborted else _abi.OK


def _nccl_communicator(group: Any, device: torch.device) -> int:
    try:
        backend = group._get_backend(device)
    except RuntimeError as error:
        raise ValueError(f"device is {device}, for which the group has no backend") from error
    if backend.name() != "nccl" or not hasattr(backend, "_comm_ptr"):
        raise ValueError(
            f"device is {device}, for which the group has the backend {backend.name()}; CUDA needs nccl, of a PyTorch that tells its "
            f"communicator (ProcessGroupNCCL._comm_ptr), which {torch.__version__} {'does' if hasattr(backend, '_comm_ptr') else 'does not'}"
        )
    torch.distributed.all_reduce(torch.zeros(1, device=device), group=group)  # the first collective call makes it
    return backend._comm_ptr()


class Ranks:
    """This rank's end of a process group. Collective: every rank of the group makes one, for the same kind of device.

    group: None = the default group. device: None = the current CUDA device if the group's backend is nccl, else the CPU. timeout: seconds that a wait for
    messages may take. With NCCL, `status` has to be polled: nothing else tells of a dead rank. A group of another kind cannot be interrupted:
    there `abort` makes later calls fail, and a call that waits ends with its time-out.
    """

    def __init__(self, group: Any = None, *, device: Union[torch.device, str, None] = None, timeout: float = 600.0) -> None:
        self._handle: Optional[ctypes.c_void_p] = None
        group = torch.distributed.group.WORLD if group is None else group
        if group is None:
            raise RuntimeError("there is no process group; call torch.distributed.init_process_group first")
        if device is None:
            device = "cuda" if torch.distributed.get_backend(group) == "nccl" else "cpu"
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"device is {self.device}; it must be a CPU or a CUDA device")
        nccl = self.device.type == "cuda"
        if nccl and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.rank: int = torch.distributed.get_rank(group)
        self.num_ranks: int = torch.distributed.get_world_size(group)
        communicator = _nccl_communicator(group, self.device) if nccl else None
        self._context = Context(self.device.type, self.device.index or 0, threads=0 if nccl else torch.get_num_threads())
        self._messages = None if nccl else _Messages(group)
        #: The kinds of calls of each plan that `fa_dist_prepare` has seen.
        self._prepared: "weakref.WeakKeyDictionary[Plan, Set[Tuple[Any, ...]]]" = weakref.WeakKeyDictionary()
        config = _abi_dist.fa_dist_config()
        check(lib.fa_dist_config_init(ctypes.byref(config), ctypes.sizeof(config)))
        _abi.assign(config, "timeout_ms", max(1, int(timeout * 1000)))
        if self._messages is not None:
            config.transport = ctypes.pointer(self._messages.table)
        handle = ctypes.c_void_p()
        self._check(lib.fa_dist_create(ctypes.byref(handle), self._context._open(), communicator, ctypes.byref(config)))
        self._handle = handle

    def close(self) -> None:
        """Ends the handle; the group stays. It cannot be used afterwards."""
        handle, self._handle = self._handle, None
        if handle:
            lib.fa_dist_destroy(handle)
            self._context.close()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()

    def _open(self) -> ctypes.c_void_p:
        if self._handle is None:
            raise ValueError("the ranks are closed")
        return self._handle

    def _check(self, status: int) -> None:
        try:
            check(status, self._context._open())
        except Error as error:
            raise error from (self._messages.error if self._messages is not None else None)

    def status(self) -> None:
        """Raises `flashattn.Error` if messages have failed or are late. Does not wait."""
        check(lib.fa_dist_status(self._open()))

    def abort(self) -> None:
        """Makes this and later calls fail. With NCCL it aborts the group's communicator, which is of no use afterwards."""
        check(lib.fa_dist_abort(self._open()))

    def attention(
        self,
        plan: Plan,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: Optional[float] = None,
        softcap: float = 0.0,
        sink: Optional[Tensor] = None,
        alibi_slopes: Optional[Tensor] = None,
        alibi_log_scale: float = 0.0,
        deterministic: bool = False,
        return_lse: bool = False,
    ) -> "Tensor | tuple[Tensor, Tensor]":
        """Attention of this rank's rows, (rows, heads, head_dim), in the order of `plan.rows(rank)`. Collective, and so is its backward.

        Mask and window are the plan's. The lse that return_lse=True adds is (heads, rows). Gradients flow to q, k, v and sink, also through the lse. All
        ranks give the same options, and need gradients alike. That of sink is the sum over all ranks on each of them: do not sum it again.
        The first call of a kind compares the arguments of all ranks.
        """
        options: Dict[str, Any] = {**plan._mask, "scale": scale, "softcap": softcap, "alibi_log_scale": alibi_log_scale}
        options.update(alibi_slopes=alibi_slopes, deterministic=deterministic)
        needed = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sink))
        out, lse = _Attention.apply(self, plan, options, return_lse, needed, q, k, v, sink)
        return (out, lse) if return_lse else out

    def _problem(self, tensors: Sequence[Optional[Tensor]], options: Dict[str, Any]) -> _abi.fa_attention:
        q, k, v, sink, out, lse = tensors
        view = _viewer(self.device)
        problem = problem_of(q, k, v, {**options, "sink": sink}, view, [])
        problem.out, problem.lse = view(out, "out"), view(lse, "lse")
        return problem

    def _gradients(self, tensors: Sequence[Optional[Tensor]]) -> _abi.fa_gradients:
        gradients = _abi.fa_gradients(ctypes.sizeof(_abi.fa_gradients))
        for name, tensor in zip(("dout", "dlse", "dq", "dk", "dv", "dsink"), tensors):
            if tensor is not None:
                setattr(gradients, name, _viewer(self.device)(tensor, name))
        return gradients


def _contiguous_like(tensor: Optional[Tensor]) -> Optional[Tensor]:
    return None if tensor is None else torch.empty_like(tensor, memory_format=torch.contiguous_format)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ranks, plan, options, return_lse, needed, q, k, v, sink):
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
        q, k, v = _rows(q), _rows(k), _rows(v)
        given = [q, k, v, sink]
        problem = ranks._problem([*given, out, lse], options)
        gradients = None
        if needed:
            dout, dlse = torch.empty_like(out), torch.empty_like(lse) if return_lse else None
            results = [_contiguous_like(x) for x in given]  # in memory of their own, or the library refuses them
            gradients = ctypes.byref(ranks._gradients([dout, dlse, *results]))
        prepared = ranks._prepared.setdefault(plan, set())
        kind = (needed, return_lse, sink is None, *((name, _kind(value)) for name, value in options.items()))
        if kind not in prepared:
            ranks._check(lib.fa_dist_prepare(ranks._open(), plan._handle, ctypes.byref(problem), gradients))
            prepared.add(kind)
        ranks._check(lib.fa_dist_forward(ranks._open(), plan._handle, ctypes.byref(problem), None, 0, _stream(ranks.device)))
        ctx.ranks, ctx.plan, ctx.options, ctx.return_lse = ranks, plan, options, return_lse
        ctx.save_for_backward(q, k, v, sink, out, lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        ranks: Ranks = ctx.ranks
        saved = ctx.saved_tensors
        results = [_contiguous_like(x) for x in saved[:4]]
        dout, dlse = _rows(dout), _rows(dlse) if ctx.return_lse else None
        problem = ranks._problem(saved, ctx.options)
        gradients = ranks._gradients([dout, dlse, *results])
        ranks._check(
            lib.fa_dist_backward(
                ranks._open(),
                ctx.plan._handle,
                ctypes.byref(problem),
                ctypes.byref(gradients),
                None,
                0,
                _stream(ranks.device),
            )
        )
        return (None, None, None, None, None, *results)


def _kind(option: Any) -> Any:
    """What an option is compared by: contents of tensors do not count."""
    return (tuple(option.shape), option.dtype) if isinstance(option, Tensor) else option
