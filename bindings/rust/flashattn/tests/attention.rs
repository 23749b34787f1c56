// SPDX-License-Identifier: Apache-2.0
//! Forward, backward and merge against attention by definition in f64; what is refused and how.

use flashattn::{Attention, Bf16, Context, CpuIsa, Element, Gradients, Settings, TensorView, TensorViewMut, F16};

mod common;
use common::numbers;

const BATCH: usize = 2;
const ROWS: usize = 21;
const KEYS: usize = 33;
const HEADS: usize = 4;
const KEY_HEADS: usize = 2;
const DIM: usize = 16;
const DIM_V: usize = 24;

struct Tensors {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    dout: Vec<f32>,
}

impl Tensors {
    fn new() -> Self {
        Tensors {
            q: numbers(1, BATCH * ROWS * HEADS * DIM),
            k: numbers(2, BATCH * KEYS * KEY_HEADS * DIM),
            v: numbers(3, BATCH * KEYS * KEY_HEADS * DIM_V),
            dout: numbers(4, BATCH * ROWS * HEADS * DIM_V),
        }
    }
}

#[derive(Default)]
struct Expected {
    out: Vec<f64>,
    lse: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
}

/// Causal attention with grouped heads and its gradients, by definition.
fn reference(t: &Tensors) -> Expected {
    let mut e = Expected {
        out: vec![0.0; t.dout.len()],
        lse: vec![0.0; BATCH * HEADS * ROWS],
        dq: vec![0.0; t.q.len()],
        dk: vec![0.0; t.k.len()],
        dv: vec![0.0; t.v.len()],
    };
    let scale = 1.0 / (DIM as f64).sqrt();
    for b in 0..BATCH {
        for h in 0..HEADS {
            for i in 0..ROWS {
                let q = ((b * ROWS + i) * HEADS + h) * DIM;
                let o = ((b * ROWS + i) * HEADS + h) * DIM_V;
                let key = |j: usize| (b * KEYS + j) * KEY_HEADS + h / (HEADS / KEY_HEADS);
                let visible = i + KEYS - ROWS + 1;
                let logits: Vec<f64> = (0..visible)
                    .map(|j| scale * (0..DIM).map(|c| f64::from(t.q[q + c]) * f64::from(t.k[key(j) * DIM + c])).sum::<f64>())
                    .collect();
                let lse = logits.iter().map(|x| x.exp()).sum::<f64>().ln();
                e.lse[(b * HEADS + h) * ROWS + i] = lse;
                for (j, x) in logits.iter().enumerate() {
                    for c in 0..DIM_V {
                        e.out[o + c] += (x - lse).exp() * f64::from(t.v[key(j) * DIM_V + c]);
                    }
                }
                let delta: f64 = (0..DIM_V).map(|c| e.out[o + c] * f64::from(t.dout[o + c])).sum();
                for (j, x) in logits.iter().enumerate() {
                    let p = (x - lse).exp();
                    let dp: f64 = (0..DIM_V).map(|c| f64::from(t.dout[o + c]) * f64::from(t.v[key(j) * DIM_V + c])).sum();
                    let ds = scale * p * (dp - delta);
                    for c in 0..DIM_V {
                        e.dv[key(j) * DIM_V + c] += p * f64::from(t.dout[o + c]);
                    }
                    for c in 0..DIM {
                        e.dq[q + c] += ds * f64::from(t.k[key(j) * DIM + c]);
                        e.dk[key(j) * DIM + c] += ds * f64::from(t.q[q + c]);
                    }
                }
            }
        }
    }
    e
}

fn assert_close<T: Element + Into<f32>>(actual: &[T], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(actual.len(), expected.len(), "{}", what);
    for (n, (&a, &e)) in actual.iter().zip(expected).enumerate() {
        let a = f64::from(a.into());
        assert!((a - e).abs() <= tolerance * (1.0 + e.abs()), "{}[{}] is {}, not {}", what, n, a, e);
    }
}

const Q_SHAPE: [usize; 4] = [BATCH, ROWS, HEADS, DIM];
const K_SHAPE: [usize; 4] = [BATCH, KEYS, KEY_HEADS, DIM];
const V_SHAPE: [usize; 4] = [BATCH, KEYS, KEY_HEADS, DIM_V];
const OUT_SHAPE: [usize; 4] = [BATCH, ROWS, HEADS, DIM_V];
const LSE_SHAPE: [usize; 3] = [BATCH, HEADS, ROWS];

