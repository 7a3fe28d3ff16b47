//! The thread of a process that looks at the store: for another rank's failure, and to say for whom this one waits.

use std::{
    collections::BTreeSet,
    fmt, thread,
    time::{Duration, Instant},
};

use drivetrain_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::{
    environment,
    store::Store,
    world::{Duty, Watched},
};

/// How often it looks: an abort reaches everyone within this time.
const PERIOD: Duration = Duration::from_millis(100);

/// How long a rank waits before it says so.
const PATIENCE: Duration = Duration::from_secs(1);

const FAILURE: &str = "failure";

/// The first failure of any rank.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Failure {
    rank: usize,
    kind: i64,
    text: String,
}

/// For whom a rank waits, and in what.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Blocked {
    pub(crate) by: usize,
    pub(crate) operation: String,
    pub(crate) group: String,
    pub(crate) sequence: u64,
}

/// As it stands at the store; the count shows that the rank still runs.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Status {
    blocked: Option<Blocked>,
    count: u64,
}

/// A rank that waits, for another.
#[derive(Debug)]
pub(crate) struct Waiting {
    rank: usize,
    blocked: Blocked,
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Blocked {
            by,
            operation,
            group,
            sequence,
        } = &self.blocked;
        let rank = self.rank;
        write!(
            f,
            "rank {rank} waits for rank {by} in {operation} {sequence} of {group}"
        )
    }
}

impl Failure {
    pub(crate) fn of(rank: usize, cause: &Error) -> Self {
        Self {
            rank,
            kind: cause.kind().code(),
            text: cause.to_string(),
        }
    }

    fn error(self) -> Error {
        let message = format!("rank {} failed, so all do", self.rank);
        Error::new(ErrorKind::from_code(self.kind), "communicate", message)
            .with("rank", self.rank)
            .caused_by(self.text)
    }
}

fn publish(store: &Store, failure: &Failure) -> Result<()> {
    if store.add("failures", 1)? == 1 {
        store.set(FAILURE, &json(failure))?;
    }
    Ok(())
}

/// Leaves word, at the store that a launcher keeps, of a rank that cannot do so itself.
///
/// # Errors
/// `RankLost` if the store does not answer.
pub fn announce_loss(store: &Store, rank: usize, cause: &Error) -> Result<()> {
    publish(
        &store.under(environment::OWN_RUN),
        &Failure::of(rank, cause),
    )
}

/// Until the process leaves the world.
pub(crate) fn watch(seen: &Watched) {
    let mut said = None;
    let mut count = 0;
    loop {
        match seen.lock_duty(PERIOD) {
            Duty::End => return,
            Duty::Publish(failure) => {
                // Where the store is gone, so is whoever would read it.
                let _ = publish(&seen.store, &failure);
            }
            Duty::Look(blocked) if !seen.has_failed() => {
                let long = blocked.filter(|(since, _)| since.elapsed() > PATIENCE);
                let now = long.map(|(_, blocked)| blocked);
                let looked = look(&seen.store).and_then(|failure| {
                    if now.is_some() || said.is_some() {
                        count += 1;
                        let blocked = now.clone();
                        let key = format!("blocked/{}", seen.rank);
                        seen.store.set(&key, &json(&Status { blocked, count }))?;
                        said = now;
                    }
                    Ok(failure)
                });
                match looked {
                    Ok(None) => {}
                    Ok(Some(failure)) => seen.fail(&failure.error(), true),
                    Err(_) if seen.is_closing() => return,
                    Err(cause) => seen.fail(&lost(seen.keeper, &cause), true),
                }
            }
            Duty::Look(_) => {}
        }
    }
}

fn look(store: &Store) -> Result<Option<Failure>> {
    let bytes = store.get(FAILURE)?;
    Ok(bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()))
}

fn lost(keeper: &str, cause: &Error) -> Error {
    let message = format!("{keeper}, which keeps the store at which ranks meet, is gone");
    let error = Error::new(ErrorKind::RankLost, "communicate", message);
    let error = match keeper.strip_prefix("rank ") {
        Some(rank) => error.with("missing", format!("[{rank}]")),
        None => error,
    };
    error.caused_by(cause.duplicate())
}

/// Of ranks that did not come in time: those that wait for nobody themselves, and who waits for whom. Where all wait in
/// a circle, they are the causes themselves.
pub(crate) fn find_causes(
    store: &Store,
    own: usize,
    missing: &BTreeSet<usize>,
) -> (Vec<usize>, Vec<Waiting>) {
    let status = |rank: usize| -> Option<Status> {
        let bytes = store.get(&format!("blocked/{rank}")).ok()??;
        serde_json::from_slice(&bytes).ok()
    };
    let mut causes = BTreeSet::new();
    let mut waiting = Vec::new();
    let mut seen = BTreeSet::from([own]);
    let mut queue: Vec<usize> = missing.iter().copied().collect();
    while let Some(rank) = queue.pop() {
        if !seen.insert(rank) {
            continue;
        }
        let blocked = status(rank).and_then(|before| {
            before.blocked.as_ref()?;
            thread::sleep(3 * PERIOD);
            // One that does not count on was stopped as it waited.
            status(rank).filter(|now| now.count > before.count)?.blocked
        });
        match blocked {
            Some(blocked) => {
                queue.push(blocked.by);
                waiting.push(Waiting { rank, blocked });
            }
            None => {
                causes.insert(rank);
            }
        }
    }
    if causes.is_empty() {
        causes.clone_from(missing);
    }
    (causes.into_iter().collect(), waiting)
}

fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).unwrap_or_default()
}

/// How long from now.
pub(crate) fn deadline(timeout: Duration) -> Instant {
    let now = Instant::now();
    // Beyond what an instant holds is for ever.
    now.checked_add(timeout)
        .unwrap_or_else(|| now + Duration::from_secs(10 * 365 * 86400))
}
