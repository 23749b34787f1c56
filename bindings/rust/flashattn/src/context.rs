// SPDX-License-Identifier: Apache-2.0
use std::cell::Cell;
use std::ffi::CStr;
use std::mem::size_of;
use std::os::raw::{c_char, c_void};
use std::path::Path;
use std::ptr::null_mut;

use flashattn_sys as sys;

use crate::error::{check, owned};
use crate::score::{source, text_source};
use crate::{Append, Attention, Error, Gradients, Result, Score, ScoreFunction, TensorView, TensorViewMut};

/// Instruction set of the CPU kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CpuIsa {
    /// The most capable instruction set of this processor.
    Auto,
    /// Vector code for any processor.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AVX-512 with bf16 products (AVX512_BF16).
    Avx512Bf16,
    /// AVX-512 with AMX tiles of bf16 and int8.
    Amx,
    /// 64-bit Arm with NEON.
    Neon,
    /// 64-bit Arm with bf16 products (FEAT_BF16).
    NeonBf16,
    /// 64-bit Arm with products of fp16 in fp32 (FEAT_FHM).
    NeonFhm,
    /// 64-bit Arm with SVE whose vectors have 256 bits.
    Sve256,
}

/// Settings of a CPU context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Threads of a call; 0 = one for every processor that the process may use.
    pub threads: u32,
    /// Instruction set; one that this processor lacks is refused.
    pub isa: CpuIsa,
}

impl Default for Settings {
    fn default() -> Self {
        Settings { threads: 0, isa: CpuIsa::Auto }
    }
}

/// Settings of a context on a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaSettings {
    /// Number of the device.
    pub device: u32,
    /// Only kernels that devices of this compute capability (major * 10 + minor, at least 80) run, too; 0 = the device's.
    pub arch: u32,
}

/// The device of a context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// For people to read.
    pub name: String,
    /// Whether it is a GPU.
    pub cuda: bool,
    /// Number of the GPU; 0 for the CPU.
    pub index: i32,
    /// Threads a call uses; 0 for a GPU.
    pub threads: i32,
    /// Instruction set in use; [`CpuIsa::Auto`] for a GPU.
    pub isa: CpuIsa,
    /// Compute capability of the GPU, major * 10 + minor; 0 for the CPU.
    pub compute_capability: i32,
    /// Streaming multiprocessors of the GPU; 0 for the CPU.
    pub multiprocessors: i32,
    /// Memory of the device.
    pub memory_bytes: u64,
}

/// How a call would run.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Name of the kernel, for people to read.
    pub kernel: String,
    /// The reason for this kernel.
    pub reason: String,
    /// Scratch memory that the call needs.
    pub workspace_bytes: u64,
    /// Operations of the matrix products over visible pairs.
    pub flops: f64,
    /// Bytes of inputs and outputs.
    pub bytes: f64,
    /// Number of KV splits; 1 = not split.
    pub num_splits: i32,
    /// The number of the arithmetic of `Attention::same_bits`; 0 without it.
    pub same_bits_contract: i32,
}

/// A device with its settings, threads and scratch memory. One thread uses it at a time, which is why it is `Send` but not `Sync`.
#[derive(Debug)]
pub struct Context {
    raw: sys::fa_context,
    stream: sys::fa_stream,
    workspace: *mut c_void,
    workspace_bytes: usize,
}

// SAFETY: the library lets a context move between threads; the others are addresses for it alone.
unsafe impl Send for Context {}

impl Context {
    /// The CPU with all its threads.
    pub fn new() -> Result<Self> {
        Self::with(Settings::default())
    }

    /// Runs a function on a context of the calling thread, [`Context::new`] once per thread and kept until the thread ends.
    pub fn of_this_thread<R>(run: impl FnOnce(&Context) -> Result<R>) -> Result<R> {
        thread_local! {
            static CONTEXT: Cell<Option<Context>> = const { Cell::new(None) };
        }
        // Taken out for the time of the call: one inside `run` makes another context.
        let context = CONTEXT.with(Cell::take).map_or_else(Context::new, Ok)?;
        let result = run(&context);
        CONTEXT.with(|kept| kept.set(Some(context)));
        result
    }

