// SPDX-License-Identifier: Apache-2.0
//! Raw declarations of `flashattn.h`, name for name. The header documents them; the crate `flashattn` is the safe way to use them.
//!
//! The library is linked (build.rs says how it is found), or, with the feature `dynamic-loading`, opened by [`load`] at run time: a program
//! then builds without it, and can do without it when it is not there.
//!
//! Structs are declared with one macro, which also lists their fields, so that the tests can compare every offset with a C
//! compiler's.
#![allow(non_camel_case_types)]

use std::mem::{size_of, MaybeUninit};
use std::os::raw::{c_char, c_void};
use std::ptr::addr_of;

pub type fa_status = i32;
pub const FA_OK: fa_status = 0;
pub const FA_ERROR_INVALID_ARGUMENT: fa_status = 100;
pub const FA_ERROR_STRUCT_VERSION: fa_status = 101;
pub const FA_ERROR_SHAPE: fa_status = 102;
pub const FA_ERROR_DTYPE: fa_status = 103;
pub const FA_ERROR_ALIGNMENT: fa_status = 104;
pub const FA_ERROR_WORKSPACE: fa_status = 105;
pub const FA_ERROR_BUSY: fa_status = 106;
pub const FA_ERROR_UNSUPPORTED: fa_status = 200;
pub const FA_ERROR_ARCH: fa_status = 201;
pub const FA_ERROR_NOT_BUILT: fa_status = 202;
pub const FA_ERROR_NO_DEVICE: fa_status = 300;
pub const FA_ERROR_DRIVER: fa_status = 301;
pub const FA_ERROR_CUDA: fa_status = 302;
pub const FA_ERROR_OUT_OF_MEMORY: fa_status = 400;
pub const FA_ERROR_INTERNAL: fa_status = 401;
pub const FA_ERROR_CALLBACK: fa_status = 402;

pub type fa_device_type = i32;
pub const FA_DEVICE_AUTO: fa_device_type = 0;
pub const FA_DEVICE_CPU: fa_device_type = 1;
pub const FA_DEVICE_CUDA: fa_device_type = 2;

pub type fa_cpu_isa = i32;
pub const FA_CPU_ISA_AUTO: fa_cpu_isa = 0;
pub const FA_CPU_ISA_PORTABLE: fa_cpu_isa = 100;
pub const FA_CPU_ISA_AVX2: fa_cpu_isa = 200;
pub const FA_CPU_ISA_AVX512: fa_cpu_isa = 300;
pub const FA_CPU_ISA_AVX512_BF16: fa_cpu_isa = 350;
pub const FA_CPU_ISA_AMX: fa_cpu_isa = 400;
pub const FA_CPU_ISA_NEON: fa_cpu_isa = 500;
pub const FA_CPU_ISA_NEON_FHM: fa_cpu_isa = 525;
pub const FA_CPU_ISA_NEON_BF16: fa_cpu_isa = 550;
pub const FA_CPU_ISA_SVE256: fa_cpu_isa = 600;

pub type fa_log_level = i32;
pub const FA_LOG_ERROR: fa_log_level = 1;
pub const FA_LOG_WARNING: fa_log_level = 2;
pub const FA_LOG_INFO: fa_log_level = 3;

pub type fa_dtype = i32;
pub const FA_FLOAT32: fa_dtype = 0x0001_2002;
pub const FA_FLOAT16: fa_dtype = 0x0001_1002;
pub const FA_BFLOAT16: fa_dtype = 0x0001_1004;
pub const FA_FLOAT8_E4M3: fa_dtype = 0x0001_080A;
pub const FA_INT8: fa_dtype = 0x0001_0800;
pub const FA_INT32: fa_dtype = 0x0001_2000;
pub const FA_INT64: fa_dtype = 0x0001_4000;
pub const FA_UINT8: fa_dtype = 0x0001_0801;
pub const FA_BOOL: fa_dtype = 0x0001_0806;
pub const FA_BIT: fa_dtype = 0x0001_0106;

