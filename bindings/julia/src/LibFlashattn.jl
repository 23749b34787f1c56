# SPDX-License-Identifier: Apache-2.0
"""
Raw declarations of `flashattn.h`, name for name, and the loaded library. The header documents them; `FlashAttn` is the way to use them.

A test compares constants, functions and the layout of every struct with the header (bindings/check_drift.py, without Julia).
"""
module LibFlashattn

using Libdl

const FA_OK = Int32(0)
const FA_ERROR_INVALID_ARGUMENT = Int32(100)
const FA_ERROR_STRUCT_VERSION = Int32(101)
const FA_ERROR_SHAPE = Int32(102)
const FA_ERROR_DTYPE = Int32(103)
const FA_ERROR_ALIGNMENT = Int32(104)
const FA_ERROR_WORKSPACE = Int32(105)
const FA_ERROR_BUSY = Int32(106)
const FA_ERROR_UNSUPPORTED = Int32(200)
const FA_ERROR_ARCH = Int32(201)
const FA_ERROR_NOT_BUILT = Int32(202)
const FA_ERROR_NO_DEVICE = Int32(300)
const FA_ERROR_DRIVER = Int32(301)
const FA_ERROR_CUDA = Int32(302)
const FA_ERROR_OUT_OF_MEMORY = Int32(400)
const FA_ERROR_INTERNAL = Int32(401)
const FA_ERROR_CALLBACK = Int32(402)
const FA_DEVICE_AUTO = Int32(0)
const FA_DEVICE_CPU = Int32(1)
const FA_DEVICE_CUDA = Int32(2)
const FA_CPU_ISA_AUTO = Int32(0)
const FA_CPU_ISA_PORTABLE = Int32(100)
const FA_CPU_ISA_AVX2 = Int32(200)
const FA_CPU_ISA_AVX512 = Int32(300)
const FA_CPU_ISA_AVX512_BF16 = Int32(350)
const FA_CPU_ISA_AMX = Int32(400)
const FA_CPU_ISA_NEON = Int32(500)
const FA_CPU_ISA_NEON_FHM = Int32(525)
const FA_CPU_ISA_NEON_BF16 = Int32(550)
const FA_CPU_ISA_SVE256 = Int32(600)
const FA_LOG_ERROR = Int32(1)
const FA_LOG_WARNING = Int32(2)
const FA_LOG_INFO = Int32(3)
const FA_FLOAT32 = Int32(0x00012002)
const FA_FLOAT16 = Int32(0x00011002)
const FA_BFLOAT16 = Int32(0x00011004)
const FA_FLOAT8_E4M3 = Int32(0x0001080A)
const FA_INT8 = Int32(0x00010800)
const FA_INT32 = Int32(0x00012000)
const FA_INT64 = Int32(0x00014000)
const FA_UINT8 = Int32(0x00010801)
const FA_BOOL = Int32(0x00010806)
const FA_BIT = Int32(0x00010106)
const FA_MASK_NONE = Int32(0)
const FA_MASK_CAUSAL = Int32(1)
const FA_MASK_CAUSAL_TOP_LEFT = Int32(2)
const FA_SLICE_FULL = Int32(0)
const FA_SLICE_CAUSAL = Int32(1)
const FA_SLICE_INVERSE_CAUSAL = Int32(2)
const FA_SLICE_BOTH_CAUSAL = Int32(3)
const FA_WINDOW_LEFT = UInt32(1)
const FA_WINDOW_RIGHT = UInt32(2)
const FA_FLAG_DETERMINISTIC = UInt32(1)
const FA_FLAG_BATCH_INVARIANT = UInt32(2)
const FA_FLAG_SAME_BITS = UInt32(4)
const FA_FLAG_FP32_PRODUCTS = UInt32(8)
const FA_APPEND_INTERLEAVED = UInt32(1)
const FA_STRUCT_CONFIG = Int32(1)
const FA_STRUCT_DEVICE_PROPERTIES = Int32(2)
const FA_STRUCT_TENSOR = Int32(3)
const FA_STRUCT_ATTENTION = Int32(4)
const FA_STRUCT_GRADIENTS = Int32(5)
const FA_STRUCT_PLAN_INFO = Int32(6)
const FA_STRUCT_APPEND = Int32(7)
const FA_STRUCT_MERGE_PROBLEM = Int32(8)
const FA_STRUCT_SCORE_SOURCE = Int32(9)
const FA_STRUCT_SCORE_TENSOR = Int32(10)
const FA_STRUCT_JVP = Int32(11)
const FA_SCORE_BY_BATCH = UInt32(1)
const FA_SCORE_BY_HEAD = UInt32(2)
const FA_SCORE_BY_QUERY = UInt32(4)
const FA_SCORE_BY_KEY = UInt32(8)
const FA_SCORE_BY_ANY = UInt32(16)
const FA_SCORE_TILE_PARTIAL = Int32(0)
const FA_SCORE_TILE_EMPTY = Int32(1)
const FA_SCORE_TILE_FULL = Int32(2)

