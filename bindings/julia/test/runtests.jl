# SPDX-License-Identifier: Apache-2.0
using FlashAttn
using FlashAttn: LibFlashattn
using Random
using Test

# Attention and its gradients by definition, in Float64; arrays are (head_dim, heads, rows, batch).
function reference(q, k, v, dout; causal = false)
    q, k, v, dout = Float64.(q), Float64.(k), Float64.(v), Float64.(dout)
    out, dq, dk, dv = zero(dout), zero(q), zero(k), zero(v)
    lse = zeros(size(q, 3), size(q, 2), size(q, 4))
    scale, group = 1 / sqrt(size(q, 1)), size(q, 2) ÷ size(k, 2)
    shift = size(k, 3) - size(q, 3)
    for b in axes(q, 4), h in axes(q, 2)
        g = (h - 1) ÷ group + 1
        x = scale .* (q[:, h, :, b]' * k[:, g, :, b])
        causal && (x = [j <= i + shift ? x[i, j] : -Inf for i in axes(x, 1), j in axes(x, 2)])
        p = exp.(x)
        total = sum(p; dims = 2)
        lse[:, h, b] = log.(vec(total))
        p ./= total
        out[:, h, :, b] = v[:, g, :, b] * p'
        dp = dout[:, h, :, b]' * v[:, g, :, b]
        ds = scale .* p .* (dp .- sum(p .* dp; dims = 2))
        dq[:, h, :, b] = k[:, g, :, b] * ds'
        dk[:, g, :, b] += q[:, h, :, b] * ds
        dv[:, g, :, b] += dout[:, h, :, b] * p
    end
    return out, lse, dq, dk, dv
end

@testset "against the definition" begin
    Random.seed!(1)
    q, dout = randn(Float32, 16, 4, 19, 2), randn(Float32, 16, 4, 19, 2)
    k, v = randn(Float32, 16, 2, 27, 2), randn(Float32, 16, 2, 27, 2)
    for causal in (false, true)
        out, lse = attention(q, k, v; causal)
        dq, dk, dv, dbias, dsink = attention_gradients(dout, q, k, v, out, lse; causal)
        expected = reference(q, k, v, dout; causal)
        for (got, wanted) in zip((out, lse, dq, dk, dv), expected)
            @test maximum(abs.(got .- wanted)) < 5e-5
        end
        @test dbias === nothing && dsink === nothing
    end
end

@testset "views, Float16, options" begin
    packed = randn(Float32, 8, 2, 3, 5, 1) # (head_dim, heads, q k v, rows, batch)
    parts = [view(packed, :, :, n, :, :) for n = 1:3]
    @test attention(parts...)[1] == attention(copy.(parts)...)[1]
    half = [Float16.(x) for x in parts]
    @test maximum(abs.(Float32.(attention(half...)[1]) .- attention(parts...)[1])) < 1e-2
    context = Context(; threads = 1)
    out, lse = attention(parts...; context, sink = zeros(Float32, 2), window = (1, 0), softcap = 5.0, scale = 0.5)
    @test all(isfinite, out)
    plan = query_forward(out, lse, parts...; context)
    @test startswith(plan.kernel, "cpu_") && plan.flops > 0
    close(context)
    close(context)
end

@testset "refusals" begin
    q = zeros(Float32, 8, 2, 3, 1)
    failed = try
        attention(q, zeros(Float32, 4, 2, 3, 1), q)
    catch e
        e
    end
    @test failed isa FlashAttnError && failed.status == LibFlashattn.FA_ERROR_SHAPE
    @test occursin("FA_ERROR_SHAPE: k", sprint(showerror, failed))
    @test_throws ArgumentError attention(zeros(Float64, 8, 2, 3, 1), q, q)
    @test_throws ArgumentError attention(q, q, q; causal = :middle)
    @test_throws FlashAttnError Context(; threads = -1)
end

# FLASHATTN_LAYOUT is a program, generated from flashattn.h, that prints `struct size` and `struct.field offset size` lines.
@testset "layout" begin
    program = get(ENV, "FLASHATTN_LAYOUT", "")
    if isempty(program)
        @info "FLASHATTN_LAYOUT is not set: layout not compared"
    else
        structs = filter(n -> startswith(String(n), "fa_") && getfield(LibFlashattn, n) isa DataType, names(LibFlashattn; all = true))
        ours = String[]
        for name in structs
            T = getfield(LibFlashattn, name)
            push!(ours, "$name $(sizeof(T))")
            for n = 1:fieldcount(T)
                push!(ours, "$name.$(fieldname(T, n)) $(fieldoffset(T, n)) $(sizeof(fieldtype(T, n)))")
            end
        end
        @test sort(ours) == sort(readlines(`$program`))
    end
end
