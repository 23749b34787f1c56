// SPDX-License-Identifier: Apache-2.0
use flashattn_sys as sys;

mod sealed {
    pub trait Sealed {}
}

/// A type a tensor can hold. Which tensor takes which is for the library to say.
pub trait Element: sealed::Sealed + Copy + 'static {
    #[doc(hidden)]
    const DTYPE: i32;
}

/// A 16-bit IEEE float, as bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct F16(pub u16);

/// A bfloat16, as bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(pub u16);

/// An 8-bit float of 4 exponent and 3 mantissa bits without infinities, as bits: for operands of forward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct F8E4M3(pub u8);

macro_rules! element {
    ($($type:ty => $dtype:ident,)*) => {
        $(
            impl sealed::Sealed for $type {}
            impl Element for $type {
                const DTYPE: i32 = sys::$dtype;
            }
        )*
    };
}

element! {
    f32 => FA_FLOAT32,
    F16 => FA_FLOAT16,
    Bf16 => FA_BFLOAT16,
    F8E4M3 => FA_FLOAT8_E4M3,
    i8 => FA_INT8,
    i32 => FA_INT32,
    i64 => FA_INT64,
    u8 => FA_UINT8,
    bool => FA_BOOL,
}

impl From<f32> for Bf16 {
    /// Rounds to nearest, ties to even.
    fn from(value: f32) -> Self {
        let bits = value.to_bits();
        if value.is_nan() {
            return Bf16((bits >> 16) as u16 | 0x40);
        }
        Bf16((bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16) as u16)
    }
}

impl From<Bf16> for f32 {
    fn from(value: Bf16) -> f32 {
        f32::from_bits(u32::from(value.0) << 16)
    }
}

impl From<f32> for F16 {
    /// Rounds to nearest, ties to even.
    fn from(value: f32) -> Self {
        let sign = (value.to_bits() >> 16 & 0x8000) as u16;
        let magnitude = value.abs();
        let bits = magnitude.to_bits();
        F16(sign
            | if magnitude.is_nan() {
                0x7E00
            } else if magnitude >= 65520.0 {
                0x7C00
            } else if magnitude < f32::from_bits(0x3880_0000) {
                // Below 2^-14: adding 0.5 leaves a multiple of 2^-24 in the low bits.
                ((magnitude + 0.5).to_bits() - 0.5f32.to_bits()) as u16
            } else {
                ((bits + 0xFFF + (bits >> 13 & 1) - (112 << 23)) >> 13) as u16
            })
    }
}

impl From<F16> for f32 {
    fn from(value: F16) -> f32 {
        let sign = u32::from(value.0 & 0x8000) << 16;
        let magnitude = u32::from(value.0 & 0x7FFF);
        let positive = if magnitude >= 0x7C00 {
            f32::from_bits(magnitude << 13 | 0x7F80_0000)
        } else {
            f32::from_bits(magnitude << 13) * f32::from_bits(239 << 23) // * 2^112 moves the exponent, subnormals included
        };
        f32::from_bits(positive.to_bits() | sign)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_numbers_survive_a_round_trip() {
        for bits in 0..=u16::MAX {
            let (half, brain) = (f32::from(F16(bits)), f32::from(Bf16(bits)));
            assert!(half.is_nan() || F16::from(half) == F16(bits), "{:#x}", bits);
            assert!(brain.is_nan() || Bf16::from(brain) == Bf16(bits), "{:#x}", bits);
        }
        assert!(f32::from(F16::from(f32::NAN)).is_nan() && f32::from(Bf16::from(f32::NAN)).is_nan());
    }

    #[test]
    fn rounding_is_to_nearest_even() {
        let between = |a: u16, b: u16| (f32::from(F16(a)) + f32::from(F16(b))) / 2.0;
        for even in [0u16, 2, 0x3FE, 0x400, 0x3C00, 0x7BFE] {
            assert_eq!(F16::from(between(even, even + 1)), F16(even));
            let above = f32::from_bits(between(even, even + 1).to_bits() + 1);
            assert_eq!(F16::from(above), F16(even + 1));
        }
        assert_eq!(F16::from(65519.0), F16(0x7BFF));
        assert_eq!(F16::from(65520.0), F16(0x7C00));
        assert_eq!(Bf16::from(1.0 + 1.0 / 256.0), Bf16(0x3F80));
        assert_eq!(Bf16::from(1.0 + 3.0 / 256.0), Bf16(0x3F82));
    }
}
