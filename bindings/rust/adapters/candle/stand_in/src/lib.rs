// SPDX-License-Identifier: Apache-2.0
//! A stand-in for candle-core: the types and functions that flashattn-candle and its tests call, with the signatures of candle-core 0.9 to 0.11,
//! written from its documentation. It runs on the CPU alone, and backward knows the operations below and no others.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, RwLock, RwLockReadGuard};

/// The numbers of the crate half, which candle-core stores.
mod half {
    #[allow(non_camel_case_types)]
    #[derive(Clone, Copy, Debug, Default)]
    #[repr(transparent)]
    pub struct f16(pub u16);
    #[allow(non_camel_case_types)]
    #[derive(Clone, Copy, Debug, Default)]
    #[repr(transparent)]
    pub struct bf16(pub u16);
}
use half::{bf16, f16};

#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    Msg(String),
    Cuda(Box<dyn std::error::Error + Send + Sync>),
    BackwardNotSupported { op: &'static str },
}

pub type Result<T> = std::result::Result<T, Error>;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Msg(text) => f.write_str(text),
            Error::Cuda(error) => error.fmt(f),
            Error::BackwardNotSupported { op } => write!(f, "backward is not supported for {}", op),
        }
    }
}

impl std::error::Error for Error {}

#[macro_export]
macro_rules! bail {
    ($($argument:tt)*) => { return Err($crate::Error::Msg(format!($($argument)*))) };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DType {
    U32,
    I64,
    BF16,
    F16,
    F32,
    F64,
}

#[derive(Clone, Debug)]
pub enum Device {
    Cpu,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape(Vec<usize>);

impl Shape {
    pub fn dims(&self) -> &[usize] {
        &self.0
    }

    pub fn elem_count(&self) -> usize {
        self.0.iter().product()
    }
}

impl From<Vec<usize>> for Shape {
    fn from(dims: Vec<usize>) -> Self {
        Shape(dims)
    }
}

impl From<&[usize]> for Shape {
    fn from(dims: &[usize]) -> Self {
        Shape(dims.to_vec())
    }
}

impl From<usize> for Shape {
    fn from(size: usize) -> Self {
        Shape(vec![size])
    }
}

impl From<(usize, usize, usize, usize)> for Shape {
    fn from(dims: (usize, usize, usize, usize)) -> Self {
        Shape(vec![dims.0, dims.1, dims.2, dims.3])
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    shape: Shape,
    stride: Vec<usize>,
    start_offset: usize,
}

impl Layout {
    fn contiguous(shape: Shape) -> Self {
        let mut stride = vec![1; shape.0.len()];
        for d in (1..stride.len()).rev() {
            stride[d - 1] = stride[d] * shape.0[d];
        }
        Layout { shape, stride, start_offset: 0 }
    }

    pub fn dims(&self) -> &[usize] {
        self.shape.dims()
    }

    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    pub fn stride(&self) -> &[usize] {
        &self.stride
    }

    pub fn start_offset(&self) -> usize {
        self.start_offset
    }

    /// Where the elements lie, in the order of their indices.
    fn places(&self) -> Vec<usize> {
        let mut places = vec![self.start_offset];
        for (&size, &stride) in self.dims().iter().zip(&self.stride) {
            places = places.iter().flat_map(|&at| (0..size).map(move |n| at + n * stride)).collect();
        }
        places
    }
}

#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum CpuStorage {
    U32(Vec<u32>),
    I64(Vec<i64>),
    BF16(Vec<bf16>),
    F16(Vec<f16>),
    F32(Vec<f32>),
    F64(Vec<f64>),
}

pub mod backend {
    pub trait BackendStorage {
        fn dtype(&self) -> crate::DType;
    }
}

impl backend::BackendStorage for CpuStorage {
    fn dtype(&self) -> DType {
        match self {
            CpuStorage::U32(_) => DType::U32,
            CpuStorage::I64(_) => DType::I64,
            CpuStorage::BF16(_) => DType::BF16,
            CpuStorage::F16(_) => DType::F16,
            CpuStorage::F32(_) => DType::F32,
            CpuStorage::F64(_) => DType::F64,
        }
    }
}

impl CpuStorage {
    fn get(&self, n: usize) -> f64 {
        match self {
            CpuStorage::U32(x) => x[n].into(),
            CpuStorage::I64(x) => x[n] as f64,
            CpuStorage::BF16(x) => f32::from(flashattn::Bf16(x[n].0)).into(),
            CpuStorage::F16(x) => f32::from(flashattn::F16(x[n].0)).into(),
            CpuStorage::F32(x) => x[n].into(),
            CpuStorage::F64(x) => x[n],
        }
    }

    fn of(dtype: DType, numbers: impl Iterator<Item = f64>) -> Self {
        match dtype {
            DType::U32 => CpuStorage::U32(numbers.map(|x| x as u32).collect()),
            DType::I64 => CpuStorage::I64(numbers.map(|x| x as i64).collect()),
            DType::BF16 => CpuStorage::BF16(numbers.map(|x| bf16(flashattn::Bf16::from(x as f32).0)).collect()),
            DType::F16 => CpuStorage::F16(numbers.map(|x| f16(flashattn::F16::from(x as f32).0)).collect()),
            DType::F32 => CpuStorage::F32(numbers.map(|x| x as f32).collect()),
            DType::F64 => CpuStorage::F64(numbers.collect()),
        }
    }
}

#[derive(Debug)]
pub struct CudaStorage;
#[derive(Debug)]
pub struct MetalStorage;

#[derive(Debug)]
pub enum Storage {
    Cpu(CpuStorage),
    Cuda(CudaStorage),
    Metal(MetalStorage),
}

/// A type of the elements of a tensor.
pub trait WithDType: Sized + Copy + 'static {
    fn to_storage(numbers: Vec<Self>) -> CpuStorage;
    fn from_number(number: f64) -> Self;
    const DTYPE: DType;
}

macro_rules! with_dtype {
    ($($type:ty, $variant:ident, |$x:ident| $convert:expr;)*) => {
        $(impl WithDType for $type {
            fn to_storage(numbers: Vec<Self>) -> CpuStorage {
                CpuStorage::$variant(numbers)
            }
            fn from_number($x: f64) -> Self {
                $convert
            }
            const DTYPE: DType = DType::$variant;
        })*
    };
}

with_dtype! {
    u32, U32, |x| x as u32;
    i64, I64, |x| x as i64;
    f32, F32, |x| x as f32;
    f64, F64, |x| x;
    f16, F16, |x| f16(flashattn::F16::from(x as f32).0);
    bf16, BF16, |x| bf16(flashattn::Bf16::from(x as f32).0);
}

pub trait CustomOp3 {
    fn name(&self) -> &'static str;

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> Result<(CpuStorage, Shape)>;

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        Err(Error::Cuda(format!("no cuda implementation for {}", self.name()).into()))
    }

    fn bwd(
        &self,
        _arg1: &Tensor,
        _arg2: &Tensor,
        _arg3: &Tensor,
        _res: &Tensor,
        _grad_res: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        Err(Error::BackwardNotSupported { op: self.name() })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorId(usize);

/// Gradients of the parents, from the result and its gradient.
type Backward = Box<dyn Fn(&Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync>;

struct Node {
    parents: Vec<Tensor>,
    backward: Backward,
}

struct Inner {
    id: TensorId,
    storage: Arc<RwLock<Storage>>,
    layout: Layout,
    op: Option<Node>,
    is_variable: bool,
}

#[derive(Clone)]
pub struct Tensor(Arc<Inner>);

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor{:?}", self.dims())
    }
}

impl Tensor {
    fn make(storage: Arc<RwLock<Storage>>, layout: Layout, parents: &[&Tensor], backward: Backward, is_variable: bool) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let op = parents
            .iter()
            .any(|x| x.track_op())
            .then(|| Node { parents: parents.iter().map(|&x| x.clone()).collect(), backward });
        Tensor(Arc::new(Inner { id: TensorId(NEXT.fetch_add(1, Ordering::Relaxed)), storage, layout, op, is_variable }))
    }

    fn leaf(storage: CpuStorage, shape: Shape, is_variable: bool) -> Self {
        let backward = Box::new(|_: &Tensor, _: &Tensor| Ok(vec![]));
        Self::make(Arc::new(RwLock::new(Storage::Cpu(storage))), Layout::contiguous(shape), &[], backward, is_variable)
    }

    fn computed(storage: CpuStorage, shape: Shape, parents: &[&Tensor], backward: Backward) -> Self {
        Self::make(Arc::new(RwLock::new(Storage::Cpu(storage))), Layout::contiguous(shape), parents, backward, false)
    }

    pub fn from_vec<S: Into<Shape>, D: WithDType>(data: Vec<D>, shape: S, _device: &Device) -> Result<Self> {
        let shape = shape.into();
        if shape.elem_count() != data.len() {
            bail!("{} elements for shape {:?}", data.len(), shape);
        }
        Ok(Self::leaf(D::to_storage(data), shape, false))
    }

    pub fn ones<S: Into<Shape>>(shape: S, dtype: DType, _device: &Device) -> Result<Self> {
        let shape = shape.into();
        Ok(Self::leaf(CpuStorage::of(dtype, (0..shape.elem_count()).map(|_| 1.0)), shape, false))
    }

    pub fn id(&self) -> TensorId {
        self.0.id
    }

    pub fn dims(&self) -> &[usize] {
        self.0.layout.dims()
    }

    pub fn shape(&self) -> &Shape {
        self.0.layout.shape()
    }

    pub fn stride(&self) -> &[usize] {
        self.0.layout.stride()
    }

    pub fn layout(&self) -> &Layout {
        &self.0.layout
    }

    pub fn elem_count(&self) -> usize {
        self.shape().elem_count()
    }

    pub fn dtype(&self) -> DType {
        match &*self.0.storage.read().unwrap() {
            Storage::Cpu(storage) => backend::BackendStorage::dtype(storage),
            _ => unreachable!(),
        }
    }

    pub fn track_op(&self) -> bool {
        self.0.is_variable || self.0.op.is_some()
    }

    pub fn storage_and_layout(&self) -> (RwLockReadGuard<'_, Storage>, &Layout) {
        (self.0.storage.read().unwrap(), &self.0.layout)
    }

    fn numbers(&self) -> Vec<f64> {
        let (guard, layout) = self.storage_and_layout();
        match &*guard {
            Storage::Cpu(storage) => layout.places().into_iter().map(|n| storage.get(n)).collect(),
            _ => unreachable!(),
        }
    }

    fn storage_of(&self, dtype: DType) -> CpuStorage {
        CpuStorage::of(dtype, self.numbers().into_iter())
    }

    pub fn contiguous(&self) -> Result<Self> {
        let storage = self.storage_of(self.dtype());
        Ok(Self::computed(storage, self.shape().clone(), &[self], Box::new(|_, grad| Ok(vec![Some(grad.clone())]))))
    }

    pub fn to_dtype(&self, dtype: DType) -> Result<Self> {
        let from = self.dtype();
        let backward: Backward = Box::new(move |_, grad| Ok(vec![Some(grad.to_dtype(from)?)]));
        Ok(Self::computed(self.storage_of(dtype), self.shape().clone(), &[self], backward))
    }

    pub fn flatten_all(&self) -> Result<Self> {
        let shape = self.shape().clone();
        let backward: Backward =
            Box::new(move |_, grad| Ok(vec![Some(Self::leaf(grad.storage_of(grad.dtype()), shape.clone(), false))]));
        Ok(Self::computed(self.storage_of(self.dtype()), self.elem_count().into(), &[self], backward))
    }

    pub fn transpose(&self, dim1: usize, dim2: usize) -> Result<Self> {
        let mut layout = self.0.layout.clone();
        layout.shape.0.swap(dim1, dim2);
        layout.stride.swap(dim1, dim2);
        let backward: Backward = Box::new(move |_, grad| Ok(vec![Some(grad.transpose(dim1, dim2)?)]));
        Ok(Self::make(self.0.storage.clone(), layout, &[self], backward, false))
    }

    pub fn narrow(&self, dim: usize, start: usize, len: usize) -> Result<Self> {
        let mut layout = self.0.layout.clone();
        layout.start_offset += start * layout.stride[dim];
        layout.shape.0[dim] = len;
        let whole = self.shape().clone();
        let backward: Backward = Box::new(move |_, grad| {
            let mut padded = vec![0.0; whole.elem_count()];
            let mut part = Layout::contiguous(whole.clone());
            part.start_offset += start * part.stride[dim];
            part.shape.0[dim] = len;
            for (at, x) in part.places().into_iter().zip(grad.numbers()) {
                padded[at] = x;
            }
            Ok(vec![Some(Self::leaf(CpuStorage::of(grad.dtype(), padded.into_iter()), whole.clone(), false))])
        });
        Ok(Self::make(self.0.storage.clone(), layout, &[self], backward, false))
    }

    fn zip(&self, other: &Self, f: impl Fn(f64, f64) -> f64) -> Result<CpuStorage> {
        if self.shape() != other.shape() || self.dtype() != other.dtype() {
            bail!("{:?} of {:?} and {:?} of {:?}", self, self.dtype(), other, other.dtype());
        }
        Ok(CpuStorage::of(self.dtype(), self.numbers().into_iter().zip(other.numbers()).map(|(a, b)| f(a, b))))
    }

    pub fn add(&self, other: &Self) -> Result<Self> {
        let backward: Backward = Box::new(|_, grad| Ok(vec![Some(grad.clone()), Some(grad.clone())]));
        Ok(Self::computed(self.zip(other, |a, b| a + b)?, self.shape().clone(), &[self, other], backward))
    }

    pub fn mul(&self, other: &Self) -> Result<Self> {
        let (a, b) = (self.clone(), other.clone());
        let backward: Backward = Box::new(move |_, grad| Ok(vec![Some(grad.mul(&b)?), Some(grad.mul(&a)?)]));
        Ok(Self::computed(self.zip(other, |a, b| a * b)?, self.shape().clone(), &[self, other], backward))
    }

    pub fn sum_all(&self) -> Result<Self> {
        let like = self.clone();
        let backward: Backward = Box::new(move |_, grad| {
            let value = grad.numbers()[0];
            let storage = CpuStorage::of(like.dtype(), (0..like.elem_count()).map(|_| value));
            Ok(vec![Some(Self::leaf(storage, like.shape().clone(), false))])
        });
        let sum = self.numbers().into_iter().sum();
        Ok(Self::computed(CpuStorage::of(self.dtype(), [sum].into_iter()), Vec::new().into(), &[self], backward))
    }

    pub fn detach(&self) -> Self {
        let backward = Box::new(|_: &Tensor, _: &Tensor| Ok(vec![]));
        Self::make(self.0.storage.clone(), self.0.layout.clone(), &[], backward, false)
    }

    pub fn to_vec1<S: WithDType>(&self) -> Result<Vec<S>> {
        if S::DTYPE != self.dtype() || self.dims().len() != 1 {
            bail!("to_vec1 of {:?} of {:?} as {:?}", self, self.dtype(), S::DTYPE);
        }
        Ok(self.numbers().into_iter().map(S::from_number).collect())
    }

    pub fn apply_op3<C: 'static + CustomOp3 + Send + Sync>(&self, t2: &Self, t3: &Self, c: C) -> Result<Self> {
        let (storage, shape) = {
            let guards = [self, t2, t3].map(Tensor::storage_and_layout);
            let cpu = |n: usize| match &*guards[n].0 {
                Storage::Cpu(storage) => storage,
                _ => unreachable!(),
            };
            c.cpu_fwd(cpu(0), guards[0].1, cpu(1), guards[1].1, cpu(2), guards[2].1)?
        };
        let (a, b, d) = (self.clone(), t2.clone(), t3.clone());
        let backward: Backward = Box::new(move |res, grad| {
            let (da, db, dd) = c.bwd(&a, &b, &d, res, grad)?;
            Ok(vec![da, db, dd])
        });
        Ok(Self::computed(storage, shape, &[self, t2, t3], backward))
    }

    pub fn backward(&self) -> Result<GradStore> {
        fn visit(tensor: &Tensor, seen: &RefCell<HashMap<TensorId, ()>>, order: &mut Vec<Tensor>) {
            if seen.borrow_mut().insert(tensor.id(), ()).is_none() {
                for parent in tensor.0.op.iter().flat_map(|op| &op.parents) {
                    visit(parent, seen, order);
                }
                order.push(tensor.clone());
            }
        }
        let mut order = Vec::new();
        visit(self, &RefCell::default(), &mut order);
        let mut grads = HashMap::new();
        grads.insert(self.id(), Self::ones(self.shape().dims(), self.dtype(), &Device::Cpu)?);
        for tensor in order.iter().rev() {
            let (op, grad) = match (&tensor.0.op, grads.get(&tensor.id()).cloned()) {
                (Some(op), Some(grad)) => (op, grad),
                _ => continue,
            };
            for (parent, of_parent) in op.parents.iter().zip((op.backward)(tensor, &grad)?) {
                if let Some(of_parent) = of_parent {
                    let sum = match grads.get(&parent.id()) {
                        Some(before) => before.add(&of_parent)?,
                        None => of_parent,
                    };
                    grads.insert(parent.id(), sum);
                }
            }
        }
        Ok(GradStore(grads))
    }
}

/// A tensor that wants a gradient.
#[derive(Clone, Debug)]
pub struct Var(Tensor);

impl Var {
    pub fn from_tensor(tensor: &Tensor) -> Result<Self> {
        Ok(Var(Tensor::leaf(tensor.storage_of(tensor.dtype()), tensor.shape().clone(), true)))
    }

    pub fn as_tensor(&self) -> &Tensor {
        &self.0
    }
}

impl Deref for Var {
    type Target = Tensor;
    fn deref(&self) -> &Tensor {
        &self.0
    }
}

#[derive(Debug)]
pub struct GradStore(HashMap<TensorId, Tensor>);

impl GradStore {
    pub fn get(&self, tensor: &Tensor) -> Option<&Tensor> {
        self.0.get(&tensor.id())
    }
}
