// SPDX-License-Identifier: Apache-2.0
use std::marker::PhantomData;
use std::mem::size_of;
use std::ptr::null;

use flashattn_sys as sys;

use crate::{Score, ScoreTensor, TensorView, TensorViewMut};

/// Which keys a query may see, before windows, block mask and bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mask {
    /// Every key.
    None,
    /// Query i sees keys j <= i + seqlen_k - seqlen_q.
    Causal,
    /// Query i sees keys j <= i.
    CausalTopLeft,
}

/// One attention problem: inputs and options, shared by forward and backward. `flashattn.h` documents shapes and meaning of each.
#[derive(Clone)]
pub struct Attention<'a> {
    raw: sys::fa_attention,
    inputs: PhantomData<TensorView<'a>>,
}

/// Converts a size. More than 63 bits become the largest number, which is larger than any tensor.
fn size(value: usize) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

impl<'a> Attention<'a> {
    /// q (batch, rows, heads, head_dim), k and v likewise; or (total, heads, head_dim) with `cu_seqlens`.
    pub fn new(q: TensorView<'a>, k: TensorView<'a>, v: TensorView<'a>) -> Self {
        let raw = sys::fa_attention {
            struct_size: size_of::<sys::fa_attention>() as u32,
            q: q.raw(),
            k: k.raw(),
            v: v.raw(),
            ..Default::default()
        };
        Attention { raw, inputs: PhantomData }
    }

    /// Which keys a query may see.
    #[must_use]
    pub fn mask(mut self, mask: Mask) -> Self {
        self.raw.mask = match mask {
            Mask::None => sys::FA_MASK_NONE,
            Mask::Causal => sys::FA_MASK_CAUSAL,
            Mask::CausalTopLeft => sys::FA_MASK_CAUSAL_TOP_LEFT,
        };
        self
    }

    /// `mask(Mask::Causal)`.
    #[must_use]
    pub fn causal(self) -> Self {
        self.mask(Mask::Causal)
    }

    /// A query sees at most this many keys before its diagonal.
    #[must_use]
    pub fn window_left(mut self, keys: usize) -> Self {
        self.raw.window |= sys::FA_WINDOW_LEFT;
        self.raw.window_left = size(keys);
        self
    }

    /// A query sees at most this many keys after its diagonal.
    #[must_use]
    pub fn window_right(mut self, keys: usize) -> Self {
        self.raw.window |= sys::FA_WINDOW_RIGHT;
        self.raw.window_right = size(keys);
        self
    }

    /// Scale of q k^T; 0 = 1 / sqrt(head_dim), the default.
    #[must_use]
    pub fn scale(mut self, scale: f32) -> Self {
        self.raw.softmax_scale = scale;
        self
    }

    /// Logits become softcap * tanh(logit / softcap).
    #[must_use]
    pub fn softcap(mut self, softcap: f32) -> Self {
        self.raw.softcap = softcap;
        self
    }

    /// With `scale` > 0 and [`Attention::alibi_slopes`], slope * log(1 + scale * distance) is subtracted instead of slope * distance.
    #[must_use]
    pub fn alibi_log_scale(mut self, scale: f32) -> Self {
        self.raw.alibi_log_scale = scale;
        self
    }

    /// Elements of P are dropped with probability `p`. The same seed and offset drop the same elements on every device.
    #[must_use]
    pub fn dropout(mut self, p: f32, seed: u64, offset: u64) -> Self {
        self.raw.dropout_p = p;
        self.raw.dropout_seed = seed;
        self.raw.dropout_offset = offset;
        self.raw.dropout_seed_ptr = null();
        self.raw.dropout_offset_ptr = null();
        self
    }

    /// Like [`Attention::dropout`], with seed and offset that are read when the work runs, so that a captured CUDA graph can change them.
    ///
    /// # Safety
    /// Both are NULL, which counts as 0, or may be read by the device of the context that gets this problem, for as long as its work may run.
    #[must_use]
    pub unsafe fn dropout_at(self, p: f32, seed: *const u64, offset: *const u64) -> Self {
        let mut attention = self.dropout(p, 0, 0);
        attention.raw.dropout_seed_ptr = seed;
        attention.raw.dropout_offset_ptr = offset;
        attention
    }

    /// CUDA, a hint: number of KV splits for short queries; 0 = automatic.
    #[must_use]
    pub fn num_splits(mut self, splits: usize) -> Self {
        self.raw.num_splits = i32::try_from(splits).unwrap_or(i32::MAX);
        self
    }

    /// A score function of the context that gets this problem.
    #[must_use]
    pub fn score(mut self, score: &'a Score<'_>) -> Self {
        self.raw.score = score.raw();
        self
    }

