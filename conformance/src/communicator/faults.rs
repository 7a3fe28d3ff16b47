//! Failures: a rank that does not come, a rank that aborts, counts that do not fit. All others fail promptly,
//! and say who and what.

use std::time::{Duration, Instant};

use drivetrain_core::{
    Error, ErrorKind, Result, ViewMut,
    communicator::{Communicator, ReduceOp},
};

use super::{Body, Launch, PATIENCE, each_rank};
use crate::suite::Findings;

pub(super) const CASES: &[(&str, Body)] = &[
    ("a_late_rank_is_named", late_rank),
    ("a_failed_rank_ends_the_others", failed_rank),
    ("abort_reaches_everyone", abort),
    ("counts_must_fit", counts_must_fit),
];

/// Two all-reduces work; before the third rank 2 sleeps beyond the timeout.
fn late_rank(launch: &Launch, findings: &mut Findings) -> Result<()> {
    let timeout = Duration::from_millis(500);
    let seen = std::sync::Mutex::new(Vec::new());
    let began = Instant::now();
    let outcome = launch(3, timeout, &|c| {
        for n in 0..3 {
            if n == 2 && c.rank() == 2 {
                std::thread::sleep(timeout * 3);
                return Ok(());
            }
            let mut buffer = [1.0f32; 7];
            let sum = c
                .all_reduce(ViewMut::F32(&mut buffer), ReduceOp::Sum)
                .and_then(|work| work.wait());
            if let Err(error) = sum {
                let mut seen = seen
                    .lock()
                    .unwrap_or_else(std::sync::PoisonError::into_inner);
                seen.push((c.rank(), n, error.duplicate()));
                return Err(error);
            }
        }
        Ok(())
    });
    let took = began.elapsed();
    findings.fact("the world fails", outcome.is_err());
    let soon = took < timeout + Duration::from_secs(5);
    findings.fact("within the timeout and five seconds", soon);
    let seen = seen
        .into_inner()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    findings.fact("both others see it", seen.len() == 2);
    for (_, n, error) in &seen {
        let text = error.to_string();
        findings.fact("at the third operation", *n == 2);
        findings.fact("as a timeout or a lost rank", lost(error));
        findings.fact("the operation is named", text.contains("all_reduce"));
        findings.fact("the missing rank is named", text.contains('2'));
    }
    Ok(())
}

fn lost(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Timeout | ErrorKind::RankLost)
}

/// Rank 1 fails; the others do not wait for the timeout.
fn failed_rank(launch: &Launch, findings: &mut Findings) -> Result<()> {
    let began = Instant::now();
    let outcome = launch(3, PATIENCE, &|c| {
        c.barrier()?;
        if c.rank() == 1 {
            return Err(Error::new(ErrorKind::Data, "read_batch", "the data ended"));
        }
        c.barrier()
    });
    findings.fact("at once", began.elapsed() < PATIENCE / 2);
    let cause = outcome.err().map(|e| e.kind());
    findings.fact(
        "the first cause is reported",
        cause == Some(ErrorKind::Data),
    );
    Ok(())
}

fn abort(launch: &Launch, findings: &mut Findings) -> Result<()> {
    let began = Instant::now();
    each_rank(launch, 3, findings, |c: &dyn Communicator, f| {
        c.barrier()?;
        if c.rank() == 0 {
            c.abort(&Error::new(
                ErrorKind::Interrupted,
                "train",
                "asked to stop",
            ));
        }
        let failed = c.barrier().err();
        f.fact("a pending call fails", failed.is_some());
        let later = c.barrier().err();
        f.fact("a later call fails", later.is_some());
        let named = failed.is_some_and(|e| e.to_string().contains("asked to stop"));
        f.fact("with the cause", named);
        Ok(())
    })?;
    findings.fact("at once", began.elapsed() < PATIENCE / 2);
    Ok(())
}

/// A buffer that does not fit the counts is refused by the rank that has it, before anything is sent.
fn counts_must_fit(launch: &Launch, findings: &mut Findings) -> Result<()> {
    each_rank(launch, 2, findings, |c, f| {
        let input = [1.0f32; 3];
        let mut output = [f32::NAN; 4];
        let short = c
            .all_gather((&input[..]).into(), ViewMut::F32(&mut output), &[2, 2])
            .and_then(|work| work.wait());
        f.fact("an input of another length", short.is_err());
        Ok(())
    })?;
    each_rank(launch, 2, findings, |c, f| {
        let mut buffer = [1.0f32];
        let root = c
            .broadcast(ViewMut::F32(&mut buffer), 5)
            .and_then(|work| work.wait());
        f.fact("a root that is no member", root.is_err());
        Ok(())
    })
}