    /// The CPU with these settings.
    pub fn with(settings: Settings) -> Result<Self> {
        let config = sys::fa_config {
            device_type: sys::FA_DEVICE_CPU,
            num_threads: number("threads", settings.threads)?,
            cpu_isa: match settings.isa {
                CpuIsa::Auto => sys::FA_CPU_ISA_AUTO,
                CpuIsa::Portable => sys::FA_CPU_ISA_PORTABLE,
                CpuIsa::Avx2 => sys::FA_CPU_ISA_AVX2,
                CpuIsa::Avx512 => sys::FA_CPU_ISA_AVX512,
                CpuIsa::Avx512Bf16 => sys::FA_CPU_ISA_AVX512_BF16,
                CpuIsa::Amx => sys::FA_CPU_ISA_AMX,
                CpuIsa::Neon => sys::FA_CPU_ISA_NEON,
                CpuIsa::NeonBf16 => sys::FA_CPU_ISA_NEON_BF16,
                CpuIsa::NeonFhm => sys::FA_CPU_ISA_NEON_FHM,
                CpuIsa::Sve256 => sys::FA_CPU_ISA_SVE256,
            },
            ..Default::default()
        };
        Self::create(config)
    }

    /// A GPU. Where there is none the error says what is missing: `FA_ERROR_NOT_BUILT` in a library without CUDA, `FA_ERROR_DRIVER`,
    /// `FA_ERROR_NO_DEVICE`, or `FA_ERROR_ARCH` for a device that is too old.
    ///
    /// # Safety
    /// Calls only enqueue work, on the stream of [`Context::set_stream`], and return. So the views given to them must be of memory that the
    /// device can use ([`TensorView::from_ptr`]), and what they name must stay valid, and what is written unseen by others, until that work
    /// is done, however short the borrows. What the device reads for itself (sequence offsets, used lengths, page tables, positions) must be
    /// right: it is not checked there.
    pub unsafe fn cuda(settings: CudaSettings) -> Result<Self> {
        Self::create(sys::fa_config {
            device_type: sys::FA_DEVICE_CUDA,
            device_index: number("device", settings.device)?,
            cuda_arch: number("arch", settings.arch)?,
            ..Default::default()
        })
    }

    fn create(config: sys::fa_config) -> Result<Self> {
        load(None)?;
        let config = sys::fa_config { struct_size: size_of::<sys::fa_config>() as u32, ..config };
        let mut raw = null_mut();
        // SAFETY: both structs are alive; a failed call leaves its text with the thread. The new context is ours, and works on a GPU only
        // if the caller of `cuda` has vouched for that.
        unsafe {
            check(sys::fa_create(&mut raw, &config), null_mut())?;
            Ok(Self::from_raw(raw))
        }
    }

    /// Takes over a context made with `flashattn_sys`.
    ///
    /// # Safety
    /// `raw` is live and nobody else's. If it is of a GPU, as for [`Context::cuda`].
    pub unsafe fn from_raw(raw: sys::fa_context) -> Self {
        Context { raw, stream: null_mut(), workspace: null_mut(), workspace_bytes: 0 }
    }

    /// GPU: the stream (a `cudaStream_t`) on which the calls that follow enqueue their work; NULL, which a new context has, is the default
    /// stream. The CPU ignores it.
    ///
    /// # Safety
    /// NULL, or a stream of the context's device that lives as long as this context has it.
    pub unsafe fn set_stream(&mut self, stream: *mut c_void) {
        self.stream = stream.cast();
    }

    /// Scratch memory of the caller's for the calls that follow, instead of the library's: `workspace_bytes` of
    /// their [`Plan`] at a multiple of 256. NULL and 0 leave it to the library again.
    ///
    /// # Safety
    /// The context's device may write there, and nobody else uses it, as long as this context has it and work that got it may run.
    pub unsafe fn set_workspace(&mut self, address: *mut c_void, bytes: usize) {
        self.workspace = address;
        self.workspace_bytes = bytes;
    }

    /// The handle, for calls this crate does not wrap.
    pub fn as_raw(&self) -> sys::fa_context {
        self.raw
    }