# What every mutable struct is made of: plain bits, of which zero means "default".
function zeroed(x)
    GC.@preserve x ccall(:memset, Ptr{Cvoid}, (Ptr{Cvoid}, Cint, Csize_t), pointer_from_objref(x), 0, sizeof(typeof(x)))
    return x
end

struct fa_tensor
    data::Ptr{Cvoid}
    shape::NTuple{4,Int64}
    stride::NTuple{4,Int64}
    dtype::Int32
    ndim::Int32
end
fa_tensor() = fa_tensor(C_NULL, (0, 0, 0, 0), (0, 0, 0, 0), 0, 0)

mutable struct fa_config
    struct_size::UInt32
    device_type::Int32
    device_index::Int32
    num_threads::Int32
    cpu_isa::Int32
    cuda_arch::Int32
    parallel_for::Ptr{Cvoid}
    parallel_for_user::Ptr{Cvoid}
    log::Ptr{Cvoid}
    log_user::Ptr{Cvoid}
    kernel_cache::Ptr{UInt8}
    fa_config() = zeroed(new())
end

mutable struct fa_device_properties
    struct_size::UInt32
    device_type::Int32
    device_index::Int32
    num_threads::Int32
    cpu_isa::Int32
    compute_capability::Int32
    multiprocessors::Int32
    reserved::Int32
    memory_bytes::UInt64
    name::NTuple{128,UInt8}
    fa_device_properties() = zeroed(new())
end

struct fa_score_position
    b::Int64
    h::Int64
    i::Int64
    j::Int64
    s_q::Int64
    s_k::Int64
    start_q::Int64
    start_k::Int64
end

struct fa_score_aux
    tensors::Ptr{fa_tensor}
    user::Ptr{Cvoid}
    scalars::NTuple{8,Float32}
    num_tensors::Int32
    reserved::Int32
end

struct fa_score_tensor
    tensor::fa_tensor
    access::UInt32
    reserved::UInt32
end

mutable struct fa_score_source
    struct_size::UInt32
    reserved::UInt32
    text::Ptr{UInt8}
    text_length::UInt64
    score::Ptr{Cvoid}
    derivative::Ptr{Cvoid}
    visible::Ptr{Cvoid}
    tile::Ptr{Cvoid}
    run::Ptr{Cvoid}
    run_backward::Ptr{Cvoid}
    run_visible::Ptr{Cvoid}
    user::Ptr{Cvoid}
    fa_score_source() = zeroed(new())
end

mutable struct fa_attention
    struct_size::UInt32
    flags::UInt32
    q::fa_tensor
    k::fa_tensor
    v::fa_tensor
    out::fa_tensor
    lse::fa_tensor
    cu_seqlens_q::fa_tensor
    cu_seqlens_k::fa_tensor
    seqused_q::fa_tensor
    seqused_k::fa_tensor
    page_table::fa_tensor
    max_seqlen_q::Int64
    max_seqlen_k::Int64
    mask::Int32
    window::UInt32
    window_left::Int64
    window_right::Int64
    bias::fa_tensor
    block_mask::fa_tensor
    block_size_q::Int64
    block_size_k::Int64
    alibi_slopes::fa_tensor
    sink::fa_tensor
    softmax_scale::Float32
    softcap::Float32
    dropout_p::Float32
    num_splits::Int32
    dropout_seed::UInt64
    dropout_offset::UInt64
    dropout_seed_ptr::Ptr{UInt64}
    dropout_offset_ptr::Ptr{UInt64}
    q_descale::fa_tensor
    k_descale::fa_tensor
    v_descale::fa_tensor
    alibi_log_scale::Float32
    reserved::UInt32
    element_mask::fa_tensor
    seqstart_k::fa_tensor
    slices::fa_tensor
    block_counts::fa_tensor
    block_indices::fa_tensor
    max_logit::fa_tensor
    score::Ptr{Cvoid}
    score_tensors::Ptr{fa_score_tensor}
    num_score_tensors::Int32
    score_reserved::UInt32
    score_scalars::NTuple{8,Float32}
    kv_indices::fa_tensor
    fa_attention() = zeroed(new())