    /// What a score function reads: at most eight tensors, and eight numbers. A text needs them; a [`ScoreFunction`](crate::ScoreFunction) holds its own.
    #[must_use]
    pub fn score_inputs(mut self, tensors: &'a [ScoreTensor<'a>], scalars: [f32; 8]) -> Self {
        self.raw.score_tensors = ScoreTensor::first(tensors);
        self.raw.num_score_tensors = i32::try_from(tensors.len()).unwrap_or(i32::MAX);
        self.raw.score_scalars = scalars;
        self
    }

    /// (batch or 1, heads or 1, ceil(rows / block_rows), ceil(keys / block_keys)): zero masks a block.
    #[must_use]
    pub fn block_mask(mut self, tensor: TensorView<'a>, block_rows: usize, block_keys: usize) -> Self {
        self.raw.block_mask = tensor.raw();
        self.raw.block_size_q = size(block_rows);
        self.raw.block_size_k = size(block_keys);
        self
    }

    /// Visible blocks of keys for each block of queries: i32 numbers (batch or 1, heads or 1, ceil(rows / block_rows)), and i32 indices with one
    /// more dimension, in any order. Sizes are those of [`Attention::block_mask`], too.
    #[must_use]
    pub fn block_lists(
        mut self,
        counts: TensorView<'a>,
        indices: TensorView<'a>,
        block_rows: usize,
        block_keys: usize,
    ) -> Self {
        self.raw.block_counts = counts.raw();
        self.raw.block_indices = indices.raw();
        self.raw.block_size_q = size(block_rows);
        self.raw.block_size_k = size(block_keys);
        self
    }

    /// [`Attention::element_mask`] with one bit per pair: u8 (.., ceil(keys / 8)), adjacent bytes, in which bit 0 of a byte is the first of its keys.
    #[must_use]
    pub fn element_mask_bits(mut self, tensor: TensorView<'a>, keys: usize) -> Self {
        let mut mask = tensor.raw();
        // Any other tensor goes to the library as it is, which refuses it.
        if mask.dtype == sys::FA_UINT8 && mask.ndim == 4 {
            mask.dtype = sys::FA_BIT;
            mask.shape[3] = size(keys).min(mask.shape[3].saturating_mul(8));
            for stride in &mut mask.stride[..3] {
                *stride = stride.saturating_mul(8);
            }
        }
        self.raw.element_mask = mask;
        self
    }

    inputs! {
        /// u8 or bool (batch or 1, heads or 1, rows or 1, keys or 1): zero masks a pair.
        element_mask
        /// i32 (n, 5): q_begin, q_end, k_begin, k_end and a kind (`FA_SLICE_*`). A pair in no slice is masked.
        slices
        /// i32 (batch): number of keys at the start of each sequence that are masked (left padding).
        seqstart_k
        /// Added to the logits: (batch or 1, heads or 1, rows or 1, keys).
        bias
        /// f32 (heads) or (batch, heads).
        alibi_slopes
        /// f32 (heads): one more logit per head, in the denominator only.
        sink
        /// Packed queries: i32 or i64 (batch + 1).
        cu_seqlens_q
        /// Packed keys: i32 or i64 (batch + 1).
        cu_seqlens_k
        /// i32 (batch): number of used rows of each query sequence.
        seqused_q
        /// i32 (batch): number of used rows of each key sequence.
        seqused_k
        /// Paged keys: i32 (batch, max_pages).
        page_table
        /// Sparse attention by index, forward on the CPU: i32 (batch, rows, n) or, with packed queries, (rows, n). Each query sees the rows of its
        /// key sequence that it lists, in all its heads, and no others; negative numbers are none. Other masks, bias and dropout must be absent.
        kv_indices
        /// Descales of queries in [`F8E4M3`](crate::F8E4M3), forward only: f32 (batch, heads of k).
        q_descale
        /// Descales of keys in i8 or [`F8E4M3`](crate::F8E4M3), forward only: f32 (batch, heads), or as the keys without head_dim.
        k_descale
        /// Descales of values, likewise.
        v_descale
    }

    /// Upper bounds of the lengths of packed or paged sequences; 0 = unknown.
    #[must_use]
    pub fn max_seqlens(mut self, queries: usize, keys: usize) -> Self {
        self.raw.max_seqlen_q = size(queries);
        self.raw.max_seqlen_k = size(keys);
        self
    }

    /// Equal inputs give equal bits. Always true on the CPU.
    #[must_use]
    pub fn deterministic(mut self) -> Self {
        self.raw.flags |= sys::FA_FLAG_DETERMINISTIC;
        self
    }

    /// The bits of a sequence's result do not depend on the other sequences of the batch. Always true on the CPU.
    #[must_use]
    pub fn batch_invariant(mut self) -> Self {
        self.raw.flags |= sys::FA_FLAG_BATCH_INVARIANT;
        self
    }

    /// The bits of a row of the results do not depend on the other rows of the call, nor on how it stores its tensors. On the CPU.
    #[must_use]
    pub fn same_bits(mut self) -> Self {
        self.raw.flags |= sys::FA_FLAG_SAME_BITS;
        self
    }

    /// fp32 operands are multiplied as they are, not as sums of bf16 numbers on tensor cores. Always so on the CPU.
    #[must_use]
    pub fn fp32_products(mut self) -> Self {
        self.raw.flags |= sys::FA_FLAG_FP32_PRODUCTS;
        self
    }

    pub(crate) fn with_results(&self, out: sys::fa_tensor, lse: sys::fa_tensor) -> sys::fa_attention {
        sys::fa_attention { out, lse, ..self.raw }
    }
}

/// The tensors of backward that [`Attention`] does not have. Absent outputs are not computed.
pub struct Gradients<'a> {
    raw: sys::fa_gradients,
    outputs: PhantomData<TensorViewMut<'a>>,
}

impl<'a> Gradients<'a> {
    /// `dout` is the gradient of `out`.
    pub fn new(dout: TensorView<'a>) -> Self {
        let raw =
            sys::fa_gradients { struct_size: size_of::<sys::fa_gradients>() as u32, dout: dout.raw(), ..Default::default() };
        Gradients { raw, outputs: PhantomData }
    }

    /// The gradient of `lse`.
    #[must_use]
    pub fn dlse(mut self, tensor: TensorView<'a>) -> Self {
        self.raw.dlse = tensor.raw();
        self
    }

    outputs! {
        /// Of q.
        dq
        /// Of k, summed over the query heads that share a key head.
        dk
        /// Of v, summed over the query heads that share a key head.
        dv
        /// Of the bias, summed over its broadcast dimensions.
        dbias
        /// f32 (heads).
        dsink
    }

    pub(crate) fn raw(&self) -> &sys::fa_gradients {
        &self.raw
    }
}