    /// The device of the context.
    pub fn device(&self) -> Result<Device> {
        let mut properties =
            sys::fa_device_properties { struct_size: size_of::<sys::fa_device_properties>() as u32, ..Default::default() };
        // SAFETY: the context is live, the struct initialised; its name ends in NUL.
        unsafe {
            check(sys::fa_device_info(self.raw, &mut properties), self.raw)?;
            Ok(Device {
                name: owned(properties.name.as_ptr()),
                cuda: properties.device_type == sys::FA_DEVICE_CUDA,
                index: properties.device_index,
                threads: properties.num_threads,
                isa: match properties.cpu_isa {
                    sys::FA_CPU_ISA_PORTABLE => CpuIsa::Portable,
                    sys::FA_CPU_ISA_AVX2 => CpuIsa::Avx2,
                    sys::FA_CPU_ISA_AVX512 => CpuIsa::Avx512,
                    sys::FA_CPU_ISA_AVX512_BF16 => CpuIsa::Avx512Bf16,
                    sys::FA_CPU_ISA_AMX => CpuIsa::Amx,
                    sys::FA_CPU_ISA_NEON => CpuIsa::Neon,
                    sys::FA_CPU_ISA_NEON_BF16 => CpuIsa::NeonBf16,
                    sys::FA_CPU_ISA_NEON_FHM => CpuIsa::NeonFhm,
                    sys::FA_CPU_ISA_SVE256 => CpuIsa::Sve256,
                    _ => CpuIsa::Auto,
                },
                compute_capability: properties.compute_capability,
                multiprocessors: properties.multiprocessors,
                memory_bytes: properties.memory_bytes,
            })
        }
    }

    /// Computes `out` and, if given, `lse`: f32 (batch, heads, rows), or (heads, total) when packed.
    pub fn forward(
        &self,
        attention: &Attention<'_>,
        out: &mut TensorViewMut<'_>,
        lse: Option<&mut TensorViewMut<'_>>,
    ) -> Result<()> {
        self.run_forward(&attention.with_results(out.raw(), lse.map_or_else(Default::default, |lse| lse.raw())))
    }

    /// Like [`Context::forward`], and writes the largest visible logit of each query head to `max_logit`, f32 (heads).
    pub fn forward_with_max_logit(
        &self,
        attention: &Attention<'_>,
        out: &mut TensorViewMut<'_>,
        lse: Option<&mut TensorViewMut<'_>>,
        max_logit: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let mut raw = attention.with_results(out.raw(), lse.map_or_else(Default::default, |lse| lse.raw()));
        raw.max_logit = max_logit.raw();
        self.run_forward(&raw)
    }

    fn run_forward(&self, raw: &sys::fa_attention) -> Result<()> {
        // SAFETY: views describe memory that is alive and, for the outputs, exclusively ours; the call returns when it is done, or the
        // caller of `cuda` has vouched for the time until then.
        unsafe { check(sys::fa_forward(self.raw, raw, self.workspace, self.workspace_bytes, self.stream), self.raw) }
    }