end

mutable struct fa_gradients
    struct_size::UInt32
    reserved::UInt32
    dout::fa_tensor
    dlse::fa_tensor
    dq::fa_tensor
    dk::fa_tensor
    dv::fa_tensor
    dbias::fa_tensor
    dsink::fa_tensor
    fa_gradients() = zeroed(new())
end

mutable struct fa_append
    struct_size::UInt32
    flags::UInt32
    k::fa_tensor
    v::fa_tensor
    k_cache::fa_tensor
    v_cache::fa_tensor
    page_table::fa_tensor
    offsets::fa_tensor
    cu_seqlens::fa_tensor
    seqused::fa_tensor
    seqused_k::fa_tensor
    q::fa_tensor
    q_out::fa_tensor
    rotary_cos::fa_tensor
    rotary_sin::fa_tensor
    rotary_positions::fa_tensor
    k_descale::fa_tensor
    v_descale::fa_tensor
    fa_append() = zeroed(new())
end

mutable struct fa_jvp
    struct_size::UInt32
    reserved::UInt32
    tq::fa_tensor
    tk::fa_tensor
    tv::fa_tensor
    tout::fa_tensor
    tlse::fa_tensor
    fa_jvp() = zeroed(new())
end

mutable struct fa_merge_problem
    struct_size::UInt32
    num_parts::Int32
    out_parts::Ptr{fa_tensor}
    lse_parts::Ptr{fa_tensor}
    out::fa_tensor
    lse::fa_tensor
    fa_merge_problem() = zeroed(new())
end

mutable struct fa_plan_info
    struct_size::UInt32
    status::Int32
    workspace_bytes::UInt64
    flops::Float64
    bytes::Float64
    num_splits::Int32
    same_bits_contract::Int32
    kernel::NTuple{64,UInt8}
    reason::NTuple{320,UInt8}
    fa_plan_info() = zeroed(new())
end

# Functions, by name, of the library that was found when the module was loaded.
const FUNCTIONS = [
    :fa_append_init,
    :fa_append_kv,
    :fa_append_prepare,
    :fa_append_query,
    :fa_attention_init,
    :fa_backward,
    :fa_backward_prepare,
    :fa_backward_query,
    :fa_build_info,
    :fa_config_init,
    :fa_create,
    :fa_destroy,
    :fa_device_info,
    :fa_device_properties_init,
    :fa_forward,
    :fa_forward_jvp,
    :fa_forward_jvp_prepare,
    :fa_forward_jvp_query,
    :fa_forward_prepare,
    :fa_forward_query,
    :fa_gradients_init,
    :fa_jvp_init,
    :fa_last_cuda_error,
    :fa_last_error,
    :fa_merge,
    :fa_merge_prepare,
    :fa_merge_problem_init,
    :fa_merge_query,
    :fa_plan_info_init,
    :fa_score_create,
    :fa_score_destroy,
    :fa_score_source_init,
    :fa_sizeof,
    :fa_status_description,
    :fa_status_name,
    :fa_tensor_from_dlpack,
    :fa_version,
    :fa_version_string,
]
const addresses = Dict{Symbol,Ptr{Cvoid}}()

"""The file named by `FLASHATTN_LIBRARY`, else `libflashattn.so.0` where the system looks."""
function __init__()
    path = get(ENV, "FLASHATTN_LIBRARY", "libflashattn.so.0")
    handle = dlopen(path)
    for name in FUNCTIONS
        addresses[name] = dlsym(handle, name)
    end
    theirs = ccall(addresses[:fa_sizeof], Csize_t, (Int32,), FA_STRUCT_TENSOR)
    theirs == sizeof(fa_tensor) || error("$path: its fa_tensor has $theirs bytes, this module's $(sizeof(fa_tensor))")
end

end # module
