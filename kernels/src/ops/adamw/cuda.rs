//! Starts the kernel of `cuda.cu`.

use crate::cuda::source::ADAMW as MODULE;
use crate::cuda::{Arg, CudaError, Device, View, ViewMut, flat_blocks};
use crate::ops::adamw::AdamW;

/// Updates p, m and v in place.
///
/// # Panics
/// If the step is 0 or lengths differ.
#[track_caller]
pub fn update(
    device: &Device,
    config: &AdamW,
    p: ViewMut<'_, f32>,
    g: View<'_, f32>,
    m: ViewMut<'_, f32>,
    v: ViewMut<'_, f32>,
) -> Result<(), CudaError> {
    assert!(config.step > 0, "adamw: steps count from 1");
    g.check("g", p.len());
    m.check("m", p.len());
    v.check("v", p.len());
    let t = config.step as f64;
    let correction1 = 1.0 - config.beta1.powf(t);
    let correction2 = 1.0 - config.beta2.powf(t);
    let factors = [
        1.0 - config.lr * config.weight_decay,
        config.grad_scale,
        1.0 - config.beta1,
        config.beta2,
        1.0 - config.beta2,
        config.lr / correction1,
        1.0 / correction2.sqrt(),
        config.eps,
    ]
    .map(|factor| Arg::from(factor as f32));
    let buffers = [p.arg(), g.arg(), m.arg(), v.arg()];
    let args = [&buffers[..], &factors, &[Arg::from(p.len())]].concat();
    let (grid, block) = flat_blocks(p.len());
    // SAFETY: all have the length of p.
    unsafe { device.launch(&MODULE, "adamw_update", grid, block, &args) }
}
