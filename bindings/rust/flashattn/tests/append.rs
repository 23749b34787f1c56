// SPDX-License-Identifier: Apache-2.0
//! New rows in caches against a plain implementation, element by element: what is written, and what is not.

use flashattn::{Append, Bf16, Context, Element, TensorView, TensorViewMut, F16, F8E4M3};

mod common;
use common::numbers;

const BATCH: usize = 4;
const NEW: usize = 4;
const CAPACITY: usize = 16;
const PAGE_SIZE: usize = 4;
const PAGES: usize = 19;
const HEADS: usize = 2;
const HEADS_Q: usize = 4;
const DIM: usize = 12;
const DIM_V: usize = 10;
const HALF: usize = 4; // half the columns that are rotated
const POSITIONS: usize = 32;
/// What memory holds that nothing should write.
const UNTOUCHED: f32 = 16.0;

/// Sequence 1 is left out; sequence 2 runs over the end of its cache.
const OFFSETS: [i32; BATCH] = [3, -1, 13, 0];
const USED: [i32; BATCH] = [4, 2, 4, 2];
/// Sequence 3 has no page for its rows from 0 on.
const TABLE: [i32; BATCH * CAPACITY / PAGE_SIZE] = [7, 2, 18, 0, 3, 4, 5, 6, 8, 9, 10, 11, -1, 12, 13, 14];

/// How a test reads and writes numbers of a type, and how far a rounded one may lie from the exact one.
struct Format<T> {
    of: fn(f32) -> T,
    value: fn(T) -> f64,
    /// Half the distance between the numbers around this one.
    nearest: fn(f64) -> f64,
    /// The largest number, for a type with descales.
    largest: Option<f64>,
}

const F32: Format<f32> = Format { of: |x| x, value: f64::from, nearest: |x| x.abs() * 5e-7, largest: None };
const HALF_FLOAT: Format<F16> =
    Format { of: F16::from, value: |x| f32::from(x).into(), nearest: |x| x.abs() / 2048.0 + 1e-6, largest: None };
const BRAIN: Format<Bf16> =
    Format { of: Bf16::from, value: |x| f32::from(x).into(), nearest: |x| x.abs() / 256.0 + 1e-6, largest: None };
const I8: Format<i8> = Format { of: |x| x as i8, value: f64::from, nearest: |_| 0.5, largest: Some(127.0) };
const F8: Format<F8E4M3> = Format {
    of: |_| F8E4M3(0x58), // 16, the only number a test writes
    value: |x| {
        let (exponent, fraction) = (i32::from(x.0 >> 3 & 15), f64::from(x.0 & 7) / 8.0);
        let magnitude = if exponent == 0 { fraction / 64.0 } else { (1.0 + fraction) * 2f64.powi(exponent - 7) };
        if x.0 < 0x80 {
            magnitude
        } else {
            -magnitude
        }
    },
    nearest: |x| (x.abs() / 16.0).max(1.0 / 1024.0),
    largest: Some(448.0),
};

/// One way to append rows.
#[derive(Clone, Copy, Debug)]
struct Setting {
    paged: bool,
    packed: bool,
    rotary: bool,
    interleaved: bool,
    positions: bool,
    in_place: bool,
    by_row: bool,
}

impl Setting {
    /// Where row i of sequence n belongs: (sequence or page, row).
    fn place(&self, n: usize, i: usize) -> Option<(usize, usize)> {
        let offset = usize::try_from(OFFSETS[n]).ok()?;
        let row = offset + i;
        if i >= USED[n] as usize || row >= CAPACITY {
            return None;
        }
        if !self.paged {
            return Some((n, row));
        }
        let page = usize::try_from(TABLE[n * CAPACITY / PAGE_SIZE + row / PAGE_SIZE]).ok()?;
        Some((page, row % PAGE_SIZE))
    }

    fn rotated(&self, row: &[f64], cos: &[f32], sin: &[f32], position: i64) -> Vec<f64> {
        let mut result = row.to_vec();
        for c in 0..if self.rotary { HALF } else { 0 } {
            let (a, b) = if self.interleaved { (2 * c, 2 * c + 1) } else { (c, c + HALF) };
            let at = position as usize * HALF + c;
            let (cos, sin) = (f64::from(cos[at]), f64::from(sin[at]));
            result[a] = row[a] * cos - row[b] * sin;
            result[b] = row[a] * sin + row[b] * cos;
        }
        result
    }
}

