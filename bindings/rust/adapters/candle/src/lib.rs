// SPDX-License-Identifier: Apache-2.0
//! Attention of candle by libflashattn, on the CPU, with gradients of queries, keys and values.
//!
//! [`flash_attn`], [`flash_attn_windowed`] and [`flash_attn_varlen`] are called as those of `candle-flash-attn`, which runs on CUDA alone and has no
//! gradients. [`attention`] has every option.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use flashattn_candle::flash_attn;
//!
//! let ones = |heads| Tensor::ones((1, 128, heads, 64), DType::F32, &Device::Cpu); // batch, rows, heads, head_dim
//! let (q, k, v) = (ones(8)?, ones(2)?, ones(2)?);
//! let softmax_scale = 1.0 / 64f32.sqrt();
//! let out = flash_attn(&q, &k, &v, softmax_scale, true)?;
//! assert_eq!(out.dims(), q.dims());
//! # Ok::<(), candle_core::Error>(())
//! ```

#![deny(missing_docs)]

use std::mem::{align_of, size_of};
use std::sync::Mutex;

use candle_core::{bail, CpuStorage, CustomOp3, DType, Device, Error, Layout, Result, Shape, Storage, Tensor};
use flashattn::{Attention, Bf16, Context, Element, Gradients, TensorView, TensorViewMut, F16};

/// What [`attention`] computes beyond softmax(scale q k^T) v.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Scale of q k^T; None is 1 / sqrt(head_dim).
    pub scale: Option<f32>,
    /// A query sees the keys up to its diagonal. The last query's ends at the last key.
    pub causal: bool,
    /// A query sees at most this many keys before its diagonal.
    pub window_left: Option<usize>,
    /// A query sees at most this many keys after its diagonal.
    pub window_right: Option<usize>,
    /// Logits become softcap * tanh(logit / softcap).
    pub softcap: Option<f32>,
    /// ALiBi: slope * distance is subtracted from the logits; (heads) or (batch, heads). Gets no gradient.
    pub alibi_slopes: Option<Tensor>,
    /// The tensors hold the rows of several sequences: (rows, heads, head_dim).
    pub sequences: Option<Sequences>,
}

/// The sequences of packed tensors.
#[derive(Clone, Debug)]
pub struct Sequences {
    /// Row at which each sequence of queries begins, and one past the last row: (batch + 1) integers.
    pub offsets_q: Tensor,
    /// The same for keys and values.
    pub offsets_k: Tensor,
    /// Rows of the longest sequence of queries.
    pub max_q: usize,
    /// Rows of the longest sequence of keys.
    pub max_k: usize,
}

/// Attention of (batch, rows, heads, head_dim), like the function of `candle-flash-attn`. Keys and values may have fewer heads than queries.
pub fn flash_attn(q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32, causal: bool) -> Result<Tensor> {
    attention(q, k, v, &Options { scale: Some(softmax_scale), causal, ..Options::default() })
}

/// [`flash_attn`] where a query sees as many keys before and after its diagonal; None is no limit.
pub fn flash_attn_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let options = Options {
        scale: Some(softmax_scale),
        window_left: window_size_left,
        window_right: window_size_right,
        ..Options::default()
    };
    attention(q, k, v, &options)
}

/// [`flash_attn`] of packed sequences, (rows, heads, head_dim); `seqlens_q` and `seqlens_k` are offsets, as in [`Sequences`].
#[allow(clippy::too_many_arguments)] // those of candle-flash-attn
pub fn flash_attn_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let sequences =
        Sequences { offsets_q: seqlens_q.clone(), offsets_k: seqlens_k.clone(), max_q: max_seqlen_q, max_k: max_seqlen_k };
    attention(q, k, v, &Options { scale: Some(softmax_scale), causal, sequences: Some(sequences), ..Options::default() })
}

/// Attention of (batch, rows, heads, head_dim), or of packed sequences. Any strides are read in place where head_dim has stride 1.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, options: &Options) -> Result<Tensor> {
    let op = Op::new(options, q.track_op() || k.track_op() || v.track_op())?;
    rows(q)?.apply_op3(&rows(k)?, &rows(v)?, op)
}

/// The tensor, copied if its last dimension does not lie in adjacent memory.
fn rows(tensor: &Tensor) -> Result<Tensor> {
    match (tensor.dims().last(), tensor.stride().last()) {
        (Some(&size), Some(&stride)) if size > 1 && stride != 1 => tensor.contiguous(),
        _ => Ok(tensor.clone()),
    }
}

