//! Scalar building blocks whose loops the compiler vectorises inside [`dispatch!`], and lane-wise sums.

use pulp::Simd;

/// Lanes of the accumulator arrays: one AVX-512 register of f32, two AVX2 registers.
pub(crate) const LANES: usize = 16;

/// `a * b + c`: fused where the instruction set has it, two roundings where it does not (a call to libm
/// would be far slower than the loop around it).
#[inline(always)]
pub(crate) fn fma<S: Simd>(a: f32, b: f32, c: f32) -> f32 {
    if S::IS_SCALAR {
        a * b + c
    } else {
        a.mul_add(b, c)
    }
}

/// The larger, `b` if `a` is NaN: compiles to one instruction.
#[inline(always)]
pub(crate) fn max(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// e^x within 2 ulp for x in `[-64, 88.3]`; 0 below and infinity above; NaN for NaN.
#[inline(always)]
pub(crate) fn exp<S: Simd>(x: f32) -> f32 {
    let value = exp_below_88::<S>(x);
    if x > 88.3 { f32::INFINITY } else { value }
}

/// As [`exp`] for x up to 88.3, meaningless above.
///
/// Zero below -64 (1.6e-28) rather than down to the smallest f32: beside the 1 that a softmax or a sigmoid
/// adds it to, it is nothing, and its products with small gradients would be denormal, which costs a
/// hundred times the operation.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by a polynomial of degree 7 (minimax coefficients of Cephes'
/// expf), times 2^n by its exponent bits.
#[inline(always)]
pub(crate) fn exp_below_88<S: Simd>(x: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const LN2_HI: f32 = 355.0 / 512.0; // few bits, so n * LN2_HI is exact
    const LN2_LO: f32 = -2.121_944_4e-4;
    let shifted = fma::<S>(x, std::f32::consts::LOG2_E, MAGIC);
    let n = shifted - MAGIC;
    let r = fma::<S>(n, -LN2_LO, fma::<S>(n, -LN2_HI, x));
    let mut p = fma::<S>(1.987_569_1e-4, r, 1.398_2e-3);
    p = fma::<S>(p, r, 8.333_452e-3);
    p = fma::<S>(p, r, 4.166_579_6e-2);
    p = fma::<S>(p, r, 1.666_666_5e-1);
    p = fma::<S>(p, r, 0.5);
    p = fma::<S>(p * r, r, r) + 1.0;
    let exponent = shifted.to_bits().wrapping_sub(MAGIC.to_bits());
    let power = f32::from_bits(exponent.wrapping_add(127) << 23);
    if x < -64.0 { 0.0 } else { p * power }
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<S>(-x))
}

/// The largest element; negative infinity for none. NaN elements may be passed over.
#[inline(always)]
pub(crate) fn max_of<S: Simd>(_: S, x: &[f32]) -> f32 {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = max(x, *lane);
        }
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = max(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    rest.iter().fold(lanes[0], |m, &x| max(x, m))
}

/// Sum of x y, accumulated in f64.
#[inline(always)]
pub(crate) fn dot_f64<S: Simd>(_: S, x: &[f32], y: &[f32]) -> f64 {
    debug_assert_eq!(x.len(), y.len());
    // Two sets of lanes: the additions of one would wait for each other.
    const CHUNK: usize = 2 * LANES;
    let ((xs, x_rest), (ys, y_rest)) = (x.as_chunks::<CHUNK>(), y.as_chunks::<CHUNK>());
    let mut lanes = [0f64; CHUNK];
    for (x, y) in xs.iter().zip(ys) {
        for ((lane, &x), &y) in lanes.iter_mut().zip(x).zip(y) {
            // The product of two f32 is exact in f64.
            *lane += f64::from(x) * f64::from(y);
        }
    }
    let rest: f64 = (x_rest.iter().zip(y_rest))
        .map(|(&x, &y)| f64::from(x) * f64::from(y))
        .sum();
    let mut sums = [0f64; LANES];
    for (i, sum) in sums.iter_mut().enumerate() {
        *sum = lanes[i] + lanes[i + LANES];
    }
    sum_lanes(sums) + rest
}

/// Pairwise sum of the lanes.
#[inline(always)]
pub(crate) fn sum_lanes(mut lanes: [f64; LANES]) -> f64 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Copies into the start of `to`, a register at a time: a copy of unknown, short length is a call of memcpy.
#[inline(always)]
pub(crate) fn copy(from: &[f32], to: &mut [f32]) {
    let ((from, rest), to) = (from.as_chunks::<LANES>(), &mut to[..from.len()]);
    let (to, to_rest) = to.as_chunks_mut::<LANES>();
    for (to, from) in to.iter_mut().zip(from) {
        *to = *from;
    }
    for (to, from) in to_rest.iter_mut().zip(rest) {
        *to = *from;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::all_cpus;

    #[inline(always)]
    fn exp_all<S: Simd>(_: S, x: &[f32], y: &mut [f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = exp::<S>(x);
        }
    }

    #[test]
    fn exp_is_within_two_ulp() {
        let x: Vec<f32> = (0..400_000)
            .map(|i| -64.0 + i as f32 * (152.3 / 400_000.0))
            .collect();
        for cpu in all_cpus() {
            let mut y = vec![f32::NAN; x.len()];
            dispatch!(cpu, exp_all, &x, &mut y);
            for (&x, &y) in x.iter().zip(&y) {
                let exact = f64::from(x).exp();
                let ulp = f64::from((exact as f32).next_up()) - f64::from(exact as f32);
                let error = (f64::from(y) - exact).abs() / ulp;
                assert!(
                    error <= 2.0,
                    "{cpu:?}: exp({x}) = {y}, {error} ulp from {exact}"
                );
            }
        }
    }

    #[test]
    fn exp_keeps_its_limits() {
        for cpu in all_cpus() {
            let x = [
                f32::NAN,
                f32::INFINITY,
                f32::NEG_INFINITY,
                -64.1,
                1e30,
                0.0,
                -0.0,
                88.5,
            ];
            let mut y = [0.0; 8];
            dispatch!(cpu, exp_all, &x, &mut y);
            assert!(y[0].is_nan());
            assert_eq!(
                y[1..],
                [
                    f32::INFINITY,
                    0.0,
                    0.0,
                    f32::INFINITY,
                    1.0,
                    1.0,
                    f32::INFINITY
                ]
            );
        }
    }

    #[test]
    fn reductions_see_every_element() {
        for cpu in all_cpus() {
            for len in [0, 1, 15, 16, 17, 63, 100] {
                let mut x: Vec<f32> = (0..len).map(|i| -(i as f32) - 1.0).collect();
                let sum = dispatch!(cpu, dot_f64, &x, &x);
                assert_eq!(sum, (0..len).map(|i| (i as f64 + 1.0).powi(2)).sum::<f64>());
                for i in 0..len {
                    let kept = std::mem::replace(&mut x[i], 5.0);
                    assert_eq!(dispatch!(cpu, max_of, &x), 5.0);
                    x[i] = kept;
                }
            }
        }
    }
}
