// SPDX-License-Identifier: Apache-2.0
//! Attention over memory of a GPU. Memory and stream are other crates' or the CUDA runtime's; without any, this says what is missing.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use flashattn::{Attention, Bf16, Context, CudaSettings, Result, TensorView, TensorViewMut};

/// Attention over memory of a GPU, from cudaMalloc for example, on a stream (a cudaStream_t).
///
/// # Safety
/// Each address is of 1024 * 8 * 128 numbers that nobody else uses until the work on the stream is done.
unsafe fn attend(q: *const Bf16, k: *const Bf16, v: *const Bf16, out: *mut Bf16, stream: *mut c_void) -> Result<()> {
    let shape = [1, 1024, 8, 128];
    let mut context = Context::cuda(CudaSettings::default())?;
    context.set_stream(stream);
    let rows = |address| TensorView::from_ptr(address, &shape);
    let attention = Attention::new(rows(q)?, rows(k)?, rows(v)?).causal();
    context.forward(&attention, &mut TensorViewMut::from_ptr(out, &shape)?, None)
}

fn main() {
    // SAFETY: the library refuses addresses that are NULL.
    let error = unsafe { attend(null(), null(), null(), null_mut(), null_mut()) }.unwrap_err();
    println!("{}", error);
}
