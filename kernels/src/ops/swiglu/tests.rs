use super::{backward, forward, reference};
use crate::testing::{all_cpus, assert_close, assert_gradient, dot, random, wide};
use crate::{Cpu, Rows, RowsMut};

#[test]
fn reference_backward_is_the_derivative() {
    let (gate, up, dy) = (
        wide(&random(1, 9)),
        wide(&random(2, 9)),
        wide(&random(3, 9)),
    );
    let (dgate, dup) = reference::backward(&dy, &gate, &up);
    assert_gradient("dgate", &gate, &dgate, |g| {
        dot(&reference::forward(g, &up), &dy)
    });
    assert_gradient("dup", &up, &dup, |u| {
        dot(&reference::forward(&gate, u), &dy)
    });
}

#[test]
fn fused_and_separate_buffers_agree_with_the_reference() {
    for cpu in all_cpus() {
        for (tokens, width) in [(1, 1), (3, 37), (50, 96), (0, 4)] {
            let fused: Vec<f32> = random(1, tokens * 2 * width)
                .iter()
                .map(|x| 9.0 * x)
                .collect();
            let dy = random(2, tokens * width);
            let rows = Rows::contiguous(&fused, 2 * width);
            let (gate, up) = (rows.columns(0..width), rows.columns(width..2 * width));
            let flat = |rows: Rows<'_>| -> Vec<f64> {
                (0..rows.rows()).flat_map(|t| wide(rows.row(t))).collect()
            };
            let mut y = vec![f32::NAN; tokens * width];
            forward(cpu, gate, up, &mut y);
            assert_close("y", &y, &reference::forward(&flat(gate), &flat(up)), 3e-7);

            let mut d = vec![f32::NAN; tokens * 2 * width];
            let [dgate, dup] = RowsMut::contiguous(&mut d, 2 * width).split_columns([width, width]);
            backward(cpu, &dy, gate, up, dgate, dup);
            let (dgate_ref, dup_ref) = reference::backward(&wide(&dy), &flat(gate), &flat(up));
            let d = Rows::contiguous(&d, 2 * width);
            let band = |from: usize| -> Vec<f32> {
                (0..tokens)
                    .flat_map(|t| d.columns(from..from + width).row(t).to_vec())
                    .collect()
            };
            assert_close("dgate", &band(0), &dgate_ref, 1e-6);
            assert_close("dup", &band(width), &dup_ref, 1e-6);
        }
    }
}

#[test]
fn saturated_gates_stay_finite() {
    let gate = [-200.0, -90.0, 90.0, 200.0, 0.0];
    let mut y = [f32::NAN; 5];
    let (mut dgate, mut dup) = ([f32::NAN; 5], [f32::NAN; 5]);
    for cpu in all_cpus() {
        let rows = Rows::contiguous(&gate, 5);
        forward(cpu, rows, Rows::contiguous(&[2.0; 5], 5), &mut y);
        assert_eq!(y, [0.0, 0.0, 180.0, 400.0, 0.0]);
        let (dgate_rows, dup_rows) = (
            RowsMut::contiguous(&mut dgate, 5),
            RowsMut::contiguous(&mut dup, 5),
        );
        backward(
            cpu,
            &[1.0; 5],
            rows,
            Rows::contiguous(&[2.0; 5], 5),
            dgate_rows,
            dup_rows,
        );
        assert_eq!(dgate, [0.0, 0.0, 2.0, 2.0, 1.0]);
        assert_eq!(dup, [0.0, 0.0, 90.0, 200.0, 0.0]);
    }
}

#[test]
#[should_panic(expected = "swiglu: up is (1, 2), gate is (1, 3)")]
fn unequal_shapes_are_named() {
    forward(
        Cpu::new(1),
        Rows::contiguous(&[0.0; 3], 3),
        Rows::contiguous(&[0.0; 2], 2),
        &mut [],
    );
}
