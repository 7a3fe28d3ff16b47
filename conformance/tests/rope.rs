//! RoPE's frequencies are shared by every engine and the oracle, so they are held against values worked out by
//! hand, and their precision at long positions against f64.

use drivetrain_core::model::{RopeScaling, RopeSpec};

fn frequencies(theta: f64, scaling: RopeScaling, head_dim: usize) -> Vec<f64> {
    let rope = RopeSpec { theta, scaling };
    let all = rope.inverse_frequencies(head_dim);
    all.into_iter().map(f64::from).collect()
}

fn close(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (f, e) in found.iter().zip(expected) {
        assert!((f - e).abs() <= 1e-7 * e.abs(), "{found:?} {expected:?}");
    }
}

#[test]
fn plain_and_linear() {
    let plain = frequencies(1e4, RopeScaling::None, 8);
    close(&plain, &[1.0, 0.1, 0.01, 0.001]);
    let linear = frequencies(1e4, RopeScaling::Linear { factor: 4.0 }, 8);
    close(&linear, &[0.25, 0.025, 0.0025, 0.00025]);
}

/// Wavelengths 6.28, 62.8, 628, 6283 of an original 1000: below 1000 / 4 kept, above 1000 / 1 divided, and at
/// 628.3 the ramp is (1000 / 628.3 - 1) / 3 = 0.19718.
#[test]
fn llama3_keeps_ramps_and_divides() {
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position: 1000,
    };
    let ramp = (1000.0 / (std::f64::consts::TAU * 100.0) - 1.0) / 3.0;
    assert!((ramp - 0.197_18).abs() < 1e-5);
    let third = (1.0 - ramp) * 0.01 / 8.0 + ramp * 0.01;
    close(&frequencies(1e4, scaling, 8), &[1.0, 0.1, third, 0.000_125]);
}

/// For E = 64, original 4096: 32 rotations at dim 10.47, one at dim 22.51, so the ramp runs from 10 to 23, and
/// at dim 16 (frequency 0.01) it is 6 / 13.
#[test]
fn yarn_ramps_between_whole_dims() {
    let yarn = |truncate, original_max_position| RopeScaling::Yarn {
        factor: 8.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: 1.0,
        truncate,
        original_max_position,
    };
    let found = frequencies(1e4, yarn(true, 4096), 64);
    let of = |i: usize| 1e4_f64.powf(-(i as f64) / 32.0);
    close(&found[..11], &(0..11).map(of).collect::<Vec<_>>());
    let middle = 0.01 / 8.0 * 6.0 / 13.0 + 0.01 * 7.0 / 13.0;
    close(&found[16..17], &[middle]);
    close(
        &found[23..],
        &(23..32).map(|i| of(i) / 8.0).collect::<Vec<_>>(),
    );
    // Not truncated, the ramp is from 10.472 to 22.513.
    let found = frequencies(1e4, yarn(false, 4096), 64);
    let ramp = (16.0 - 10.472) / (22.513 - 10.472);
    let middle = 0.01 / 8.0 * ramp + 0.01 * (1.0 - ramp);
    assert!((found[16] - middle).abs() < 1e-6, "{} {middle}", found[16]);
}

/// At position 4095 cos and sin are within 1e-3 of f64's; frequencies in bf16 would be off by 1.79 rad.
#[test]
fn tables_are_precise_at_long_positions() {
    let rope = RopeSpec {
        theta: 1e4,
        scaling: RopeScaling::None,
    };
    let (cos, sin) = rope.tables(64, 4096);
    assert_eq!((cos.len(), sin.len()), (4096 * 32, 4096 * 32));
    for i in 0..32 {
        let angle = 4095.0 * 1e4_f64.powf(-(i as f64) / 32.0);
        let at = 4095 * 32 + i;
        let off = (f64::from(cos[at]) - angle.cos())
            .abs()
            .max((f64::from(sin[at]) - angle.sin()).abs());
        assert!(off < 1e-3, "dim {i}: {off}");
    }
}
