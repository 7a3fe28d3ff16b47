//! The fused update over several steps.

use drivetrain_kernels::cuda::ops::adamw::update;
use drivetrain_kernels::cuda::{CudaError, Device};
use drivetrain_kernels::ops::adamw::{AdamW, reference};

use crate::Case;
use crate::testing::{assert_close, random, wide};

pub(crate) const CASES: &[Case] = &[("adamw::several_steps", several_steps)];

fn several_steps(device: &Device) -> Result<(), CudaError> {
    let config = |step| AdamW {
        lr: 1e-2,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        step,
        grad_scale: 0.5,
    };
    for len in [0, 1, 17, 10_000] {
        let start = random(1, len);
        let mut p = device.upload(&start)?;
        let (mut m, mut v) = (device.zeros(len)?, device.zeros(len)?);
        let (mut p64, mut m64, mut v64) = (wide(&start), vec![0.0; len], vec![0.0; len]);
        for step in 1..=4 {
            let g = random(10 + step, len);
            let g_device = device.upload(&g)?;
            let (p, m, v) = (p.view_mut(), m.view_mut(), v.view_mut());
            update(device, &config(step), p, g_device.view(), m, v)?;
            reference::update(&config(step), &mut p64, &wide(&g), &mut m64, &mut v64);
        }
        assert_close("p", &p.read()?, &p64, 5e-7);
        assert_close("m", &m.read()?, &m64, 3e-7);
        assert_close("v", &v.read()?, &v64, 3e-7);
    }
    Ok(())
}