    /// Computes the gradients that are present, from the `out` and `lse` of [`Context::forward`].
    pub fn backward(
        &self,
        attention: &Attention<'_>,
        out: TensorView<'_>,
        lse: TensorView<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result<()> {
        let raw = attention.with_results(out.raw(), lse.raw());
        // SAFETY: as in `forward`; out and lse are only read.
        unsafe {
            let (workspace, bytes) = (self.workspace, self.workspace_bytes);
            check(sys::fa_backward(self.raw, &raw, gradients.raw(), workspace, bytes, self.stream), self.raw)
        }
    }

    /// Makes a score function for calls of this context, which is on the CPU.
    pub fn score<'a, F: ScoreFunction>(&self, function: &'a F) -> Result<Score<'a>> {
        let mut raw = null_mut();
        // SAFETY: the context is live, the struct initialised, and its functions take a pointer to `function`, which outlives the result.
        unsafe {
            check(sys::fa_score_create(self.raw, &source(function), &mut raw), self.raw)?;
            Ok(Score::from_raw(raw))
        }
    }

    /// Makes a score function for calls of this context, which is on a CUDA device, from C++ text that the guide to score functions describes.
    ///
    /// # Safety
    /// The text runs on the device as it is. It must read no more than the tensors of the problem have.
    pub unsafe fn score_text(&self, text: &str) -> Result<Score<'static>> {
        let mut raw = null_mut();
        check(sys::fa_score_create(self.raw, &text_source(text), &mut raw), self.raw)?;
        Ok(Score::from_raw(raw))
    }

    /// Rotates new keys and queries, and writes the new keys and values to a cache.
    pub fn append_kv(&self, append: &mut Append<'_>) -> Result<()> {
        let raw = append.raw()?;
        // SAFETY: as in `forward`; what is written came as views that may be.
        unsafe { check(sys::fa_append_kv(self.raw, raw, self.workspace, self.workspace_bytes, self.stream), self.raw) }
    }

    /// Merges (out, lse) pairs over disjoint sets of keys into the pair over all of them.
    pub fn merge(
        &self,
        parts: &[(TensorView<'_>, TensorView<'_>)],
        out: &mut TensorViewMut<'_>,
        lse: Option<&mut TensorViewMut<'_>>,
    ) -> Result<()> {
        let (outs, lses) = views_of(parts);
        let raw = merge_problem(&outs, &lses, out, lse.as_deref());
        // SAFETY: as in `forward`; the arrays hold a tensor for each part.
        unsafe { check(sys::fa_merge(self.raw, &raw, self.workspace, self.workspace_bytes, self.stream), self.raw) }
    }

    /// Reports how [`Context::forward`] would run, or its error. Reads no tensor data.
    pub fn query_forward(
        &self,
        attention: &Attention<'_>,
        out: &TensorViewMut<'_>,
        lse: Option<&TensorViewMut<'_>>,
    ) -> Result<Plan> {
        let raw = attention.with_results(out.raw(), lse.map_or_else(Default::default, |lse| lse.raw()));
        // SAFETY: the context is live and the structs initialised.
        self.query(|info| unsafe { sys::fa_forward_query(self.raw, &raw, info) })
    }

    /// Reports how [`Context::backward`] would run, or its error. Reads no tensor data.
    pub fn query_backward(
        &self,
        attention: &Attention<'_>,
        out: TensorView<'_>,
        lse: TensorView<'_>,
        gradients: &Gradients<'_>,
    ) -> Result<Plan> {
        let raw = attention.with_results(out.raw(), lse.raw());
        // SAFETY: the context is live and the structs initialised.
        self.query(|info| unsafe { sys::fa_backward_query(self.raw, &raw, gradients.raw(), info) })
    }

    /// Reports how [`Context::merge`] would run, or its error. Reads no tensor data.
    pub fn query_merge(
        &self,
        parts: &[(TensorView<'_>, TensorView<'_>)],
        out: &TensorViewMut<'_>,
        lse: Option<&TensorViewMut<'_>>,
    ) -> Result<Plan> {
        let (outs, lses) = views_of(parts);
        let raw = merge_problem(&outs, &lses, out, lse);
        // SAFETY: the context is live, the struct initialised, and its arrays hold a tensor for each part.
        self.query(|info| unsafe { sys::fa_merge_query(self.raw, &raw, info) })
    }

    /// Reports how [`Context::append_kv`] would run, or its error. Reads no tensor data.
    pub fn query_append(&self, append: &Append<'_>) -> Result<Plan> {
        let raw = append.raw()?;
        // SAFETY: the context is live and the struct initialised.
        self.query(|info| unsafe { sys::fa_append_query(self.raw, raw, info) })
    }

    /// Loads the kernels of [`Context::forward`] for this problem, so that the next call, or its capture in a CUDA graph, loads none. On the
    /// CPU it only checks the problem.
    pub fn prepare_forward(
        &self,
        attention: &Attention<'_>,
        out: &TensorViewMut<'_>,
        lse: Option<&TensorViewMut<'_>>,
    ) -> Result<()> {
        let raw = attention.with_results(out.raw(), lse.map_or_else(Default::default, |lse| lse.raw()));
        // SAFETY: the context is live and the struct initialised.
        unsafe { check(sys::fa_forward_prepare(self.raw, &raw), self.raw) }
    }

    /// Loads the kernels of [`Context::backward`] for this problem. See [`Context::prepare_forward`].
    pub fn prepare_backward(
        &self,
        attention: &Attention<'_>,
        out: TensorView<'_>,
        lse: TensorView<'_>,
        gradients: &Gradients<'_>,
    ) -> Result<()> {
        let raw = attention.with_results(out.raw(), lse.raw());
        // SAFETY: the context is live and the structs initialised.
        unsafe { check(sys::fa_backward_prepare(self.raw, &raw, gradients.raw()), self.raw) }
    }

    /// Loads the kernels of [`Context::merge`] for this problem. See [`Context::prepare_forward`].
    pub fn prepare_merge(
        &self,
        parts: &[(TensorView<'_>, TensorView<'_>)],
        out: &TensorViewMut<'_>,
        lse: Option<&TensorViewMut<'_>>,
    ) -> Result<()> {
        let (outs, lses) = views_of(parts);
        let raw = merge_problem(&outs, &lses, out, lse);
        // SAFETY: the context is live, the struct initialised, and its arrays hold a tensor for each part.
        unsafe { check(sys::fa_merge_prepare(self.raw, &raw), self.raw) }
    }

    /// Loads the kernels of [`Context::append_kv`] for this problem. See [`Context::prepare_forward`].
    pub fn prepare_append(&self, append: &Append<'_>) -> Result<()> {
        let raw = append.raw()?;
        // SAFETY: the context is live and the struct initialised.
        unsafe { check(sys::fa_append_prepare(self.raw, raw), self.raw) }
    }

    fn query(&self, ask: impl FnOnce(&mut sys::fa_plan_info) -> sys::fa_status) -> Result<Plan> {
        let mut info = sys::fa_plan_info { struct_size: size_of::<sys::fa_plan_info>() as u32, ..Default::default() };
        let status = ask(&mut info);
        // SAFETY: the context is live and `ask` was its last call; the texts end in NUL.
        unsafe {
            check(status, self.raw)?;
            Ok(Plan {
                kernel: owned(info.kernel.as_ptr()),
                reason: owned(info.reason.as_ptr()),
                workspace_bytes: info.workspace_bytes,
                flops: info.flops,
                bytes: info.bytes,
                num_splits: info.num_splits,
                same_bits_contract: info.same_bits_contract,
            })
        }
    }
}

