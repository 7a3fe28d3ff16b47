use super::{Gemm, gemm, measure_rate, reference};
use crate::Cpu;
use crate::testing::{assert_close, random, wide};

fn check(dims: Gemm) {
    let a = random(1, 64 * 600);
    let b = random(2, 64 * 600);
    let c = random(3, 64 * 600);
    let mut expected = wide(&c);
    reference::gemm(&dims, &wide(&a), &wide(&b), &mut expected);
    for threads in [1, 3] {
        let mut found = c.clone();
        gemm(Cpu::new(threads), &dims, &a, &b, &mut found);
        assert_close(
            &format!("{dims:?} threads {threads}"),
            &found,
            &expected,
            1e-6,
        );
    }
}

#[test]
fn every_layout_and_awkward_shape_agrees_with_the_reference() {
    for (m, n, k) in [
        (1, 1, 1),
        (7, 13, 5),
        (17, 1, 33),
        (1, 40, 64),
        (65, 33, 97),
        (48, 64, 3),
    ] {
        for make in [Gemm::nn, Gemm::nt, Gemm::tn] {
            check(make(m, n, k));
            check(make(m, n, k).alpha(-0.5).accumulate(true));
            check(make(m, n, k).strides(101, 103, 99));
        }
    }
}

#[test]
fn an_empty_sum_overwrites_or_keeps() {
    let mut c = [f32::NAN; 6];
    gemm(Cpu::new(1), &Gemm::nn(2, 3, 0), &[], &[], &mut c);
    assert_eq!(c, [0.0; 6]);
    c.fill(2.0);
    gemm(
        Cpu::new(1),
        &Gemm::nn(2, 3, 0).accumulate(true),
        &[],
        &[],
        &mut c,
    );
    assert_eq!(c, [2.0; 6]);
    gemm(Cpu::new(1), &Gemm::nt(0, 3, 4), &[], &[0.0; 12], &mut []);
}

#[test]
fn overwriting_does_not_read_c() {
    let mut c = [f32::NAN; 4];
    gemm(
        Cpu::new(1),
        &Gemm::nn(2, 2, 1),
        &[1.0, 2.0],
        &[3.0, 4.0],
        &mut c,
    );
    assert_eq!(c, [3.0, 4.0, 6.0, 8.0]);
}

#[test]
#[should_panic(expected = "gemm: B has 11 elements")]
fn a_short_operand_is_named() {
    gemm(
        Cpu::new(1),
        &Gemm::nn(2, 3, 4),
        &[0.0; 8],
        &[0.0; 11],
        &mut [0.0; 6],
    );
}

#[test]
fn the_measured_rate_is_plausible() {
    let rate = measure_rate(Cpu::new(1));
    assert!((1e8..1e13).contains(&rate), "{rate:e} FLOP/s");
}
