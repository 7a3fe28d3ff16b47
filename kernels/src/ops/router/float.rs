//! The two types a router computes in.

use pulp::Simd;

use crate::simd::exp_below_88;

/// f32 or f64: the type of a router's logits, and of the arithmetic on them.
pub trait Float: sealed::Arithmetic + crate::cuda::ops::router::Float {}

impl Float for f32 {}
impl Float for f64 {}

mod sealed {
    use std::iter::Sum;
    use std::ops::{Add, Div, Mul, Sub};

    use super::{Simd, exp_below_88};

    pub trait Arithmetic:
        Copy
        + Default
        + PartialOrd
        + Send
        + Sync
        + Add<Output = Self>
        + Sub<Output = Self>
        + Mul<Output = Self>
        + Div<Output = Self>
        + Sum
        + 'static
    {
        const NEG_INFINITY: Self;

        fn from_f32(x: f32) -> Self;
        fn to_f32(self) -> f32;
        fn to_f64(self) -> f64;
        fn ln(self) -> Self;
        /// e^x for x <= 0.
        fn exp_of_negative<S: Simd>(self) -> Self;
    }

    impl Arithmetic for f32 {
        const NEG_INFINITY: Self = Self::NEG_INFINITY;

        fn from_f32(x: f32) -> Self {
            x
        }

        fn to_f32(self) -> f32 {
            self
        }

        fn to_f64(self) -> f64 {
            f64::from(self)
        }

        fn ln(self) -> Self {
            Self::ln(self)
        }

        #[inline(always)]
        fn exp_of_negative<S: Simd>(self) -> Self {
            exp_below_88::<S>(self)
        }
    }

    impl Arithmetic for f64 {
        const NEG_INFINITY: Self = Self::NEG_INFINITY;

        fn from_f32(x: f32) -> Self {
            Self::from(x)
        }

        fn to_f32(self) -> f32 {
            self as f32
        }

        fn to_f64(self) -> f64 {
            self
        }

        fn ln(self) -> Self {
            Self::ln(self)
        }

        #[inline(always)]
        fn exp_of_negative<S: Simd>(self) -> Self {
            self.exp()
        }
    }
}