fn check<T: Element + From<f32> + Into<f32>>(context: &Context, tolerance: f64) {
    let convert = |x: &[f32]| -> Vec<T> { x.iter().map(|&x| T::from(x)).collect() };
    let restore = |x: Vec<T>| -> Vec<f32> { x.into_iter().map(Into::into).collect() };
    let t = Tensors::new();
    let (q, k, v, dout) = (convert(&t.q), convert(&t.k), convert(&t.v), convert(&t.dout));
    let rounded = Tensors { q: restore(q.clone()), k: restore(k.clone()), v: restore(v.clone()), dout: restore(dout.clone()) };
    let expected = reference(&rounded);

    let attention = Attention::new(
        TensorView::new(&q, &Q_SHAPE).unwrap(),
        TensorView::new(&k, &K_SHAPE).unwrap(),
        TensorView::new(&v, &V_SHAPE).unwrap(),
    )
    .causal();
    let mut out = vec![T::from(f32::NAN); dout.len()];
    let mut lse = vec![f32::NAN; BATCH * HEADS * ROWS];
    let mut out_view = TensorViewMut::new(&mut out, &OUT_SHAPE).unwrap();
    let mut lse_view = TensorViewMut::new(&mut lse, &LSE_SHAPE).unwrap();
    context.forward(&attention, &mut out_view, Some(&mut lse_view)).unwrap();

    let (mut dq, mut dk, mut dv) = (q.clone(), k.clone(), v.clone());
    let mut gradients = Gradients::new(TensorView::new(&dout, &OUT_SHAPE).unwrap())
        .dq(TensorViewMut::new(&mut dq, &Q_SHAPE).unwrap())
        .dk(TensorViewMut::new(&mut dk, &K_SHAPE).unwrap())
        .dv(TensorViewMut::new(&mut dv, &V_SHAPE).unwrap());
    context.backward(&attention, out_view.as_view(), lse_view.as_view(), &mut gradients).unwrap();
    assert_close(&out, &expected.out, tolerance, "out");
    assert_close(&lse, &expected.lse, tolerance, "lse");
    assert_close(&dq, &expected.dq, 4.0 * tolerance, "dq");
    assert_close(&dk, &expected.dk, 4.0 * tolerance, "dk");
    assert_close(&dv, &expected.dv, 4.0 * tolerance, "dv");
}

#[test]
fn forward_and_backward_equal_the_definition() {
    let context = Context::new().unwrap();
    check::<f32>(&context, 3e-6);
    check::<F16>(&context, 2e-3);
    check::<Bf16>(&context, 1.6e-2);
    let context = Context::with(Settings { threads: 1, isa: CpuIsa::Portable }).unwrap();
    check::<f32>(&context, 3e-6);
    let device = context.device().unwrap();
    assert_eq!((device.threads, device.isa), (1, CpuIsa::Portable));
}

#[test]
fn packed_tensors_are_only_strides() {
    let context = Context::new().unwrap();
    let shape = [BATCH, ROWS, HEADS, DIM];
    let count = BATCH * ROWS * HEADS * DIM;
    let packed = numbers(5, 3 * count);
    let views = TensorView::packed(&packed, 3, &shape).unwrap();
    let apart: Vec<Vec<f32>> = (0..3)
        .map(|part| (0..count).map(|n| packed[(n / (HEADS * DIM) * 3 + part) * HEADS * DIM + n % (HEADS * DIM)]).collect())
        .collect();
    let dense: Vec<_> = apart.iter().map(|x| TensorView::new(x, &shape).unwrap()).collect();
    let dout = numbers(6, count);

    let run = |views: &[TensorView<'_>]| {
        let attention = Attention::new(views[0], views[1], views[2]).causal();
        let (mut out, mut lse, mut grads) = (vec![0f32; count], vec![0f32; BATCH * HEADS * ROWS], vec![f32::NAN; 3 * count]);
        let mut out_view = TensorViewMut::new(&mut out, &shape).unwrap();
        let mut lse_view = TensorViewMut::new(&mut lse, &LSE_SHAPE).unwrap();
        context.forward(&attention, &mut out_view, Some(&mut lse_view)).unwrap();
        let mut parts = TensorViewMut::packed(&mut grads, 3, &shape).unwrap().into_iter();
        let mut gradients = Gradients::new(TensorView::new(&dout, &shape).unwrap())
            .dq(parts.next().unwrap())
            .dk(parts.next().unwrap())
            .dv(parts.next().unwrap());
        context.backward(&attention, out_view.as_view(), lse_view.as_view(), &mut gradients).unwrap();
        (out, grads)
    };
    let (out, grads) = run(&views);
    assert!(grads.iter().all(|x| x.is_finite()));
    assert_eq!((out, grads), run(&dense));
}

