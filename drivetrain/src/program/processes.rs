//! `--nproc`: this program once a rank.

use std::process::ExitCode;

use clap::Args;

use crate::core::Result;

/// Arguments of commands whose ranks may be processes.
#[derive(Debug, Args)]
pub(super) struct ProcessArgs {
    /// Start this many processes, one a rank, instead of threads of one process. (torchrun, srun and mpirun may start
    /// them too: their variables are read.)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    nproc: Option<u16>,
    /// The port at which these meet; 0 is any that is free
    #[arg(long, requires = "nproc", default_value_t = 0)]
    port: u16,
}

impl ProcessArgs {
    /// Where processes are asked for: starts them and waits; the program's exit code.
    #[cfg(feature = "gloo")]
    pub(super) fn launch(&self) -> Result<Option<ExitCode>> {
        use std::process::Command;

        use crate::{
            core::{Error, ErrorKind},
            launch::Processes,
        };

        let Some(count) = self.nproc else {
            return Ok(None);
        };
        let program = std::env::current_exe().map_err(|cause| {
            let message = "this program's own file cannot be found";
            Error::new(ErrorKind::Device, "start_processes", message).caused_by(cause)
        })?;
        let arguments = without_ours(std::env::args_os().skip(1));
        let processes = Processes::start(usize::from(count), self.port, || {
            let mut command = Command::new(&program);
            command.args(&arguments);
            command
        })?;
        super::interrupt::on_each_interrupt(processes.interrupter())?;
        processes.wait().map(|code| Some(ExitCode::from(code)))
    }

    /// Where processes are asked for: this build has none.
    #[cfg(not(feature = "gloo"))]
    pub(super) fn launch(&self) -> Result<Option<ExitCode>> {
        match (self.nproc, self.port) {
            (None, _) => Ok(None),
            (Some(_), _) => Err(crate::launch::no_groups().with("found", "--nproc")),
        }
    }
}

/// The arguments without `--nproc` and `--port` and their values.
#[cfg(feature = "gloo")]
fn without_ours(arguments: impl Iterator<Item = std::ffi::OsString>) -> Vec<std::ffi::OsString> {
    let mut kept = Vec::new();
    let mut arguments = arguments;
    while let Some(argument) = arguments.next() {
        match argument.to_str() {
            Some("--nproc" | "--port") => {
                arguments.next();
            }
            Some(text) if text.starts_with("--nproc=") || text.starts_with("--port=") => {}
            _ => kept.push(argument),
        }
    }
    kept
}

#[cfg(all(test, feature = "gloo"))]
mod tests {
    use super::*;

    #[test]
    fn the_ranks_are_not_told_to_start_more() {
        let all = ["train", "--nproc", "2", "job.yaml", "--port=5", "--json"];
        let kept = without_ours(all.into_iter().map(Into::into));
        assert_eq!(kept, ["train", "job.yaml", "--json"]);
    }
}
