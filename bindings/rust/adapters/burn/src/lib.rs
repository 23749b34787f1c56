// SPDX-License-Identifier: Apache-2.0
//! Attention of Burn's tensor data by libflashattn, on the CPU, for every backend of Burn.
//!
//! [`attention`] takes what `burn::tensor::module::attention` takes, as the data of the tensors: (batch, heads, rows, head_dim) in f32, and a mask of
//! bool that is true where a pair is hidden. A program gets the data by `Tensor::into_data` and makes a tensor of the result by `Tensor::from_data`.
//! Both leave Burn's graph of gradients, so a training program calls [`Attended::backward`] in a `Backward` of its own.
//!
//! ```
//! use burn_tensor::TensorData;
//! use flashattn_burn::{attention, Options};
//!
//! let ones = |heads, rows| TensorData::new(vec![1f32; heads * rows * 64], [1, heads, rows, 64]); // batch, heads, rows, head_dim
//! let (query, key, value) = (ones(8, 16), ones(2, 128), ones(2, 128));
//! let options = Options { causal: true, ..Options::default() };
//! let out = attention(&query, &key, &value, None, &options)?.out;
//! assert_eq!(out.shape.as_slice(), query.shape.as_slice());
//! # Ok::<(), flashattn_burn::Error>(())
//! ```

#![deny(missing_docs)]

use std::fmt;

use burn_tensor::TensorData;
use flashattn::{Attention, Context, Gradients, TensorView, TensorViewMut};

/// What [`attention`] computes beyond softmax(scale q k^T) v.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Scale of q k^T; None is 1 / sqrt(head_dim).
    pub scale: Option<f32>,
    /// A query sees the keys up to its diagonal. The last query's ends at the last key.
    pub causal: bool,
    /// A query sees at most this many keys before its diagonal.
    pub window_left: Option<usize>,
    /// A query sees at most this many keys after its diagonal.
    pub window_right: Option<usize>,
    /// Logits become softcap * tanh(logit / softcap).
    pub softcap: Option<f32>,
}

/// Why a call was refused or failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error(String);

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Error {}

impl From<flashattn::Error> for Error {
    fn from(error: flashattn::Error) -> Self {
        Error(error.to_string())
    }
}

/// What calls return.
pub type Result<T> = std::result::Result<T, Error>;

/// Results of [`attention`].
#[derive(Clone, Debug)]
pub struct Attended {
    /// (batch, heads, rows, columns of the values).
    pub out: TensorData,
    /// The logarithm of the sum of each row's exponentials: (batch, heads, rows).
    pub lse: TensorData,
}

/// Attention of (batch, heads, rows, head_dim) in f32. Keys and values may have fewer heads than queries. The mask is bool, (batch or 1, heads or 1, rows
/// or 1, keys or 1), and true where a pair is hidden. Rows that see no key are 0.
pub fn attention(
    query: &TensorData,
    key: &TensorData,
    value: &TensorData,
    mask: Option<&TensorData>,
    options: &Options,
) -> Result<Attended> {
    let mut shape = shape("query", query)?;
    shape[3] = self::shape("value", value)?[3];
    let lse_shape = [shape[0], shape[1], shape[2]];
    let (mut out, mut lse) = (vec![0f32; shape.iter().product()], vec![0f32; lse_shape.iter().product()]);
    let visible = Mask::new(mask)?;
    let problem = problem(query, key, value, &visible, options)?;
    {
        let mut out_view = TensorViewMut::strided(&mut out, 0, &rows_first(shape), &strides(shape))?;
        let mut lse_view = TensorViewMut::new(&mut lse, &lse_shape)?;
        Context::of_this_thread(|context| context.forward(&problem, &mut out_view, Some(&mut lse_view)))?;
    }
    Ok(Attended { out: TensorData::new(out, shape), lse: TensorData::new(lse, lse_shape) })
}

