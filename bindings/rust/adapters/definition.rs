// SPDX-License-Identifier: Apache-2.0
//! What the tests of the adapters share: attention by definition in f64, and random numbers.

use std::time::{SystemTime, UNIX_EPOCH};

/// FA_TEST_SEED, or another one in every run.
pub fn seed() -> u64 {
    let given = std::env::var("FA_TEST_SEED").ok().and_then(|text| text.parse().ok());
    given.unwrap_or_else(|| SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |time| time.subsec_nanos().into()))
}

/// Numbers between -1 and 1 without a visible pattern.
pub struct Draw(u64);

impl Draw {
    pub fn new(seed: u64) -> Self {
        Draw(seed)
    }

    pub fn numbers(&mut self, count: usize) -> Vec<f32> {
        (0..count)
            .map(|_| {
                self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
            })
            .collect()
    }
}

/// The options; a query sees the keys from `left` before to `right` after its diagonal.
#[derive(Default)]
pub struct Definition {
    pub scale: f64,
    pub left: Option<usize>,
    pub right: Option<usize>,
    pub softcap: Option<f64>,
    pub slopes: Vec<f64>,
    /// Hides a pair of (batch, head, row, key).
    pub hidden: Option<Hides>,
}

pub type Hides = Box<dyn Fn([usize; 4]) -> bool>;

pub struct Results {
    pub out: Vec<f64>,
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
}

impl Definition {
    /// Sizes are batch, rows, keys, heads, key heads, columns and columns of values; inputs are q, k, v and dout, (batch, rows, heads, columns).
    pub fn compute(&self, sizes: [usize; 7], inputs: [&[f64]; 4]) -> Results {
        let [batch, rows, keys, heads, key_heads, columns, value_columns] = sizes;
        let [q, k, v, dout] = inputs;
        let mut r =
            Results { out: vec![0.0; dout.len()], dq: vec![0.0; q.len()], dk: vec![0.0; k.len()], dv: vec![0.0; v.len()] };
        let dot = |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(x, y)| x * y).sum() };
        for n in 0..batch * rows * heads {
            let (b, i, h) = (n / heads / rows, n / heads % rows, n % heads);
            let diagonal = (i + keys) as isize - rows as isize;
            let (q_row, o_row) = (n * columns..(n + 1) * columns, n * value_columns..(n + 1) * value_columns);
            let at = |j: usize| (b * keys + j) * key_heads + h / (heads / key_heads);
            let k_row = |j: usize| at(j) * columns..(at(j) + 1) * columns;
            let v_row = |j: usize| at(j) * value_columns..(at(j) + 1) * value_columns;
            // (key, logit, derivative of the logit by q k^T)
            let visible: Vec<(usize, f64, f64)> = (0..keys)
                .filter(|&j| {
                    let distance = j as isize - diagonal;
                    let hidden = self.hidden.as_ref().map_or(false, |hides| hides([b, h, i, j]));
                    !hidden
                        && self.left.map_or(true, |w| distance >= -(w as isize))
                        && self.right.map_or(true, |w| distance <= w as isize)
                })
                .map(|j| {
                    let x = self.scale * dot(&q[q_row.clone()], &k[k_row(j)]);
                    let (x, slope) = match self.softcap {
                        Some(cap) => (cap * (x / cap).tanh(), 1.0 - (x / cap).tanh().powi(2)),
                        None => (x, 1.0),
                    };
                    let alibi = self.slopes.get(h).map_or(0.0, |s| s * (diagonal - j as isize).abs() as f64);
                    (j, x - alibi, slope * self.scale)
                })
                .collect();
            let sum: f64 = visible.iter().map(|(_, x, _)| x.exp()).sum();
            for (j, x, _) in &visible {
                for c in 0..value_columns {
                    r.out[o_row.start + c] += x.exp() / sum * v[v_row(*j).start + c];
                }
            }
            let delta = dot(&r.out[o_row.clone()], &dout[o_row.clone()]);
            for (j, x, slope) in visible {
                let p = x.exp() / sum;
                let ds = p * (dot(&dout[o_row.clone()], &v[v_row(j)]) - delta) * slope;
                for c in 0..value_columns {
                    r.dv[v_row(j).start + c] += p * dout[o_row.start + c];
                }
                for c in 0..columns {
                    r.dq[q_row.start + c] += ds * k[k_row(j).start + c];
                    r.dk[k_row(j).start + c] += ds * q[q_row.start + c];
                }
            }
        }
        r
    }
}
