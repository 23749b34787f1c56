// SPDX-License-Identifier: Apache-2.0
//! Results and gradients against attention by definition in f64; what is refused and how.

use candle_core::{DType, Device, Result, Tensor, Var};
use flashattn_candle::{attention, flash_attn, flash_attn_varlen, flash_attn_windowed, Options, Sequences};

#[path = "../../definition.rs"]
mod definition;
use definition::{seed, Definition, Draw};

struct Case {
    batch: usize,
    rows: usize,
    keys: usize,
    heads: usize,
    key_heads: usize,
    columns: usize,
    value_columns: usize,
}

const GROUPED: Case = Case { batch: 2, rows: 13, keys: 21, heads: 6, key_heads: 2, columns: 16, value_columns: 24 };

fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

fn assert_close(ours: &Tensor, expected: &[f64], tolerance: f64, what: &str) -> Result<()> {
    let ours = numbers(ours)?;
    assert_eq!(ours.len(), expected.len(), "{}", what);
    for (n, (a, e)) in ours.iter().zip(expected).enumerate() {
        assert!((a - e).abs() <= tolerance * (1.0 + e.abs()), "{}[{}] is {}, not {}", what, n, a, e);
    }
    Ok(())
}

fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2e-5,
        DType::F16 => 8e-3,
        _ => 6e-2,
    }
}

/// Forward and backward of `call` on fresh inputs, which are (batch, rows, heads, columns) in memory, or with heads before rows.
fn check(
    case: &Case,
    dtype: DType,
    heads_first: bool,
    definition: &Definition,
    call: impl Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
) -> Result<()> {
    let seed = seed();
    let mut draw = Draw::new(seed);
    let mut input = |rows, heads, columns| -> Result<(Var, Tensor)> {
        let shape = if heads_first { (case.batch, heads, rows, columns) } else { (case.batch, rows, heads, columns) };
        let data = draw.numbers(case.batch * rows * heads * columns);
        let var = Var::from_tensor(&Tensor::from_vec(data, shape, &Device::Cpu)?.to_dtype(dtype)?)?;
        let given = if heads_first { var.transpose(1, 2)? } else { var.as_tensor().clone() };
        Ok((var, given))
    };
    let (q_var, q) = input(case.rows, case.heads, case.columns)?;
    let (k_var, k) = input(case.keys, case.key_heads, case.columns)?;
    let (v_var, v) = input(case.keys, case.key_heads, case.value_columns)?;
    let shape = (case.batch, case.rows, case.heads, case.value_columns);
    let dout = Tensor::from_vec(draw.numbers(case.batch * case.rows * case.heads * case.value_columns), shape, &Device::Cpu)?
        .to_dtype(dtype)?;

    let out = call(&q, &k, &v)?;
    assert_eq!((out.dims(), out.dtype()), (&[case.batch, case.rows, case.heads, case.value_columns][..], dtype));
    let expected = definition.compute(
        [case.batch, case.rows, case.keys, case.heads, case.key_heads, case.columns, case.value_columns],
        [&numbers(&q)?, &numbers(&k)?, &numbers(&v)?, &numbers(&dout)?],
    );
    let what = format!("FA_TEST_SEED={} {:?} heads_first={}: ", seed, dtype, heads_first);
    assert_close(&out, &expected.out, tolerance(dtype), &format!("{}out", what))?;

    let grads = out.mul(&dout)?.sum_all()?.backward()?;
    for (name, var, expected) in [("dq", q_var, expected.dq), ("dk", k_var, expected.dk), ("dv", v_var, expected.dv)] {
        let gradient = grads.get(&var).unwrap_or_else(|| panic!("{}no {}", what, name));
        assert_eq!((gradient.dims(), gradient.dtype()), (var.dims(), dtype));
        let gradient = if heads_first { gradient.transpose(1, 2)? } else { gradient.clone() };
        assert_close(&gradient, &expected, 4.0 * tolerance(dtype), &format!("{}{}", what, name))?;
    }
    Ok(())
}

