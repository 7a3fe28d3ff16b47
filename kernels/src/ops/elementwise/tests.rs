use half::bf16;

use super::{add, add_assign, axpy, bf16_to_f32, f32_to_bf16, scale, sum_of_squares};
use crate::testing::{all_cpus, random};

const LENGTHS: [usize; 5] = [0, 1, 37, 16_385, 1_200_000];

#[test]
fn sums_of_squares_are_those_of_f64_on_any_number_of_threads() {
    for len in LENGTHS {
        let x = random(1, len);
        let exact: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
        for cpu in all_cpus() {
            let found = sum_of_squares(cpu, &x);
            assert!(found.finite);
            assert!((found.sum - exact).abs() <= 1e-12 * exact);
        }
        let sums = [1, 2, 3].map(|threads| sum_of_squares(crate::Cpu::new(threads), &x).sum);
        assert!(sums[0].to_bits() == sums[1].to_bits() && sums[1].to_bits() == sums[2].to_bits());
    }
}

#[test]
fn one_bad_element_is_found_wherever_it_is() {
    for cpu in all_cpus() {
        for at in [0, 15, 16, 16_384, 40_000] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = vec![1e38; 40_001];
                assert!(sum_of_squares(cpu, &x).finite);
                x[at] = bad;
                assert!(!sum_of_squares(cpu, &x).finite);
            }
        }
    }
}

#[test]
fn additions_and_scaling_touch_every_element_once() {
    for cpu in all_cpus() {
        for len in LENGTHS {
            let (x, y) = (random(1, len), random(2, len));
            let mut out = vec![f32::NAN; len];
            add(cpu, &x, &y, &mut out);
            let expected: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
            assert_eq!(out, expected);
            let mut out = y.clone();
            add_assign(cpu, &mut out, &x);
            assert_eq!(out, expected);
            let mut out = y.clone();
            axpy(cpu, -0.5, &x, &mut out);
            scale(cpu, 4.0, &mut out);
            let halves: Vec<f32> = x.iter().zip(&y).map(|(x, y)| 4.0 * (y - 0.5 * x)).collect();
            assert_eq!(out, halves);
        }
    }
}

#[test]
fn bf16_rounds_to_nearest_even_and_returns_exactly() {
    let mut x = random(1, 5000);
    x.extend([0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 1e-40]);
    x.extend([
        1.0 + 1.0 / 256.0,
        1.0 + 3.0 / 256.0,
        f32::from_bits(0x7f80_0001),
        f32::NAN,
    ]);
    for cpu in all_cpus() {
        let mut y = vec![bf16::ZERO; x.len()];
        f32_to_bf16(cpu, &x, &mut y);
        let mut back = vec![0.0; x.len()];
        bf16_to_f32(cpu, &y, &mut back);
        for ((&x, &y), &back) in x.iter().zip(&y).zip(&back) {
            if x.is_nan() {
                assert!(y.is_nan() && back.is_nan());
            } else {
                assert_eq!(y, bf16::from_f32(x));
                assert_eq!(back.to_bits(), y.to_f32().to_bits());
            }
        }
    }
}