fn rows<S: Element>(seed: u64, heads: usize, dim: usize, format: &Format<S>) -> (Vec<S>, Vec<f64>) {
    let data: Vec<S> = numbers(seed, BATCH * NEW * heads * dim).into_iter().map(format.of).collect();
    let exact = data.iter().map(|&x| (format.value)(x)).collect();
    (data, exact)
}

/// A cache after the call, with the descales of its rows.
struct Cache<'a, C> {
    what: &'a str,
    data: Vec<C>,
    descales: Vec<f32>,
    dim: usize,
    rotary: bool,
}

/// Appends rows of `S` to caches of `C`, and compares.
fn check<S: Element, C: Element + PartialEq>(context: &Context, s: Setting, source: &Format<S>, target: &Format<C>) {
    let (cos, sin) = (numbers(1, POSITIONS * HALF), numbers(2, POSITIONS * HALF));
    let (outer, inner) = if s.paged { (PAGES, PAGE_SIZE) } else { (BATCH, CAPACITY) };
    let shape = |heads, dim| if s.packed { vec![BATCH * NEW, heads, dim] } else { vec![BATCH, NEW, heads, dim] };
    let (q, exact_q) = rows(3, HEADS_Q, DIM, source);
    let (k, exact_k) = rows(4, HEADS, DIM, source);
    let (v, exact_v) = rows(5, HEADS, DIM_V, source);
    let cache = |what, dim, rotary, scale: f32| Cache {
        what,
        data: vec![(target.of)(UNTOUCHED); outer * inner * HEADS * dim],
        descales: match target.largest {
            None => Vec::new(),
            Some(_) if s.by_row => vec![UNTOUCHED; outer * inner * HEADS],
            // The smallest of them are too small for the largest rows.
            Some(largest) => (0..BATCH * HEADS).map(|i| scale * (i + 1) as f32 / largest as f32).collect(),
        },
        dim,
        rotary,
    };
    let mut keys = cache("k_cache", DIM, s.rotary, 0.3);
    let mut values = cache("v_cache", DIM_V, false, 0.4);
    let mut lengths = [UNTOUCHED as i32; BATCH];
    let positions: Vec<i64> = (0..BATCH * NEW)
        .map(|i| if s.positions { (i * 5 % POSITIONS) as i64 } else { i64::from(OFFSETS[i / NEW]) + (i % NEW) as i64 })
        .collect();
    let starts: Vec<i32> = (0..=BATCH).map(|n| (n * NEW) as i32).collect();
    let mut rotated: Vec<S> = if s.in_place { q.clone() } else { vec![(source.of)(UNTOUCHED); q.len()] };

    let view = |data, heads, dim| TensorView::new(data, &shape(heads, dim)).unwrap();
    let mut append =
        Append::new(view(&k, HEADS, DIM), TensorViewMut::new(&mut keys.data, &[outer, inner, HEADS, DIM]).unwrap())
            .values(view(&v, HEADS, DIM_V), TensorViewMut::new(&mut values.data, &[outer, inner, HEADS, DIM_V]).unwrap())
            .offsets(TensorView::new(&OFFSETS, &[BATCH]).unwrap())
            .seqused(TensorView::new(&USED, &[BATCH]).unwrap())
            .seqused_k(TensorViewMut::new(&mut lengths, &[BATCH]).unwrap());
    if s.packed {
        append = append.cu_seqlens(TensorView::new(&starts, &[BATCH + 1]).unwrap());
    }
    if s.paged {
        append = append.page_table(TensorView::new(&TABLE, &[BATCH, CAPACITY / PAGE_SIZE]).unwrap());
    }
    if s.rotary {
        let table = |data| TensorView::new(data, &[POSITIONS, HALF]).unwrap();
        append = append.rotary(table(&cos), table(&sin));
        let result = TensorViewMut::new(&mut rotated, &shape(HEADS_Q, DIM)).unwrap();
        append = if s.in_place { append.q(result) } else { append.q_into(view(&q, HEADS_Q, DIM), result) };
        if s.interleaved {
            append = append.interleaved();
        }
        if s.positions {
            let shape = if s.packed { vec![BATCH * NEW] } else { vec![BATCH, NEW] };
            append = append.rotary_positions(TensorView::new(&positions, &shape).unwrap());
        }
    }
    if target.largest.is_some() && s.by_row {
        append = append
            .k_descale_by_row(TensorViewMut::new(&mut keys.descales, &[outer, inner, HEADS]).unwrap())
            .v_descale_by_row(TensorViewMut::new(&mut values.descales, &[outer, inner, HEADS]).unwrap());
    } else if target.largest.is_some() {
        append = append
            .k_descale(TensorView::new(&keys.descales, &[BATCH, HEADS]).unwrap())
            .v_descale(TensorView::new(&values.descales, &[BATCH, HEADS]).unwrap());
    }
    assert!(context.query_append(&append).unwrap().kernel.contains("append"));
    context.prepare_append(&append).unwrap();
    context.append_kv(&mut append).unwrap();

    for n in 0..BATCH {
        let expected = if OFFSETS[n] < 0 { 0 } else { (OFFSETS[n] + USED[n]).min(CAPACITY as i32) };
        assert_eq!(lengths[n], expected, "sequence {}", n);
    }
    for (cache, exact) in [(&keys, &exact_k), (&values, &exact_v)] {
        let (mut touched, mut touched_descales) = (vec![false; cache.data.len()], vec![false; cache.descales.len()]);
        for at in 0..BATCH * NEW * HEADS {
            let (h, i, n) = (at % HEADS, at / HEADS % NEW, at / HEADS / NEW);
            let (o, r) = match s.place(n, i) {
                Some(place) => place,
                None => continue,
            };
            let mut row = exact[at * cache.dim..(at + 1) * cache.dim].to_vec();
            if cache.rotary {
                row = s.rotated(&row, &cos, &sin, positions[n * NEW + i]);
            }
            let to = (o * inner + r) * HEADS + h;
            let largest = row.iter().fold(0f64, |largest, x| largest.max(x.abs()));
            let descale = match target.largest {
                None => 1.0,
                Some(limit) if s.by_row => {
                    touched_descales[to] = true;
                    let descale = f64::from(cache.descales[to]);
                    assert!(
                        (descale * limit / largest - 1.0).abs() < 1e-6,
                        "{}: descale {} of {}",
                        cache.what,
                        descale,
                        largest
                    );
                    descale
                }
                Some(_) => f64::from(cache.descales[n * HEADS + h]),
            };
            for (c, x) in row.iter().enumerate() {
                let limit = target.largest.unwrap_or(f64::INFINITY);
                let expected = (x / descale).clamp(-limit, limit);
                let got = (target.value)(cache.data[to * cache.dim + c]);
                touched[to * cache.dim + c] = true;
                let copied = target.largest.is_none() && !(cache.rotary && c < 2 * HALF);
                let tolerance = if copied { 0.0 } else { (target.nearest)(expected) + 1e-5 * expected.abs().max(1.0) };
                assert!(
                    (got - expected).abs() <= tolerance,
                    "{:?}: {}: column {} of row {}, head {} of sequence {} is {}, not {}",
                    s,
                    cache.what,
                    c,
                    i,
                    h,
                    n,
                    got,
                    expected
                );
            }
        }
        let kept = |(x, &touched): (&C, &bool)| touched || *x == (target.of)(UNTOUCHED);
        assert!(cache.data.iter().zip(&touched).all(kept), "{:?}: {}: an old row was written", s, cache.what);
        let kept = |(x, &touched): (&f32, &bool)| touched || *x == UNTOUCHED;
        assert!(!s.by_row || cache.descales.iter().zip(&touched_descales).all(kept), "{:?}: an old descale was written", s);
    }
    for (at, exact) in exact_q.chunks(DIM).enumerate() {
        let (i, n) = (at / HEADS_Q % NEW, at / HEADS_Q / NEW);
        let used = s.rotary && i < USED[n] as usize && OFFSETS[n] >= 0;
        let expected = if used {
            if s.place(n, i).is_none() {
                continue; // flashattn.h leaves open what becomes of queries whose keys find no place
            }
            s.rotated(exact, &cos, &sin, positions[n * NEW + i])
        } else if s.in_place {
            exact.to_vec()
        } else {
            vec![UNTOUCHED.into(); DIM]
        };
        for (c, x) in expected.iter().enumerate() {
            let got = (source.value)(rotated[at * DIM + c]);
            assert!(
                (got - x).abs() <= (source.nearest)(*x) + 1e-5,
                "{:?}: column {} of query {} is {}, not {}",
                s,
                c,
                at,
                got,
                x
            );
        }
    }
}

