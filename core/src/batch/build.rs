//! Ways to make a batch, each of which keeps its invariants.

use indexmap::IndexMap;

use super::{Batch, Column, ColumnData, ColumnScope, LOSS_MASK};
use crate::{Error, ErrorKind, Result};

/// Collects sequences one by one.
///
/// ```
/// # use drivetrain_core::batch::BatchBuilder;
/// let mut builder = BatchBuilder::new();
/// builder.push(&[5, 6, 7], Some(&[false, true, true]))?;
/// builder.push(&[8, 9], None)?;
/// let batch = builder.build()?;
/// assert_eq!(batch.starts(), [0, 3, 5]);
/// assert_eq!(batch.scored(), [false, true, true, false, true]);
/// # Ok::<(), drivetrain_core::Error>(())
/// ```
#[derive(Debug)]
pub struct BatchBuilder {
    tokens: Vec<u32>,
    starts: Vec<usize>,
    mask: Vec<u8>,
    groups: Option<Vec<usize>>,
    columns: IndexMap<String, Column>,
}

impl Default for BatchBuilder {
    fn default() -> Self {
        Self::new()
    }
}

impl BatchBuilder {
    /// An empty batch.
    pub fn new() -> Self {
        Self {
            tokens: Vec::new(),
            starts: vec![0],
            mask: Vec::new(),
            groups: None,
            columns: IndexMap::new(),
        }
    }

    /// Adds a sequence; without a mask every token but the first is scored.
    ///
    /// # Errors
    /// `Data` if the mask's length is not the sequence's.
    pub fn push(&mut self, tokens: &[u32], loss_mask: Option<&[bool]>) -> Result<&mut Self> {
        if let Some(mask) = loss_mask
            && mask.len() != tokens.len()
        {
            return Err(Error::new(
                ErrorKind::Data,
                "build_batch",
                "loss_mask and tokens differ in length",
            )
            .with("sequence", self.starts.len() - 1)
            .with("expected", tokens.len())
            .with("found", mask.len()));
        }
        self.tokens.extend_from_slice(tokens);
        match loss_mask {
            Some(mask) => self.mask.extend(mask.iter().map(|&m| u8::from(m))),
            None => self.mask.extend(std::iter::repeat_n(1, tokens.len())),
        }
        self.starts.push(self.tokens.len());
        Ok(self)
    }

    /// Where each group starts among the sequences, and the end. Default: a group a sequence.
    pub fn groups(&mut self, groups: Vec<usize>) -> &mut Self {
        self.groups = Some(groups);
        self
    }

    /// Adds a column, checked in [`Self::build`].
    pub fn column(&mut self, name: impl Into<String>, column: Column) -> &mut Self {
        self.columns.insert(name.into(), column);
        self
    }

    /// The batch, as one micro-batch.
    ///
    /// # Errors
    /// `Data` if the groups do not cover the sequences, or a column's length does not fit.
    pub fn build(self) -> Result<Batch> {
        let num_sequences = self.starts.len() - 1;
        let groups = self.groups.unwrap_or_else(|| (0..=num_sequences).collect());
        check_cut("groups", &groups, num_sequences)?;
        let mut batch = Batch {
            tokens: self.tokens,
            starts: self.starts,
            groups,
            microbatches: vec![0, num_sequences],
            columns: IndexMap::new(),
        };
        batch.set_column(LOSS_MASK, Column::per_token(ColumnData::U8(self.mask)))?;
        for (name, column) in self.columns {
            batch.set_column(name, column)?;
        }
        Ok(batch)
    }
}

impl Batch {
    /// The same sequences, cut into micro-batches at these sequence indices.
    ///
    /// # Errors
    /// `Data` if the cuts do not begin at 0, decrease, do not end at B, or split a group.
    pub fn with_microbatches(mut self, cuts: Vec<usize>) -> Result<Batch> {
        check_cut("microbatches", &cuts, self.num_sequences())?;
        if let Some(split) = cuts.iter().find(|c| self.groups.binary_search(c).is_err()) {
            return Err(
                Error::new(ErrorKind::Data, "cut_batch", "a micro-batch splits a group")
                    .with("sequence", split),
            );
        }
        self.microbatches = cuts;
        Ok(self)
    }
}

