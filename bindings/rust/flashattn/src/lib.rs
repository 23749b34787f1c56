// SPDX-License-Identifier: Apache-2.0
//! Exact attention, forward and backward, through libflashattn: the safe API over host memory, and an unsafe way in for
//! that of GPUs.
//!
//! ```
//! use flashattn::{Attention, Context, TensorView, TensorViewMut};
//!
//! let shape = [1, 128, 4, 64]; // batch, rows, heads, head_dim
//! let q = vec![0.5f32; 128 * 4 * 64];
//! let mut out = vec![0f32; q.len()];
//! let view = TensorView::new(&q, &shape)?;
//! let attention = Attention::new(view, view, view).causal();
//! Context::new()?.forward(&attention, &mut TensorViewMut::new(&mut out, &shape)?, None)?;
//! assert_eq!(out[0], 0.5);
//! # Ok::<(), flashattn::Error>(())
//! ```
//!
//! A view is checked against the bounds of the slice it is made from, and views that will be written must not overlap themselves;
//! the library checks the rest (sequence offsets and page tables included), so safe code cannot reach memory that is not its own.
//! GPU memory is beyond what slices can describe, and calls on it return before their work is done: [`Context::cuda`] and
//! [`TensorView::from_ptr`] are unsafe. Caches of keys and values are filled by [`Context::append_kv`].

#![deny(missing_docs)]

#[macro_use]
mod fields;

mod append;
mod attention;
mod context;
mod element;
mod error;
mod score;
mod tensor;

pub use append::Append;
pub use attention::{Attention, Gradients, Mask};
pub use context::{build_info, load, version, Context, CpuIsa, CudaSettings, Device, Plan, Settings};
pub use element::{Bf16, Element, F16, F8E4M3};
pub use error::{Error, Result};
pub use score::{Access, Pair, Score, ScoreFunction, ScoreTensor, Tile};
pub use tensor::{TensorView, TensorViewMut};
