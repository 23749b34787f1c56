# SPDX-License-Identifier: Apache-2.0
"""Context parallelism for PyTorch: sequences whose rows are spread over the ranks of a process group of torch.distributed.

    from flashattn.distributed import Plan, Ranks
    plan = Plan([total], heads_q=32, heads_k=8, head_dim=128, num_ranks=dist.get_world_size(), dtype=torch.bfloat16, causal=True)
    ranks = Ranks()                                  # of the default group; keep it
    tokens = plan.scatter(tokens, rank)              # and position ids: once a batch, for all layers
    out = ranks.attention(plan, q, k, v)             # (rows of the rank, heads, head_dim), in every layer; differentiable
    out = ranks.decode(q, k_cache, v_cache)          # all queries, over a KV cache of which each rank has some rows

Every rank makes the same calls in the same order. Messages of an NCCL group travel over its communicator, those of any other group by isend
and irecv, in host memory. docs/distributed.md says what the ways are and what travels.
"""

from __future__ import annotations

import ctypes
import weakref
from datetime import timedelta
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

import torch
import torch.distributed
from torch import Tensor

from . import _abi, _abi_dist, _tensor
from ._context import Context
from ._error import Error, check
from ._options import problem_of, set_options
from ._torch_ops import _NO_GRADIENT, _result_dtype, _rows, _stream, _viewer
from .torch import Integers, _int32

__all__ = ["CallInfo", "Piece", "Plan", "Ranks"]

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


