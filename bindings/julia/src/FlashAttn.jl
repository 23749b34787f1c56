# SPDX-License-Identifier: Apache-2.0
"""
Exact attention, forward and backward, through libflashattn, on the CPU.

    using FlashAttn
    out, lse = attention(q, k, v; causal = true)        # q: (head_dim, heads, rows, batch)
    dq, dk, dv = attention_gradients(dout, q, k, v, out, lse; causal = true)

Julia's arrays begin with the dimension that lies closest together, so theirs are the C dimensions in reverse: (head_dim, heads, rows, batch) is
the library's (batch, rows, heads, head_dim) without a copy. Views of any strides are taken as they are, if their first stride is 1.
"""
module FlashAttn

include("LibFlashattn.jl")
using .LibFlashattn
using .LibFlashattn: addresses, fa_tensor, fa_append, fa_attention, fa_gradients, fa_config, fa_merge_problem, fa_plan_info

export Context, FlashAttnError, append_kv!, attention, attention!, attention_gradients, merge_attention!, query_forward
export SLICE_BOTH_CAUSAL, SLICE_CAUSAL, SLICE_FULL, SLICE_INVERSE_CAUSAL

const SLICE_FULL = LibFlashattn.FA_SLICE_FULL
const SLICE_CAUSAL = LibFlashattn.FA_SLICE_CAUSAL
const SLICE_INVERSE_CAUSAL = LibFlashattn.FA_SLICE_INVERSE_CAUSAL
const SLICE_BOTH_CAUSAL = LibFlashattn.FA_SLICE_BOTH_CAUSAL

"""A call that the library refused or could not complete: its status, the constant's name, and the library's sentence."""
struct FlashAttnError <: Exception
    status::Int32
    text::String
end

status_name(status) = unsafe_string(ccall(addresses[:fa_status_name], Cstring, (Int32,), status))
Base.showerror(io::IO, e::FlashAttnError) = print(io, status_name(e.status), ": ", e.text)

last_error(handle) = unsafe_string(ccall(addresses[:fa_last_error], Cstring, (Ptr{Cvoid},), handle))
check(status, handle) = status == LibFlashattn.FA_OK || throw(FlashAttnError(status, last_error(handle)))

"""Version of the loaded library."""
version() = VersionNumber(unsafe_string(ccall(addresses[:fa_version_string], Cstring, ())))

"""
    Context(; threads = 0)

The CPU with its threads (0 = all) and scratch memory. One task uses it at a time.
"""
mutable struct Context
    handle::Ptr{Cvoid}
    function Context(; threads::Integer = 0)
        config = fa_config()
        check(ccall(addresses[:fa_config_init], Int32, (Ref{fa_config}, Csize_t), config, sizeof(fa_config)), C_NULL)
        config.device_type = LibFlashattn.FA_DEVICE_CPU
        config.num_threads = threads
        handle = Ref{Ptr{Cvoid}}(C_NULL)
        check(ccall(addresses[:fa_create], Int32, (Ptr{Ptr{Cvoid}}, Ref{fa_config}), handle, config), C_NULL)
        return finalizer(close, new(handle[]))
    end
end

"""Ends the context and its threads. Closing twice has no effect."""
function Base.close(ctx::Context)
    ccall(addresses[:fa_destroy], Cvoid, (Ptr{Cvoid},), ctx.handle)
    ctx.handle = C_NULL
    return nothing
end

const default = Ref{Union{Nothing,Context}}(nothing)
default_context() = (default[] === nothing && (default[] = Context()); default[])

dtype(::Type{Float32}) = LibFlashattn.FA_FLOAT32
dtype(::Type{Float16}) = LibFlashattn.FA_FLOAT16
dtype(::Type{Int8}) = LibFlashattn.FA_INT8
dtype(::Type{Int32}) = LibFlashattn.FA_INT32
dtype(::Type{Int64}) = LibFlashattn.FA_INT64
dtype(::Type{UInt8}) = LibFlashattn.FA_UINT8
dtype(::Type{Bool}) = LibFlashattn.FA_BOOL
dtype(T::Type) = throw(ArgumentError("libflashattn has no dtype for $T"))

# Sizes and strides in C's order. The array is put into `alive`, which the caller preserves as long as the library may use its address.
tensor(alive, ::Nothing) = fa_tensor()
function tensor(alive, x::StridedArray{T,N}) where {T,N}
    1 <= N <= 4 || throw(ArgumentError("a tensor has 1 to 4 dimensions, not $N"))
    push!(alive, x)
    pad(dims) = ntuple(d -> d <= N ? Int64(dims[N+1-d]) : Int64(0), 4)
    return fa_tensor(pointer(x), pad(size(x)), pad(strides(x)), dtype(T), N)
