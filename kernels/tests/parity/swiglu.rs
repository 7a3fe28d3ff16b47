//! SwiGLU over two bands of one buffer.

use drivetrain_kernels::cuda::ops::swiglu::{backward, forward};
use drivetrain_kernels::cuda::{CudaError, Device};
use drivetrain_kernels::ops::swiglu::reference;

use crate::testing::{assert_close, random, wide};
use crate::{Case, poisoned};

pub(crate) const CASES: &[Case] = &[
    ("swiglu::fused_bands", fused_bands),
    ("swiglu::saturated_gates_stay_finite", saturated),
];

fn fused_bands(device: &Device) -> Result<(), CudaError> {
    for (tokens, width) in [(1, 1), (3, 37), (50, 96), (2, 600), (0, 4)] {
        let fused: Vec<f32> = random(1, tokens * 2 * width)
            .iter()
            .map(|x| 9.0 * x)
            .collect();
        let dy = random(2, tokens * width);
        let band = |x: &[f32], start: usize| -> Vec<f32> {
            x.chunks(2 * width)
                .flat_map(|row| row[start..start + width].to_vec())
                .collect()
        };
        let (gate, up) = (wide(&band(&fused, 0)), wide(&band(&fused, width)));
        let fused_device = device.upload(&fused)?;
        let rows = fused_device.rows(2 * width);
        let (gate_rows, up_rows) = (rows.columns(0..width), rows.columns(width..2 * width));
        let mut y = poisoned(device, tokens * width)?;
        forward(device, gate_rows, up_rows, y.view_mut())?;
        assert_close("y", &y.read()?, &reference::forward(&gate, &up), 3e-7);

        let mut d = poisoned(device, tokens * 2 * width)?;
        let [dgate, dup] = d.rows_mut(2 * width).split_columns([width, width]);
        backward(
            device,
            device.upload(&dy)?.view(),
            gate_rows,
            up_rows,
            dgate,
            dup,
        )?;
        let (dgate_ref, dup_ref) = reference::backward(&wide(&dy), &gate, &up);
        let d = d.read()?;
        assert_close("dgate", &band(&d, 0), &dgate_ref, 1e-6);
        assert_close("dup", &band(&d, width), &dup_ref, 1e-6);
    }
    Ok(())
}

fn saturated(device: &Device) -> Result<(), CudaError> {
    let gate = device.upload(&[-200.0, -90.0, 90.0, 200.0, 0.0])?;
    let up = device.upload(&[2.0; 5])?;
    let mut y = poisoned(device, 5)?;
    forward(device, gate.rows(5), up.rows(5), y.view_mut())?;
    assert_close("y", &y.read()?, &[0.0, 0.0, 180.0, 400.0, 0.0], 0.0);
    let (mut dgate, mut dup) = (poisoned(device, 5)?, poisoned(device, 5)?);
    let ones = device.upload(&[1.0; 5])?;
    backward(
        device,
        ones.view(),
        gate.rows(5),
        up.rows(5),
        dgate.rows_mut(5),
        dup.rows_mut(5),
    )?;
    assert_close("dgate", &dgate.read()?, &[0.0, 0.0, 2.0, 2.0, 1.0], 0.0);
    assert_close("dup", &dup.read()?, &[0.0, 0.0, 90.0, 200.0, 0.0], 0.0);
    Ok(())
}