class CallInfo(NamedTuple):
    """How a call would run on this rank."""

    reason: str
    workspace_bytes: int
    received_bytes: int
    sent_bytes: int
    #: 0 for `decode`, and if no document is cut.
    num_stages: int
    #: Number of calls of attention kernels.
    num_launches: int


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
        self.lengths: List[int] = list(lengths)
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

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank is {rank}; the plan has {self.num_ranks} ranks")

    def rows(self, rank: int) -> Tensor:
        """The global rows of a rank, in the order of its tensors."""
        self._check_rank(rank)
        return self.permutation[self.rank_offsets[rank] : self.rank_offsets[rank + 1]]

    def scatter(self, whole: Tensor, rank: int, dim: int = 0) -> Tensor:
        """A rank's rows of a tensor that has all rows in dimension `dim`. Differentiable; no communication."""
        if whole.shape[dim] != self.total_rows:
            raise ValueError(f"whole has {whole.shape[dim]} rows in dimension {dim}; the plan has {self.total_rows}")
        return whole.index_select(dim, self.rows(rank).to(whole.device))

    def scatter_bias(self, biases: Sequence[Tensor], rank: int) -> Tensor:
        """A rank's rows of a bias, as `Ranks.attention` takes it, from one bias per document, (1, heads_q or 1, rows, rows): that of a padded batch is
        bias.split(1).

        Columns are not permuted: they remain the keys of the row's document, and shorter documents get columns of zeros behind them, which nobody
        reads. Differentiable; no communication.
        """
        self._check_rank(rank)
        if len(biases) != len(self.lengths) or not self.lengths:
            raise ValueError(f"biases has {len(biases)} tensors; the plan has {len(self.lengths)} documents")
        heads = biases[0].shape[1:2]
        for document, (bias, rows) in enumerate(zip(biases, self.lengths)):
            if bias.shape != (1, *heads, rows, rows):
                raise ValueError(
                    f"biases[{document}] has shape {tuple(bias.shape)}; it must be (1, heads, {rows}, {rows}), with as many heads as biases[0]"
                )
        pieces = [piece for piece in self.pieces if piece.rank == rank]
        columns = max((self.lengths[piece.document] for piece in pieces), default=0)
        parts = [
            torch.nn.functional.pad(
                biases[piece.document][:, :, piece.row_begin : piece.row_end], (0, columns - self.lengths[piece.document])
            )
            for piece in pieces
        ]
        return torch.cat(parts, 2) if parts else biases[0][:, :, :0, :0]

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
        self._group = group
        self._timeout = timeout
        communicator = _nccl_communicator(group, self.device) if nccl else None
        self._context = Context(self.device.type, self.device.index or 0, threads=0 if nccl else torch.get_num_threads())
        self._messages = None if nccl else _Messages(group)
        #: The kinds of calls of each plan that `fa_dist_prepare` has seen.
        self._prepared: "weakref.WeakKeyDictionary[Plan, Set[Tuple[Any, ...]]]" = weakref.WeakKeyDictionary()
        #: Those that `fa_dist_decode_prepare` has seen.
        self._prepared_decodes: Set[Tuple[Any, ...]] = set()
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
        bias: Optional[Tensor] = None,
        sink: Optional[Tensor] = None,
        alibi_slopes: Optional[Tensor] = None,
        alibi_log_scale: float = 0.0,
        dropout_p: float = 0.0,
        dropout_seed: Union[int, Tensor, None] = None,
        dropout_offset: int = 0,
        deterministic: bool = False,
        fp32_products: bool = False,
        return_lse: bool = False,
    ) -> "Tensor | tuple[Tensor, Tensor]":
        """Attention of this rank's rows, (rows, heads, head_dim), in the order of `plan.rows(rank)`. Collective, and so is its backward.

        Mask and window are the plan's. The lse that return_lse=True adds is (heads, rows). Gradients flow to q, k, v, bias and sink, also through
        the lse. All ranks give the same options, and need gradients alike. That of sink is the sum over all ranks on each of them: do not sum it
        again. The first call of a kind compares the arguments of all ranks.

        bias: that of this rank's rows, (1, heads_q or 1, rows, keys), with a column for each key of the row's document, from key 0 on; `plan.scatter_bias`
        makes it. Its gradient is of the same rows, with zeros behind the last key of a row's document.

        Dropout drops the same elements as one device that computes all rows. Every rank needs the same seed for that, so rank 0 sends its seed and
        offset to the others in every forward, by a broadcast of the group; backward reads the copy. dropout_seed=None draws it from PyTorch's
        generator of the device, on every rank, and a number or a tensor of one int64 on the device sets it. Whatever other ranks give or draw has no
        effect. A captured graph draws or reads a new seed on each replay, but repeats a number. Documents must be cut at multiples of 16 rows (Plan
        does so where every length is a multiple of 16, and the total one of 16 num_ranks and at least 1024 num_ranks), or the way is "all_to_all".
        """
        if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(_NO_GRADIENT.format("alibi_slopes"))
        options: Dict[str, Any] = {**plan._mask, "scale": scale, "softcap": softcap, "alibi_log_scale": alibi_log_scale}
        options.update(alibi_slopes=alibi_slopes, dropout_p=dropout_p, deterministic=deterministic, fp32_products=fp32_products)
        dropout = self._seed(dropout_seed, dropout_offset) if dropout_p != 0 else None
        inputs = (q, k, v, bias, sink)
        wanted = _wanted(inputs) if torch.is_grad_enabled() else ()
        out, lse = _Attention.apply(self, plan, options, return_lse, wanted, dropout, *inputs)
        return (out, lse) if return_lse else out

    def query(
        self,
        plan: Plan,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        bias: Optional[Tensor] = None,
        sink: Optional[Tensor] = None,
        return_lse: bool = False,
        backward: bool = False,
        **options: Any,
    ) -> CallInfo:
        """How `attention` would run on this rank with the same arguments, or, with backward=True, its backward for those inputs here that require a
        gradient. Raises the `Error` it would raise. Not collective. Reads no tensor data.
        """
        inputs = (_rows(q), _rows(k), _rows(v), bias, sink)
        out, lse = _new_results(q, v)
        problem = self._problem(*inputs[:3], out, lse, {**plan._mask, **options, "bias": bias, "sink": sink})
        gradients = None
        if backward:
            wanted = _wanted((q, k, v, bias, sink))
            if not wanted:
                raise ValueError("backward is True, but no input requires a gradient")
            gradients, _holds = self._new_gradients(wanted, inputs, out, lse if return_lse else None)
        given = None if gradients is None else ctypes.byref(gradients)
        return self._info(lambda info: lib.fa_dist_query(self._open(), plan._handle, ctypes.byref(problem), given, info))

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: Optional[float] = None,
        softcap: float = 0.0,
        sink: Optional[Tensor] = None,
        causal: Union[bool, str] = False,
        window: Tuple[Optional[int], Optional[int]] = (None, None),
        bias: Optional[Tensor] = None,
        element_mask: Optional[Tensor] = None,
        kv_indices: Integers = None,
        seqused_k: Integers = None,
        seqstart_k: Integers = None,
        page_table: Integers = None,
        max_seqlen_k: int = 0,
        q_descale: Optional[Tensor] = None,
        k_descale: Optional[Tensor] = None,
        v_descale: Optional[Tensor] = None,
        num_splits: int = 0,
        deterministic: bool = False,
        batch_invariant: bool = False,
        fp32_products: bool = False,
        return_lse: bool = False,
    ) -> "Tensor | tuple[Tensor, Tensor]":
        """Attention of all queries, (batch, rows, heads, head_dim), over a KV cache of which each rank has some rows. Collective, without gradients.

        Every rank gives all queries, and the rows of the cache that it has, as many as it has (also none) and in any order. `seqused_k`, `seqstart_k`,
        `page_table`, masks, `kv_indices`, bias and the descales of keys and values are those of its own rows, and mean what `flashattn.torch.attention`
        says of these rows alone. A query sees every row in use of every rank that no mask hides: where several new tokens have the last rows of one
        rank, it gives causal=True, and the others do not. Every rank gets the whole out and, with return_lse=True, the lse, (batch, heads, rows). All ranks
        give the same sink and options. The first call of a kind, by the shape of the queries and the options, compares those of all ranks.
        """
        given = {
            "q": q,
            "k": k,
            "v": v,
            "sink": sink,
            "bias": bias,
            "q_descale": q_descale,
            "k_descale": k_descale,
            "v_descale": v_descale,
        }
        if torch.is_grad_enabled():
            for name, tensor in given.items():
                if tensor is not None and tensor.requires_grad:
                    raise NotImplementedError(
                        f"{name} requires a gradient, but decode has none; give {name}.detach(), or call it under torch.no_grad()"
                    )
        options: Dict[str, Any] = {"scale": scale, "softcap": softcap, "sink": sink}
        options.update(deterministic=deterministic, batch_invariant=batch_invariant, fp32_products=fp32_products)
        # What the ranks compare, and no more: a cache may change its shape on one rank alone, which then must not wait for the others.
        kind = (q.shape, q.dtype, v.shape[-1:], *((name, _kind(value)) for name, value in options.items()))
        options.update(causal=causal, window=window, bias=bias, element_mask=element_mask, kv_indices=kv_indices)
        options.update(seqused_k=seqused_k, seqstart_k=seqstart_k, page_table=page_table, max_seqlen_k=max_seqlen_k)
        options.update(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, num_splits=num_splits)
        problem, out, lse, _holds = self._decode_problem(q, k, v, return_lse, options)
        if kind not in self._prepared_decodes:
            self._check(lib.fa_dist_decode_prepare(self._open(), ctypes.byref(problem)))
            self._prepared_decodes.add(kind)
        self._check(lib.fa_dist_decode(self._open(), ctypes.byref(problem), None, 0, _stream(self.device)))
        return (out, lse) if return_lse else out

    def query_decode(self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **options: Any) -> CallInfo:
        """How `decode` would run on this rank with the same arguments; raises the `Error` it would raise. Not collective. Reads no tensor data."""
        problem, *_holds = self._decode_problem(q, k, v, return_lse, options)
        return self._info(lambda info: lib.fa_dist_decode_query(self._open(), ctypes.byref(problem), info))

    def _info(self, ask: Callable[[Any], int]) -> CallInfo:
        info = _abi_dist.fa_dist_info()
        check(lib.fa_dist_info_init(ctypes.byref(info), ctypes.sizeof(info)))
        self._check(ask(ctypes.byref(info)))
        numbers = (info.workspace_bytes, info.received_bytes, info.sent_bytes, info.num_stages, info.num_launches)
        return CallInfo(info.reason.decode("utf-8", "replace"), *numbers)

    def _seed(self, seed: Union[int, Tensor, None], offset: int) -> Tensor:
        """This rank's seed and offset of dropout, two int64 on the device."""
        if not isinstance(seed, (int, Tensor, type(None))):
            raise TypeError(f"dropout_seed is a {type(seed).__name__}; it must be a number, a tensor of one int64, or None")
        numbers = _abi.fa_attention()
        set_options(numbers, {"dropout_seed": seed, "dropout_offset": offset}, _viewer(self.device), [])
        pair = torch.empty(2, dtype=torch.int64, device=self.device)
        if seed is None:  # every rank draws, so that generators which are alike on all ranks remain so
            pair[:1] = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=self.device)
        elif isinstance(seed, Tensor):
            pair[:1] = seed.reshape(1)
        else:
            pair[0] = ctypes.c_int64(numbers.dropout_seed).value  # the same bits
        pair[1] = ctypes.c_int64(numbers.dropout_offset).value
        return pair

    def _send_seed(self, pair: Tensor) -> None:
        """Gives every rank the seed and offset of rank 0."""
        if self.num_ranks == 1:
            return
        if self._messages is not None:
            self.status()  # after a failure nobody sends anything
        try:
            source = torch.distributed.get_global_rank(self._group, 0)
            work = torch.distributed.broadcast(pair, source, group=self._group, async_op=True)
            if self._messages is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            if self._messages is not None:  # as after any failure of its messages; an NCCL communicator remains the caller's
                self.abort()
            text = f"the dropout seed of rank 0 did not come to rank {self.rank}: {error}"
            raise Error(_abi_dist.ERROR_TRANSPORT, text) from error

    def _problem(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Optional[Tensor],
        options: Dict[str, Any],
        dropout: Optional[Tensor] = None,
    ) -> _abi.fa_attention:
        view = _viewer(self.device)
        problem = problem_of(q, k, v, options, view, [])
        problem.out = view(out, "out")
        if lse is not None:
            problem.lse = view(lse, "lse")
        if dropout is not None:
            problem.dropout_seed_ptr = dropout.data_ptr()
            problem.dropout_offset_ptr = dropout.data_ptr() + dropout.itemsize
        return problem

    def _decode_problem(self, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, options: Dict[str, Any]) -> Any:
        """(problem, out, lse, what must live as long as the problem)"""
        if q.dim() != 4:
            raise TypeError(f"q has {q.dim()} dimensions; decode needs (batch, rows, heads, head_dim)")
        options = {**options}
        for name in ("kv_indices", "seqused_k", "seqstart_k", "page_table"):
            options[name] = _int32(options.get(name), self.device, name)
        q, k, v = _rows(q), _rows(k), _rows(v)
        out = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=_result_dtype(q))
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32) if return_lse else None
        return self._problem(q, k, v, out, lse, options), out, lse, (q, k, v, options)

    def _gradients(self, dout: Tensor, dlse: Optional[Tensor], results: Dict[str, Tensor]) -> _abi.fa_gradients:
        gradients = _abi.fa_gradients(ctypes.sizeof(_abi.fa_gradients))
        view = _viewer(self.device)
        gradients.dout = view(dout, "dout")
        if dlse is not None:
            gradients.dlse = view(dlse, "dlse")
        for name, tensor in results.items():
            setattr(gradients, name, view(tensor, name))
        return gradients

    def _new_gradients(
        self, wanted: Sequence[str], inputs: Sequence[Optional[Tensor]], out: Tensor, lse: Optional[Tensor]
    ) -> Tuple[_abi.fa_gradients, Any]:
        """Those of a backward with memory that nobody has written, to prepare it or to ask about it; and what must live as long as they."""
        dout, dlse = torch.empty_like(out), None if lse is None else torch.empty_like(lse)
        results = _results(wanted, inputs)
        return self._gradients(dout, dlse, results), (dout, dlse, results)