/// One call: the options in host memory, and what backward needs of forward.
struct Op {
    options: Options,
    alibi: Option<(Vec<f32>, Vec<usize>)>,
    offsets: Option<(Vec<i64>, Vec<i64>)>,
    tracked: bool,
    lse: Mutex<Vec<f32>>,
}

impl Op {
    fn new(options: &Options, tracked: bool) -> Result<Self> {
        // The library takes 0 for an absent option.
        for (name, value) in [("scale", options.scale), ("softcap", options.softcap)] {
            if value == Some(0.0) {
                bail!("{} is 0; None leaves it out", name);
            }
        }
        let alibi = match &options.alibi_slopes {
            Some(slopes) if slopes.track_op() => bail!("alibi_slopes wants a gradient, which is not computed; detach it"),
            Some(slopes) => {
                let numbers = slopes.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
                Some((numbers, slopes.dims().to_vec()))
            }
            None => None,
        };
        let offsets = match &options.sequences {
            Some(s) => {
                let of = |tensor: &Tensor| tensor.to_dtype(DType::I64)?.to_vec1();
                Some((of(&s.offsets_q)?, of(&s.offsets_k)?))
            }
            None => None,
        };
        Ok(Op { options: options.clone(), alibi, offsets, tracked, lse: Mutex::new(Vec::new()) })
    }

    fn problem<'a>(&'a self, q: TensorView<'a>, k: TensorView<'a>, v: TensorView<'a>) -> flashattn::Result<Attention<'a>> {
        let mut problem = Attention::new(q, k, v).scale(self.options.scale.unwrap_or(0.0));
        problem = problem.softcap(self.options.softcap.unwrap_or(0.0));
        if self.options.causal {
            problem = problem.causal();
        }
        if let Some(keys) = self.options.window_left {
            problem = problem.window_left(keys);
        }
        if let Some(keys) = self.options.window_right {
            problem = problem.window_right(keys);
        }
        if let Some((slopes, shape)) = &self.alibi {
            problem = problem.alibi_slopes(TensorView::new(slopes, shape)?);
        }
        if let (Some((of_q, of_k)), Some(sequences)) = (&self.offsets, &self.options.sequences) {
            problem = problem
                .cu_seqlens_q(TensorView::new(of_q, &[of_q.len()])?)
                .cu_seqlens_k(TensorView::new(of_k, &[of_k.len()])?)
                .max_seqlens(sequences.max_q, sequences.max_k);
        }
        Ok(problem)
    }
}

impl CustomOp3 for Op {
    fn name(&self) -> &'static str {
        "flashattn"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let mut shape = q_layout.dims().to_vec();
        if let (Some(columns), Some(&of_v)) = (shape.last_mut(), v_layout.dims().last()) {
            *columns = of_v;
        }
        // (batch, heads, rows); of packed tensors (heads, rows).
        let lse_shape = match *q_layout.dims() {
            [batch, rows, heads, _] => vec![batch, heads, rows],
            [rows, heads, _] => vec![heads, rows],
            _ => bail!("q has shape {:?}; it must have 4 dimensions, or 3 of packed sequences", q_layout.dims()),
        };
        let mut out = zeros_like(q, shape.iter().product())?;
        let mut lse = vec![0f32; if self.tracked { lse_shape.iter().product() } else { 0 }];
        {
            let views = (view(q, q_layout)?, view(k, k_layout)?, view(v, v_layout)?);
            let problem = self.problem(views.0, views.1, views.2).map_err(failed)?;
            let mut out_view = view_mut(&mut out, &shape)?;
            if self.tracked {
                let mut lse_view = TensorViewMut::new(&mut lse, &lse_shape).map_err(failed)?;
                Context::of_this_thread(|context| context.forward(&problem, &mut out_view, Some(&mut lse_view)))
                    .map_err(failed)?;
            } else {
                Context::of_this_thread(|context| context.forward(&problem, &mut out_view, None)).map_err(failed)?;
            }
        }
        *self.lse.lock().map_err(|_| Error::Msg("another thread panicked in flashattn".into()))? = lse;
        Ok((out, Shape::from(shape)))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let lse = self.lse.lock().map_err(|_| Error::Msg("another thread panicked in flashattn".into()))?;
        let lse_shape = match *q.dims() {
            [batch, rows, heads, _] => vec![batch, heads, rows],
            [rows, heads, _] => vec![heads, rows],
            _ => bail!("q has shape {:?}", q.dims()),
        };
        let dout = rows(dout)?;
        let guards = [q, k, v, out, &dout].map(Tensor::storage_and_layout);
        let storage = |n: usize| match &*guards[n].0 {
            Storage::Cpu(storage) => Ok(storage),
            _ => bail!("flashattn computes gradients on the CPU alone"),
        };
        let viewed = |n: usize| view(storage(n)?, guards[n].1);
        let mut results = [None, None, None];
        for (n, tensor) in [q, k, v].iter().enumerate() {
            if tensor.track_op() {
                results[n] = Some(zeros_like(storage(n)?, tensor.elem_count())?);
            }
        }
        {
            let problem = self.problem(viewed(0)?, viewed(1)?, viewed(2)?).map_err(failed)?;
            let mut gradients = Gradients::new(viewed(4)?);
            for (n, (result, tensor)) in results.iter_mut().zip([q, k, v]).enumerate() {
                if let Some(result) = result {
                    let written = view_mut(result, tensor.dims())?;
                    gradients = match n {
                        0 => gradients.dq(written),
                        1 => gradients.dk(written),
                        _ => gradients.dv(written),
                    };
                }
            }
            let lse_view = TensorView::new(&lse, &lse_shape).map_err(failed)?;
            let out_view = viewed(3)?;
            Context::of_this_thread(|context| context.backward(&problem, out_view, lse_view, &mut gradients))
                .map_err(failed)?;
        }
        let [dq, dk, dv] = results;
        let tensor = |result: Option<CpuStorage>, like: &Tensor| result.map(|x| from_storage(x, like.shape())).transpose();
        Ok((tensor(dq, q)?, tensor(dk, k)?, tensor(dv, v)?))
    }
}

