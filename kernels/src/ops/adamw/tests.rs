use super::{AdamW, reference, update};
use crate::Cpu;
use crate::testing::{all_cpus, assert_close, random, wide};

fn config(step: u64) -> AdamW {
    AdamW {
        lr: 1e-2,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        step,
        grad_scale: 0.5,
    }
}

#[test]
fn several_steps_agree_with_the_reference() {
    for cpu in all_cpus() {
        for len in [0, 1, 17, 10_000] {
            let mut p = random(1, len);
            let (mut m, mut v) = (vec![0.0; len], vec![0.0; len]);
            let (mut p64, mut m64, mut v64) = (wide(&p), wide(&m), wide(&v));
            for step in 1..=4 {
                let g = random(10 + step, len);
                update(cpu, &config(step), &mut p, &g, &mut m, &mut v);
                reference::update(&config(step), &mut p64, &wide(&g), &mut m64, &mut v64);
            }
            assert_close("p", &p, &p64, 5e-7);
            assert_close("m", &m, &m64, 3e-7);
            assert_close("v", &v, &v64, 3e-7);
        }
    }
}

/// By hand: the first step moves every weight by lr against the sign of its gradient, after decay.
#[test]
fn the_first_step_is_lr_times_sign() {
    let (mut p, mut m, mut v) = ([1.0, -2.0], [0.0; 2], [0.0; 2]);
    update(
        Cpu::new(1),
        &config(1),
        &mut p,
        &[4.0, -1e-3],
        &mut m,
        &mut v,
    );
    assert_close("p", &p, &[0.999 - 0.01, -1.998 + 0.01], 2e-7);
    assert_close("m", &m, &[0.2, -5e-5], 2e-7);
    assert_close("v", &v, &[0.2, 1.25e-8], 2e-7);
}

#[test]
#[should_panic(expected = "steps count from 1")]
fn step_zero_is_refused() {
    update(Cpu::new(1), &config(0), &mut [], &[], &mut [], &mut []);
}
