// SPDX-License-Identifier: Apache-2.0
use std::fmt;
use std::marker::PhantomData;

use flashattn_sys as sys;

use crate::{Element, Error, Result};

const MAX_DIMS: usize = 4;

/// A tensor inside a slice that is only read. Strides count elements and may be zero or negative.
#[derive(Clone, Copy)]
pub struct TensorView<'a> {
    raw: sys::fa_tensor,
    slice: PhantomData<&'a ()>,
}

/// A tensor inside a slice that a call writes.
pub struct TensorViewMut<'a> {
    raw: sys::fa_tensor,
    slice: PhantomData<&'a mut ()>,
}

// SAFETY: they stand for the slices they were made from, whose elements are plain numbers.
unsafe impl Send for TensorView<'_> {}
unsafe impl Sync for TensorView<'_> {}
unsafe impl Send for TensorViewMut<'_> {}
unsafe impl Sync for TensorViewMut<'_> {}

fn refuse<T>(text: String) -> Result<T> {
    Err(Error::new(sys::FA_ERROR_SHAPE, text))
}

fn dense_strides(shape: &[usize]) -> Vec<isize> {
    let mut strides = vec![1isize; shape.len()];
    for d in (0..shape.len().saturating_sub(1)).rev() {
        // A product that overflows belongs to a tensor that cannot fit its slice, which `describe_within` finds.
        strides[d] = isize::try_from(shape[d + 1]).unwrap_or(isize::MAX).saturating_mul(strides[d + 1]);
    }
    strides
}

/// Strides of one of `parts` tensors that lie side by side before the last two dimensions: (..., parts, heads, head_dim).
fn packed_strides(shape: &[usize], parts: usize) -> Result<(Vec<isize>, usize)> {
    if shape.len() < 2 {
        return refuse(format!("a packed tensor needs at least 2 dimensions, not {}", shape.len()));
    }
    let inner = shape.len() - 2;
    let mut whole = shape.to_vec();
    whole.insert(inner, parts);
    let mut strides = dense_strides(&whole);
    let step = strides.remove(inner);
    Ok((strides, step as usize))
}

/// The tensor but for its address.
fn describe(shape: &[usize], strides: &[isize], dtype: i32) -> Result<sys::fa_tensor> {
    if shape.len() > MAX_DIMS || shape.len() != strides.len() {
        return refuse(format!(
            "{} sizes and {} strides; both must be the same, at most {}",
            shape.len(),
            strides.len(),
            MAX_DIMS
        ));
    }
    let mut tensor = sys::fa_tensor { dtype, ndim: shape.len() as i32, ..Default::default() };
    for (d, (&size, &stride)) in shape.iter().zip(strides).enumerate() {
        tensor.shape[d] = match i64::try_from(size) {
            Ok(size) => size,
            Err(_) => return refuse(format!("size {} does not fit 63 bits", size)),
        };
        tensor.stride[d] = stride as i64;
    }
    Ok(tensor)
}

/// Checks that every element lies in a slice of `len` elements and describes the tensor but for its address.
fn describe_within(len: usize, offset: usize, shape: &[usize], strides: &[isize], dtype: i32) -> Result<sys::fa_tensor> {
    let tensor = describe(shape, strides, dtype)?;
    let (mut first, mut last) = (offset as i128, offset as i128);
    for (&size, &stride) in shape.iter().zip(strides) {
        let reach = (size as i128 - 1) * stride as i128; // below 2^126; their sums could overflow
        first = first.saturating_add(reach.min(0));
        last = last.saturating_add(reach.max(0));
    }
    let empty = shape.contains(&0);
    if offset > len || (!empty && (first < 0 || last >= len as i128)) {
        return refuse(format!(
            "a tensor of shape {:?} with strides {:?} at offset {} does not fit a slice of {} elements",
            shape, strides, offset, len
        ));
    }
    Ok(tensor)
}

/// Checks that no two indices name the same element, by the sufficient rule that each dimension steps over all that lies below it.
fn check_writable(shape: &[usize], strides: &[isize]) -> Result<()> {
    let mut dims: Vec<(usize, usize)> =
        shape.iter().zip(strides).filter(|(&size, _)| size > 1).map(|(&size, &stride)| (stride.unsigned_abs(), size)).collect();
    dims.sort_unstable();
    let mut extent = 1u128;
    for (stride, size) in dims {
        if (stride as u128) < extent && !shape.contains(&0) {
            return refuse(format!(
                "a tensor of shape {:?} with strides {:?} overlaps itself and cannot be written",
                shape, strides
            ));
        }
        extent = extent.saturating_add((stride as u128).saturating_mul(size as u128 - 1));
    }
    Ok(())
}

impl<'a> TensorView<'a> {
    /// The whole slice, rows last to first: the last dimension has stride 1.
    pub fn new<T: Element>(data: &'a [T], shape: &[usize]) -> Result<Self> {
        Self::strided(data, 0, shape, &dense_strides(shape))
    }

    /// The tensor whose element (0, 0, ...) is `data[offset]`.
    pub fn strided<T: Element>(data: &'a [T], offset: usize, shape: &[usize], strides: &[isize]) -> Result<Self> {
        let mut raw = describe_within(data.len(), offset, shape, strides, T::DTYPE)?;
        // From the whole slice's pointer: negative strides reach back before `offset`.
        raw.data = data.as_ptr().wrapping_add(offset) as *mut T as *mut _;
        Ok(TensorView { raw, slice: PhantomData })
    }