#[test]
fn rows_find_their_places() {
    let context = Context::new().unwrap();
    for bits in 0..64 {
        let is = |bit: u32| bits >> bit & 1 != 0;
        let mut s = Setting {
            paged: is(0),
            packed: is(1),
            rotary: is(2),
            interleaved: is(3),
            positions: is(4),
            in_place: is(5),
            by_row: false,
        };
        check(&context, s, &F32, &F32);
        check(&context, s, &HALF_FLOAT, &HALF_FLOAT);
        check(&context, s, &BRAIN, &BRAIN);
        for by_row in [false, true] {
            s.by_row = by_row;
            check(&context, s, &F32, &I8);
            check(&context, s, &BRAIN, &I8);
            check(&context, s, &F32, &F8);
        }
    }
}

#[test]
fn keys_alone_and_what_is_refused() {
    let context = Context::new().unwrap();
    let (k, mut cache, mut descales) = (vec![0.5f32; 16], vec![0i8; 64], vec![UNTOUCHED; 8]);
    let row = TensorView::new(&k, &[1, 1, 2, 8]).unwrap();
    let shape = [1, 4, 2, 8];
    context.append_kv(&mut Append::new(row, TensorViewMut::new(&mut cache, &shape).unwrap())).unwrap();
    assert_eq!(cache[..17], [&[0; 16], &[0i8][..]].concat()); // 0.5 / 1 rounds to even

    // Descales that would be written through a view that is only read, and the reverse.
    let held = descales.clone();
    let append = Append::new(row, TensorViewMut::new(&mut cache, &shape).unwrap());
    let mut append = append.k_descale(TensorView::new(&held, &[1, 4, 2]).unwrap());
    let error = context.append_kv(&mut append).unwrap_err();
    assert_eq!(context.query_append(&append).unwrap_err().to_string(), error.to_string());
    assert_eq!((error.name(), error.text()), ("FA_ERROR_SHAPE", "k_descale has 3 dimensions; it needs 2"));
    let append = Append::new(row, TensorViewMut::new(&mut cache, &shape).unwrap());
    let by_row = TensorViewMut::new(&mut descales[..2], &[1, 2]).unwrap();
    let error = context.append_kv(&mut append.v_descale_by_row(by_row)).unwrap_err();
    assert_eq!((error.name(), error.text()), ("FA_ERROR_SHAPE", "v_descale_by_row has 2 dimensions; it needs 3"));

    let refused = |change: fn(Append<'static>) -> Append<'static>, word: &str| {
        let k: &'static [f32] = &[0.0; 16];
        let cache: &'static mut [f32] = Box::leak(vec![0f32; 64].into());
        let k = TensorView::new(k, &[1, 1, 2, 8]).unwrap();
        let append = Append::new(k, TensorViewMut::new(cache, &[1, 4, 2, 8]).unwrap());
        let error = context.append_kv(&mut change(append)).unwrap_err();
        assert!(error.text().contains(word), "{}", error);
    };
    refused(|append| append.interleaved(), "rotary_cos is absent");
    refused(|append| append.offsets(TensorView::new(&[0i64], &[1]).unwrap()), "offsets");
    refused(|append| append.seqused(TensorView::new(&[2i32], &[1]).unwrap()), "seqused");
    refused(|append| append.page_table(TensorView::new(&[0i32; 4], &[2, 2]).unwrap()), "page_table");
}