end

tensor(alive, x::BitArray) = tensor(alive, Array{Bool}(x))

# A BitArray is in memory what the library calls bits if its rows begin at a byte; otherwise it is copied into bytes.
bits(alive, x) = tensor(alive, x)
function bits(alive, x::BitArray{4})
    n1, n2, n3, n4 = size(x)
    n1 % 8 == 0 || return tensor(alive, x)
    push!(alive, x)
    return fa_tensor(pointer(x.chunks), (n4, n3, n2, n1), (n1 * n2 * n3, n1 * n2, n1, 1), LibFlashattn.FA_BIT, 4)
end

function problem(
    alive,
    q,
    k,
    v,
    out,
    lse;
    causal = false,
    window = (nothing, nothing),
    scale = nothing,
    softcap = 0,
    bias = nothing,
    sink = nothing,
    element_mask = nothing,
    block_mask = nothing,
    block_counts = nothing,
    block_indices = nothing,
    block_size = (0, 0),
    slices = nothing,
    kv_indices = nothing,
    seqused_k = nothing,
    seqstart_k = nothing,
    page_table = nothing,
    k_descale = nothing,
    v_descale = nothing,
    dropout_p = 0,
    dropout_seed = 0,
    max_logit = nothing,
)
    p = fa_attention()
    check(ccall(addresses[:fa_attention_init], Int32, (Ref{fa_attention}, Csize_t), p, sizeof(fa_attention)), C_NULL)
    p.q, p.k, p.v = tensor(alive, q), tensor(alive, k), tensor(alive, v)
    p.out, p.lse = tensor(alive, out), tensor(alive, lse)
    p.bias, p.sink = tensor(alive, bias), tensor(alive, sink)
    p.seqused_k, p.page_table = tensor(alive, seqused_k), tensor(alive, page_table)
    p.k_descale, p.v_descale = tensor(alive, k_descale), tensor(alive, v_descale)
    p.element_mask, p.block_mask = bits(alive, element_mask), tensor(alive, block_mask)
    p.block_counts, p.block_indices = tensor(alive, block_counts), tensor(alive, block_indices)
    p.block_size_q, p.block_size_k = block_size
    p.kv_indices = tensor(alive, kv_indices)
    p.slices, p.seqstart_k, p.max_logit = tensor(alive, slices), tensor(alive, seqstart_k), tensor(alive, max_logit)
    causal in (true, false, :top_left) || throw(ArgumentError("causal is $causal; it must be true, false or :top_left"))
    p.mask =
        causal === :top_left ? LibFlashattn.FA_MASK_CAUSAL_TOP_LEFT :
        causal ? LibFlashattn.FA_MASK_CAUSAL : LibFlashattn.FA_MASK_NONE
    left, right = window
    if left !== nothing
        p.window |= LibFlashattn.FA_WINDOW_LEFT
        p.window_left = left
    end
    if right !== nothing
        p.window |= LibFlashattn.FA_WINDOW_RIGHT
        p.window_right = right
    end
    p.softmax_scale = scale === nothing ? 0 : scale
    p.softcap = softcap
    p.dropout_p = dropout_p
    p.dropout_seed = dropout_seed
    return p
end