pub type fa_mask_kind = i32;
pub const FA_MASK_NONE: fa_mask_kind = 0;
pub const FA_MASK_CAUSAL: fa_mask_kind = 1;
pub const FA_MASK_CAUSAL_TOP_LEFT: fa_mask_kind = 2;

pub const FA_SLICE_FULL: i32 = 0;
pub const FA_SLICE_CAUSAL: i32 = 1;
pub const FA_SLICE_INVERSE_CAUSAL: i32 = 2;
pub const FA_SLICE_BOTH_CAUSAL: i32 = 3;

pub const FA_WINDOW_LEFT: u32 = 1;
pub const FA_WINDOW_RIGHT: u32 = 2;
pub const FA_FLAG_DETERMINISTIC: u32 = 1;
pub const FA_FLAG_BATCH_INVARIANT: u32 = 2;
pub const FA_FLAG_SAME_BITS: u32 = 4;
pub const FA_FLAG_FP32_PRODUCTS: u32 = 8;
pub const FA_APPEND_INTERLEAVED: u32 = 1;

pub type fa_struct_kind = i32;
pub const FA_STRUCT_CONFIG: fa_struct_kind = 1;
pub const FA_STRUCT_DEVICE_PROPERTIES: fa_struct_kind = 2;
pub const FA_STRUCT_TENSOR: fa_struct_kind = 3;
pub const FA_STRUCT_ATTENTION: fa_struct_kind = 4;
pub const FA_STRUCT_GRADIENTS: fa_struct_kind = 5;
pub const FA_STRUCT_PLAN_INFO: fa_struct_kind = 6;
pub const FA_STRUCT_APPEND: fa_struct_kind = 7;
pub const FA_STRUCT_MERGE_PROBLEM: fa_struct_kind = 8;
pub const FA_STRUCT_SCORE_SOURCE: fa_struct_kind = 9;
pub const FA_STRUCT_SCORE_TENSOR: fa_struct_kind = 10;
pub const FA_STRUCT_JVP: fa_struct_kind = 11;

pub const FA_SCORE_BY_BATCH: u32 = 1;
pub const FA_SCORE_BY_HEAD: u32 = 2;
pub const FA_SCORE_BY_QUERY: u32 = 4;
pub const FA_SCORE_BY_KEY: u32 = 8;
pub const FA_SCORE_BY_ANY: u32 = 16;

pub type fa_score_tile = i32;
pub const FA_SCORE_TILE_PARTIAL: fa_score_tile = 0;
pub const FA_SCORE_TILE_EMPTY: fa_score_tile = 1;
pub const FA_SCORE_TILE_FULL: fa_score_tile = 2;

/// Opaque; a context is a pointer to it.
#[repr(C)]
pub struct fa_context_s {
    _private: [u8; 0],
}
pub type fa_context = *mut fa_context_s;

/// Opaque; a score function is a pointer to it.
#[repr(C)]
pub struct fa_score_s {
    _private: [u8; 0],
}
pub type fa_score = *mut fa_score_s;

/// The CUDA driver's stream.
#[repr(C)]
pub struct CUstream_st {
    _private: [u8; 0],
}
pub type fa_stream = *mut CUstream_st;

pub type fa_task_fn = Option<unsafe extern "C" fn(task_context: *mut c_void, task: i32)>;
pub type fa_parallel_for_fn =
    Option<unsafe extern "C" fn(user: *mut c_void, num_tasks: i32, task: fa_task_fn, task_context: *mut c_void)>;
pub type fa_log_fn = Option<unsafe extern "C" fn(user: *mut c_void, level: fa_log_level, message: *const c_char)>;

pub type fa_score_fn =
    Option<unsafe extern "C" fn(s: f32, position: *const fa_score_position, aux: *const fa_score_aux) -> f32>;
