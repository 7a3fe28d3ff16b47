//! Where the ranks of a run are: threads of this process, or processes that a launcher started.

#[cfg(feature = "gloo")]
mod processes;

use std::time::Duration;

use drivetrain_core::{Error, ErrorKind, Result, config::JobConfig, launch::Ranks};

#[cfg(feature = "gloo")]
pub use processes::Processes;

/// Least time for ranks to meet: they read models and libraries first, on busy machines.
const MEETING: Duration = Duration::from_secs(300);

/// Set for processes that this program has started.
const STARTED: &str = "DRIVETRAIN_STARTED";

/// Whether what is said of a job before it runs is said by this process: not by each of many ranks.
pub fn speaks() -> bool {
    std::env::var_os(STARTED).is_none() && std::env::var("RANK").map_or(true, |rank| rank == "0")
}

/// Ranks as the variables of a launcher say (torchrun, Slurm, Open MPI, or `--nproc`): meets the other processes.
/// Threads where nothing says so. Where processes are on several machines, each machine's cores are shared out among
/// its own.
///
/// # Errors
/// `Config` for variables that make no sense, or a build that has no process groups; those of meeting.
pub fn find_ranks(config: &mut JobConfig) -> Result<Ranks> {
    let variable = |name: &str| std::env::var(name).ok();
    found(config, &variable)
}

#[cfg(feature = "gloo")]
fn found(config: &mut JobConfig, variable: &dyn Fn(&str) -> Option<String>) -> Result<Ranks> {
    let Some(launched) = drivetrain_c10d::environment::find(variable)? else {
        return Ok(Ranks::Threads);
    };
    let timeout = Duration::from_secs_f64(config.timeout_seconds);
    let threads = config.parallel.threads(launched.local_size);
    config.parallel.threads_per_rank.get_or_insert(threads);
    let rendezvous = launched.rendezvous(timeout.max(MEETING), timeout);
    Ok(Ranks::Process(drivetrain_c10d::connect(&rendezvous)?))
}

#[cfg(not(feature = "gloo"))]
fn found(_: &mut JobConfig, variable: &dyn Fn(&str) -> Option<String>) -> Result<Ranks> {
    let several = |name: &str| variable(name).and_then(|n| n.parse().ok()).unwrap_or(1) > 1u32;
    let sizes = ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"];
    match sizes.into_iter().find(|name| several(name)) {
        None => Ok(Ranks::Threads),
        Some(name) => Err(no_groups().with("found", name)),
    }
}

/// This build cannot have ranks in processes.
#[cfg(not(feature = "gloo"))]
pub(crate) fn no_groups() -> Error {
    let message = "this build has no process groups: its ranks are threads of one process";
    Error::new(ErrorKind::Unsupported, "find_ranks", message)
        .help("build with the feature `gloo`, which needs libtorch, or start one process")
}

/// Processes were asked for that cannot be started.
#[cfg(feature = "gloo")]
fn cannot_start(message: &str) -> Error {
    Error::new(ErrorKind::Device, "start_processes", message)
}
