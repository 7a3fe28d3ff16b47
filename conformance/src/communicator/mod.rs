//! What every `Communicator` must do: ours over threads, others over processes, a stranger's.
//!
//! A world is handed in as a function that runs a body on each rank; every case runs it on some world sizes.

mod collectives;
mod faults;
mod groups;
mod messages;

use std::{sync::Arc, time::Duration};

use drivetrain_core::{Result, communicator::Communicator};
use libtest_mimic::{Failed, Trial};

use crate::suite::Findings;

/// What one rank does.
pub type RankMain<'a> = &'a (dyn Fn(Arc<dyn Communicator>) -> Result<()> + Sync);

/// Runs a body on every rank of a new world of this size and timeout, and returns the first failure.
pub type Launch = Arc<dyn Fn(usize, Duration, RankMain<'_>) -> Result<()> + Send + Sync>;

/// Long enough for a loaded machine.
const PATIENCE: Duration = Duration::from_secs(30);

type Body = fn(&Launch, &mut Findings) -> Result<()>;

/// The cases, as tests named `communicator/NAME/...`.
pub fn communicator_cases(name: &str, launch: &Launch) -> Vec<Trial> {
    let all = [
        collectives::CASES,
        groups::CASES,
        messages::CASES,
        faults::CASES,
    ]
    .concat();
    let trial = |(case, body): (&str, Body)| {
        let launch = launch.clone();
        Trial::test(format!("communicator/{name}/{case}"), move || {
            let mut findings = Findings::default();
            body(&launch, &mut findings)
                .and_then(|()| findings.verdict())
                .map_err(|error| Failed::from(error.to_string()))
        })
    };
    all.into_iter().map(trial).collect()
}

/// Runs a body on each rank, which compares into findings of its own; all are collected.
fn each_rank(
    launch: &Launch,
    world_size: usize,
    findings: &mut Findings,
    body: impl Fn(&dyn Communicator, &mut Findings) -> Result<()> + Sync,
) -> Result<()> {
    let collected = std::sync::Mutex::new(Vec::new());
    launch(world_size, PATIENCE, &|communicator| {
        let mut own = Findings::default();
        body(&*communicator, &mut own)?;
        let mut all = collected
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        all.push(own);
        Ok(())
    })?;
    let all = collected
        .into_inner()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    findings.fact("every rank ran", all.len() == world_size);
    all.into_iter().for_each(|own| findings.extend(own));
    Ok(())
}