#[test]
fn causal_in_every_dtype_and_order() -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for heads_first in [false, true] {
            for causal in [false, true] {
                let definition = Definition { scale: 0.3, right: causal.then_some(0), ..Definition::default() };
                check(&GROUPED, dtype, heads_first, &definition, |q, k, v| flash_attn(q, k, v, 0.3, causal))?;
            }
        }
    }
    Ok(())
}

#[test]
fn windows() -> Result<()> {
    for (left, right) in [(Some(3), None), (None, Some(2)), (Some(4), Some(0)), (None, None)] {
        let definition = Definition { scale: 0.25, left, right, ..Definition::default() };
        check(&GROUPED, DType::F32, true, &definition, |q, k, v| flash_attn_windowed(q, k, v, 0.25, left, right))?;
    }
    Ok(())
}

#[test]
fn every_option() -> Result<()> {
    let slopes: Vec<f32> = (1..=GROUPED.heads).map(|n| n as f32 / 8.0).collect();
    let alibi = Tensor::from_vec(slopes.clone(), slopes.len(), &Device::Cpu)?;
    let options =
        Options { causal: true, window_left: Some(5), softcap: Some(1.5), alibi_slopes: Some(alibi), ..Options::default() };
    let definition = Definition {
        scale: 1.0 / (GROUPED.columns as f64).sqrt(),
        left: Some(5),
        right: Some(0),
        softcap: Some(1.5),
        slopes: slopes.into_iter().map(f64::from).collect(),
        hidden: None,
    };
    check(&GROUPED, DType::F32, false, &definition, |q, k, v| attention(q, k, v, &options))
}

/// Each sequence of a packed batch gives what it gives alone.
#[test]
fn packed_sequences() -> Result<()> {
    let seed = seed();
    let mut draw = Draw::new(seed);
    let (heads, columns) = (3, 8);
    let (of_q, of_k) = ([0u32, 5, 5, 14], [0u32, 7, 9, 19]);
    let mut input = |rows: u32| -> Result<Var> {
        let shape = vec![rows as usize, heads, columns];
        Var::from_tensor(&Tensor::from_vec(draw.numbers(rows as usize * heads * columns), shape, &Device::Cpu)?)
    };
    let (q, k, v, dout) = (input(14)?, input(19)?, input(19)?, input(14)?);
    let offsets = |of: &[u32]| Tensor::from_vec(of.to_vec(), of.len(), &Device::Cpu);
    let out = flash_attn_varlen(&q, &k, &v, &offsets(&of_q)?, &offsets(&of_k)?, 9, 10, 0.4, true)?;
    let grads = out.mul(&dout)?.sum_all()?.backward()?;
    let definition = Definition { scale: 0.4, right: Some(0), ..Definition::default() };
    for n in 0..3 {
        let part = |tensor: &Tensor, of: &[u32]| -> Result<Vec<f64>> {
            numbers(&tensor.narrow(0, of[n] as usize, (of[n + 1] - of[n]) as usize)?)
        };
        let (rows, keys) = ((of_q[n + 1] - of_q[n]) as usize, (of_k[n + 1] - of_k[n]) as usize);
        let inputs = [part(&q, &of_q)?, part(&k, &of_k)?, part(&v, &of_k)?, part(&dout, &of_q)?];
        let expected = definition
            .compute([1, rows, keys, heads, heads, columns, columns], [&inputs[0], &inputs[1], &inputs[2], &inputs[3]]);
        let what = |name| format!("FA_TEST_SEED={} sequence {}: {}", seed, n, name);
        for (name, ours, of, expected) in [
            ("out", &out, &of_q, expected.out),
            ("dq", grads.get(&q).unwrap(), &of_q, expected.dq),
            ("dk", grads.get(&k).unwrap(), &of_k, expected.dk),
            ("dv", grads.get(&v).unwrap(), &of_k, expected.dv),
        ] {
            let ours = ours.narrow(0, of[n] as usize, (of[n + 1] - of[n]) as usize)?;
            assert_close(&ours, &expected, 8e-5, &what(name))?;
        }
    }
    Ok(())
}

