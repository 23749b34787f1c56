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
using .LibFlashattn: addresses, fa_tensor, fa_attention, fa_gradients, fa_config, fa_plan_info

export Context, FlashAttnError, attention, attention!, attention_gradients, query_forward

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
dtype(::Type{Int32}) = LibFlashattn.FA_INT32
dtype(::Type{Int64}) = LibFlashattn.FA_INT64
dtype(::Type{UInt8}) = LibFlashattn.FA_UINT8
dtype(::Type{Bool}) = LibFlashattn.FA_BOOL
dtype(T::Type) = throw(ArgumentError("libflashattn has no dtype for $T"))

# Sizes and strides in C's order. The array must be kept alive by the caller.
tensor(::Nothing) = fa_tensor()
function tensor(x::StridedArray{T,N}) where {T,N}
    1 <= N <= 4 || throw(ArgumentError("a tensor has 1 to 4 dimensions, not $N"))
    pad(dims) = ntuple(d -> d <= N ? Int64(dims[N+1-d]) : Int64(0), 4)
    return fa_tensor(pointer(x), pad(size(x)), pad(strides(x)), dtype(T), N)
end

function problem(q, k, v, out, lse, bias, sink, causal, window, scale, softcap, dropout_p, dropout_seed)
    p = fa_attention()
    check(ccall(addresses[:fa_attention_init], Int32, (Ref{fa_attention}, Csize_t), p, sizeof(fa_attention)), C_NULL)
    p.q, p.k, p.v, p.out, p.lse = tensor(q), tensor(k), tensor(v), tensor(out), tensor(lse)
    p.bias, p.sink = tensor(bias), tensor(sink)
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
`dropout_p`, `dropout_seed`, `context`.
"""
function attention!(
    out,
    lse,
    q,
    k,
    v;
    causal = false,
    window = (nothing, nothing),
    scale = nothing,
    softcap = 0,
    bias = nothing,
    sink = nothing,
    dropout_p = 0,
    dropout_seed = 0,
    context = default_context(),
)
    GC.@preserve q k v out lse bias sink context begin
        p = problem(q, k, v, out, lse, bias, sink, causal, window, scale, softcap, dropout_p, dropout_seed)
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
    causal = false,
    window = (nothing, nothing),
    scale = nothing,
    softcap = 0,
    bias = nothing,
    sink = nothing,
    dropout_p = 0,
    dropout_seed = 0,
    context = default_context(),
)
    like(x) = x === nothing ? nothing : Array{eltype(x)}(undef, size(x))
    dq, dk, dv, dbias, dsink = like(q), like(k), like(v), like(bias), like(sink)
    GC.@preserve q k v out lse bias sink dout dlse dq dk dv dbias dsink context begin
        p = problem(q, k, v, out, lse, bias, sink, causal, window, scale, softcap, dropout_p, dropout_seed)
        g = fa_gradients()
        check(ccall(addresses[:fa_gradients_init], Int32, (Ref{fa_gradients}, Csize_t), g, sizeof(fa_gradients)), C_NULL)
        g.dout, g.dlse, g.dq, g.dk, g.dv = tensor(dout), tensor(dlse), tensor(dq), tensor(dk), tensor(dv)
        g.dbias, g.dsink = tensor(dbias), tensor(dsink)
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

text(bytes) = String(UInt8[b for b in Iterators.takewhile(!iszero, bytes)])

"""
    query_forward(out, lse, q, k, v; context, ...)

How `attention!` would run: (kernel, reason, workspace_bytes, flops, bytes). Throws what it would throw; reads no data.
"""
function query_forward(
    out,
    lse,
    q,
    k,
    v;
    causal = false,
    window = (nothing, nothing),
    scale = nothing,
    softcap = 0,
    bias = nothing,
    sink = nothing,
    dropout_p = 0,
    dropout_seed = 0,
    context = default_context(),
)
    info = fa_plan_info()
    check(ccall(addresses[:fa_plan_info_init], Int32, (Ref{fa_plan_info}, Csize_t), info, sizeof(fa_plan_info)), C_NULL)
    GC.@preserve q k v out lse bias sink context begin
        p = problem(q, k, v, out, lse, bias, sink, causal, window, scale, softcap, dropout_p, dropout_seed)
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