#[test]
fn merged_parts_equal_the_whole() {
    let context = Context::new().unwrap();
    let t = Tensors::new();
    let q = TensorView::new(&t.q, &Q_SHAPE).unwrap();
    let run = |from: usize, to: usize| {
        let part = |x, dim: usize| {
            let strides = [(KEYS * KEY_HEADS * dim) as isize, (KEY_HEADS * dim) as isize, dim as isize, 1];
            TensorView::strided(x, from * KEY_HEADS * dim, &[BATCH, to - from, KEY_HEADS, dim], &strides).unwrap()
        };
        let attention = Attention::new(q, part(&t.k, DIM), part(&t.v, DIM_V));
        let (mut out, mut lse) = (vec![0f32; t.dout.len()], vec![0f32; BATCH * HEADS * ROWS]);
        let mut out_view = TensorViewMut::new(&mut out, &OUT_SHAPE).unwrap();
        let mut lse_view = TensorViewMut::new(&mut lse, &LSE_SHAPE).unwrap();
        context.forward(&attention, &mut out_view, Some(&mut lse_view)).unwrap();
        (out, lse)
    };
    let parts = [run(0, 10), run(10, 11), run(11, KEYS)];
    let whole = run(0, KEYS);
    let views: Vec<_> = parts
        .iter()
        .map(|(out, lse)| (TensorView::new(out, &OUT_SHAPE).unwrap(), TensorView::new(lse, &LSE_SHAPE).unwrap()))
        .collect();
    let (mut out, mut lse) = (vec![f32::NAN; whole.0.len()], vec![f32::NAN; whole.1.len()]);
    let mut out_view = TensorViewMut::new(&mut out, &OUT_SHAPE).unwrap();
    let mut lse_view = TensorViewMut::new(&mut lse, &LSE_SHAPE).unwrap();
    assert_eq!(context.merge(&[], &mut out_view, None).unwrap_err().name(), "FA_ERROR_INVALID_ARGUMENT");
    assert_eq!(context.query_merge(&[], &out_view, None).unwrap_err().name(), "FA_ERROR_INVALID_ARGUMENT");
    assert_eq!(context.prepare_merge(&[], &out_view, None).unwrap_err().name(), "FA_ERROR_INVALID_ARGUMENT");
    let plan = context.query_merge(&views, &out_view, Some(&lse_view)).unwrap();
    assert!(plan.kernel.contains("merge"), "{}", plan.kernel);
    assert_eq!((plan.workspace_bytes, plan.flops), (0, (2 * 3 * whole.0.len()) as f64));
    context.prepare_merge(&views, &out_view, Some(&lse_view)).unwrap();
    context.merge(&views, &mut out_view, Some(&mut lse_view)).unwrap();
    let wide = |x: &[f32]| -> Vec<f64> { x.iter().map(|&x| f64::from(x)).collect() };
    assert_close(&out, &wide(&whole.0), 3e-6, "out");
    assert_close(&lse, &wide(&whole.1), 3e-6, "lse");
}

