// SPDX-License-Identifier: Apache-2.0
use std::marker::PhantomData;
use std::mem::size_of;
use std::os::raw::c_void;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::process::abort;
use std::ptr::{null, null_mut};

use flashattn_sys as sys;

use crate::TensorView;

/// A pair of a query and a key, by row and number within their sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// Sequence of the batch.
    pub batch: usize,
    /// Query head.
    pub head: usize,
    /// Query row, within the sequence.
    pub query: usize,
    /// Key, within the sequence.
    pub key: usize,
    /// Used length of the sequence of queries.
    pub queries: usize,
    /// Used length of the sequence of keys.
    pub keys: usize,
}

/// How much of a tile of pairs is visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tile {
    /// Ask for each pair.
    Partial,
    /// No pair is visible.
    Empty,
    /// The function masks no pair.
    Full,
}

/// A score function and a mask, for contexts on the CPU. What is not implemented changes nothing. Functions are called concurrently, on
/// the threads that compute, and depend on their arguments only. A panic ends the process.
pub trait ScoreFunction: Sync {
    /// Whether [`ScoreFunction::score`] is called.
    const CHANGES_SCORES: bool = true;
    /// Whether [`ScoreFunction::visible`] is called.
    const MASKS: bool = true;

    /// The new score of a pair, from softmax_scale * q k. -inf masks it.
    fn score(&self, s: f32, _pair: &Pair) -> f32 {
        s
    }
    /// The derivative of the new score with respect to s. Whoever implements `score` implements this, too, for backward.
    fn derivative(&self, _s: f32, _pair: &Pair) -> f32 {
        1.0
    }
    /// Whether a pair is visible.
    fn visible(&self, _pair: &Pair) -> bool {
        true
    }
    /// Judges the tile of `queries` x `keys` pairs from `first` on, so that those without a visible pair are skipped.
    fn tile(&self, _first: &Pair, _queries: usize, _keys: usize) -> Tile {
        Tile::Partial
    }
}

/// What the index of the elements of a [`ScoreTensor`] consists of: `QUERY | KEY` is a tensor (1, 1, queries, keys).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access(u32);

impl Access {
    /// The sequence of the batch.
    pub const BATCH: Access = Access(sys::FA_SCORE_BY_BATCH);
    /// The query head.
    pub const HEAD: Access = Access(sys::FA_SCORE_BY_HEAD);
    /// The query.
    pub const QUERY: Access = Access(sys::FA_SCORE_BY_QUERY);
    /// The key.
    pub const KEY: Access = Access(sys::FA_SCORE_BY_KEY);
    /// Anything: a table with 1 to 4 dimensions.
    pub const ANY: Access = Access(sys::FA_SCORE_BY_ANY);
}

impl std::ops::BitOr for Access {
    type Output = Access;
    fn bitor(self, other: Access) -> Access {
        Access(self.0 | other.0)
    }
}

/// A tensor that a score function reads. But for tables it has 4 dimensions: the batch, heads, queries and keys of its access, and 1 for others.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct ScoreTensor<'a> {
    raw: sys::fa_score_tensor,
    memory: PhantomData<&'a ()>,
}

impl<'a> ScoreTensor<'a> {
    /// A tensor on the device of the context that gets the problem.
    pub fn new(tensor: TensorView<'a>, access: Access) -> Self {
        ScoreTensor { raw: sys::fa_score_tensor { tensor: tensor.raw(), access: access.0, reserved: 0 }, memory: PhantomData }
    }

    /// The first of adjacent ones.
    pub(crate) fn first(tensors: &[ScoreTensor<'_>]) -> *const sys::fa_score_tensor {
        if tensors.is_empty() {
            null()
        } else {
            tensors.as_ptr().cast()
        }
    }
}

/// A [`ScoreFunction`] as the library keeps it, made by [`Context::score`](crate::Context::score), or a text, made by
/// [`Context::score_text`](crate::Context::score_text), for calls of that context.
pub struct Score<'a> {
    raw: sys::fa_score,
    function: PhantomData<&'a ()>,
}

