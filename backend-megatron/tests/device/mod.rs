//! The engine on an emulated device: the CUDA sources as C++, every access of memory checked. With
//! `DRIVETRAIN_CUDA_DEVICE=0` it is that GPU instead, for every rank; nothing else changes.
#![allow(dead_code)] // each test file uses a part

#[path = "../../../kernels/tests/parity/emulator.rs"]
pub(crate) mod emulator;

use std::sync::Arc;

use drivetrain_core::{
    Diagnostic, Result,
    communicator::Communicator,
    config::{DeviceConfig, JobSpec},
    engine::{Backend, Capability, Engine, WeightInit},
    plan::TrainPlan,
};
use drivetrain_kernels::cuda::{CudaError, Device, Driver, Unified};
use drivetrain_megatron::MegatronOn;
use emulator::{Emulator, Order};

/// The backend whose every job has `device: cuda`, which is the emulator.
#[derive(Debug)]
pub(crate) struct OnDevice(pub(crate) MegatronOn);

/// Over the emulator, or the GPU that was asked for.
pub(crate) const EMULATED: OnDevice = OnDevice(MegatronOn(open));

fn open(_rank: usize) -> Result<Unified, CudaError> {
    let driver: Arc<dyn Driver> = match std::env::var("DRIVETRAIN_CUDA_DEVICE") {
        Ok(ordinal) => gpu(&ordinal)?,
        Err(_) => Arc::new(Emulator::new(Order::Forward)),
    };
    Ok(Unified::new(Device::new(driver)))
}

/// One for all cases, so that each kernel is compiled once.
#[cfg(feature = "cuda")]
fn gpu(ordinal: &str) -> Result<Arc<dyn Driver>, CudaError> {
    use std::sync::OnceLock;

    use drivetrain_kernels::cuda::Gpu;

    static GPU: OnceLock<Result<Arc<Gpu>, CudaError>> = OnceLock::new();
    let ordinal = ordinal.parse().expect("DRIVETRAIN_CUDA_DEVICE is a number");
    let gpu = GPU
        .get_or_init(|| Gpu::open(ordinal).map(Arc::new))
        .clone()?;
    Ok(gpu)
}

#[cfg(not(feature = "cuda"))]
fn gpu(_: &str) -> Result<Arc<dyn Driver>, CudaError> {
    Err(CudaError::NotBuilt)
}

impl Backend for OnDevice {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn capability(&self) -> Capability {
        self.0.capability()
    }

    fn check(&self, job: &JobSpec) -> Vec<Diagnostic> {
        self.0.check(job)
    }

    fn plan(&self, job: &JobSpec) -> Result<TrainPlan> {
        let mut job = job.clone();
        job.config.device = DeviceConfig::Cuda;
        self.0.plan(&job)
    }

    fn build(
        &self,
        plan: &TrainPlan,
        world: Arc<dyn Communicator>,
        init: WeightInit<'_>,
    ) -> Result<Box<dyn Engine>> {
        self.0.build(plan, world, init)
    }
}
