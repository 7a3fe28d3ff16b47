use super::{RmsNormDims, apply, backward, forward, forward_residual, reference};
use crate::testing::{all_cpus, assert_close, assert_gradient, dot, random, wide};
use crate::{Rows, RowsMut};

#[test]
fn reference_backward_is_the_derivative() {
    let dims = RmsNormDims::new(3, 5, 1e-5);
    let (x, w, dy) = (
        wide(&random(1, 15)),
        wide(&random(2, 5)),
        wide(&random(3, 15)),
    );
    let (dx, dw) = reference::backward(&dims, &dy, &x, &w);
    assert_gradient("dx", &x, &dx, |x| {
        dot(&reference::forward(&dims, x, &w).0, &dy)
    });
    assert_gradient("dw", &w, &dw, |w| {
        dot(&reference::forward(&dims, &x, w).0, &dy)
    });
}

#[test]
fn rows_and_heads_agree_with_the_reference() {
    for cpu in all_cpus() {
        for (tokens, groups, width) in [
            (1, 1, 1),
            (5, 1, 37),
            (50, 1, 96),
            (33, 3, 16),
            (4, 2, 70),
            (0, 1, 8),
        ] {
            let dims = RmsNormDims::per_head(tokens, groups, width, 1e-6);
            let (len, row) = (dims.rows() * width, groups * width);
            let (x, w, dy) = (random(1, len), random(2, width), random(3, len));
            let mut y = vec![f32::NAN; len];
            let mut inv_rms = vec![f32::NAN; dims.rows()];
            let out = RowsMut::contiguous(&mut y, row);
            forward(cpu, &dims, Rows::contiguous(&x, row), &w, out, &mut inv_rms);
            let (y_ref, inv_ref) = reference::forward(&dims, &wide(&x), &wide(&w));
            assert_close("y", &y, &y_ref, 3e-7);
            assert_close("inv_rms", &inv_rms, &inv_ref, 1e-7);
            let mut again = vec![f32::NAN; len];
            let out = RowsMut::contiguous(&mut again, row);
            apply(cpu, &dims, Rows::contiguous(&x, row), &w, &inv_rms, out);
            assert_eq!(again, y, "made again from inv_rms");

            let (dx_ref, dw_ref) = reference::backward(&dims, &wide(&dy), &wide(&x), &wide(&w));
            for accumulate in [false, true] {
                let add = if accumulate { 0.25 } else { 0.0 };
                let start = if accumulate { 0.25 } else { f32::NAN };
                let (mut dx, mut dw) = (vec![start; len], vec![start; width]);
                backward(
                    cpu,
                    &dims,
                    Rows::contiguous(&dy, row),
                    Rows::contiguous(&x, row),
                    &w,
                    &inv_rms,
                    accumulate,
                    RowsMut::contiguous(&mut dx, row),
                    accumulate,
                    &mut dw,
                );
                let plus = |x: &[f64]| -> Vec<f64> { x.iter().map(|x| x + add).collect() };
                assert_close("dx", &dx, &plus(&dx_ref), 1e-6);
                assert_close("dw", &dw, &plus(&dw_ref), 1e-6);
            }
        }
    }
}

#[test]
fn the_fused_residual_equals_an_addition_and_a_norm() {
    for cpu in all_cpus() {
        for (tokens, width) in [(1, 3), (40, 50)] {
            let dims = RmsNormDims::new(tokens, width, 1e-5);
            let len = tokens * width;
            let (x, residual, w) = (random(1, len), random(2, len), random(3, width));
            let (mut h, mut y, mut r) = (
                vec![f32::NAN; len],
                vec![f32::NAN; len],
                vec![f32::NAN; tokens],
            );
            forward_residual(cpu, &dims, &x, &residual, &w, &mut h, &mut y, &mut r);
            let sum: Vec<f32> = x.iter().zip(&residual).map(|(x, r)| x + r).collect();
            assert_eq!(h, sum);
            let (y_ref, r_ref) = reference::forward(&dims, &wide(&sum), &wide(&w));
            assert_close("y", &y, &y_ref, 3e-7);
            assert_close("inv_rms", &r, &r_ref, 1e-7);
            let mut again = vec![f32::NAN; len];
            let out = RowsMut::contiguous(&mut again, width);
            apply(cpu, &dims, Rows::contiguous(&h, width), &w, &r, out);
            assert_eq!(again, y, "made again from h and inv_rms");
        }
    }
}

#[test]
fn a_band_leaves_its_neighbours_alone() {
    let dims = RmsNormDims::per_head(3, 2, 4, 1e-6);
    let (x, w) = (random(1, 3 * 8), random(2, 4));
    let mut buffer = vec![9.0; 3 * 20];
    let mut inv_rms = vec![0.0; 6];
    for cpu in all_cpus() {
        let [_, band, _] = RowsMut::contiguous(&mut buffer, 20).split_columns([5, 8, 7]);
        forward(cpu, &dims, Rows::contiguous(&x, 8), &w, band, &mut inv_rms);
        let band: Vec<f32> = buffer
            .chunks(20)
            .flat_map(|row| row[5..13].to_vec())
            .collect();
        assert_close(
            "y",
            &band,
            &reference::forward(&dims, &wide(&x), &wide(&w)).0,
            3e-7,
        );
        assert!(
            buffer
                .chunks(20)
                .all(|row| row[..5].iter().chain(&row[13..]).all(|&x| x == 9.0))
        );
    }
}
