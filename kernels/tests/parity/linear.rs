//! Linear layers, contiguous and in bands: products of the device's library, bias kernels.

use drivetrain_kernels::cuda::ops::linear::{
    backward_bias, backward_input, backward_weight, forward,
};
use drivetrain_kernels::cuda::{CudaError, Device};
use drivetrain_kernels::ops::linear::{LinearDims, reference};

use crate::testing::{assert_close, random, wide};
use crate::{Case, filled};

pub(crate) const CASES: &[Case] = &[("linear::contiguous_and_in_bands", layers)];

fn layers(device: &Device) -> Result<(), CudaError> {
    for (t, d, n) in [(1, 1, 1), (3, 5, 17), (40, 64, 33), (7, 97, 130), (0, 4, 3)] {
        // x has 2 columns before it and y 3, none behind; or neither.
        for (x_before, y_before) in [(0, 0), (2, 3)] {
            let (x_stride, y_stride) = (d + x_before, n + y_before);
            let dims = LinearDims {
                x_stride,
                y_stride,
                ..LinearDims::new(t, d, n)
            };
            let (x, dy) = (random(1, t * x_stride), random(4, t * y_stride));
            let (w, b) = (random(2, n * d), random(3, n));
            let band = |x: &[f32], stride: usize, before: usize| -> Vec<f32> {
                x.chunks(stride)
                    .flat_map(|row| row[before..].to_vec())
                    .collect()
            };
            let (x_wide, dy_wide) = (
                wide(&band(&x, x_stride, x_before)),
                wide(&band(&dy, y_stride, y_before)),
            );
            let (x, dy) = (device.upload(&x)?, device.upload(&dy)?);
            let x_rows = x.rows(x_stride).columns(x_before..x_stride);
            let dy_rows = dy.rows(y_stride).columns(y_before..y_stride);
            let (w_device, b_device) = (device.upload(&w)?, device.upload(&b)?);
            for bias in [None, Some(&b)] {
                let mut y = filled(device, t * y_stride, 8.0)?;
                let [_, rows] = y.rows_mut(y_stride).split_columns([y_before, n]);
                let view = bias.map(|_| b_device.view());
                forward(device, &dims, x_rows, w_device.rows(d), view, rows)?;
                let y = y.read()?;
                let bias = bias.map(|bias| wide(bias));
                let expected = reference::forward(&dims, &x_wide, &wide(&w), bias.as_deref());
                assert_close("y", &band(&y, y_stride, y_before), &expected, 1e-6);
                let kept = y
                    .chunks(y_stride)
                    .all(|row| row[..y_before].iter().all(|&x| x == 8.0));
                assert!(kept, "columns beside y are as they were");
            }
            let (dx, dw, db) = reference::backward(&dims, &dy_wide, &x_wide, &wide(&w));
            for accumulate in [false, true] {
                let start = if accumulate { 1.0 } else { f32::NAN };
                let plus = |x: &[f64]| -> Vec<f64> {
                    x.iter()
                        .map(|x| x + f64::from(u8::from(accumulate)))
                        .collect()
                };
                let mut found = filled(device, t * x_stride, start)?;
                let [_, rows] = found.rows_mut(x_stride).split_columns([x_before, d]);
                backward_input(device, &dims, dy_rows, w_device.rows(d), accumulate, rows)?;
                assert_close(
                    "dx",
                    &band(&found.read()?, x_stride, x_before),
                    &plus(&dx),
                    1e-6,
                );
                let mut found = filled(device, n * d, start)?;
                backward_weight(
                    device,
                    &dims,
                    dy_rows,
                    x_rows,
                    accumulate,
                    found.rows_mut(d),
                )?;
                assert_close("dw", &found.read()?, &plus(&dw), 1e-6);
                let mut found = filled(device, n, start)?;
                backward_bias(device, &dims, dy_rows, accumulate, found.view_mut())?;
                assert_close("db", &found.read()?, &plus(&db), 1e-6);
            }
        }
    }
    Ok(())
}