fn check_cut(what: &'static str, cut: &[usize], end: usize) -> Result<()> {
    let sound = cut.first() == Some(&0) && cut.last() == Some(&end) && cut.is_sorted();
    if sound {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Data,
        "build_batch",
        "the cut does not cover the sequences in order",
    )
    .with("field", what)
    .with("expected", format!("0, ..., {end}, never decreasing"))
    .with("found", format!("{cut:?}")))
}

pub(super) fn select(batch: &Batch, sequences: &[usize]) -> Batch {
    let token_rows: Vec<_> = sequences.iter().map(|&s| batch.sequence(s)).collect();
    let sequence_rows: Vec<_> = sequences.iter().map(|&s| s..s + 1).collect();
    let mut starts = vec![0];
    for rows in &token_rows {
        starts.push(starts[starts.len() - 1] + rows.len());
    }
    let columns = batch
        .columns
        .iter()
        .map(|(name, column)| {
            let rows = match column.scope {
                ColumnScope::Token => &token_rows,
                ColumnScope::Sequence => &sequence_rows,
            };
            let data = column.data.rows(column.width(), rows);
            (
                name.clone(),
                Column {
                    data,
                    ..column.clone()
                },
            )
        })
        .collect();
    Batch {
        tokens: token_rows
            .iter()
            .flat_map(|r| &batch.tokens[r.clone()])
            .copied()
            .collect(),
        starts,
        groups: selected_groups(batch, sequences),
        microbatches: vec![0, sequences.len()],
        columns,
    }
}

fn selected_groups(batch: &Batch, sequences: &[usize]) -> Vec<usize> {
    let mut groups = vec![0];
    let mut at = 0;
    while at < sequences.len() {
        let first = sequences[at];
        let whole = batch.groups.binary_search(&first).ok().and_then(|g| {
            let len = batch.groups.get(g + 1)? - first;
            let run = sequences.get(at..at + len)?;
            (len > 0 && run.iter().enumerate().all(|(i, &s)| s == first + i)).then_some(len)
        });
        at += whole.unwrap_or(1);
        groups.push(at);
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch() -> Batch {
        let mut builder = BatchBuilder::default();
        builder.push(&[1, 2, 3], None).unwrap();
        builder.build().unwrap()
    }

    #[test]
    fn a_loss_mask_is_a_0_or_1_a_token_and_nothing_else() {
        let masks = [
            Column::per_token(ColumnData::I64(vec![0, 1, 1])),
            Column::per_token(ColumnData::F32(vec![0.0, 1.0, 1.0])),
            Column::per_token(ColumnData::U8(vec![0, 1, 2])),
            Column::per_sequence(ColumnData::U8(vec![1])),
            Column {
                trailing: vec![2],
                ..Column::per_token(ColumnData::U8(vec![0; 6]))
            },
        ];
        for mask in masks {
            let error = batch().set_column(LOSS_MASK, mask).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Data);
        }
        let mut batch = batch();
        let mask = Column::per_token(ColumnData::U8(vec![1, 0, 1]));
        batch.set_column(LOSS_MASK, mask).unwrap();
        assert_eq!(batch.scored(), [false, false, true]);
    }

    #[test]
    fn a_batch_of_no_sequences_has_one_empty_micro_batch_to_take_part_with() {
        let none = BatchBuilder::default().build().unwrap();
        assert_eq!(none.num_sequences(), 0);
        assert_eq!(none.iter_microbatches().count(), 1);
        assert_eq!(batch().iter_microbatches().count(), 1);
        assert_eq!(batch().predicted(), [false, true, true]);
    }
}