"""
    attention!(out, lse, q, k, v; options...)

Writes into `out` and, unless it is `nothing`, `lse`: Float32, (rows, heads, batch). Options: `causal` (true, false, :top_left), `window` = (left, right) with
`nothing` for no limit, `scale` (nothing = 1 / sqrt(head_dim)), `softcap`, `bias` (rows of k, rows of q or 1, heads or 1, batch or 1), `sink` (heads),
`seqused_k` and `page_table` of a cache as for [`append_kv!`](@ref), `k_descale` and `v_descale` of keys and values in Int8, `dropout_p`, `dropout_seed`,
`max_logit` (heads), Float32, which receives the largest visible logit of each head, `context`.

Masks as data; rows and blocks count from 0, as in C:
- `element_mask`: Bool, UInt8 or a BitArray, (rows of k or 1, rows of q or 1, heads or 1, batch or 1); false masks the pair. A BitArray is copied unless its
  first size is a multiple of 8.
- `seqstart_k`: (batch) Int32, number of keys at the start of each sequence that are masked.
- `slices`: (5, n) Int32, q_begin, q_end, k_begin, k_end and a kind (`SLICE_FULL`, `SLICE_CAUSAL`, `SLICE_INVERSE_CAUSAL`, `SLICE_BOTH_CAUSAL`); a pair in no
  slice is masked.
- `kv_indices`: (n, rows of q, batch) Int32, the rows of k that each query sees, in all its heads, and no others; a negative number is none. Forward,
  without other masks, bias and dropout.
- `block_mask`: (blocks of k, blocks of q, heads or 1, batch or 1); or lists of the visible blocks of keys, Int32: `block_counts`, (blocks of q, heads or 1,
  batch or 1), and `block_indices`, (largest count, blocks of q, heads or 1, batch or 1). `block_size` = (rows of q, rows of k).
"""
function attention!(out, lse, q, k, v; context = default_context(), options...)
    alive = Any[]
    GC.@preserve alive context begin
        p = problem(alive, q, k, v, out, lse; options...)
        status = ccall(
            addresses[:fa_forward],
            Int32,
            (Ptr{Cvoid}, Ref{fa_attention}, Ptr{Cvoid}, Csize_t, Ptr{Cvoid}),
            context.handle,
            p,
            C_NULL,
            0,
            C_NULL,
        )
        check(status, context.handle)
    end
    return out
end

"""
    attention(q, k, v; options...) -> (out, lse)

softmax(scale q k' + ..., masked) v of (head_dim, heads, rows, batch), and the log of the softmax's denominator, (rows, heads, batch). Options as for
[`attention!`](@ref).
"""
function attention(q, k, v; options...)
    ndims(q) == 4 || throw(ArgumentError("q has $(ndims(q)) dimensions; it needs (head_dim, heads, rows, batch)"))
    out = similar(q, eltype(q), (size(v, 1), size(q, 2), size(q, 3), size(q, 4)))
    lse = Array{Float32}(undef, size(q, 3), size(q, 2), size(q, 4))
    attention!(out, lse, q, k, v; options...)
    return out, lse
end

"""
    attention_gradients(dout, q, k, v, out, lse; dlse = nothing, options...) -> (dq, dk, dv, dbias, dsink)

Gradients of [`attention`](@ref) for the gradients `dout` (and `dlse`) of its results, with the same options; `nothing` for a bias or sink that is not given.
"""
function attention_gradients(
    dout,
    q,
    k,
    v,
    out,
    lse;
    dlse = nothing,
    bias = nothing,
    sink = nothing,
    context = default_context(),
    options...,
)
    like(x) = x === nothing ? nothing : Array{eltype(x)}(undef, size(x))
    dq, dk, dv, dbias, dsink = like(q), like(k), like(v), like(bias), like(sink)
    alive = Any[]
    GC.@preserve alive context begin
        p = problem(alive, q, k, v, out, lse; bias = bias, sink = sink, options...)
        g = fa_gradients()
        check(ccall(addresses[:fa_gradients_init], Int32, (Ref{fa_gradients}, Csize_t), g, sizeof(fa_gradients)), C_NULL)
        g.dout, g.dlse = tensor(alive, dout), tensor(alive, dlse)
        g.dq, g.dk, g.dv = tensor(alive, dq), tensor(alive, dk), tensor(alive, dv)
        g.dbias, g.dsink = tensor(alive, dbias), tensor(alive, dsink)
        status = ccall(
            addresses[:fa_backward],
            Int32,
            (Ptr{Cvoid}, Ref{fa_attention}, Ref{fa_gradients}, Ptr{Cvoid}, Csize_t, Ptr{Cvoid}),
            context.handle,
            p,
            g,
            C_NULL,
            0,
            C_NULL,
        )
        check(status, context.handle)
    end
    return dq, dk, dv, dbias, dsink
end

