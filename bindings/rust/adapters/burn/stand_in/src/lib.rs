// SPDX-License-Identifier: Apache-2.0
//! A stand-in for burn-tensor: the type and functions that flashattn-burn and its tests call, with the signatures of burn-tensor 0.21, written
//! from its documentation.

use std::any::Any;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DType {
    F64,
    F32,
    Bool,
}

#[derive(Debug)]
pub enum DataError {
    TypeMismatch(String),
}

/// The type of an element of a tensor.
pub trait Element: Any + Clone + Send + Sync {
    fn dtype() -> DType;
}

macro_rules! elements {
    ($($type:ty, $dtype:ident;)*) => {
        $(impl Element for $type {
            fn dtype() -> DType {
                DType::$dtype
            }
        })*
    };
}

elements! {
    f64, F64;
    f32, F32;
    bool, Bool;
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape(Vec<usize>);

impl Shape {
    pub fn as_slice(&self) -> &[usize] {
        &self.0
    }
}

impl<const D: usize> From<[usize; D]> for Shape {
    fn from(dims: [usize; D]) -> Self {
        Shape(dims.to_vec())
    }
}

/// The elements, whose type is not part of the tensor's.
trait Elements: Any + Send + Sync {
    fn duplicate(&self) -> Box<dyn Elements>;
    fn as_any(&self) -> &dyn Any;
}

impl<E: Element> Elements for Vec<E> {
    fn duplicate(&self) -> Box<dyn Elements> {
        Box::new(self.clone())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

pub struct TensorData {
    values: Box<dyn Elements>,
    pub shape: Shape,
    pub dtype: DType,
}

impl Clone for TensorData {
    fn clone(&self) -> Self {
        TensorData { values: self.values.duplicate(), shape: self.shape.clone(), dtype: self.dtype }
    }
}

impl std::fmt::Debug for TensorData {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TensorData{:?} of {:?}", self.shape.0, self.dtype)
    }
}

impl TensorData {
    pub fn new<E: Element, S: Into<Shape>>(value: Vec<E>, shape: S) -> Self {
        let shape = shape.into();
        assert_eq!(value.len(), shape.0.iter().product::<usize>());
        TensorData { values: Box::new(value), shape, dtype: E::dtype() }
    }

    pub fn as_slice<E: Element>(&self) -> Result<&[E], DataError> {
        let values = self.values.as_any().downcast_ref::<Vec<E>>();
        values.map(|x| &x[..]).ok_or_else(|| DataError::TypeMismatch(format!("{:?} is not {:?}", self.dtype, E::dtype())))
    }
}
