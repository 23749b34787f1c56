// SPDX-License-Identifier: Apache-2.0
//! Score functions against the options that do the same.

use flashattn::{
    Access, Attention, Context, Gradients, Pair, Score, ScoreFunction, ScoreTensor, TensorView, TensorViewMut, Tile,
};

mod common;
use common::numbers;

const Q: [usize; 4] = [2, 21, 4, 16];
const K: [usize; 4] = [2, 33, 2, 16];

/// tanh within a limit.
struct Softcap(f32);

impl ScoreFunction for Softcap {
    const MASKS: bool = false;
    fn score(&self, s: f32, _pair: &Pair) -> f32 {
        self.0 * (s / self.0).tanh()
    }
    fn derivative(&self, s: f32, _pair: &Pair) -> f32 {
        1.0 - (s / self.0).tanh().powi(2)
    }
}

/// A causal mask that skips what lies above the diagonal.
struct Causal;

impl ScoreFunction for Causal {
    const CHANGES_SCORES: bool = false;
    fn visible(&self, p: &Pair) -> bool {
        assert!(p.batch < 2 && p.head < 4 && p.query < p.queries && p.key < p.keys && p.queries == 21 && p.keys == 33);
        p.key + p.queries <= p.query + p.keys
    }
    fn tile(&self, p: &Pair, queries: usize, keys: usize) -> Tile {
        if p.key + p.queries > p.query + queries - 1 + p.keys {
            Tile::Empty
        } else if p.key + keys - 1 + p.queries <= p.query + p.keys {
            Tile::Full
        } else {
            Tile::Partial
        }
    }
}

/// Nothing is implemented: nothing changes.
struct Nothing;

impl ScoreFunction for Nothing {}

/// out, dq, dk and dv.
fn run(context: &Context, vary: impl for<'a> Fn(Attention<'a>) -> Attention<'a>, score: Option<&Score<'_>>) -> Vec<f32> {
    let count = |shape: &[usize; 4]| shape.iter().product::<usize>();
    let (q, k, v, dout) = (numbers(1, count(&Q)), numbers(2, count(&K)), numbers(3, count(&K)), numbers(4, count(&Q)));
    let (mut out, mut lse) = (vec![0f32; q.len()], vec![0f32; 2 * 4 * 21]);
    let (mut dq, mut dk, mut dv) = (vec![0f32; q.len()], vec![0f32; k.len()], vec![0f32; k.len()]);
    let view = |data, shape| TensorView::new(data, shape).unwrap();
    let mut attention = vary(Attention::new(view(&q, &Q), view(&k, &K), view(&v, &K)));
    if let Some(score) = score {
        attention = attention.score(score);
    }
    context
        .forward(
            &attention,
            &mut TensorViewMut::new(&mut out, &Q).unwrap(),
            Some(&mut TensorViewMut::new(&mut lse, &[2, 4, 21]).unwrap()),
        )
        .unwrap();
    let mut gradients = Gradients::new(view(&dout, &Q))
        .dq(TensorViewMut::new(&mut dq, &Q).unwrap())
        .dk(TensorViewMut::new(&mut dk, &K).unwrap())
        .dv(TensorViewMut::new(&mut dv, &K).unwrap());
    let lse = TensorView::new(&lse, &[2, 4, 21]).unwrap();
    context.backward(&attention, view(&out, &Q), lse, &mut gradients).unwrap();
    drop(gradients);
    [out, dq, dk, dv].concat()
}

fn assert_close(some: &[f32], others: &[f32]) {
    assert_eq!(some.len(), others.len());
    for (x, y) in some.iter().zip(others) {
        assert!((x - y).abs() < 1e-5, "{x} and {y}");
    }
}

#[test]
fn functions_do_what_options_do() {
    let context = Context::new().unwrap();
    let softcap = Softcap(2.0);
    let score = context.score(&softcap).unwrap();
    assert_close(&run(&context, |a| a, Some(&score)), &run(&context, |a| a.softcap(2.0), None));
    let causal = context.score(&Causal).unwrap();
    assert_close(&run(&context, |a| a, Some(&causal)), &run(&context, |a| a.causal(), None));
    let nothing = context.score(&Nothing).unwrap();
    assert_close(&run(&context, |a| a, Some(&nothing)), &run(&context, |a| a, None));
}

#[test]
fn a_score_belongs_to_its_context() {
    let (one, other) = (Context::new().unwrap(), Context::new().unwrap());
    let score = one.score(&Causal).unwrap();
    let q = numbers(1, 21 * 16);
    let mut out = vec![0f32; q.len()];
    let view = TensorView::new(&q, &[1, 21, 1, 16]).unwrap();
    let attention = Attention::new(view, view, view).score(&score);
    let error = other.forward(&attention, &mut TensorViewMut::new(&mut out, &[1, 21, 1, 16]).unwrap(), None).unwrap_err();
    assert!(error.to_string().contains("another context"), "{error}");
}

#[test]
fn texts_are_for_cuda() {
    let context = Context::new().unwrap();
    for (text, names) in
        [("bool visible(const Position &, const Aux &) { return true; }", "function"), ("", "empty"), ("a\0b", "null")]
    {
        // SAFETY: no text runs on the CPU.
        let error = unsafe { context.score_text(text) }.err().unwrap();
        assert!(error.to_string().contains(names), "{error}");
    }
}

#[test]
fn inputs_of_a_score_are_checked() {
    let context = Context::new().unwrap();
    let score = context.score(&Nothing).unwrap();
    let q = numbers(1, 21 * 16);
    let slopes = [0.5f32];
    let by_query = numbers(2, 21);
    let view = TensorView::new(&q, &[1, 21, 1, 16]).unwrap();
    let forward = |tensors: &[ScoreTensor<'_>], scalars| {
        let mut out = vec![0f32; q.len()];
        let attention = Attention::new(view, view, view).score(&score).score_inputs(tensors, scalars);
        context.forward(&attention, &mut TensorViewMut::new(&mut out, &[1, 21, 1, 16]).unwrap(), None).map(|()| out)
    };
    let head = ScoreTensor::new(TensorView::new(&slopes, &[1, 1, 1, 1]).unwrap(), Access::HEAD);
    let query = |access| ScoreTensor::new(TensorView::new(&by_query, &[1, 1, 21, 1]).unwrap(), access);
    assert_eq!(forward(&[], [0.0; 8]).unwrap(), forward(&[head, query(Access::QUERY | Access::HEAD)], [1.0; 8]).unwrap());
    let error = forward(&[head, query(Access::KEY)], [0.0; 8]).unwrap_err();
    assert!(error.to_string().contains("score_tensors[1].tensor.shape[2] is 21"), "{error}");
}
