// SPDX-License-Identifier: Apache-2.0
use std::marker::PhantomData;
use std::mem::size_of;

use flashattn_sys as sys;

use crate::{Error, Result, TensorView, TensorViewMut};

/// New keys and values for a KV cache, and the rotary embedding of new keys and queries: see
/// [`Context::append_kv`](crate::Context::append_kv). `flashattn.h` documents shapes and meaning of each field (`fa_append`).
///
/// Row i of sequence n goes to row `offsets[n] + i` of its cache. Rows outside the cache are skipped. Two sequences that
/// share a page must not both write new rows to it.
pub struct Append<'a> {
    raw: sys::fa_append,
    /// Whether the call may write k_descale and v_descale.
    writes_descale: [bool; 2],
    memory: PhantomData<(TensorView<'a>, TensorViewMut<'a>)>,
}

impl<'a> Append<'a> {
    /// Keys k (batch, new rows, heads, head_dim), or (total, heads, head_dim) with `cu_seqlens`, for a cache (batch, rows, heads, head_dim) or,
    /// with `page_table`, (pages, page size, heads, head_dim); of k's type, [`F8E4M3`](crate::F8E4M3) or i8.
    pub fn new(k: TensorView<'a>, k_cache: TensorViewMut<'a>) -> Self {
        let raw = sys::fa_append {
            struct_size: size_of::<sys::fa_append>() as u32,
            k: k.raw(),
            k_cache: k_cache.raw(),
            ..Default::default()
        };
        Append { raw, writes_descale: [false; 2], memory: PhantomData }
    }

    /// Values, shaped as the keys except for head_dim.
    #[must_use]
    pub fn values(mut self, v: TensorView<'a>, v_cache: TensorViewMut<'a>) -> Self {
        self.raw.v = v.raw();
        self.raw.v_cache = v_cache.raw();
        self
    }

    /// Tables of cosines and sines, (positions, rotary_dim / 2), f32 or of the type of k: the first rotary_dim columns of keys and queries are
    /// rotated, columns c and c + rotary_dim / 2 together.
    #[must_use]
    pub fn rotary(mut self, cos: TensorView<'a>, sin: TensorView<'a>) -> Self {
        self.raw.rotary_cos = cos.raw();
        self.raw.rotary_sin = sin.raw();
        self
    }

    /// Columns 2c and 2c + 1 are rotated together instead.
    #[must_use]
    pub fn interleaved(mut self) -> Self {
        self.raw.flags |= sys::FA_APPEND_INTERLEAVED;
        self
    }

    /// Queries of the new rows, (batch, new rows, heads, head_dim) or (total, heads, head_dim), rotated in place.
    #[must_use]
    pub fn q(mut self, q: TensorViewMut<'a>) -> Self {
        self.raw.q = q.raw();
        self.raw.q_out = Default::default();
        self
    }

    /// Queries of the new rows, rotated into `q_out`.
    #[must_use]
    pub fn q_into(mut self, q: TensorView<'a>, q_out: TensorViewMut<'a>) -> Self {
        self.raw.q = q.raw();
        self.raw.q_out = q_out.raw();
        self
    }

    inputs! {
        /// Paged caches: i32 (batch, max_pages).
        page_table
        /// i32 (batch): rows that each sequence already has in the cache; absent = 0. A negative offset skips the sequence.
        offsets
        /// Packed new rows: i32 or i64 (batch + 1).
        cu_seqlens
        /// i32 (batch): number of used new rows of each sequence.
        seqused
        /// Positions of the new rows for `rotary`, (batch, new rows) or (total), i32 or i64; without them `offsets[n] + i`.
        rotary_positions
    }

    outputs! {
        /// i32 (batch): rows that each sequence has afterwards, for `seqused_k` of the next [`Attention`](crate::Attention).
        seqused_k
    }

    /// Descales of the keys in an 8-bit cache, f32 (batch, heads): rows are divided by them.
    #[must_use]
    pub fn k_descale(mut self, descales: TensorView<'a>) -> Self {
        self.raw.k_descale = descales.raw();
        self.writes_descale[0] = false;
        self
    }

    /// Descales of the values, likewise.
    #[must_use]
    pub fn v_descale(mut self, descales: TensorView<'a>) -> Self {
        self.raw.v_descale = descales.raw();
        self.writes_descale[1] = false;
        self
    }

    /// Descales of the keys in an 8-bit cache, f32, shaped as the cache without head_dim: one is computed for each new row and written.
    #[must_use]
    pub fn k_descale_by_row(mut self, descales: TensorViewMut<'a>) -> Self {
        self.raw.k_descale = descales.raw();
        self.writes_descale[0] = true;
        self
    }

    /// Descales of the values, likewise.
    #[must_use]
    pub fn v_descale_by_row(mut self, descales: TensorViewMut<'a>) -> Self {
        self.raw.v_descale = descales.raw();
        self.writes_descale[1] = true;
        self
    }

    /// The struct, if what the call will write are views that may be written: the library tells descales to read from descales to write by their
    /// number of dimensions.
    pub(crate) fn raw(&self) -> Result<&sys::fa_append> {
        let descales = [("k_descale", &self.raw.k_descale), ("v_descale", &self.raw.v_descale)];
        for ((name, tensor), writes) in descales.into_iter().zip(self.writes_descale) {
            let (suffix, ndim) = if writes { ("_by_row", 3) } else { ("", 2) };
            if !tensor.data.is_null() && tensor.ndim != ndim {
                let text = format!("{}{} has {} dimensions; it needs {}", name, suffix, tensor.ndim, ndim);
                return Err(Error::new(sys::FA_ERROR_SHAPE, text));
            }
        }
        Ok(&self.raw)
    }
}