#[test]
fn views_stay_inside_their_slices() {
    let mut data = [0f32; 24];
    assert!(TensorView::new(&data, &[2, 3, 4]).is_ok());
    assert!(TensorView::new(&data, &[1, 2, 3, 4]).is_ok());
    assert!(TensorView::new(&data, &[2, 3, 5]).is_err());
    assert!(TensorView::new(&data, &[usize::MAX, usize::MAX, 4]).is_err());
    assert!(TensorView::new(&data, &[1, 1, 1, 1, 24]).is_err());
    assert!(TensorView::new(&data, &[0, 1000, 1000, 4]).is_ok());
    assert!(TensorView::strided(&data, 0, &[5, 8], &[4, 1]).is_ok());
    assert!(TensorView::strided(&data, 1, &[5, 8], &[4, 1]).is_err());
    assert!(TensorView::strided(&data, 16, &[5, 8], &[-4, 1]).is_ok());
    assert!(TensorView::strided(&data, 15, &[5, 8], &[-4, 1]).is_err());
    assert!(TensorView::strided(&data, 0, &[1 << 40, 24], &[0, 1]).is_ok());
    assert!(TensorView::strided(&data, 0, &[2, 24], &[isize::MIN, 1]).is_err());
    let (huge, far) = (isize::MAX as usize, isize::MAX);
    assert!(TensorView::strided(&data, 0, &[huge, huge, huge, huge], &[far, far, far, far]).is_err());
    assert!(TensorView::strided(&data, 0, &[huge, huge, huge, huge], &[-far, -far, -far, far]).is_err());
    assert!(TensorView::strided(&data, 25, &[0], &[1]).is_err());
    assert!(TensorView::strided(&data, 0, &[24], &[]).is_err());
    assert_eq!(TensorView::packed(&data, 3, &[2, 2, 2]).unwrap().len(), 3);
    assert!(TensorView::packed(&data, 4, &[2, 2, 2]).is_err());
    assert!(TensorView::packed(&data, 3, &[2]).is_err());

    assert!(TensorViewMut::new(&mut data, &[2, 3, 4]).is_ok());
    assert!(TensorViewMut::strided(&mut data, 16, &[5, 4], &[-4, 1]).is_ok());
    assert!(TensorViewMut::strided(&mut data, 0, &[5, 8], &[4, 1]).is_err());
    assert!(TensorViewMut::strided(&mut data, 0, &[2, 24], &[0, 1]).is_err());
    assert!(TensorViewMut::strided(&mut data, 0, &[0, huge, huge, huge], &[far, far, far, far]).is_ok());
    let error = TensorViewMut::packed(&mut data, 4, &[2, 2, 2]).unwrap_err();
    assert_eq!(error.name(), "FA_ERROR_SHAPE");
    assert!(error.text().contains("does not fit a slice of 24 elements"), "{}", error);
}

#[test]
fn the_library_names_the_argument() {
    let context = Context::new().unwrap();
    let t = Tensors::new();
    let q = TensorView::new(&t.q, &Q_SHAPE).unwrap();
    let k = TensorView::new(&t.k, &K_SHAPE).unwrap();
    let v = TensorView::new(&t.v, &V_SHAPE).unwrap();
    let mut out = vec![0f32; t.dout.len()];
    let mut out = TensorViewMut::new(&mut out, &OUT_SHAPE).unwrap();

    assert!(context.query_forward(&Attention::new(q, k, v), &out, None).unwrap().flops > 0.0);
    let refusals = [
        (Attention::new(q, v, v), "FA_ERROR_SHAPE", "k"),
        (Attention::new(q, k, v).softcap(-1.0), "FA_ERROR_INVALID_ARGUMENT", "softcap"),
        (Attention::new(q, k, v).dropout(1.5, 0, 0), "FA_ERROR_INVALID_ARGUMENT", "dropout_p"),
        (Attention::new(q, k, v).block_mask(q, 0, 0), "FA_ERROR", "block_"),
    ];
    for (attention, name, word) in refusals {
        let error = context.forward(&attention, &mut out, None).unwrap_err();
        assert!(error.name().starts_with(name) && error.text().contains(word), "{}", error);
        assert_eq!(context.query_forward(&attention, &out, None).unwrap_err(), error);
        assert_eq!(error.to_string(), format!("{}: {}", error.name(), error.text()));
    }
    let starts = [0i32, 9, 1 << 30];
    let packed = Attention::new(
        TensorView::new(&t.q, &[BATCH * ROWS, HEADS, DIM]).unwrap(),
        TensorView::new(&t.k, &[BATCH * KEYS, KEY_HEADS, DIM]).unwrap(),
        TensorView::new(&t.v, &[BATCH * KEYS, KEY_HEADS, DIM_V]).unwrap(),
    )
    .cu_seqlens_q(TensorView::new(&starts, &[3]).unwrap())
    .cu_seqlens_k(TensorView::new(&starts, &[3]).unwrap());
    let mut packed_out = vec![0f32; t.dout.len()];
    let mut packed_out = TensorViewMut::new(&mut packed_out, &[BATCH * ROWS, HEADS, DIM_V]).unwrap();
    let error = context.forward(&packed, &mut packed_out, None).unwrap_err();
    assert!(error.text().contains("cu_seqlens"), "{}", error);

    assert!(Context::with(Settings { threads: u32::MAX, isa: CpuIsa::Auto }).is_err());
    assert!(Context::with(Settings { threads: 1 << 20, isa: CpuIsa::Auto }).unwrap_err().text().contains("num_threads"));
}

