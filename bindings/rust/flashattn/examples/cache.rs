// SPDX-License-Identifier: Apache-2.0
//! A step of an inference engine: a new row for each sequence into a paged cache, and attention over the cache.

use flashattn::{Append, Attention, Context, TensorView, TensorViewMut};

fn main() -> flashattn::Result<()> {
    let context = Context::new()?;
    let (batch, heads, dim) = (2, 4, 64);
    let cache_shape = [8, 16, heads, dim]; // pages, page size
    let mut keys = vec![0f32; cache_shape.iter().product()];
    let mut values = keys.clone();
    let pages = [6, 1, 3, 4]; // two per sequence
    let table = TensorView::new(&pages, &[batch, 2])?;
    let mut lengths = [0i32; 2];

    // The first sequence has 20 rows already, the second none.
    let shape = [batch, 1, heads, dim];
    let (k, v) = (vec![0.5f32; batch * heads * dim], vec![2f32; batch * heads * dim]);
    let mut append = Append::new(TensorView::new(&k, &shape)?, TensorViewMut::new(&mut keys, &cache_shape)?)
        .values(TensorView::new(&v, &shape)?, TensorViewMut::new(&mut values, &cache_shape)?)
        .page_table(table)
        .offsets(TensorView::new(&[20, 0], &[batch])?)
        .seqused_k(TensorViewMut::new(&mut lengths, &[batch])?);
    context.append_kv(&mut append)?;

    let (q, mut out) = (vec![1f32; k.len()], vec![0f32; k.len()]);
    let cache = |data| TensorView::new(data, &cache_shape);
    let attention = Attention::new(TensorView::new(&q, &shape)?, cache(&keys)?, cache(&values)?)
        .page_table(table)
        .seqused_k(TensorView::new(&lengths, &[batch])?);
    context.forward(&attention, &mut TensorViewMut::new(&mut out, &shape)?, None)?;
    assert_eq!((lengths, out[heads * dim]), ([21, 1], 2.0));
    Ok(())
}
