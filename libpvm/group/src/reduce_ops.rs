//! The predefined reduce functions: maximum, minimum, sum and product, element by element.

// The elements are in the program's memory.
#![allow(unsafe_code)]

use crate::pvm::ElementType;
use sempa_proto::{PvmError, PvmResult};
use std::ffi::c_void;
use std::ops::{Add, Mul};

/// Operation of a predefined reduce function on two elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReduceOp {
    Max,
    Min,
    Sum,
    Product,
}

/// A complex number in the layout of C and Fortran.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
struct Complex<T>(T, T);

trait Element: Copy {
    fn is_less_than(self, other: Self) -> bool;
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;

    fn combine(self, op: ReduceOp, other: Self) -> Self {
        match op {
            ReduceOp::Max if self.is_less_than(other) => other,
            ReduceOp::Min if other.is_less_than(self) => other,
            ReduceOp::Max | ReduceOp::Min => self,
            ReduceOp::Sum => self.sum(other),
            ReduceOp::Product => self.product(other),
        }
    }
}

macro_rules! integers {
    ($($t:ty),*) => {$(
        impl Element for $t {
            fn is_less_than(self, other: Self) -> bool { self < other }
            fn sum(self, other: Self) -> Self { self.wrapping_add(other) }
            fn product(self, other: Self) -> Self { self.wrapping_mul(other) }
        }
    )*};
}
integers!(i8, i16, i32, i64);

macro_rules! floats {
    ($($t:ty),*) => {$(
        impl Element for $t {
            fn is_less_than(self, other: Self) -> bool { self < other }
            fn sum(self, other: Self) -> Self { self + other }
            fn product(self, other: Self) -> Self { self * other }
        }
    )*};
}
floats!(f32, f64);

impl<T> Element for Complex<T>
where
    T: Copy + Into<f64> + Add<Output = T> + Mul<Output = T> + std::ops::Sub<Output = T>,
{
    /// Compares complex numbers by their modulus.
    fn is_less_than(self, other: Self) -> bool {
        modulus(self.0.into(), self.1.into()) < modulus(other.0.into(), other.1.into())
    }

    fn sum(self, other: Self) -> Self {
        Self(self.0 + other.0, self.1 + other.1)
    }

    fn product(self, other: Self) -> Self {
        Self(
            self.0 * other.0 - self.1 * other.1,
            self.0 * other.1 + self.1 * other.0,
        )
    }
}

/// Returns the modulus of a complex number, without an overflow of the squares. `f64::hypot` would
/// call the C library `libm`, which programs do not link that were built for PVM's archive.
fn modulus(real: f64, imaginary: f64) -> f64 {
    let (real, imaginary) = (real.abs(), imaginary.abs());
    if real.is_infinite() || imaginary.is_infinite() {
        return f64::INFINITY;
    }
    let (larger, smaller) = if real < imaginary {
        (imaginary, real)
    } else {
        (real, imaginary)
    };
    if larger == 0.0 {
        return smaller;
    }
    let ratio = smaller / larger;
    larger * (1.0 + ratio * ratio).sqrt()
}

/// Computes `x[i] = x[i] op y[i]` for all elements. The arrays need not be aligned.
///
/// # Safety
/// Both arrays have `count` elements.
unsafe fn combine_elements<T: Element>(
    op: ReduceOp,
    x: *mut c_void,
    y: *const c_void,
    count: usize,
) {
    let (x, y) = (x.cast::<T>(), y.cast::<T>());
    for i in 0..count {
        // SAFETY: both arrays have an element `i`.
        unsafe {
            let new_value = x
                .add(i)
                .read_unaligned()
                .combine(op, y.add(i).read_unaligned());
            x.add(i).write_unaligned(new_value);
        }
    }
}

/// Combines the array `y` into the array `x`, element by element.
///
/// # Errors
/// `BadParam` for sums and products of bytes.
///
/// # Safety
/// Both arrays have `count` elements of this type.
pub(crate) unsafe fn combine(
    op: ReduceOp,
    element_type: ElementType,
    x: *mut c_void,
    y: *const c_void,
    count: usize,
) -> PvmResult<()> {
    let combine_typed = match element_type {
        ElementType::Byte if matches!(op, ReduceOp::Sum | ReduceOp::Product) => {
            return Err(PvmError::BadParam);
        }
        ElementType::Byte => combine_elements::<i8>,
        ElementType::Short => combine_elements::<i16>,
        ElementType::Int => combine_elements::<i32>,
        ElementType::Float => combine_elements::<f32>,
        ElementType::Cplx => combine_elements::<Complex<f32>>,
        ElementType::Double => combine_elements::<f64>,
        ElementType::Dcplx => combine_elements::<Complex<f64>>,
        ElementType::Long => combine_elements::<i64>,
    };
    // SAFETY: by this function's contract.
    unsafe { combine_typed(op, x, y, count) };
    Ok(())
}
