//! How ranks meet.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use drivetrain_core::{Error, ErrorKind, Result, communicator::transport::Place};

use crate::{
    communicator::GlooCommunicator,
    shim::ffi,
    store::{Store, first_line, is_loopback, milliseconds},
    watch::deadline,
    world::World,
};

/// Where and as whom a process meets the others.
#[derive(Debug, Clone, PartialEq)]
pub struct Rendezvous {
    /// This process's rank.
    pub rank: usize,
    /// Processes in all.
    pub world_size: usize,
    /// The machine of whoever keeps the store.
    pub host: String,
    /// The store's port.
    pub port: u16,
    /// Whether a launcher keeps the store; if not, rank 0 does.
    pub launcher_keeps_store: bool,
    /// Keeps the keys of one start apart from those of another at the same store.
    pub name: String,
    /// How long to wait for the others. c10d looks up the name of every address that it sees: where name servers do not
    /// answer, that alone takes seconds.
    pub meeting_timeout: Duration,
    /// How long each operation may take.
    pub timeout: Duration,
    /// The network interface to use, by name; `None` is that of the machine's name, or the loopback where the store is
    /// on it.
    pub interface: Option<String>,
}

/// Meets the others and connects to each. Collective.
///
/// # Errors
/// `Device` where the store cannot be kept, `Timeout` naming the ranks that did not come, `Config` where two processes
/// have one rank or ranks disagree on how many there are.
pub fn connect(rendezvous: &Rendezvous) -> Result<Arc<GlooCommunicator>> {
    let Rendezvous {
        rank,
        world_size,
        meeting_timeout,
        ..
    } = *rendezvous;
    let until = deadline(meeting_timeout);
    let keeps = rank == 0 && !rendezvous.launcher_keeps_store;
    let store = Store::open(&rendezvous.host, rendezvous.port, keeps, meeting_timeout)
        .map_err(|error| error.with("rank", rank))?
        .under(&rendezvous.name);
    arrive(rendezvous, &store, until)?;

    let interface = match &rendezvous.interface {
        Some(name) => name.clone(),
        None if is_loopback(&rendezvous.host) => "lo".to_owned(),
        None => String::new(),
    };
    let left = until.saturating_duration_since(Instant::now());
    let prefix = format!("{}gloo", store.prefix());
    let (own, size) = (rank as i32, world_size as i32);
    let connected = ffi::connect_gloo(
        store.inner(),
        &prefix,
        own,
        size,
        milliseconds(left),
        &interface,
    );
    let group = match connected {
        Ok(group) => group,
        Err(cause) => return Err(not_connected(rendezvous, &store, until, cause.what())),
    };
    store.set(&format!("connected/{rank}"), b"")?;
    let place = Place::in_world(rank, world_size);
    let keeper = match rendezvous.launcher_keeps_store {
        true => "the launcher",
        false => "rank 0",
    };
    let world = World::new(&place, rendezvous.timeout, group, store, keeps, keeper)?;
    Ok(Arc::new(GlooCommunicator::new(world, place)?))
}

/// Says that this rank is here, and waits for the others.
fn arrive(rendezvous: &Rendezvous, store: &Store, until: Instant) -> Result<()> {
    let Rendezvous {
        rank, world_size, ..
    } = *rendezvous;
    if store.add(&format!("taken/{rank}"), 1)? > 1 {
        let message = format!("two processes are rank {rank}");
        return Err(Error::new(ErrorKind::Config, "meet", message)
            .with("rank", rank)
            .with("store", format!("{}:{}", rendezvous.host, rendezvous.port))
            .help("give each process a rank of its own; another job may be using this port"));
    }
    let key = |rank: usize| format!("arrived/{rank}");
    store.set(&key(rank), world_size.to_string().as_bytes())?;
    let keys: Vec<String> = (0..world_size).map(key).collect();
    match store.get_all(&keys, until)? {
        Ok(sizes) => {
            for (other, size) in sizes.iter().enumerate() {
                let size = String::from_utf8_lossy(size).into_owned();
                if size != world_size.to_string() {
                    let message = "ranks disagree on how many there are";
                    return Err(Error::new(ErrorKind::Config, "meet", message)
                        .with("rank", rank)
                        .with("expected", world_size)
                        .with("found", format!("{size} (rank {other})")));
                }
            }
            Ok(())
        }
        Err(missing) => Err(not_there(rendezvous, &missing)),
    }
}

fn not_there(rendezvous: &Rendezvous, missing: &[usize]) -> Error {
    let seconds = rendezvous.meeting_timeout.as_secs_f64();
    let message = format!("ranks {missing:?} did not come within {seconds} s");
    Error::new(ErrorKind::Timeout, "meet", message)
        .with("rank", rendezvous.rank)
        .with("missing", format!("{missing:?}"))
        .with("store", format!("{}:{}", rendezvous.host, rendezvous.port))
        .help("look for the first error of the missing ranks; every rank must be started")
}

fn not_connected(rendezvous: &Rendezvous, store: &Store, until: Instant, cause: &str) -> Error {
    // Those that are late come a moment after this one; who has been lost does not.
    let until = until.min(Instant::now() + Duration::from_secs(2));
    let others = (0..rendezvous.world_size).filter(|&rank| rank != rendezvous.rank);
    let others: Vec<usize> = others.collect();
    let keys: Vec<String> = others.iter().map(|r| format!("connected/{r}")).collect();
    thread::sleep(Duration::from_millis(50));
    let missing = match store.get_all(&keys, until) {
        Ok(Err(missing)) => missing.into_iter().map(|i| others[i]).collect(),
        _ => Vec::new(),
    };
    let message = match missing.is_empty() {
        true => "ranks met but cannot connect to each other".to_owned(),
        false => format!("ranks {missing:?} came, but did not connect"),
    };
    Error::new(ErrorKind::RankLost, "meet", message)
        .with("rank", rendezvous.rank)
        .with("missing", format!("{missing:?}"))
        .help(
            "look for the first error of the missing ranks; if there is none, name the network interface that reaches \
             the other machines (GLOO_SOCKET_IFNAME)",
        )
        .caused_by(first_line(cause))
}