pub type fa_score_visible_fn =
    Option<unsafe extern "C" fn(position: *const fa_score_position, aux: *const fa_score_aux) -> i32>;
pub type fa_score_tile_fn = Option<
    unsafe extern "C" fn(first: *const fa_score_position, queries: i64, keys: i64, aux: *const fa_score_aux) -> fa_score_tile,
>;
pub type fa_score_run_fn = Option<
    unsafe extern "C" fn(
        s: *mut f32,
        derivative: *mut f32,
        first: *const fa_score_position,
        keys: i64,
        aux: *const fa_score_aux,
    ),
>;
pub type fa_score_visible_run_fn =
    Option<unsafe extern "C" fn(visible: *mut u8, first: *const fa_score_position, keys: i64, aux: *const fa_score_aux)>;

/// A struct's name and size, and its fields' names, offsets and sizes.
pub struct Layout {
    pub name: &'static str,
    pub size: usize,
    pub fields: Vec<(&'static str, usize, usize)>,
}

/// Declares `#[repr(C)]` structs whose all-zero value is the default, and [`layouts`], which lists their fields.
macro_rules! abi_structs {
    ($($name:ident { $($field:ident: $type:ty,)* })*) => {
        $(
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub struct $name {
                $(pub $field: $type,)*
            }

            impl Default for $name {
                fn default() -> Self {
                    // SAFETY: integers, floats, raw pointers and optional functions, for which zero is a value.
                    unsafe { MaybeUninit::zeroed().assume_init() }
                }
            }
        )*

        /// The layout of every struct as this crate declares it.
        pub fn layouts() -> Vec<Layout> {
            vec![$({
                let place = $name::default();
                let base = addr_of!(place) as usize;
                Layout {
                    name: stringify!($name),
                    size: size_of::<$name>(),
                    fields: vec![$((stringify!($field), addr_of!(place.$field) as usize - base, size_of::<$type>()),)*],
                }
            },)*]
        }
    };
}

abi_structs! {
    fa_config {
        struct_size: u32,
        device_type: fa_device_type,
        device_index: i32,
        num_threads: i32,
        cpu_isa: fa_cpu_isa,
        cuda_arch: i32,
        parallel_for: fa_parallel_for_fn,
        parallel_for_user: *mut c_void,
        log: fa_log_fn,
        log_user: *mut c_void,
        kernel_cache: *const c_char,
    }
    fa_device_properties {
        struct_size: u32,
        device_type: fa_device_type,
        device_index: i32,
        num_threads: i32,
        cpu_isa: fa_cpu_isa,
        compute_capability: i32,
        multiprocessors: i32,
        reserved: i32,
        memory_bytes: u64,
        name: [c_char; 128],
    }
    fa_tensor {
        data: *mut c_void,
        shape: [i64; 4],
        stride: [i64; 4],
        dtype: fa_dtype,
        ndim: i32,
    }
    fa_attention {
        struct_size: u32,
        flags: u32,
        q: fa_tensor,
        k: fa_tensor,
        v: fa_tensor,
        out: fa_tensor,
        lse: fa_tensor,
        cu_seqlens_q: fa_tensor,
        cu_seqlens_k: fa_tensor,
        seqused_q: fa_tensor,
        seqused_k: fa_tensor,
        page_table: fa_tensor,
        max_seqlen_q: i64,
        max_seqlen_k: i64,
        mask: fa_mask_kind,
        window: u32,
        window_left: i64,
        window_right: i64,
        bias: fa_tensor,
        block_mask: fa_tensor,
        block_size_q: i64,
        block_size_k: i64,
        alibi_slopes: fa_tensor,
        sink: fa_tensor,
        softmax_scale: f32,
        softcap: f32,
        dropout_p: f32,
        num_splits: i32,
        dropout_seed: u64,
        dropout_offset: u64,
        dropout_seed_ptr: *const u64,
        dropout_offset_ptr: *const u64,
        q_descale: fa_tensor,
        k_descale: fa_tensor,
        v_descale: fa_tensor,
        alibi_log_scale: f32,
        reserved: u32,
        element_mask: fa_tensor,
        seqstart_k: fa_tensor,
        slices: fa_tensor,
        block_counts: fa_tensor,
        block_indices: fa_tensor,
        max_logit: fa_tensor,
        score: *mut fa_score_s,
        score_tensors: *const fa_score_tensor,
        num_score_tensors: i32,
        score_reserved: u32,
        score_scalars: [f32; 8],
        kv_indices: fa_tensor,
    }
    fa_gradients {
        struct_size: u32,
        reserved: u32,
        dout: fa_tensor,
        dlse: fa_tensor,
        dq: fa_tensor,
        dk: fa_tensor,
        dv: fa_tensor,
        dbias: fa_tensor,
        dsink: fa_tensor,
    }
    fa_jvp {
        struct_size: u32,
        reserved: u32,
        tq: fa_tensor,
        tk: fa_tensor,
        tv: fa_tensor,
        tout: fa_tensor,
        tlse: fa_tensor,
    }
    fa_plan_info {
        struct_size: u32,
        status: fa_status,
        workspace_bytes: u64,
        flops: f64,
        bytes: f64,
        num_splits: i32,
        same_bits_contract: i32,
        kernel: [c_char; 64],
        reason: [c_char; 320],
    }
    fa_append {
        struct_size: u32,
        flags: u32,
        k: fa_tensor,
        v: fa_tensor,
        k_cache: fa_tensor,
        v_cache: fa_tensor,
        page_table: fa_tensor,
        offsets: fa_tensor,
        cu_seqlens: fa_tensor,
        seqused: fa_tensor,
        seqused_k: fa_tensor,
        q: fa_tensor,
        q_out: fa_tensor,
        rotary_cos: fa_tensor,
        rotary_sin: fa_tensor,
        rotary_positions: fa_tensor,
        k_descale: fa_tensor,
        v_descale: fa_tensor,
    }
    fa_merge_problem {
        struct_size: u32,
        num_parts: i32,
        out_parts: *const fa_tensor,
        lse_parts: *const fa_tensor,
        out: fa_tensor,
        lse: fa_tensor,
    }
    fa_score_source {
        struct_size: u32,
        reserved: u32,
        text: *const c_char,
        text_length: u64,
        score: fa_score_fn,
        derivative: fa_score_fn,
        visible: fa_score_visible_fn,
        tile: fa_score_tile_fn,
        run: fa_score_run_fn,
        run_backward: fa_score_run_fn,
        run_visible: fa_score_visible_run_fn,
        user: *mut c_void,
    }
    fa_score_tensor {
        tensor: fa_tensor,
        access: u32,
        reserved: u32,
    }
    fa_score_position {
        b: i64,
        h: i64,
        i: i64,
        j: i64,
        s_q: i64,
        s_k: i64,
        start_q: i64,
        start_k: i64,
    }
    fa_score_aux {
        tensors: *const fa_tensor,
        user: *mut c_void,
        scalars: [f32; 8],
        num_tensors: i32,
        reserved: i32,
    }
}

mod library;
pub use library::{is_loaded, load};

library::functions! {
    pub fn fa_status_name(status: fa_status) -> *const c_char;
    pub fn fa_status_description(status: fa_status) -> *const c_char;
    pub fn fa_version() -> i32;
    pub fn fa_version_string() -> *const c_char;
    pub fn fa_build_info() -> *const c_char;
    pub fn fa_config_init(config: *mut fa_config, size: usize) -> fa_status;
    pub fn fa_create(out: *mut fa_context, config: *const fa_config) -> fa_status;
    pub fn fa_destroy(ctx: fa_context);
    pub fn fa_last_error(ctx: fa_context) -> *const c_char;
    pub fn fa_last_cuda_error(ctx: fa_context) -> i32;
    pub fn fa_device_properties_init(properties: *mut fa_device_properties, size: usize) -> fa_status;
    pub fn fa_device_info(ctx: fa_context, properties: *mut fa_device_properties) -> fa_status;
    pub fn fa_tensor_from_dlpack(tensor: *mut fa_tensor, dl_tensor: *const c_void) -> fa_status;
    pub fn fa_attention_init(attention: *mut fa_attention, size: usize) -> fa_status;
    pub fn fa_gradients_init(gradients: *mut fa_gradients, size: usize) -> fa_status;
    pub fn fa_jvp_init(jvp: *mut fa_jvp, size: usize) -> fa_status;
    pub fn fa_append_init(append: *mut fa_append, size: usize) -> fa_status;
    pub fn fa_merge_problem_init(merge: *mut fa_merge_problem, size: usize) -> fa_status;
    pub fn fa_plan_info_init(info: *mut fa_plan_info, size: usize) -> fa_status;
    pub fn fa_forward_query(ctx: fa_context, attention: *const fa_attention, info: *mut fa_plan_info) -> fa_status;
    pub fn fa_backward_query(
        ctx: fa_context,
        attention: *const fa_attention,
        gradients: *const fa_gradients,
        info: *mut fa_plan_info,
    ) -> fa_status;
    pub fn fa_forward_jvp_query(
        ctx: fa_context,
        attention: *const fa_attention,
        jvp: *const fa_jvp,
        info: *mut fa_plan_info,
    ) -> fa_status;
    pub fn fa_merge_query(ctx: fa_context, merge: *const fa_merge_problem, info: *mut fa_plan_info) -> fa_status;
    pub fn fa_append_query(ctx: fa_context, append: *const fa_append, info: *mut fa_plan_info) -> fa_status;
    pub fn fa_forward_prepare(ctx: fa_context, attention: *const fa_attention) -> fa_status;
    pub fn fa_backward_prepare(ctx: fa_context, attention: *const fa_attention, gradients: *const fa_gradients) -> fa_status;
    pub fn fa_forward_jvp_prepare(ctx: fa_context, attention: *const fa_attention, jvp: *const fa_jvp) -> fa_status;
    pub fn fa_merge_prepare(ctx: fa_context, merge: *const fa_merge_problem) -> fa_status;
    pub fn fa_append_prepare(ctx: fa_context, append: *const fa_append) -> fa_status;
    pub fn fa_forward(
        ctx: fa_context,
        attention: *const fa_attention,
        workspace: *mut c_void,
        workspace_bytes: usize,
        stream: fa_stream,
    ) -> fa_status;
    pub fn fa_backward(
        ctx: fa_context,
        attention: *const fa_attention,
        gradients: *const fa_gradients,
        workspace: *mut c_void,
        workspace_bytes: usize,
        stream: fa_stream,
    ) -> fa_status;
    pub fn fa_forward_jvp(
        ctx: fa_context,
        attention: *const fa_attention,
        jvp: *const fa_jvp,
        workspace: *mut c_void,
        workspace_bytes: usize,
        stream: fa_stream,
    ) -> fa_status;
    pub fn fa_merge(
        ctx: fa_context,
        merge: *const fa_merge_problem,
        workspace: *mut c_void,
        workspace_bytes: usize,
        stream: fa_stream,
    ) -> fa_status;
    pub fn fa_append_kv(
        ctx: fa_context,
        append: *const fa_append,
        workspace: *mut c_void,
        workspace_bytes: usize,
        stream: fa_stream,
    ) -> fa_status;
    pub fn fa_score_source_init(source: *mut fa_score_source, size: usize) -> fa_status;
    pub fn fa_score_create(ctx: fa_context, source: *const fa_score_source, out: *mut fa_score) -> fa_status;
    pub fn fa_score_destroy(score: fa_score);
    pub fn fa_sizeof(kind: fa_struct_kind) -> usize;
}
