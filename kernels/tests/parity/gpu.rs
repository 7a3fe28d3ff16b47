//! The same cases on a GPU.

use libtest_mimic::{Failed, Trial};

use crate::Case;

#[cfg(feature = "cuda")]
pub(crate) fn trials(ordinal: &str, cases: &[Case]) -> Vec<Trial> {
    use std::sync::{Arc, OnceLock};

    use drivetrain_kernels::cuda::{CudaError, Device, Gpu};

    // One for all cases, so that each module is compiled once.
    static DEVICE: OnceLock<Result<Device, CudaError>> = OnceLock::new();
    let ordinal = ordinal.to_owned();
    let device = move || -> Result<Device, Failed> {
        let ordinal = ordinal
            .parse()
            .map_err(|_| format!("{ordinal:?} is no device number"))?;
        let open = || Ok(Device::new(Arc::new(Gpu::open(ordinal)?)));
        Ok(DEVICE.get_or_init(open).clone()?)
    };
    let trial = |&(name, case): &Case| {
        let device = device.clone();
        Trial::test(format!("{name} Gpu"), move || {
            let device = device()?;
            case(&device)?;
            Ok(device.synchronize()?)
        })
    };
    cases.iter().map(trial).collect()
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn trials(ordinal: &str, _: &[Case]) -> Vec<Trial> {
    let message =
        format!("device {ordinal} was asked for, but this was built without the feature cuda");
    vec![Trial::test("gpu", || Err(Failed::from(message)))]
}
