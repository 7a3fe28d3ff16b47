//! The device that a rank computes on, and what it answers while its state is away from it.

use drivetrain_core::{
    Error, ErrorKind, Result,
    config::{DeviceConfig, JobConfig},
    engine::Residency,
};
use tch::{Cuda, Device, utils::has_cudart};

/// Whether the libtorch that is linked was built with CUDA. Looks at no device.
pub(crate) fn has_cuda() -> bool {
    has_cudart()
}

/// A job's device: of GPUs the one whose number is the rank's, modulo how many there are.
pub(crate) fn open(config: &JobConfig, rank: usize) -> Result<Device> {
    if config.device == DeviceConfig::Cpu {
        return Ok(Device::Cpu);
    }
    let fault = |cause: &str| {
        Error::new(ErrorKind::Device, "open_device", cause).help(
            "write `device: cpu`, or build with LIBTORCH set to the folder of a libtorch that has CUDA",
        )
    };
    if !has_cuda() {
        return Err(fault("device `cuda`, and this libtorch has no CUDA"));
    }
    match usize::try_from(Cuda::device_count()) {
        Ok(count) if count > 0 => Ok(Device::Cuda(rank % count)),
        _ => Err(fault("device `cuda`, and libtorch finds no GPU here")),
    }
}

/// Where an engine's state lies, and what it can do there: the same on every device.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Offloaded(pub(crate) Residency);

impl Offloaded {
    /// Refuses what needs the optimizer's state on the device.
    pub(crate) fn train(self, operation: &'static str) -> Result<()> {
        self.refuse(operation, self.0 != Residency::Device)
    }

    /// Refuses what needs weights on the device.
    pub(crate) fn score(self, operation: &'static str) -> Result<()> {
        self.refuse(operation, self.0 == Residency::Offloaded)
    }

    fn refuse(self, operation: &'static str, away: bool) -> Result<()> {
        match away {
            false => Ok(()),
            true => Err(Error::new(
                ErrorKind::CallOrder,
                operation,
                "the state that this needs is offloaded",
            )
            .with("residency", format!("{:?}", self.0))
            .help("call set_residency(Device) first")),
        }
    }
}
