//! The first calls of libtorch's vector math.

use std::sync::{Mutex, PoisonError};

use drivetrain_core::Result;
use tch::{Device, Kind, Tensor};

use crate::error::{Torch, torch};

/// Calls each function of the vector math library that the engine uses once, on one thread.
///
/// The library chooses its code when a function is called first. Two threads of one `exp` that made this call at the
/// same time were seen, about once in fifty processes on a busy machine, to get an exponential that is wrong by 3e-5
/// in the rows of one of them: the right code from the second call on, and no error.
pub(crate) fn warm_up() -> Result<()> {
    static DONE: Mutex<bool> = Mutex::new(false);
    let mut done = DONE.lock().unwrap_or_else(PoisonError::into_inner);
    if !*done {
        first_calls().map_err(torch("warm_up"))?;
        *done = true;
    }
    Ok(())
}

/// Small enough that libtorch does not split them over threads.
fn first_calls() -> Torch<()> {
    const LEN: i64 = 64;
    for kind in [Kind::Float, Kind::Double] {
        let ones = Tensor::f_ones([LEN], (kind, Device::Cpu))?;
        let _ = ones.f_exp()?.f_log()?;
    }
    Ok(())
}
