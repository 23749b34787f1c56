// SPDX-License-Identifier: Apache-2.0
//! Results and gradients against attention by definition in f64; what is refused and how.

use burn_tensor::TensorData;
use flashattn_burn::{attention, Options, Result};

#[path = "../../definition.rs"]
mod definition;
use definition::{seed, Definition, Draw};

const BATCH: usize = 2;
const HEADS: usize = 6;
const KEY_HEADS: usize = 2;
const ROWS: usize = 13;
const KEYS: usize = 21;
const COLUMNS: usize = 16;
const VALUE_COLUMNS: usize = 24;

/// In the order of the definition: (batch, rows, heads, columns).
fn numbers(data: &TensorData) -> Vec<f64> {
    let x = data.as_slice::<f32>().unwrap();
    let s = data.shape.as_slice();
    let mut y = vec![0.0; x.len()];
    for (n, &x) in x.iter().enumerate() {
        let (c, i, h, b) = (n % s[3], n / s[3] % s[2], n / s[3] / s[2] % s[1], n / s[3] / s[2] / s[1]);
        y[((b * s[2] + i) * s[1] + h) * s[3] + c] = x.into();
    }
    y
}

fn assert_close(ours: &TensorData, expected: &[f64], tolerance: f64, what: &str) {
    let ours = numbers(ours);
    assert_eq!(ours.len(), expected.len(), "{}", what);
    for (n, (a, e)) in ours.iter().zip(expected).enumerate() {
        assert!((a - e).abs() <= tolerance * (1.0 + e.abs()), "{}[{}] is {}, not {}", what, n, a, e);
    }
}

fn inputs(draw: &mut Draw) -> [TensorData; 4] {
    let mut of =
        |heads, rows, columns| TensorData::new(draw.numbers(BATCH * heads * rows * columns), [BATCH, heads, rows, columns]);
    [of(HEADS, ROWS, COLUMNS), of(KEY_HEADS, KEYS, COLUMNS), of(KEY_HEADS, KEYS, VALUE_COLUMNS), of(HEADS, ROWS, VALUE_COLUMNS)]
}

fn check(options: &Options, mask: Option<&TensorData>, definition: &Definition, seed: u64, draw: &mut Draw) -> Result<()> {
    let [q, k, v, grad] = inputs(draw);
    let results = attention(&q, &k, &v, mask, options)?;
    let [dq, dk, dv] = results.backward(&q, &k, &v, mask, options, &grad)?;
    assert_eq!(results.out.shape.as_slice(), &[BATCH, HEADS, ROWS, VALUE_COLUMNS]);
    let sizes = [BATCH, ROWS, KEYS, HEADS, KEY_HEADS, COLUMNS, VALUE_COLUMNS];
    let expected = definition.compute(sizes, [&numbers(&q), &numbers(&k), &numbers(&v), &numbers(&grad)]);
    let what = |name| format!("FA_TEST_SEED={} {:?}: {}", seed, options, name);
    assert_close(&results.out, &expected.out, 2e-5, &what("out"));
    for (name, ours, expected) in [("dq", dq, expected.dq), ("dk", dk, expected.dk), ("dv", dv, expected.dv)] {
        assert_close(&ours, &expected, 8e-5, &what(name));
    }
    Ok(())
}

#[test]
fn every_option() -> Result<()> {
    let seed = seed();
    let mut draw = Draw::new(seed);
    let own = 1.0 / (COLUMNS as f64).sqrt();
    for (options, definition) in [
        (Options::default(), Definition { scale: own, ..Definition::default() }),
        (Options { causal: true, ..Options::default() }, Definition { scale: own, right: Some(0), ..Definition::default() }),
        (
            Options { scale: Some(0.4), window_left: Some(3), window_right: Some(2), ..Options::default() },
            Definition { scale: f64::from(0.4f32), left: Some(3), right: Some(2), ..Definition::default() },
        ),
        (
            Options { softcap: Some(1.5), causal: true, ..Options::default() },
            Definition { scale: own, right: Some(0), softcap: Some(1.5), ..Definition::default() },
        ),
    ] {
        check(&options, None, &definition, seed, &mut draw)?;
    }
    Ok(())
}

/// True hides, as in Burn, and dimensions of one element are broadcast.
#[test]
fn masks() -> Result<()> {
    let seed = seed();
    let mut draw = Draw::new(seed);
    for shape in [[BATCH, HEADS, ROWS, KEYS], [BATCH, 1, 1, KEYS], [1, 1, ROWS, KEYS], [1, HEADS, ROWS, 1]] {
        let hidden: Vec<bool> = draw.numbers(shape.iter().product()).iter().map(|&x| x > 0.2).collect();
        let mask = TensorData::new(hidden.clone(), shape);
        let at = move |place: [usize; 4]| {
            let index = place.iter().zip(shape).fold(0, |sum, (&n, size)| sum * size + if size == 1 { 0 } else { n });
            hidden[index]
        };
        let definition = Definition { scale: 0.5, hidden: Some(Box::new(at)), ..Definition::default() };
        check(&Options { scale: Some(0.5), ..Options::default() }, Some(&mask), &definition, seed, &mut draw)?;
    }
    Ok(())
}

#[test]
fn refusals() {
    let ones = |shape: [usize; 4]| TensorData::new(vec![1f32; shape.iter().product()], shape);
    let good = ones([2, 4, 5, 8]);
    let plain = Options::default();
    for (text, query, mask, options) in [
        ("scale is 0", good.clone(), None, Options { scale: Some(0.0), ..plain }),
        ("softcap is 0", good.clone(), None, Options { softcap: Some(0.0), ..plain }),
        ("softcap is -1", good.clone(), None, Options { softcap: Some(-1.0), ..plain }),
        ("query is F64; it must be f32", TensorData::new(vec![1f64; 320], [2, 4, 5, 8]), None, plain),
        ("query has shape [320]; it must have 4 dimensions", TensorData::new(vec![1f32; 320], [320]), None, plain),
        ("FA_ERROR_SHAPE: q has 3 heads", ones([2, 3, 5, 8]), None, plain),
        ("mask is F32; it must be bool", good.clone(), Some(good.clone()), plain),
        ("element_mask.shape[3]", good.clone(), Some(TensorData::new(vec![true; 6], [1, 1, 1, 6])), plain),
    ] {
        let error = attention(&query, &good, &good, mask.as_ref(), &options).expect_err(text).to_string();
        assert!(error.contains(text), "{:?} does not say {:?}", error, text);
    }
}
