//! Starting one process a rank on this machine, and seeing them to their end.

use std::{
    os::unix::process::{CommandExt, ExitStatusExt},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use drivetrain_c10d::{Store, announce_loss, environment};
use drivetrain_core::{Error, ErrorKind, Result};

use super::{MEETING, STARTED, cannot_start};

/// How often they are looked at.
const PERIOD: Duration = Duration::from_millis(50);

/// What ranks have, once one has failed, to learn of it and say what they saw.
const GRACE: Duration = Duration::from_secs(5);

/// One process a rank; killed when this is dropped.
#[derive(Debug)]
pub struct Processes {
    ranks: Vec<Rank>,
    store: Store,
    /// Signals to pass on.
    interrupts: Arc<AtomicUsize>,
}

#[derive(Debug)]
struct Rank {
    child: Child,
    status: Option<ExitStatus>,
}

impl Processes {
    /// Starts `count` processes of a command, told which ranks they are as torchrun would. They meet at a store that
    /// this process keeps, on `port`; 0 is any that is free.
    ///
    /// # Errors
    /// `Device` if the port is taken or a process cannot be started.
    pub fn start(count: usize, port: u16, command: impl Fn() -> Command) -> Result<Self> {
        let store = Store::serve(port, MEETING)?;
        let mut processes = Self {
            ranks: Vec::with_capacity(count),
            interrupts: Arc::default(),
            store,
        };
        for rank in 0..count {
            let mut command = command();
            command
                .envs(environment::variables(rank, count, processes.store.port()))
                .env(STARTED, "1")
                .stdin(Stdio::null())
                // A terminal's signals reach this process, which passes them on.
                .process_group(0);
            if rank > 0 {
                command.stdout(Stdio::null());
            }
            let child = command.spawn().map_err(|cause| {
                cannot_start("a process cannot be started")
                    .with("rank", rank)
                    .caused_by(cause)
            })?;
            processes.ranks.push(Rank {
                child,
                status: None,
            });
        }
        Ok(processes)
    }

    /// What asks the ranks to stop, once a call.
    pub fn interrupter(&self) -> impl Fn() + Send + 'static {
        let interrupts = Arc::clone(&self.interrupts);
        move || {
            interrupts.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits for all. When one ends by a signal or with an error, the others have a little time to end by
    /// themselves: each then says what it saw.
    ///
    /// # Errors
    /// `RankLost` naming a rank that a signal ended. Otherwise the exit code of the rank that failed first is returned:
    /// it has said why.
    pub fn wait(mut self) -> Result<u8> {
        let mut passed_on = 0;
        let mut first: Option<(usize, ExitStatus)> = None;
        let mut until: Option<Instant> = None;
        loop {
            let asked = self.interrupts.load(Ordering::Relaxed);
            while passed_on < asked {
                passed_on += 1;
                self.signal(libc::SIGINT);
            }
            for (rank, status) in self.ended()? {
                if status.success() || first.is_some() {
                    continue;
                }
                first = Some((rank, status));
                until = Some(Instant::now() + GRACE);
                if let Some(error) = killed(rank, status) {
                    // The others learn of it now rather than at their next operation with that rank.
                    let told = announce_loss(&self.store, rank, &error);
                    drop(told);
                }
            }
            if self.ranks.iter().all(|rank| rank.status.is_some()) {
                break;
            }
            if until.is_some_and(|until| Instant::now() > until) {
                self.signal(libc::SIGKILL);
                until = None;
            }
            thread::sleep(PERIOD);
        }
        match first {
            None => Ok(0),
            Some((rank, status)) => match killed(rank, status) {
                Some(error) => Err(error),
                None => Ok(status
                    .code()
                    .and_then(|code| u8::try_from(code).ok())
                    .unwrap_or(1)),
            },
        }
    }

    /// Those that have ended since the last call.
    fn ended(&mut self) -> Result<Vec<(usize, ExitStatus)>> {
        let mut ended = Vec::new();
        for (rank, process) in self.ranks.iter_mut().enumerate() {
            if process.status.is_some() {
                continue;
            }
            let status = process.child.try_wait().map_err(|cause| {
                cannot_start("a process cannot be waited for")
                    .with("rank", rank)
                    .caused_by(cause)
            })?;
            if let Some(status) = status {
                process.status = Some(status);
                ended.push((rank, status));
            }
        }
        // One that was killed is the cause of what others say.
        ended.sort_by_key(|(_, status)| status.signal().is_none());
        Ok(ended)
    }

    #[allow(unsafe_code)]
    fn signal(&self, signal: i32) {
        for rank in self.ranks.iter().filter(|rank| rank.status.is_none()) {
            let Ok(id) = i32::try_from(rank.child.id()) else {
                continue;
            };
            // SAFETY: takes two numbers. The process has not been waited for, so its id is nobody else's.
            let _ = unsafe { libc::kill(id, signal) };
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for rank in self.ranks.iter_mut().filter(|rank| rank.status.is_none()) {
            // It may have ended by itself.
            let _ = rank.child.kill();
            let _ = rank.child.wait();
        }
    }
}

fn killed(rank: usize, status: ExitStatus) -> Option<Error> {
    let signal = status.signal()?;
    let message = format!("rank {rank} was ended by signal {signal}");
    let error =
        Error::new(ErrorKind::RankLost, "run_ranks", message).with("missing", format!("[{rank}]"));
    Some(match signal {
        libc::SIGKILL => error
            .help("if nobody ended it, the machine had no memory left: look at the kernel's log"),
        _ => error,
    })
}
