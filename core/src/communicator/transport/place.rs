//! A rank's place in a group, and what a call must satisfy by itself.

use std::collections::BTreeSet;

use crate::{DType, Error, ErrorKind, Result, View, ViewMut};

/// A rank's place in a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Its index among the members.
    pub rank: usize,
    /// The members' ranks in the world.
    pub members: Vec<usize>,
    /// What the group is for.
    pub label: String,
}

/// Where rank r's part begins.
pub fn offset(counts: &[usize], rank: usize) -> usize {
    counts[..rank].iter().sum()
}

impl Place {
    /// In the group of all.
    pub fn in_world(rank: usize, world_size: usize) -> Self {
        Self {
            rank,
            members: (0..world_size).collect(),
            label: "world".to_owned(),
        }
    }

    /// Its rank in the world.
    pub fn world_rank(&self) -> usize {
        self.members[self.rank]
    }

    /// In a group of these ranks of this group.
    ///
    /// # Errors
    /// `Defect` if it is none of them, one is no member, or one is named twice.
    pub fn in_subgroup(&self, ranks: &[usize], label: &str) -> Result<Self> {
        const OPERATION: &str = "subgroup";
        let rank = ranks.iter().position(|&r| r == self.rank).ok_or_else(|| {
            let message = "the caller is not in the new group";
            Error::new(ErrorKind::Defect, OPERATION, message)
                .with("rank", self.world_rank())
                .with("found", format!("{ranks:?}"))
        })?;
        let mut seen = BTreeSet::new();
        for &peer in ranks {
            self.check_peer(OPERATION, peer)?;
            if !seen.insert(peer) {
                let message = "a rank is named twice";
                return Err(Error::new(ErrorKind::Defect, OPERATION, message)
                    .with("found", format!("{ranks:?}")));
            }
        }
        Ok(Self {
            rank,
            members: ranks.iter().map(|&r| self.members[r]).collect(),
            label: label.to_owned(),
        })
    }

    /// A buffer is as long as the counts say.
    ///
    /// # Errors
    /// `Defect` if not.
    pub fn check_len(&self, operation: &'static str, expected: usize, found: usize) -> Result<()> {
        if expected == found {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Defect,
            operation,
            "a buffer's length does not fit the counts",
        )
        .with("rank", self.world_rank())
        .with("group", &self.label)
        .with("expected", expected)
        .with("found", found))
    }

    /// Input and output are of one dtype.
    ///
    /// # Errors
    /// `Defect` if not.
    pub fn check_dtype(&self, operation: &'static str, input: DType, output: DType) -> Result<()> {
        if input == output {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Defect,
            operation,
            "input and output differ in dtype",
        )
        .with("rank", self.world_rank())
        .with("group", &self.label)
        .with("expected", input)
        .with("found", output))
    }

    /// There are as many counts as members.
    ///
    /// # Errors
    /// `Defect` if not.
    pub fn check_counts(&self, operation: &'static str, counts: &[usize]) -> Result<()> {
        if counts.len() == self.members.len() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Defect,
            operation,
            "as many counts as members are needed",
        )
        .with("rank", self.world_rank())
        .with("group", &self.label)
        .with("expected", self.members.len())
        .with("found", counts.len()))
    }

    /// There is such a rank in the group.
    ///
    /// # Errors
    /// `Defect` if not.
    pub fn check_peer(&self, operation: &'static str, peer: usize) -> Result<()> {
        if peer < self.members.len() {
            return Ok(());
        }
        Err(
            Error::new(ErrorKind::Defect, operation, "no such rank in the group")
                .with("rank", self.world_rank())
                .with("group", &self.label)
                .with("expected", format!("below {}", self.members.len()))
                .with("found", peer),
        )
    }

    /// What an all-gather is given fits its counts.
    ///
    /// # Errors
    /// `Defect` if not.
    pub fn check_all_gather(
        &self,
        operation: &'static str,
        input: View<'_>,
        output: &ViewMut<'_>,
        counts: &[usize],
    ) -> Result<()> {
        self.check_counts(operation, counts)?;
        self.check_dtype(operation, input.dtype(), output.dtype())?;
        self.check_len(operation, counts[self.rank], input.len())?;
        self.check_len(operation, counts.iter().sum(), output.len())
    }

    /// What a reduce-scatter is given fits its counts.
    ///
    /// # Errors
    /// `Defect` if not.
    pub fn check_reduce_scatter(
        &self,
        operation: &'static str,
        input: View<'_>,
        output: &ViewMut<'_>,
        counts: &[usize],
    ) -> Result<()> {
        self.check_counts(operation, counts)?;
        self.check_dtype(operation, input.dtype(), output.dtype())?;
        self.check_len(operation, counts.iter().sum(), input.len())?;
        self.check_len(operation, counts[self.rank], output.len())
    }

    /// What an all-to-all is given fits its counts.
    ///
    /// # Errors
    /// `Defect` if not.
    pub fn check_all_to_all(
        &self,
        operation: &'static str,
        (input, send_counts): (View<'_>, &[usize]),
        (output, receive_counts): (&ViewMut<'_>, &[usize]),
    ) -> Result<()> {
        self.check_counts(operation, send_counts)?;
        self.check_counts(operation, receive_counts)?;
        self.check_len(operation, send_counts.iter().sum(), input.len())?;
        self.check_len(operation, receive_counts.iter().sum(), output.len())?;
        self.check_dtype(operation, input.dtype(), output.dtype())
    }
}
