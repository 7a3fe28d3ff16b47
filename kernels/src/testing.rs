//! Random inputs, comparisons and finite differences for the tests of the ops.

use crate::{Cpu, Isa};

/// A Cpu for each instruction set of this machine, and one with several threads.
pub(crate) fn all_cpus() -> Vec<Cpu> {
    let mut cpus: Vec<Cpu> = [Isa::Portable, Isa::Avx2, Isa::Avx512]
        .into_iter()
        .filter_map(|isa| Cpu::with_isa(isa, 1))
        .collect();
    cpus.push(Cpu::new(3));
    cpus
}

/// Values uniform in [-1, 1), the same for the same seed.
pub(crate) fn random(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    (0..len)
        .map(|_| (next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
        .collect()
}

pub(crate) fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// Asserts that every element differs by at most `tolerance` times the largest expected magnitude.
///
/// Inputs of the tests are of order 1, so what cancels to less than 0.25 is held to `tolerance` times that.
#[track_caller]
pub(crate) fn assert_close(what: &str, found: &[f32], expected: &[f64], tolerance: f64) {
    let scale = expected.iter().fold(0.25f64, |m, x| m.max(x.abs()));
    assert_within(what, found, expected, tolerance * scale);
}

/// Asserts that every element differs by at most `bound`.
#[track_caller]
pub(crate) fn assert_within(what: &str, found: &[f32], expected: &[f64], bound: f64) {
    assert_eq!(found.len(), expected.len(), "{what}: lengths");
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(found) - expected).abs();
        assert!(
            error <= bound,
            "{what}[{i}]: found {found}, expected {expected}, error {error:e}, allowed {bound:e}"
        );
    }
}

/// Asserts that `gradient` is the derivative of `loss` at `x`, by central differences in f64.
#[track_caller]
pub(crate) fn assert_gradient(
    what: &str,
    x: &[f64],
    gradient: &[f64],
    mut loss: impl FnMut(&[f64]) -> f64,
) {
    assert_eq!(x.len(), gradient.len(), "{what}: lengths");
    let step = 1e-5;
    let scale = gradient.iter().fold(0f64, |m, x| m.max(x.abs())).max(1e-3);
    let mut moved = x.to_vec();
    for i in 0..x.len() {
        moved[i] = x[i] + step;
        let above = loss(&moved);
        moved[i] = x[i] - step;
        let below = loss(&moved);
        moved[i] = x[i];
        let difference = (above - below) / (2.0 * step);
        let error = (difference - gradient[i]).abs() / scale;
        assert!(
            error <= 1e-7,
            "{what}[{i}]: gradient {}, finite difference {difference}, error {error:e}",
            gradient[i]
        );
    }
}

/// Sum of x y: the loss whose derivative by x is y.
pub(crate) fn dot(x: &[f64], y: &[f64]) -> f64 {
    assert_eq!(x.len(), y.len());
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}
