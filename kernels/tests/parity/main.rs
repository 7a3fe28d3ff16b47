//! The functions of `cuda::ops` against the f64 references, with the tolerances of the CPU's tests.
//!
//! Kernels run in the emulator, in one order of threads and, with `--include-ignored`, in the other. With
//! `DRIVETRAIN_CUDA_DEVICE=0` they run on that GPU instead; nothing else of this program changes.

mod adamw;
mod attention;
mod cross_entropy;
mod elementwise;
mod embedding;
mod emulator;
mod gpu;
mod linear;
mod permute;
mod probe;
mod rms_norm;
mod rope;
mod router;
mod swiglu;
#[path = "../../src/testing.rs"]
#[allow(dead_code)]
mod testing;
mod unified;

use std::sync::Arc;

use drivetrain_kernels::cuda::{Buffer, CudaError, Device, Element};
// What testing.rs takes from its crate.
use drivetrain_kernels::{Cpu, Isa};
use emulator::{Emulator, Order};
use libtest_mimic::{Arguments, Failed, Trial};

/// A test of one op over its shapes.
type Case = (&'static str, fn(&Device) -> Result<(), CudaError>);

fn main() {
    let arguments = Arguments::from_args();
    let cases = CASES.concat();
    let trials = match std::env::var("DRIVETRAIN_CUDA_DEVICE") {
        Ok(ordinal) => gpu::trials(&ordinal, &cases),
        Err(_) => {
            let mut trials = emulated(&cases);
            trials.extend(probe::trials());
            trials
        }
    };
    libtest_mimic::run(&arguments, trials).exit();
}

const CASES: [&[Case]; 12] = [
    adamw::CASES,
    attention::CASES,
    cross_entropy::CASES,
    elementwise::CASES,
    embedding::CASES,
    linear::CASES,
    permute::CASES,
    rms_norm::CASES,
    rope::CASES,
    router::CASES,
    swiglu::CASES,
    unified::CASES,
];

fn emulated(cases: &[Case]) -> Vec<Trial> {
    let mut trials = Vec::new();
    for order in [Order::Forward, Order::Backward] {
        for &(name, case) in cases {
            let trial = Trial::test(format!("{name} {order:?}"), move || {
                case(&Device::new(Arc::new(Emulator::new(order)))).map_err(Failed::from)
            });
            trials.push(trial.with_ignored_flag(order == Order::Backward));
        }
    }
    trials
}

/// A buffer on the device with a value that no result may keep.
fn poisoned(device: &Device, len: usize) -> Result<Buffer<f32>, CudaError> {
    device.upload(&vec![f32::NAN; len])
}

/// A buffer of `len` times `value`.
fn filled<T: Element>(device: &Device, len: usize, value: T) -> Result<Buffer<T>, CudaError> {
    device.upload(&vec![value; len])
}
