# SPDX-License-Identifier: Apache-2.0
using FlashAttn
using FlashAttn: LibFlashattn
using Random
using Test

# Attention, its gradients and each head's largest logit by definition, in Float64; arrays are (head_dim, heads, rows, batch).
# `visible` is asked with the batch and, from 0, the rows of q and k.
function reference(q, k, v, dout; causal = false, visible = (b, i, j) -> true)
    q, k, v, dout = Float64.(q), Float64.(k), Float64.(v), Float64.(dout)
    out, dq, dk, dv = zero(dout), zero(q), zero(k), zero(v)
    lse = zeros(size(q, 3), size(q, 2), size(q, 4))
    scale, group = 1 / sqrt(size(q, 1)), size(q, 2) ÷ size(k, 2)
    shift, top = size(k, 3) - size(q, 3), fill(-Inf, size(q, 2))
    for b in axes(q, 4), h in axes(q, 2)
        g = (h - 1) ÷ group + 1
        x = scale .* (q[:, h, :, b]' * k[:, g, :, b])
        causal && (x = [j <= i + shift ? x[i, j] : -Inf for i in axes(x, 1), j in axes(x, 2)])
        x = [visible(b, i - 1, j - 1) ? x[i, j] : -Inf for i in axes(x, 1), j in axes(x, 2)]
        top[h] = max(top[h], maximum(x))
        p = exp.(x)
        total = sum(p; dims = 2)
        lse[:, h, b] = log.(vec(total))
        p ./= ifelse.(total .> 0, total, 1)
        out[:, h, :, b] = v[:, g, :, b] * p'
        dp = dout[:, h, :, b]' * v[:, g, :, b]
        ds = scale .* p .* (dp .- sum(p .* dp; dims = 2))
        dq[:, h, :, b] = k[:, g, :, b] * ds'
        dk[:, g, :, b] += q[:, h, :, b] * ds
        dv[:, g, :, b] += dout[:, h, :, b] * p
    end
    return out, lse, dq, dk, dv, top
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

@testset "masks as data" begin
    Random.seed!(4)
    q, dout = randn(Float32, 8, 4, 9, 2), randn(Float32, 8, 4, 9, 2)
    for keys in (20, 24) # bits of 24 keys are taken as they are, those of 20 copied
        k, v = randn(Float32, 8, 2, keys, 2), randn(Float32, 8, 2, keys, 2)
        pairs = rand(keys, 9, 1, 2) .< 0.5
        slices = Int32[0 5; 6 9; 4 0; 9 keys; SLICE_FULL SLICE_CAUSAL]
        last = (keys - 1) ÷ 10
        blocks = reshape([(i == 1) == (j == 0) for j = 0:last, i = 0:2], last + 1, 3, 1, 1)
        counts, indices = reshape(Int32[2, 1, 2], 3, 1, 1), reshape(Int32[last 0 1; 1 -1 last], 2, 3, 1, 1)
        by_pair(b, i, j) = pairs[j+1, i+1, 1, b]
        by_block(b, i, j) = (i ÷ 3 == 1) == (j ÷ 10 == 0)
        for (visible, options) in (
            (by_pair, (element_mask = pairs,)),
            (by_pair, (element_mask = Array{Bool}(pairs),)),
            (by_pair, (element_mask = UInt8.(pairs),)),
            ((b, i, j) -> j >= (2, 7)[b], (seqstart_k = Int32[2, 7],)),
            ((b, i, j) -> i < 6 && 4 <= j < 9 || i >= 5 && j <= i + keys - 9, (slices = slices,)),
            (by_block, (block_mask = blocks, block_size = (3, 10))),
            (by_block, (block_counts = counts, block_indices = indices, block_size = (3, 10))),
        )
            top = fill(NaN32, 4)
            out, lse = attention(q, k, v; max_logit = top, options...)
            dq, dk, dv, _, _ = attention_gradients(dout, q, k, v, out, lse; options...)
            expected = reference(q, k, v, dout; visible = visible)
            for (got, wanted) in zip((out, lse, dq, dk, dv, top), expected)
                hidden = wanted .== -Inf
                @test (got .== -Inf) == hidden
                @test maximum(abs.(got .- wanted)[.!hidden]) < 5e-5
            end
        end
    end
    # Keys by index, which are those of the lists' mask.
    k, pairs = randn(Float32, 8, 2, 20, 2), rand(20, 9, 1, 2) .< 0.5
    lists = Int32[pairs[j, i, 1, b] ? j - 1 : -1 for j = 1:20, i = 1:9, b = 1:2]
    @test maximum(abs.(attention(q, k, k; kv_indices = lists)[1] .- attention(q, k, k; element_mask = pairs)[1])) < 1e-6
    # One row of bits for all queries, and what is refused.
    k, shown = randn(Float32, 8, 2, 16, 2), reshape(BitArray(j % 3 == 0 for j = 1:16), 16, 1, 1, 1)
    @test attention(q, k, k; element_mask = shown)[1] == attention(q, k, k; element_mask = repeat(shown, 1, 9, 1, 1))[1]
    @test_throws FlashAttnError attention(q, k, k; element_mask = trues(24, 9, 1, 1))
    @test_throws FlashAttnError attention(q, k, k; slices = zeros(Int32, 4, 1))
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

# A row of keys or queries rotated by hand; pairs are columns c and c + half, or 2c - 1 and 2c.
function rotated(x, cos, sin, interleaved)
    y, half = copy(x), length(cos)
    for c = 1:half
        i, j = interleaved ? (2c - 1, 2c) : (c, c + half)
        y[i] = x[i] * cos[c] - x[j] * sin[c]
        y[j] = x[i] * sin[c] + x[j] * cos[c]
    end
    return y
end

@testset "caches" begin
    Random.seed!(2)
    heads, dim, rows, batch, page_size = 2, 8, 3, 2, 4
    k, v = randn(Float32, dim, heads, rows, batch), randn(Float32, dim, heads, rows, batch)
    q = randn(Float32, dim, heads, rows, batch)
    cos, sin = randn(Float32, 3, 16), randn(Float32, 3, 16)
    held = Int32[5, 0]
    pages = Int32[2 0; 1 3] # (max pages, batch), from 0
    for paged in (false, true), interleaved in (false, true)
        shape = paged ? (dim, heads, page_size, 5) : (dim, heads, 2page_size, batch)
        k_cache, v_cache, used, turned = fill(7.0f0, shape), fill(7.0f0, shape), Int32[0, 0], zero(q)
        table = paged ? pages : nothing
        append_kv!(
            k_cache,
            v_cache,
            k,
            v;
            offsets = held,
            page_table = table,
            seqused_k = used,
            rotary_cos = cos,
            rotary_sin = sin,
            interleaved = interleaved,
            q = q,
            q_out = turned,
        )
        @test used == [8, 3]
        written = 0
        for b = 1:batch, i = 1:rows, h = 1:heads
            place = held[b] + i - 1 # from 0
            outer, row = paged ? (pages[place÷page_size+1, b] + 1, place % page_size + 1) : (b, place + 1)
            c, s = cos[:, place+1], sin[:, place+1]
            @test maximum(abs.(k_cache[:, h, row, outer] .- rotated(k[:, h, i, b], c, s, interleaved))) < 1e-5
            @test maximum(abs.(turned[:, h, i, b] .- rotated(q[:, h, i, b], c, s, interleaved))) < 1e-5
            @test v_cache[:, h, row, outer] == v[:, h, i, b]
            written += dim
        end
        @test count(!=(7.0f0), v_cache) == written
        out, _ = attention(turned, k_cache, v_cache; page_table = table, seqused_k = Int32[0, 3])
        own = paged ? pages[1, 2] + 1 : 2 # where the second sequence's rows begin
        alone, _ = attention(turned[:, :, :, 2:2], k_cache[:, :, 1:3, own:own], v_cache[:, :, 1:3, own:own])
        @test all(iszero, out[:, :, :, 1]) && maximum(abs.(out[:, :, :, 2:2] .- alone)) < 1e-5
    end
    bytes, descales = zeros(Int8, dim, heads, 4, batch), zeros(Float32, heads, 4, batch)
    append_kv!(bytes, nothing, k, nothing; k_descale = descales)
    for b = 1:batch, i = 1:rows, h = 1:heads
        @test descales[h, i, b] ≈ maximum(abs.(k[:, h, i, b])) / 127
        @test maximum(abs.(bytes[:, h, i, b] .* descales[h, i, b] .- k[:, h, i, b])) <= 0.51 * descales[h, i, b]
    end
    @test all(iszero, descales[:, 4, :])
    @test_throws FlashAttnError append_kv!(bytes, nothing, k, v)
end

@testset "merging" begin
    Random.seed!(3)
    q, k, v = randn(Float32, 8, 2, 3, 1), randn(Float32, 8, 2, 9, 1), randn(Float32, 8, 2, 9, 1)
    whole, whole_lse = attention(q, k, v)
    parts = [attention(q, view(k, :, :, keys, :), view(v, :, :, keys, :)) for keys in (1:2, 3:3, 4:9)]
    out, lse = zero(whole), zero(whole_lse)
    merge_attention!(out, lse, parts)
    @test maximum(abs.(out .- whole)) < 1e-5 && maximum(abs.(lse .- whole_lse)) < 1e-5
    fill!(out, 0)
    merge_attention!(out, nothing, parts)
    @test maximum(abs.(out .- whole)) < 1e-5
    @test_throws FlashAttnError merge_attention!(out, lse, [])
end

# What the README shows.
@testset "README" begin
    q, k, v, dout = (randn(Float32, 64, 8, 1024, 1) for _ in 1:4) # (head_dim, heads, rows, batch)
    out, lse = attention(q, k, v; causal = true)
    dq, dk, dv, _, _ = attention_gradients(dout, q, k, v, out, lse; causal = true)
    @test size(dq) == size(q)
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