// SAFETY: a handle belongs to no thread; its references are counted atomically, and its function is Sync.
unsafe impl Send for Score<'_> {}
unsafe impl Sync for Score<'_> {}

impl Score<'_> {
    /// # Safety
    /// `raw` is live, nobody else's, and its functions may be called as long as it lives.
    pub(crate) unsafe fn from_raw(raw: sys::fa_score) -> Self {
        Score { raw, function: PhantomData }
    }

    pub(crate) fn raw(&self) -> sys::fa_score {
        self.raw
    }
}

impl Drop for Score<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle is live and this is its owner. A call in flight keeps what it needs.
        unsafe { sys::fa_score_destroy(self.raw) }
    }
}

pub(crate) fn text_source(text: &str) -> sys::fa_score_source {
    // A length of 0 stands for a text that ends with a null.
    let text = if text.is_empty() { "\0" } else { text };
    sys::fa_score_source {
        struct_size: size_of::<sys::fa_score_source>() as u32,
        text: text.as_ptr().cast(),
        text_length: if text == "\0" { 0 } else { text.len() as u64 },
        ..Default::default()
    }
}

pub(crate) fn source<F: ScoreFunction>(function: &F) -> sys::fa_score_source {
    sys::fa_score_source {
        struct_size: size_of::<sys::fa_score_source>() as u32,
        score: F::CHANGES_SCORES.then_some(score::<F> as _),
        derivative: F::CHANGES_SCORES.then_some(derivative::<F> as _),
        visible: F::MASKS.then_some(visible::<F> as _),
        tile: F::MASKS.then_some(tile::<F> as _),
        user: function as *const F as *mut c_void,
        text: null_mut(),
        ..Default::default()
    }
}

/// Calls `body` with the function and the pair. A panic must not unwind through the library.
///
/// # Safety
/// As the library calls its functions: both pointers are valid, and `user` is the `F` of [`source`].
unsafe fn call<F: ScoreFunction, R>(
    position: *const sys::fa_score_position,
    aux: *const sys::fa_score_aux,
    body: impl FnOnce(&F, &Pair) -> R,
) -> R {
    let (function, p) = (&*(*aux).user.cast::<F>(), &*position);
    let pair = Pair {
        batch: p.b as usize,
        head: p.h as usize,
        query: p.i as usize,
        key: p.j as usize,
        queries: p.s_q as usize,
        keys: p.s_k as usize,
    };
    catch_unwind(AssertUnwindSafe(|| body(function, &pair))).unwrap_or_else(|_| abort())
}

unsafe extern "C" fn score<F: ScoreFunction>(
    s: f32,
    position: *const sys::fa_score_position,
    aux: *const sys::fa_score_aux,
) -> f32 {
    call(position, aux, |function: &F, pair| function.score(s, pair))
}

unsafe extern "C" fn derivative<F: ScoreFunction>(
    s: f32,
    position: *const sys::fa_score_position,
    aux: *const sys::fa_score_aux,
) -> f32 {
    call(position, aux, |function: &F, pair| function.derivative(s, pair))
}

unsafe extern "C" fn visible<F: ScoreFunction>(position: *const sys::fa_score_position, aux: *const sys::fa_score_aux) -> i32 {
    call(position, aux, |function: &F, pair| i32::from(function.visible(pair)))
}

unsafe extern "C" fn tile<F: ScoreFunction>(
    first: *const sys::fa_score_position,
    queries: i64,
    keys: i64,
    aux: *const sys::fa_score_aux,
) -> sys::fa_score_tile {
    call(first, aux, |function: &F, pair| match function.tile(pair, queries as usize, keys as usize) {
        Tile::Partial => sys::FA_SCORE_TILE_PARTIAL,
        Tile::Empty => sys::FA_SCORE_TILE_EMPTY,
        Tile::Full => sys::FA_SCORE_TILE_FULL,
    })
}