fn failed(error: flashattn::Error) -> Error {
    Error::Msg(error.to_string())
}

fn unsupported<T>(dtype: DType) -> Result<T> {
    bail!("q, k and v must be F32, F16 or BF16, not {:?}", dtype)
}

/// Bits of 16-bit floats as the numbers of this library.
fn bits<T, B: Element>(numbers: &[T]) -> &[B] {
    assert!(size_of::<T>() == size_of::<B>() && align_of::<T>() == align_of::<B>());
    // SAFETY: called with half::f16 and half::bf16 alone, which are u16 as F16 and Bf16 are.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), numbers.len()) }
}

fn bits_mut<T, B: Element>(numbers: &mut [T]) -> &mut [B] {
    assert!(size_of::<T>() == size_of::<B>() && align_of::<T>() == align_of::<B>());
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), numbers.len()) }
}

fn view<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<TensorView<'a>> {
    let strides: Vec<isize> = layout.stride().iter().map(|&stride| stride as isize).collect();
    let (offset, shape) = (layout.start_offset(), layout.dims());
    match storage {
        CpuStorage::F32(x) => TensorView::strided(x, offset, shape, &strides),
        CpuStorage::F16(x) => TensorView::strided(bits::<_, F16>(x), offset, shape, &strides),
        CpuStorage::BF16(x) => TensorView::strided(bits::<_, Bf16>(x), offset, shape, &strides),
        other => return unsupported(dtype(other)),
    }
    .map_err(failed)
}

fn view_mut<'a>(storage: &'a mut CpuStorage, shape: &[usize]) -> Result<TensorViewMut<'a>> {
    match storage {
        CpuStorage::F32(x) => TensorViewMut::new(x, shape),
        CpuStorage::F16(x) => TensorViewMut::new(bits_mut::<_, F16>(x), shape),
        CpuStorage::BF16(x) => TensorViewMut::new(bits_mut::<_, Bf16>(x), shape),
        other => return unsupported(dtype(other)),
    }
    .map_err(failed)
}

fn zeros_like(storage: &CpuStorage, count: usize) -> Result<CpuStorage> {
    Ok(match storage {
        CpuStorage::F32(_) => CpuStorage::F32(vec![Default::default(); count]),
        CpuStorage::F16(_) => CpuStorage::F16(vec![Default::default(); count]),
        CpuStorage::BF16(_) => CpuStorage::BF16(vec![Default::default(); count]),
        other => return unsupported(dtype(other)),
    })
}

fn from_storage(storage: CpuStorage, shape: &Shape) -> Result<Tensor> {
    match storage {
        CpuStorage::F32(x) => Tensor::from_vec(x, shape.clone(), &Device::Cpu),
        CpuStorage::F16(x) => Tensor::from_vec(x, shape.clone(), &Device::Cpu),
        CpuStorage::BF16(x) => Tensor::from_vec(x, shape.clone(), &Device::Cpu),
        other => unsupported(dtype(&other)),
    }
}

fn dtype(storage: &CpuStorage) -> DType {
    candle_core::backend::BackendStorage::dtype(storage)
}
