//! Where a rank computes: what the job's `device` says, and what becomes of a device's faults.
//!
//! On `cuda` weights, gradients, moments and activations lie in unified memory, which the communicator takes as it
//! takes the host's. A device's first fault stays, and what comes after it does nothing: so a rank whose device has
//! failed meets the others where all agree on the outcome, and all get the error.

use std::{collections::BTreeSet, sync::Arc};

use drivetrain_core::{
    Diagnostic, Error, ErrorKind, Result,
    communicator::Communicator,
    config::{DeviceConfig, JobSpec},
    plan::TrainPlan,
};
use drivetrain_kernels::{
    Cpu, Processor,
    cuda::{CudaError, Unified, ops},
};

use crate::options::{Collectives, Options};

/// The kinds that this build can compute on.
pub(crate) fn kinds() -> BTreeSet<String> {
    let mut kinds = BTreeSet::from(["cpu".to_owned()]);
    if cfg!(feature = "cuda") {
        kinds.insert("cuda".to_owned());
    }
    kinds
}

/// The device of a world rank: ranks take turns where they are more than devices. Ranks are of one machine.
///
/// # Errors
/// Where there is none, or what it needs is missing.
#[cfg(feature = "cuda")]
pub(crate) fn gpu(rank: usize) -> Result<Unified, CudaError> {
    use drivetrain_kernels::cuda::{Device, Gpu};

    let gpu = Gpu::open(rank % Gpu::count()?.max(1))?;
    Ok(Unified::new(Device::new(Arc::new(gpu))))
}

/// None.
///
/// # Errors
/// Always.
#[cfg(not(feature = "cuda"))]
pub(crate) fn gpu(_: usize) -> Result<Unified, CudaError> {
    Err(CudaError::NotBuilt)
}

/// The processor of this rank, whose device `open` opens by its rank. Collective over `world`: where one has none,
/// all fail.
///
/// # Errors
/// `Device` where there is none; the communicator's.
pub(crate) fn open(
    plan: &TrainPlan,
    world: &dyn Communicator,
    open: fn(usize) -> Result<Unified, CudaError>,
) -> Result<Processor> {
    match plan.config.device {
        DeviceConfig::Cpu => {
            let threads = plan.config.parallel.threads(world.world_size());
            Ok(Cpu::new(threads).into())
        }
        DeviceConfig::Cuda => {
            let opened = open(world.rank()).map_err(|cause| {
                Error::new(ErrorKind::Device, "open_device", "no CUDA device to be had")
                    .with("device", "cuda")
                    .help("run where there is one, or write `device: cpu`")
                    .caused_by(cause)
            });
            world.agree("open_device", opened).map(Processor::Device)
        }
    }
}

/// The world as the job says that its ranks talk. Collective over it.
///
/// # Errors
/// `Config` for options that `check` finds wrong; `Device` where NCCL is wanted and cannot be had; the communicator's.
pub(crate) fn connect(
    plan: &TrainPlan,
    world: Arc<dyn Communicator>,
) -> Result<Arc<dyn Communicator>> {
    let options = Options::read(&plan.config)
        .map_err(|found| Error::new(ErrorKind::Config, "build_engine", found))?;
    match (plan.config.device, options.collectives) {
        (DeviceConfig::Cpu, _) | (_, Collectives::Host) => Ok(world),
        #[cfg(feature = "cuda")]
        (DeviceConfig::Cuda, Collectives::Nccl) => crate::nccl::over(world),
        #[cfg(not(feature = "cuda"))]
        (DeviceConfig::Cuda, Collectives::Nccl) => {
            let message = "NCCL comes with the feature `cuda`, which this build lacks";
            Err(Error::new(ErrorKind::Device, "build_engine", message))
        }
    }
}

/// Whether the processor is sound.
///
/// # Errors
/// `Device` with its first fault.
pub(crate) fn check(processor: &Processor, operation: &'static str) -> Result<()> {
    processor.check().map_err(|cause| {
        Error::new(ErrorKind::Device, operation, "the device failed")
            .with("device", "cuda")
            .help(
                "start again from the last checkpoint; where memory ran out, with fewer tokens a micro-batch or \
                 more recomputation",
            )
            .caused_by(cause)
    })
}

/// What of a job the kernels of a device do not take.
pub(crate) fn faults(job: &JobSpec) -> Vec<Diagnostic> {
    let (model, most_experts) = (&job.model, ops::router::MOST_EXPERTS);
    let most_dim = ops::attention::MOST_HEAD_DIM;
    let mut faults = Vec::new();
    let mut fault = |found: String, right: String| {
        let right = format!("{right}; or write `cpu`");
        faults.push(Diagnostic::error("MEGATRON-01", "device", found, right));
    };
    if job.config.device == DeviceConfig::Cpu {
        return faults;
    }
    if model.head_dim > most_dim {
        let found = format!("the model's heads have {} dims", model.head_dim);
        fault(found, format!("the CUDA kernels take {most_dim} at most"));
    }
    if let Some(moe) = model.moe.filter(|moe| moe.num_experts > most_experts) {
        let found = format!("the model has {} experts a layer", moe.num_experts);
        fault(
            found,
            format!("the CUDA kernels take {most_experts} at most"),
        );
    }
    faults
}
