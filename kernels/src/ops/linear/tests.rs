use super::{LinearDims, backward_bias, backward_input, backward_weight, forward, reference};
use crate::testing::{all_cpus, assert_close, assert_gradient, dot, random, wide};

const SHAPES: [(usize, usize, usize); 5] =
    [(1, 1, 1), (3, 5, 17), (40, 64, 33), (7, 97, 130), (0, 4, 3)];

#[test]
fn reference_backward_is_the_derivative() {
    let dims = LinearDims::new(3, 4, 5);
    let (x, w, b) = (
        wide(&random(1, 12)),
        wide(&random(2, 20)),
        wide(&random(3, 5)),
    );
    let dy = wide(&random(4, 15));
    let (dx, dw, db) = reference::backward(&dims, &dy, &x, &w);
    assert_gradient("dx", &x, &dx, |x| {
        dot(&reference::forward(&dims, x, &w, Some(&b)), &dy)
    });
    assert_gradient("dw", &w, &dw, |w| {
        dot(&reference::forward(&dims, &x, w, Some(&b)), &dy)
    });
    assert_gradient("db", &b, &db, |b| {
        dot(&reference::forward(&dims, &x, &w, Some(b)), &dy)
    });
}

#[test]
fn contiguous_layers_agree_with_the_reference() {
    for cpu in all_cpus() {
        for (t, d, n) in SHAPES {
            let dims = LinearDims::new(t, d, n);
            let (x, w, b) = (random(1, t * d), random(2, n * d), random(3, n));
            let dy = random(4, t * n);
            let (dx, dw, db) = reference::backward(&dims, &wide(&dy), &wide(&x), &wide(&w));
            for bias in [None, Some(b.as_slice())] {
                let mut y = vec![f32::NAN; t * n];
                forward(cpu, &dims, &x, &w, bias, &mut y);
                let bias = bias.map(wide);
                let expected = reference::forward(&dims, &wide(&x), &wide(&w), bias.as_deref());
                assert_close("y", &y, &expected, 1e-6);
            }
            for accumulate in [false, true] {
                let start = if accumulate { 1.0 } else { f32::NAN };
                let plus = |x: &[f64]| -> Vec<f64> {
                    x.iter()
                        .map(|x| x + f64::from(u8::from(accumulate)))
                        .collect()
                };
                let mut found = vec![start; t * d];
                backward_input(cpu, &dims, &dy, &w, accumulate, &mut found);
                assert_close("dx", &found, &plus(&dx), 1e-6);
                let mut found = vec![start; n * d];
                backward_weight(cpu, &dims, &dy, &x, accumulate, &mut found);
                assert_close("dw", &found, &plus(&dw), 1e-6);
                let mut found = vec![start; n];
                backward_bias(cpu, &dims, &dy, accumulate, &mut found);
                assert_close("db", &found, &plus(&db), 1e-6);
            }
        }
    }
}

#[test]
fn a_band_of_a_wider_buffer_leaves_its_neighbours_alone() {
    let (t, d, n) = (5, 6, 7);
    let dims = LinearDims {
        x_stride: 9,
        y_stride: 20,
        ..LinearDims::new(t, d, n)
    };
    let (x, w, b) = (random(1, t * 9), random(2, n * d), random(3, n));
    let cut: Vec<f32> = x.chunks(9).flat_map(|row| row[..d].to_vec()).collect();
    let expected = reference::forward(&dims, &wide(&cut), &wide(&w), Some(&wide(&b)));
    let mut y = vec![8.0; t * 20];
    for cpu in all_cpus() {
        forward(cpu, &dims, &x, &w, Some(&b), &mut y[4..]);
        let band: Vec<f32> = y.chunks(20).flat_map(|row| row[4..11].to_vec()).collect();
        assert_close("y", &band, &expected, 1e-6);
        for row in y.chunks(20) {
            assert!(row[..4].iter().chain(&row[11..]).all(|&x| x == 8.0));
        }
    }
}
