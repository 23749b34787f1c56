// SPDX-License-Identifier: Apache-2.0
//! Causal attention of 8 heads over 1024 rows, forward and backward.

use flashattn::{Attention, Context, Gradients, TensorView, TensorViewMut};

fn main() -> flashattn::Result<()> {
    let shape = [1, 1024, 8, 64]; // batch, rows, heads, head_dim
    let numbers = |step: usize| -> Vec<f32> { (0..1024 * 8 * 64).map(|i| (i * step % 101) as f32 / 50.0 - 1.0).collect() };
    let (q, k, v, dout) = (numbers(7), numbers(11), numbers(13), numbers(17));
    let mut out = vec![0f32; q.len()];
    let mut lse = vec![0f32; 8 * 1024];
    let (mut dq, mut dk, mut dv) = (out.clone(), out.clone(), out.clone());

    let context = Context::new()?;
    let attention =
        Attention::new(TensorView::new(&q, &shape)?, TensorView::new(&k, &shape)?, TensorView::new(&v, &shape)?).causal();
    let mut out = TensorViewMut::new(&mut out, &shape)?;
    let mut lse = TensorViewMut::new(&mut lse, &[1, 8, 1024])?;
    context.forward(&attention, &mut out, Some(&mut lse))?;
    let mut gradients = Gradients::new(TensorView::new(&dout, &shape)?)
        .dq(TensorViewMut::new(&mut dq, &shape)?)
        .dk(TensorViewMut::new(&mut dk, &shape)?)
        .dv(TensorViewMut::new(&mut dv, &shape)?);
    context.backward(&attention, out.as_view(), lse.as_view(), &mut gradients)?;

    let plan = context.query_forward(&attention, &out, Some(&lse))?;
    let largest = dq.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    println!(
        "libflashattn {}, kernel {}, {:.1} MFLOP, largest |dq| {}",
        flashattn::version(),
        plan.kernel,
        plan.flops / 1e6,
        largest
    );
    Ok(())
}