/// The tensors of the parts of a merge, as the C interface has them.
fn views_of(parts: &[(TensorView<'_>, TensorView<'_>)]) -> (Vec<sys::fa_tensor>, Vec<sys::fa_tensor>) {
    (parts.iter().map(|part| part.0.raw()).collect(), parts.iter().map(|part| part.1.raw()).collect())
}

/// A merge of parts that the two arrays, of one length, describe. The struct points to them.
fn merge_problem(
    outs: &[sys::fa_tensor],
    lses: &[sys::fa_tensor],
    out: &TensorViewMut<'_>,
    lse: Option<&TensorViewMut<'_>>,
) -> sys::fa_merge_problem {
    sys::fa_merge_problem {
        struct_size: size_of::<sys::fa_merge_problem>() as u32,
        num_parts: i32::try_from(outs.len()).unwrap_or(i32::MAX), // more parts than that cannot exist in memory
        out_parts: outs.as_ptr(),
        lse_parts: lses.as_ptr(),
        out: out.raw(),
        lse: lse.map_or_else(Default::default, |lse| lse.raw()),
    }
}

/// A setting as the C interface has it.
fn number(name: &str, value: u32) -> Result<i32> {
    i32::try_from(value).map_err(|_| Error::new(sys::FA_ERROR_INVALID_ARGUMENT, format!("{} is {}", name, value)))
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: ours, and no call is running.
        unsafe { sys::fa_destroy(self.raw) }
    }
}

/// Opens the library with the feature `dynamic-loading`, and does nothing without it: the file at `path`, else the one named by
/// `FLASHATTN_LIBRARY`, else `libflashattn.so.0` where the system looks. [`Context::new`] does it by itself; call it to choose the file, or to
/// learn whether the library is there (`FA_ERROR_NOT_BUILT` if not).
pub fn load(path: Option<&Path>) -> Result<()> {
    sys::load(path).map_err(|text| Error::new(sys::FA_ERROR_NOT_BUILT, text))
}

/// # Safety
/// `text` is a static NUL-terminated string.
unsafe fn constant(text: *const c_char) -> &'static str {
    CStr::from_ptr(text).to_str().unwrap_or("")
}

/// Version of the loaded library.
///
/// # Panics
/// With the feature `dynamic-loading`, while no library is loaded.
pub fn version() -> &'static str {
    // SAFETY: a static string.
    unsafe { constant(sys::fa_version_string()) }
}

/// What the loaded library contains, one key=value a line.
///
/// # Panics
/// With the feature `dynamic-loading`, while no library is loaded.
pub fn build_info() -> &'static str {
    // SAFETY: a static string.
    unsafe { constant(sys::fa_build_info()) }
}