/// One mask, of blocks of ROWS x 2, as bits, bytes, lists and slices: equal results, unlike those without a mask.
#[test]
fn one_mask_in_many_forms() {
    let context = Context::new().unwrap();
    let t = Tensors::new();
    let q = TensorView::new(&t.q, &Q_SHAPE).unwrap();
    let k = TensorView::new(&t.k, &K_SHAPE).unwrap();
    let v = TensorView::new(&t.v, &V_SHAPE).unwrap();
    let shown = |key: usize| key / 2 % 2 == 0;
    let bytes: Vec<bool> = (0..KEYS).map(shown).collect();
    let row = (KEYS + 7) / 8;
    let mut bits = vec![0u8; row];
    (0..KEYS).filter(|&key| shown(key)).for_each(|key| bits[key / 8] |= 1 << (key % 8));
    let list: Vec<i32> = (0..(KEYS as i32 + 1) / 2).rev().filter(|block| block % 2 == 0).collect();
    let counts = [list.len() as i32];
    let slices: Vec<i32> = list.iter().flat_map(|block| [0, ROWS as i32, 2 * block, 2 * block + 2, 0]).collect();
    let none = [0i32; BATCH];
    let forms = [
        Attention::new(q, k, v).element_mask(TensorView::new(&bytes, &[1, 1, 1, KEYS]).unwrap()),
        Attention::new(q, k, v).element_mask_bits(TensorView::new(&bits, &[1, 1, 1, row]).unwrap(), KEYS),
        Attention::new(q, k, v).block_lists(
            TensorView::new(&counts, &[1, 1, 1]).unwrap(),
            TensorView::new(&list, &[1, 1, 1, list.len()]).unwrap(),
            ROWS,
            2,
        ),
        Attention::new(q, k, v)
            .slices(TensorView::new(&slices, &[list.len(), 5]).unwrap())
            .seqstart_k(TensorView::new(&none, &[BATCH]).unwrap()),
        Attention::new(q, k, v),
    ];
    // The largest logit of each head by definition, over all keys or the visible ones.
    let largest = |head: usize, only_shown: bool| {
        let mut largest = f64::NEG_INFINITY;
        for (batch, row, key) in (0..BATCH * ROWS * KEYS).map(|n| (n / (ROWS * KEYS), n / KEYS % ROWS, n % KEYS)) {
            let q = ((batch * ROWS + row) * HEADS + head) * DIM;
            let k = ((batch * KEYS + key) * KEY_HEADS + head / (HEADS / KEY_HEADS)) * DIM;
            let dot: f64 = (0..DIM).map(|d| f64::from(t.q[q + d]) * f64::from(t.k[k + d])).sum();
            if !only_shown || shown(key) {
                largest = largest.max(dot / (DIM as f64).sqrt());
            }
        }
        largest
    };
    let results: Vec<Vec<f32>> = forms
        .iter()
        .enumerate()
        .map(|(form, attention)| {
            let (mut out, mut again, mut top) = (vec![0f32; t.dout.len()], vec![0f32; t.dout.len()], vec![f32::NAN; HEADS]);
            let mut out_view = TensorViewMut::new(&mut out, &OUT_SHAPE).unwrap();
            let mut top_view = TensorViewMut::new(&mut top, &[HEADS]).unwrap();
            context.forward_with_max_logit(attention, &mut out_view, None, &mut top_view).unwrap();
            let expected: Vec<f64> = (0..HEADS).map(|head| largest(head, form < 4)).collect();
            assert_close(&top, &expected, 3e-6, "max_logit");
            context.forward(attention, &mut TensorViewMut::new(&mut again, &OUT_SHAPE).unwrap(), None).unwrap();
            assert_eq!(out, again);
            out
        })
        .collect();
    assert!(results[1..4].iter().all(|result| *result == results[0]));
    assert_ne!(results[0], results[4]);

    // The same pairs by index; entries of -1 are no key.
    let lists: Vec<i32> =
        (0..BATCH * ROWS * KEYS).map(|n| n % KEYS).map(|key| if shown(key) { key as i32 } else { -1 }).collect();
    let by_index = Attention::new(q, k, v).kv_indices(TensorView::new(&lists, &[BATCH, ROWS, KEYS]).unwrap());
    let mut out = vec![0f32; t.dout.len()];
    context.forward(&by_index, &mut TensorViewMut::new(&mut out, &OUT_SHAPE).unwrap(), None).unwrap();
    let expected: Vec<f64> = results[0].iter().map(|&x| f64::from(x)).collect();
    assert_close(&out, &expected, 3e-6, "kv_indices");

    let mut out = vec![0f32; t.dout.len()];
    let mut out = TensorViewMut::new(&mut out, &OUT_SHAPE).unwrap();
    let bits = TensorView::new(&bits, &[1, 1, 1, row]).unwrap();
    for (attention, word) in [
        (Attention::new(q, k, v).element_mask_bits(bits, 8 * row + 100), "element_mask.shape[3]"),
        (Attention::new(q, k, v).element_mask_bits(q, KEYS), "element_mask.dtype"),
    ] {
        let error = context.forward(&attention, &mut out, None).unwrap_err();
        assert!(error.text().contains(word), "{}", error);
    }
}