/// One buffer of (batch, rows, heads, 3 columns), and columns that are not adjacent.
#[test]
fn parts_of_a_tensor() -> Result<()> {
    let mut draw = Draw::new(seed());
    let (rows, heads, columns) = (9, 2, 8);
    let whole = Tensor::from_vec(draw.numbers(rows * heads * 3 * columns), (1, rows, heads, 3 * columns), &Device::Cpu)?;
    let definition = Definition { scale: 0.5, right: Some(0), ..Definition::default() };
    let zeros = vec![0.0; rows * heads * columns];
    let parts = (whole.narrow(3, 0, columns)?, whole.narrow(3, columns, columns)?, whole.narrow(3, 2 * columns, columns)?);
    let scattered = parts.0.transpose(2, 3)?.contiguous()?.transpose(2, 3)?;
    assert_ne!(scattered.stride()[3], 1);
    let expected = definition.compute(
        [1, rows, rows, heads, heads, columns, columns],
        [&numbers(&parts.0)?, &numbers(&parts.1)?, &numbers(&parts.2)?, &zeros],
    );
    for q in [&parts.0, &scattered] {
        assert_close(&flash_attn(q, &parts.1, &parts.2, 0.5, true)?, &expected.out, 2e-5, "out")?;
    }
    Ok(())
}

/// Only tensors that want a gradient get one, and backward can run twice on one graph.
#[test]
fn gradients_of_what_is_asked_for() -> Result<()> {
    let mut draw = Draw::new(seed());
    let mut input = || Tensor::from_vec(draw.numbers(2 * 7 * 3 * 8), (2, 7, 3, 8), &Device::Cpu);
    let (q, k, v) = (input()?, Var::from_tensor(&input()?)?, input()?);
    let sum = flash_attn(&q, &k, &v, 0.5, false)?.sum_all()?;
    let (first, second) = (sum.backward()?, sum.backward()?);
    assert!(first.get(&q).is_none() && first.get(&v).is_none());
    let (first, second) = (numbers(first.get(&k).unwrap())?, numbers(second.get(&k).unwrap())?);
    assert!(first.iter().any(|&x| x != 0.0));
    assert_eq!(first, second);
    Ok(())
}

#[test]
fn refusals() -> Result<()> {
    let ones = |shape: (usize, usize, usize, usize), dtype| Tensor::ones(shape, dtype, &Device::Cpu);
    let good = ones((2, 5, 4, 8), DType::F32)?;
    let slopes = Tensor::ones(4, DType::F32, &Device::Cpu)?;
    let plain = Options::default();
    let tracked = Options { alibi_slopes: Some(Var::from_tensor(&slopes)?.as_tensor().clone()), ..plain.clone() };
    let offsets = Tensor::ones(3, DType::U32, &Device::Cpu)?;
    let sequences = Some(Sequences { offsets_q: offsets.clone(), offsets_k: offsets, max_q: 5, max_k: 5 });
    let cases = [
        ("scale is 0", good.clone(), Options { scale: Some(0.0), ..plain.clone() }),
        ("softcap is 0", good.clone(), Options { softcap: Some(0.0), ..plain.clone() }),
        ("softcap", good.clone(), Options { softcap: Some(-1.0), ..plain.clone() }),
        ("alibi_slopes wants a gradient", good.clone(), tracked),
        ("F64", ones((2, 5, 4, 8), DType::F64)?, plain.clone()),
        ("k.dtype is float32", ones((2, 5, 4, 8), DType::F16)?, plain.clone()),
        ("FA_ERROR_SHAPE: q has 3 heads", ones((2, 5, 3, 8), DType::F32)?, plain.clone()),
        ("must have 4 dimensions", slopes, plain.clone()),
        ("q.ndim is 4", good.clone(), Options { sequences, ..plain }),
    ];
    for (text, q, options) in cases {
        let error = attention(&q, &good, &good, &options).expect_err(text).to_string();
        assert!(error.contains(text), "{:?} does not say {:?}", error, text);
    }
    Ok(())
}
