//! The norm, its fusion with the residual, and its gradients.

use drivetrain_kernels::cuda::ops::rms_norm::{apply, backward, forward, forward_residual};
use drivetrain_kernels::cuda::{CudaError, Device};
use drivetrain_kernels::ops::rms_norm::{RmsNormDims, reference};

use crate::testing::{assert_close, random, wide};
use crate::{Case, filled, poisoned};

pub(crate) const CASES: &[Case] = &[
    ("rms_norm::rows_and_heads", rows_and_heads),
    ("rms_norm::residual", residual),
    ("rms_norm::a_band_leaves_its_neighbours_alone", band),
];

fn rows_and_heads(device: &Device) -> Result<(), CudaError> {
    for (tokens, groups, width) in [
        (1, 1, 1),
        (5, 1, 37),
        (50, 1, 96),
        (33, 3, 16),
        (4, 2, 70),
        (3, 1, 1500),
        (0, 1, 8),
    ] {
        let dims = RmsNormDims::per_head(tokens, groups, width, 1e-6);
        let (len, row) = (dims.rows() * width, groups * width);
        let (x, w, dy) = (random(1, len), random(2, width), random(3, len));
        let (x_device, w_device) = (device.upload(&x)?, device.upload(&w)?);
        let (mut y, mut inv_rms) = (poisoned(device, len)?, poisoned(device, dims.rows())?);
        let (x_rows, w_view) = (x_device.rows(row), w_device.view());
        forward(
            device,
            &dims,
            x_rows,
            w_view,
            y.rows_mut(row),
            inv_rms.view_mut(),
        )?;
        let (y_ref, inv_ref) = reference::forward(&dims, &wide(&x), &wide(&w));
        assert_close("y", &y.read()?, &y_ref, 3e-7);
        assert_close("inv_rms", &inv_rms.read()?, &inv_ref, 1e-7);
        let mut again = poisoned(device, len)?;
        apply(
            device,
            &dims,
            x_rows,
            w_view,
            inv_rms.view(),
            again.rows_mut(row),
        )?;
        assert_eq!(again.read()?, y.read()?);

        let dy_device = device.upload(&dy)?;
        let (dx_ref, dw_ref) = reference::backward(&dims, &wide(&dy), &wide(&x), &wide(&w));
        for accumulate in [false, true] {
            let (add, start) = if accumulate {
                (0.25, 0.25)
            } else {
                (0.0, f32::NAN)
            };
            let (mut dx, mut dw) = (filled(device, len, start)?, filled(device, width, start)?);
            backward(
                device,
                &dims,
                dy_device.rows(row),
                x_rows,
                w_view,
                inv_rms.view(),
                accumulate,
                dx.rows_mut(row),
                accumulate,
                dw.view_mut(),
            )?;
            let plus = |x: &[f64]| -> Vec<f64> { x.iter().map(|x| x + add).collect() };
            assert_close("dx", &dx.read()?, &plus(&dx_ref), 1e-6);
            assert_close("dw", &dw.read()?, &plus(&dw_ref), 1e-6);
        }
    }
    Ok(())
}

fn residual(device: &Device) -> Result<(), CudaError> {
    for (tokens, width) in [(1, 3), (40, 50), (0, 4)] {
        let dims = RmsNormDims::new(tokens, width, 1e-5);
        let len = tokens * width;
        let (x, residual, w) = (random(1, len), random(2, len), random(3, width));
        let (mut h, mut y) = (poisoned(device, len)?, poisoned(device, len)?);
        let mut inv_rms = poisoned(device, tokens)?;
        forward_residual(
            device,
            &dims,
            device.upload(&x)?.view(),
            device.upload(&residual)?.view(),
            device.upload(&w)?.view(),
            h.view_mut(),
            y.view_mut(),
            inv_rms.view_mut(),
        )?;
        let sum: Vec<f32> = x.iter().zip(&residual).map(|(x, r)| x + r).collect();
        assert_eq!(h.read()?, sum);
        let (y_ref, r_ref) = reference::forward(&dims, &wide(&sum), &wide(&w));
        assert_close("y", &y.read()?, &y_ref, 3e-7);
        assert_close("inv_rms", &inv_rms.read()?, &r_ref, 1e-7);
    }
    Ok(())
}

fn band(device: &Device) -> Result<(), CudaError> {
    let dims = RmsNormDims::per_head(3, 2, 4, 1e-6);
    let (x, w) = (random(1, 3 * 8), random(2, 4));
    let (mut buffer, mut inv_rms) = (filled(device, 3 * 20, 9.0)?, poisoned(device, 6)?);
    let [_, band, _] = buffer.rows_mut(20).split_columns([5, 8, 7]);
    let (x_device, w_device) = (device.upload(&x)?, device.upload(&w)?);
    forward(
        device,
        &dims,
        x_device.rows(8),
        w_device.view(),
        band,
        inv_rms.view_mut(),
    )?;
    let found = buffer.read()?;
    let band: Vec<f32> = found
        .chunks(20)
        .flat_map(|row| row[5..13].to_vec())
        .collect();
    let (expected, _) = reference::forward(&dims, &wide(&x), &wide(&w));
    assert_close("y", &band, &expected, 3e-7);
    for row in found.chunks(20) {
        assert!(
            row[..5].iter().chain(&row[13..]).all(|&x| x == 9.0),
            "{row:?}"
        );
    }
    Ok(())
}