#: Gradients of q, k, v, bias and sink.
_GRADIENTS = ("dq", "dk", "dv", "dbias", "dsink")


def _wanted(inputs: Sequence[Optional[Tensor]]) -> Tuple[str, ...]:
    """The gradients that backward computes. If it is needed at all, that of a bias depends on what requires one, because it is large, and not every plan
    has it; the others are always computed.
    """
    if not any(x is not None and x.requires_grad for x in inputs):
        return ()
    return tuple(name for name, x in zip(_GRADIENTS, inputs) if x is not None and (name != "dbias" or x.requires_grad))


def _results(wanted: Sequence[str], inputs: Sequence[Optional[Tensor]]) -> Dict[str, Tensor]:
    """Memory for the gradients, of their own, or the library refuses them."""
    return {
        name: torch.empty_like(x, memory_format=torch.contiguous_format)
        for name, x in zip(_GRADIENTS, inputs)
        if name in wanted and x is not None
    }


def _new_results(q: Tensor, v: Tensor) -> Tuple[Tensor, Tensor]:
    if q.dim() != 3:
        raise TypeError(f"q has {q.dim()} dimensions; it needs (rows of the rank, heads, head_dim)")
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ranks, plan, options, return_lse, wanted, dropout, q, k, v, bias, sink):
        out, lse = _new_results(q, v)
        inputs = (_rows(q), _rows(k), _rows(v), bias, sink)
        problem = ranks._problem(*inputs[:3], out, lse, {**options, "bias": bias, "sink": sink}, dropout)
        prepared = ranks._prepared.setdefault(plan, set())
        heads = None if bias is None else (bias.dtype, bias.shape[1:2])
        kind = (wanted, return_lse, heads, sink is None, *((name, _kind(value)) for name, value in options.items()))
        if kind not in prepared:
            gradients = None
            if wanted:
                gradients, _holds = ranks._new_gradients(wanted, inputs, out, lse if return_lse else None)
            given = None if gradients is None else ctypes.byref(gradients)
            ranks._check(lib.fa_dist_prepare(ranks._open(), plan._handle, ctypes.byref(problem), given))
            prepared.add(kind)
        if dropout is not None:  # not before the ranks agree that there is dropout
            ranks._send_seed(dropout)
        ranks._check(lib.fa_dist_forward(ranks._open(), plan._handle, ctypes.byref(problem), None, 0, _stream(ranks.device)))
        ctx.ranks, ctx.plan, ctx.options, ctx.return_lse, ctx.wanted = ranks, plan, options, return_lse, wanted
        ctx.save_for_backward(*inputs, out, lse, dropout)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        ranks: Ranks = ctx.ranks
        *inputs, out, lse, dropout = ctx.saved_tensors
        results = _results(ctx.wanted, inputs)
        dout, dlse = _rows(dout), _rows(dlse) if ctx.return_lse else None
        q, k, v, bias, sink = inputs
        problem = ranks._problem(q, k, v, out, lse, {**ctx.options, "bias": bias, "sink": sink}, dropout)
        gradients = ranks._gradients(dout, dlse, results)
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
        return (*[None] * 6, *(results.get(name) for name in _GRADIENTS))


def _kind(option: Any) -> Any:
    """What an option is compared by: contents of tensors do not count."""
    return (tuple(option.shape), option.dtype) if isinstance(option, Tensor) else option
