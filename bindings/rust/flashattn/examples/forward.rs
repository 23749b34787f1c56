// SPDX-License-Identifier: Apache-2.0
//! Causal attention, as short as it gets.

use flashattn::{Attention, Context, TensorView, TensorViewMut};

fn main() -> flashattn::Result<()> {
    let shape = [1, 128, 4, 64]; // batch, rows, heads, head_dim
    let q = vec![0.5f32; 128 * 4 * 64];
    let mut out = vec![0f32; q.len()];
    let view = TensorView::new(&q, &shape)?;
    let attention = Attention::new(view, view, view).causal();
    Context::new()?.forward(&attention, &mut TensorViewMut::new(&mut out, &shape)?, None)?;
    assert_eq!(out[0], 0.5);
    Ok(())
}
