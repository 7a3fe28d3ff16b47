//! What a call must satisfy by itself.

use super::LocalCommunicator;
use crate::{DType, Error, ErrorKind, Result};

impl LocalCommunicator {
    pub(super) fn check_len(
        &self,
        operation: &'static str,
        expected: usize,
        found: usize,
    ) -> Result<()> {
        if expected == found {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Defect,
            operation,
            "a buffer's length does not fit the counts",
        )
        .with("rank", self.members[self.rank])
        .with("group", &self.label)
        .with("expected", expected)
        .with("found", found))
    }

    pub(super) fn check_dtype(
        &self,
        operation: &'static str,
        input: DType,
        output: DType,
    ) -> Result<()> {
        if input == output {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Defect,
            operation,
            "input and output differ in dtype",
        )
        .with("rank", self.members[self.rank])
        .with("group", &self.label)
        .with("expected", input)
        .with("found", output))
    }

    pub(super) fn check_counts(&self, operation: &'static str, counts: &[usize]) -> Result<()> {
        if counts.len() == self.members.len() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Defect,
            operation,
            "as many counts as members are needed",
        )
        .with("rank", self.members[self.rank])
        .with("group", &self.label)
        .with("expected", self.members.len())
        .with("found", counts.len()))
    }

    pub(super) fn check_peer(&self, operation: &'static str, peer: usize) -> Result<()> {
        if peer < self.members.len() {
            return Ok(());
        }
        Err(
            Error::new(ErrorKind::Defect, operation, "no such rank in the group")
                .with("rank", self.members[self.rank])
                .with("group", &self.label)
                .with("expected", format!("below {}", self.members.len()))
                .with("found", peer),
        )
    }
}
