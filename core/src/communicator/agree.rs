//! All ranks succeed or all fail.

use super::Communicator;
use crate::{Error, ErrorKind, Result};

impl dyn Communicator + '_ {
    /// This rank's value if every rank has one. Otherwise an error on every rank: of the lowest rank that
    /// failed its own, of every other rank one of the same kind that names this rank and quotes its error.
    ///
    /// # Errors
    /// That; the communicator's, where this rank has no error of its own.
    pub fn agree<T>(&self, operation: &'static str, outcome: Result<T>) -> Result<T> {
        let text = match &outcome {
            Ok(_) => String::new(),
            Err(error) => error.to_string(),
        };
        // Of each rank its error's kind, counted from 1 (0 is none), and the length of the text.
        let kind = outcome.as_ref().err().map_or(0, |e| e.kind().code() + 1);
        let own = [kind, text.len() as i64];
        let mut all = vec![0i64; 2 * self.world_size()];
        let gathered = self
            .all_gather(
                own.as_slice().into(),
                (&mut all).into(),
                &vec![2; self.world_size()],
            )
            .and_then(super::Work::wait);
        let value = match (outcome, gathered) {
            (Err(own), Err(_)) => return Err(own),
            (Ok(_), Err(lost)) => return Err(lost),
            (outcome, Ok(())) => outcome,
        };
        let Some(first) = all.chunks_exact(2).position(|rank| rank[0] != 0) else {
            return value;
        };
        let mut quoted = match first == self.rank() {
            true => text.into_bytes(),
            false => vec![0u8; all[2 * first + 1] as usize],
        };
        let told = self
            .broadcast((&mut quoted).into(), first)
            .and_then(super::Work::wait);
        match value {
            Err(own) if first == self.rank() => return Err(own.with("rank", self.members()[first])),
            Err(own) if told.is_err() => return Err(own),
            _ => told?,
        }
        let kind = ErrorKind::from_code(all[2 * first] - 1);
        let first = self.members()[first];
        Err(
            Error::new(kind, operation, format!("rank {first} failed, so all do"))
                .with("rank", first)
                .caused_by(String::from_utf8_lossy(&quoted).into_owned())
                .secondary(),
        )
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::launch::run_ranks;

    fn fault(kind: ErrorKind) -> Error {
        Error::new(kind, "read", format!("a fault of kind {kind:?}"))
    }

    #[test]
    fn every_rank_has_the_kind_and_the_text_of_the_lowest_that_failed() {
        let kinds = [None, Some(ErrorKind::Data), None, Some(ErrorKind::File)];
        let seen = run_ranks(4, Duration::from_secs(20), |world| {
            let own = kinds[world.rank()];
            let outcome = own.map_or(Ok(world.rank()), |kind| Err(fault(kind)));
            let error = world.agree("load", outcome).unwrap_err();
            let again = world.agree("load", Ok(world.rank()))?;
            assert_eq!(again, world.rank());
            Ok((
                error.kind(),
                error.is_secondary(),
                error.context("rank").map(str::to_owned),
                error.to_string(),
            ))
        })
        .unwrap();
        for (rank, (kind, secondary, named, text)) in seen.into_iter().enumerate() {
            assert_eq!((kind, secondary), (ErrorKind::Data, rank != 1));
            assert_eq!(named.as_deref(), Some("1"));
            assert!(text.contains("a fault of kind Data"), "{text}");
        }
    }

    #[test]
    fn an_error_outlives_a_world_that_is_gone() {
        let kinds = run_ranks(2, Duration::from_secs(20), |world| {
            if world.rank() == 0 {
                return Ok(None);
            }
            let error = world.agree::<()>("load", Err(fault(ErrorKind::Data)));
            Ok(error.err().map(|e| e.kind()))
        });
        assert_eq!(kinds.unwrap(), [None, Some(ErrorKind::Data)]);
    }
}
