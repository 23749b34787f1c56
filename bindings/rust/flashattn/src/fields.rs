// SPDX-License-Identifier: Apache-2.0
//! Methods that set one tensor of a struct each: its name is the field's. Impl blocks use them with a lifetime `'a` and a field `raw`.

/// Tensors that are read.
macro_rules! inputs {
    ($($(#[$doc:meta])* $name:ident)*) => {
        $(
            $(#[$doc])*
            #[must_use]
            pub fn $name(mut self, tensor: $crate::TensorView<'a>) -> Self {
                self.raw.$name = tensor.raw();
                self
            }
        )*
    };
}

/// Tensors that are written.
macro_rules! outputs {
    ($($(#[$doc:meta])* $name:ident)*) => {
        $(
            $(#[$doc])*
            #[must_use]
            pub fn $name(mut self, tensor: $crate::TensorViewMut<'a>) -> Self {
                self.raw.$name = tensor.raw();
                self
            }
        )*
    };
}