    /// The `parts` tensors of a slice of shape (..., parts, heads, head_dim), each of shape (..., heads, head_dim): a packed QKV.
    pub fn packed<T: Element>(data: &'a [T], parts: usize, shape: &[usize]) -> Result<Vec<Self>> {
        let (strides, step) = packed_strides(shape, parts)?;
        (0..parts).map(|part| Self::strided(data, part.saturating_mul(step), shape, &strides)).collect()
    }

    /// The tensor at an address this crate cannot check, in memory of a GPU for example, rows last to first.
    ///
    /// # Safety
    /// As for [`TensorView::from_raw`].
    pub unsafe fn from_ptr<T: Element>(address: *const T, shape: &[usize]) -> Result<Self> {
        Self::from_ptr_strided(address, shape, &dense_strides(shape))
    }

    /// The tensor whose element (0, 0, ...) lies at an address this crate cannot check.
    ///
    /// # Safety
    /// As for [`TensorView::from_raw`].
    pub unsafe fn from_ptr_strided<T: Element>(address: *const T, shape: &[usize], strides: &[isize]) -> Result<Self> {
        let mut raw = describe(shape, strides, T::DTYPE)?;
        raw.data = address as *mut T as *mut _;
        Ok(Self::from_raw(raw))
    }

    /// A tensor this crate cannot check, as the C interface has it.
    ///
    /// # Safety
    /// Until `'a` ends the tensor may be read by a context of its device and is written by nothing.
    pub unsafe fn from_raw(raw: sys::fa_tensor) -> Self {
        TensorView { raw, slice: PhantomData }
    }

    /// Sizes, outermost first.
    pub fn shape(&self) -> &[i64] {
        &self.raw.shape[..self.raw.ndim as usize]
    }

    pub(crate) fn raw(&self) -> sys::fa_tensor {
        self.raw
    }
}

impl<'a> TensorViewMut<'a> {
    /// The whole slice, rows last to first: the last dimension has stride 1.
    pub fn new<T: Element>(data: &'a mut [T], shape: &[usize]) -> Result<Self> {
        Self::strided(data, 0, shape, &dense_strides(shape))
    }

    /// The tensor whose element (0, 0, ...) is `data[offset]`; no two indices may name the same element.
    pub fn strided<T: Element>(data: &'a mut [T], offset: usize, shape: &[usize], strides: &[isize]) -> Result<Self> {
        let mut raw = describe_within(data.len(), offset, shape, strides, T::DTYPE)?;
        check_writable(shape, strides)?;
        // From the whole slice's pointer: negative strides reach back before `offset`.
        raw.data = data.as_mut_ptr().wrapping_add(offset) as *mut _;
        Ok(TensorViewMut { raw, slice: PhantomData })
    }

    /// The `parts` tensors of a slice of shape (..., parts, heads, head_dim), each of shape (..., heads, head_dim).
    pub fn packed<T: Element>(data: &'a mut [T], parts: usize, shape: &[usize]) -> Result<Vec<Self>> {
        let (strides, step) = packed_strides(shape, parts)?;
        check_writable(shape, &strides)?;
        let base = data.as_mut_ptr();
        (0..parts)
            .map(|part| {
                let offset = part.saturating_mul(step);
                let mut raw = describe_within(data.len(), offset, shape, &strides, T::DTYPE)?;
                raw.data = base.wrapping_add(offset) as *mut _;
                Ok(TensorViewMut { raw, slice: PhantomData })
            })
            .collect()
    }

    /// The tensor at an address this crate cannot check, in memory of a GPU for example, rows last to first.
    ///
    /// # Safety
    /// As for [`TensorViewMut::from_raw`].
    pub unsafe fn from_ptr<T: Element>(address: *mut T, shape: &[usize]) -> Result<Self> {
        Self::from_ptr_strided(address, shape, &dense_strides(shape))
    }

    /// The tensor whose element (0, 0, ...) lies at an address this crate cannot check; no two indices may name the same element.
    ///
    /// # Safety
    /// As for [`TensorViewMut::from_raw`].
    pub unsafe fn from_ptr_strided<T: Element>(address: *mut T, shape: &[usize], strides: &[isize]) -> Result<Self> {
        let mut raw = describe(shape, strides, T::DTYPE)?;
        check_writable(shape, strides)?;
        raw.data = address as *mut _;
        Ok(Self::from_raw(raw))
    }

    /// A tensor this crate cannot check, as the C interface has it.
    ///
    /// # Safety
    /// Until `'a` ends the tensor may be written by a context of its device and nothing else reads or writes it.
    pub unsafe fn from_raw(raw: sys::fa_tensor) -> Self {
        TensorViewMut { raw, slice: PhantomData }
    }

    /// The same tensor, to be read while this view is not written.
    pub fn as_view(&self) -> TensorView<'_> {
        TensorView { raw: self.raw, slice: PhantomData }
    }

    /// Sizes, outermost first.
    pub fn shape(&self) -> &[i64] {
        &self.raw.shape[..self.raw.ndim as usize]
    }

    pub(crate) fn raw(&self) -> sys::fa_tensor {
        self.raw
    }
}

fn debug(f: &mut fmt::Formatter<'_>, name: &str, raw: &sys::fa_tensor) -> fmt::Result {
    let ndim = raw.ndim as usize;
    f.debug_struct(name)
        .field("shape", &&raw.shape[..ndim])
        .field("stride", &&raw.stride[..ndim])
        .field("dtype", &format_args!("{:#x}", raw.dtype))
        .finish()
}

impl fmt::Debug for TensorView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug(f, "TensorView", &self.raw)
    }
}

impl fmt::Debug for TensorViewMut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug(f, "TensorViewMut", &self.raw)
    }
}
