use super::{GroupedDims, backward_input, backward_weight, forward, reference};
use crate::Cpu;
use crate::testing::{all_cpus, assert_close, assert_gradient, dot, random, wide};

#[test]
fn reference_backward_is_the_derivative() {
    let dims = GroupedDims {
        offsets: &[0, 2, 2, 5],
        inputs: 3,
        outputs: 2,
    };
    let (x, w, dy) = (
        wide(&random(1, 15)),
        wide(&random(2, 18)),
        wide(&random(3, 10)),
    );
    let (dx, dw) = reference::backward(&dims, &dy, &x, &w);
    assert_gradient("dx", &x, &dx, |x| {
        dot(&reference::forward(&dims, x, &w), &dy)
    });
    assert_gradient("dw", &w, &dw, |w| {
        dot(&reference::forward(&dims, &x, w), &dy)
    });
}

#[test]
fn uneven_and_empty_experts_agree_with_the_reference() {
    for cpu in all_cpus() {
        for (offsets, inputs, outputs) in [
            (&[0, 2, 2, 5][..], 3, 2),
            (&[0, 0, 70, 71, 71], 33, 17),
            (&[0, 40], 16, 64),
            (&[0, 0, 0], 5, 4),
            (&[0], 5, 4),
        ] {
            let dims = GroupedDims {
                offsets,
                inputs,
                outputs,
            };
            let (r, len) = (dims.rows(), dims.experts() * outputs * inputs);
            let (x, w, dy) = (
                random(1, r * inputs),
                random(2, len),
                random(3, r * outputs),
            );
            let mut y = vec![f32::NAN; r * outputs];
            forward(cpu, &dims, &x, &w, &mut y);
            let (x64, w64, dy64) = (wide(&x), wide(&w), wide(&dy));
            assert_close("y", &y, &reference::forward(&dims, &x64, &w64), 2e-6);
            let (dx_ref, dw_ref) = reference::backward(&dims, &dy64, &x64, &w64);
            for (accumulate, start, add) in [(false, f32::NAN, 0.0), (true, 0.5, 0.5)] {
                let plus = |x: &[f64]| -> Vec<f64> { x.iter().map(|x| x + add).collect() };
                let (mut dx, mut dw) = (vec![start; x.len()], vec![start; len]);
                backward_input(cpu, &dims, &dy, &w, accumulate, &mut dx);
                backward_weight(cpu, &dims, &dy, &x, accumulate, &mut dw);
                assert_close("dx", &dx, &plus(&dx_ref), 2e-6);
                assert_close("dw", &dw, &plus(&dw_ref), 2e-6);
                let n = outputs * inputs;
                for (e, ends) in offsets.windows(2).enumerate() {
                    if ends[0] == ends[1] {
                        assert_eq!(dw[e * n..(e + 1) * n], vec![add as f32; n]);
                    }
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "offsets must rise from 0")]
fn falling_offsets_are_refused() {
    let dims = GroupedDims {
        offsets: &[0, 3, 2],
        inputs: 1,
        outputs: 1,
    };
    forward(Cpu::new(1), &dims, &[0.0; 2], &[0.0; 2], &mut [0.0; 2]);
}
