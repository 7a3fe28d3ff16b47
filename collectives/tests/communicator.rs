//! What every communicator must do, over a library that is none: it moves its floats by a second world of thread ranks,
//! and checks how it is called.

use std::{
    collections::BTreeMap,
    process::ExitCode,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
};

use drivetrain_collectives::{Collective, Group, GroupId, Offloaded, Open};
use drivetrain_conformance::communicator::{Launch, communicator_cases};
use drivetrain_core::{
    Error, ErrorKind, Result,
    communicator::{Communicator, LocalCommunicator, LocalOptions, ReduceOp},
    launch::run_ranks,
};
use libtest_mimic::{Arguments, Failed, Trial};

/// Ends of worlds that wait for their members, by id.
type Worlds = Arc<(
    Mutex<BTreeMap<GroupId, Vec<Arc<LocalCommunicator>>>>,
    Condvar,
)>;

#[derive(Debug, Clone)]
struct Threads {
    worlds: Worlds,
    options: LocalOptions,
}

#[derive(Debug)]
struct Joined {
    end: Arc<LocalCommunicator>,
    aborted: AtomicBool,
}

impl Open for Threads {
    fn id(&self) -> Result<GroupId> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mut id = [7; 128];
        id[..8].copy_from_slice(&NEXT.fetch_add(1, SeqCst).to_le_bytes());
        Ok(id)
    }

    fn join(&self, id: &GroupId, rank: usize, size: usize) -> Result<Arc<dyn Group>> {
        let mut worlds = self.worlds.0.lock().unwrap_or_else(PoisonError::into_inner);
        let ends = worlds.entry(*id).or_insert_with(|| {
            LocalCommunicator::world(size, self.options)
                .into_iter()
                .collect()
        });
        assert_eq!(ends.len(), size, "members of a group have another id");
        Ok(Arc::new(Joined {
            end: ends[rank].clone(),
            aborted: AtomicBool::new(false),
        }))
    }
}

impl Group for Joined {
    fn run(&self, collective: &Collective, input: &[f32]) -> Result<Vec<f32>> {
        if self.aborted.load(SeqCst) {
            return Err(Error::new(ErrorKind::Device, "run", "aborted"));
        }
        let end = &self.end;
        let mut output = vec![f32::NAN; collective.output_len(end.rank(), input.len())];
        match collective {
            Collective::AllReduce => {
                output.copy_from_slice(input);
                end.all_reduce((&mut output).into(), ReduceOp::Sum)?
            }
            Collective::AllGather { counts } => {
                end.all_gather(input.into(), (&mut output).into(), counts)?
            }
            Collective::ReduceScatter { counts } => {
                let sum = ReduceOp::Sum;
                end.reduce_scatter(input.into(), (&mut output).into(), counts, sum)?
            }
            Collective::Broadcast { root } => {
                output.copy_from_slice(input);
                end.broadcast((&mut output).into(), *root)?
            }
            Collective::AllToAll {
                send_counts,
                receive_counts,
            } => {
                let output = (&mut output).into();
                end.all_to_all(input.into(), send_counts, output, receive_counts)?
            }
        }
        .wait()?;
        Ok(output)
    }

    fn abort(&self) {
        self.aborted.store(true, SeqCst);
        let cause = Error::new(
            ErrorKind::Device,
            "abort",
            "the library was told to give up",
        );
        self.end.abort(&cause);
    }
}

/// A library whose id or whose members cannot be had.
#[derive(Debug)]
struct Missing {
    id: bool,
    fails: usize,
    threads: Threads,
}

impl Open for Missing {
    fn id(&self) -> Result<GroupId> {
        match self.id {
            true => Err(Error::new(
                ErrorKind::Device,
                "id",
                "libnccl cannot be loaded",
            )),
            false => self.threads.id(),
        }
    }

    fn join(&self, id: &GroupId, rank: usize, size: usize) -> Result<Arc<dyn Group>> {
        match rank == self.fails {
            true => Err(Error::new(
                ErrorKind::Device,
                "join",
                "libnccl cannot be loaded",
            )),
            false => self.threads.join(id, rank, size),
        }
    }
}

fn threads(timeout: std::time::Duration) -> Threads {
    Threads {
        worlds: Worlds::default(),
        options: LocalOptions { timeout },
    }
}

/// What one rank lacks fails all of them, and none waits.
fn a_missing_library_fails_all(id: bool) -> std::result::Result<(), Failed> {
    let timeout = std::time::Duration::from_secs(30);
    let threads = threads(timeout);
    let outcome = run_ranks(3, timeout, |world| {
        let open = Missing {
            id,
            fails: 1,
            threads: threads.clone(),
        };
        Ok(Offloaded::new(world, Arc::new(open)).map(drop))
    });
    for rank in outcome? {
        let error = rank.err().ok_or("a rank goes on alone")?;
        let says = error.to_string().contains("libnccl cannot be loaded");
        if error.kind() != ErrorKind::Device || !says {
            return Err(error.to_string().into());
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    let launch: Launch = Arc::new(|world_size, timeout, body| {
        let open = Arc::new(threads(timeout));
        let rank = |world| body(Arc::new(Offloaded::new(world, open.clone())?));
        run_ranks(world_size, timeout, rank).map(drop)
    });
    let mut cases = communicator_cases("offloaded", &launch);
    for (name, id) in [("id", true), ("member", false)] {
        let name = format!("missing_library/{name}");
        cases.push(Trial::test(name, move || a_missing_library_fails_all(id)));
    }
    libtest_mimic::run(&Arguments::from_args(), cases).exit_code()
}