impl Attended {
    /// Gradients of query, key and value, in this order. The first arguments are those of [`attention`]; `grad` is the gradient of `out`.
    pub fn backward(
        &self,
        query: &TensorData,
        key: &TensorData,
        value: &TensorData,
        mask: Option<&TensorData>,
        options: &Options,
        grad: &TensorData,
    ) -> Result<[TensorData; 3]> {
        let visible = Mask::new(mask)?;
        let problem = problem(query, key, value, &visible, options)?;
        let shapes = [shape("query", query)?, shape("key", key)?, shape("value", value)?];
        let mut results = shapes.map(|shape| vec![0f32; shape.iter().product()]);
        {
            let [dq, dk, dv] = &mut results;
            let lse = numbers("lse", &self.lse)?;
            let lse = TensorView::new(lse, self.lse.shape.as_slice())?;
            let mut gradients = Gradients::new(view("grad", grad)?)
                .dq(TensorViewMut::strided(dq, 0, &rows_first(shapes[0]), &strides(shapes[0]))?)
                .dk(TensorViewMut::strided(dk, 0, &rows_first(shapes[1]), &strides(shapes[1]))?)
                .dv(TensorViewMut::strided(dv, 0, &rows_first(shapes[2]), &strides(shapes[2]))?);
            let out = view("out", &self.out)?;
            Context::of_this_thread(|context| context.backward(&problem, out, lse, &mut gradients))?;
        }
        let [dq, dk, dv] = results;
        Ok([TensorData::new(dq, shapes[0]), TensorData::new(dk, shapes[1]), TensorData::new(dv, shapes[2])])
    }
}

/// Burn's mask, inverted: true where a pair is visible.
struct Mask(Option<(Vec<bool>, [usize; 4])>);

impl Mask {
    fn new(mask: Option<&TensorData>) -> Result<Self> {
        let mask = match mask {
            Some(mask) => mask,
            None => return Ok(Mask(None)),
        };
        let shape = shape("mask", mask)?;
        let hidden: &[bool] = mask.as_slice().map_err(|_| Error(format!("mask is {:?}; it must be bool", mask.dtype)))?;
        Ok(Mask(Some((hidden.iter().map(|hidden| !hidden).collect(), shape))))
    }
}

fn problem<'a>(
    query: &'a TensorData,
    key: &'a TensorData,
    value: &'a TensorData,
    mask: &'a Mask,
    options: &Options,
) -> Result<Attention<'a>> {
    // The library takes 0 for an absent option.
    for (name, value) in [("scale", options.scale), ("softcap", options.softcap)] {
        if value == Some(0.0) {
            return Err(Error(format!("{} is 0; None leaves it out", name)));
        }
    }
    let mut problem = Attention::new(view("query", query)?, view("key", key)?, view("value", value)?)
        .scale(options.scale.unwrap_or(0.0))
        .softcap(options.softcap.unwrap_or(0.0));
    if options.causal {
        problem = problem.causal();
    }
    if let Some(keys) = options.window_left {
        problem = problem.window_left(keys);
    }
    if let Some(keys) = options.window_right {
        problem = problem.window_right(keys);
    }
    if let Some((visible, shape)) = &mask.0 {
        problem = problem.element_mask(TensorView::new(visible, shape)?);
    }
    Ok(problem)
}

fn shape(name: &str, data: &TensorData) -> Result<[usize; 4]> {
    let shape = data.shape.as_slice();
    <[usize; 4]>::try_from(shape).map_err(|_| Error(format!("{} has shape {:?}; it must have 4 dimensions", name, shape)))
}

/// (batch, heads, rows, columns) as the library names dimensions: (batch, rows, heads, columns).
fn rows_first(shape: [usize; 4]) -> [usize; 4] {
    [shape[0], shape[2], shape[1], shape[3]]
}

fn strides(shape: [usize; 4]) -> [isize; 4] {
    let [_, heads, rows, columns] = shape.map(|size| size as isize);
    [heads * rows * columns, columns, rows * columns, 1]
}

fn numbers<'a>(name: &str, data: &'a TensorData) -> Result<&'a [f32]> {
    data.as_slice().map_err(|_| Error(format!("{} is {:?}; it must be f32", name, data.dtype)))
}

fn view<'a>(name: &str, data: &'a TensorData) -> Result<TensorView<'a>> {
    let shape = shape(name, data)?;
    Ok(TensorView::strided(numbers(name, data)?, 0, &rows_first(shape), &strides(shape))?)
}