"""
    append_kv!(k_cache, v_cache, k, v; options...)

Writes new keys and values, (head_dim, heads, new rows, batch), into caches (head_dim, heads, rows, batch) or, with `page_table`, (head_dim, heads, page size,
pages), and rotates them and the queries on the way. `v_cache` and `v` may be `nothing`. Options: `offsets`, (batch) Int32, rows that each sequence has already;
`seqused`, (batch) Int32, how many of the new rows count; `seqused_k`, (batch) Int32, written: rows that each sequence has afterwards; `page_table`,
(max pages, batch) Int32, whose page numbers count from 0; `rotary_cos` and `rotary_sin`, (rotary_dim / 2, positions); `rotary_positions`, (new rows, batch)
Int32 or Int64, from 0 too; `interleaved`; `q`, the queries of the new rows, rotated into `q_out` or, without it, in place; `k_descale` and `v_descale` of caches in
Int8, Float32: (heads, batch) is read, (heads, rows, batch) or (heads, page size, pages) is written; `context`.
"""
function append_kv!(
    k_cache,
    v_cache,
    k,
    v;
    offsets = nothing,
    seqused = nothing,
    seqused_k = nothing,
    page_table = nothing,
    rotary_cos = nothing,
    rotary_sin = nothing,
    rotary_positions = nothing,
    interleaved = false,
    q = nothing,
    q_out = nothing,
    k_descale = nothing,
    v_descale = nothing,
    context = default_context(),
)
    alive = Any[]
    GC.@preserve alive context begin
        a = fa_append()
        check(ccall(addresses[:fa_append_init], Int32, (Ref{fa_append}, Csize_t), a, sizeof(fa_append)), C_NULL)
        a.k, a.v, a.k_cache, a.v_cache = tensor(alive, k), tensor(alive, v), tensor(alive, k_cache), tensor(alive, v_cache)
        a.offsets, a.seqused, a.seqused_k = tensor(alive, offsets), tensor(alive, seqused), tensor(alive, seqused_k)
        a.page_table, a.q, a.q_out = tensor(alive, page_table), tensor(alive, q), tensor(alive, q_out)
        a.rotary_cos, a.rotary_sin = tensor(alive, rotary_cos), tensor(alive, rotary_sin)
        a.rotary_positions = tensor(alive, rotary_positions)
        a.k_descale, a.v_descale = tensor(alive, k_descale), tensor(alive, v_descale)
        interleaved && (a.flags |= LibFlashattn.FA_APPEND_INTERLEAVED)
        status = ccall(
            addresses[:fa_append_kv],
            Int32,
            (Ptr{Cvoid}, Ref{fa_append}, Ptr{Cvoid}, Csize_t, Ptr{Cvoid}),
            context.handle,
            a,
            C_NULL,
            0,
            C_NULL,
        )
        check(status, context.handle)
    end
    return k_cache, v_cache
end

"""
    merge_attention!(out, lse, parts; context)

Combines results `(out, lse)` of [`attention`](@ref) over disjoint sets of keys into the result over all of them; `lse` may be `nothing`.
"""
function merge_attention!(out, lse, parts; context = default_context())
    alive = Any[]
    GC.@preserve alive context begin
        outs = fa_tensor[tensor(alive, part[1]) for part in parts]
        lses = fa_tensor[tensor(alive, part[2]) for part in parts]
        m = fa_merge_problem()
        check(ccall(addresses[:fa_merge_problem_init], Int32, (Ref{fa_merge_problem}, Csize_t), m, sizeof(fa_merge_problem)), C_NULL)
        m.num_parts = length(outs)
        m.out, m.lse = tensor(alive, out), tensor(alive, lse)
        GC.@preserve outs lses begin
            m.out_parts, m.lse_parts = pointer(outs), pointer(lses)
            status = ccall(
                addresses[:fa_merge],
                Int32,
                (Ptr{Cvoid}, Ref{fa_merge_problem}, Ptr{Cvoid}, Csize_t, Ptr{Cvoid}),
                context.handle,
                m,
                C_NULL,
                0,
                C_NULL,
            )
        end
        check(status, context.handle)
    end
    return out
end

text(bytes) = String(UInt8[b for b in Iterators.takewhile(!iszero, bytes)])

"""
    query_forward(out, lse, q, k, v; options...)

How `attention!` would run: (kernel, reason, workspace_bytes, flops, bytes). Throws what it would throw; reads no data.
"""
function query_forward(out, lse, q, k, v; context = default_context(), options...)
    info = fa_plan_info()
    check(ccall(addresses[:fa_plan_info_init], Int32, (Ref{fa_plan_info}, Csize_t), info, sizeof(fa_plan_info)), C_NULL)
    alive = Any[]
    GC.@preserve alive context begin
        p = problem(alive, q, k, v, out, lse; options...)
        status = ccall(
            addresses[:fa_forward_query],
            Int32,
            (Ptr{Cvoid}, Ref{fa_attention}, Ref{fa_plan_info}),
            context.handle,
            p,
            info,
        )
        check(status, context.handle)
    end
    return (
        kernel = text(info.kernel),
        reason = text(info.reason),
        workspace_bytes = info.workspace_bytes,
        flops = info.flops,
        bytes = info.bytes,
    )
end

end # module