#[test]
fn a_context_moves_between_threads() {
    let context = Context::new().unwrap();
    let context = std::thread::spawn(move || {
        check::<f32>(&context, 3e-6);
        context
    })
    .join()
    .unwrap();
    check::<f32>(&context, 3e-6);
    assert!(flashattn::build_info().contains(&format!("version={}", flashattn::version())));
}

#[test]
fn keys_in_8_bits() {
    // Four int8 keys of one head, each with its own descale.
    let q = numbers(1, 3 * 8);
    let bytes: Vec<i8> = (0..32).map(|i| (i * 37 % 21 - 10) as i8).collect();
    let descales = [0.5f32, 0.25, 1.0, 2.0];
    let exact: Vec<f32> = bytes.iter().enumerate().map(|(i, &x)| f32::from(x) * descales[i / 8]).collect();
    let (mut out, mut expected) = (vec![0f32; 24], vec![0f32; 24]);
    let context = Context::new().unwrap();
    let q = TensorView::new(&q, &[1, 3, 1, 8]).unwrap();
    let keys = TensorView::new(&bytes, &[1, 4, 1, 8]).unwrap();
    let descale = TensorView::new(&descales, &[1, 4, 1]).unwrap();
    let quantised = Attention::new(q, keys, keys).k_descale(descale).v_descale(descale);
    context.forward(&quantised, &mut TensorViewMut::new(&mut out, &[1, 3, 1, 8]).unwrap(), None).unwrap();
    let keys = TensorView::new(&exact, &[1, 4, 1, 8]).unwrap();
    let plain = Attention::new(q, keys, keys);
    context.forward(&plain, &mut TensorViewMut::new(&mut expected, &[1, 3, 1, 8]).unwrap(), None).unwrap();
    for (got, wanted) in out.iter().zip(&expected) {
        assert!((got - wanted).abs() < 1e-4, "{} is not {}", got, wanted);
    }
}

/// Calls of a thread share a context, one inside another has its own, and a failure leaves it usable.
#[test]
fn the_context_of_a_thread() {
    let address = || Context::of_this_thread(|context| Ok(context.as_raw() as usize)).unwrap();
    let first = address();
    assert_eq!(first, address());
    let nested = Context::of_this_thread(|outer| {
        let inner = Context::of_this_thread(|inner| Ok(inner.as_raw() as usize))?;
        Ok((outer.as_raw() as usize, inner))
    });
    let (outer, inner) = nested.unwrap();
    assert_eq!(outer, first);
    assert_ne!(inner, outer);
    assert_ne!(std::thread::spawn(address).join().unwrap(), address());
    let one = [1f32; 4];
    let view = TensorView::new(&one, &[1, 1, 1, 4]).unwrap();
    let mut out = [f32::NAN; 2];
    let mut out_view = TensorViewMut::new(&mut out, &[1, 1, 1, 2]).unwrap();
    let failed = Context::of_this_thread(|context| context.forward(&Attention::new(view, view, view), &mut out_view, None));
    assert_eq!(failed.unwrap_err().name(), "FA_ERROR_SHAPE");
    let mut out = [f32::NAN; 4];
    let mut out_view = TensorViewMut::new(&mut out, &[1, 1, 1, 4]).unwrap();
    Context::of_this_thread(|context| context.forward(&Attention::new(view, view, view), &mut out_view, None)).unwrap();
    assert_eq!(out, one);
}
