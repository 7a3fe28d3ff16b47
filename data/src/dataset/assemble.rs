//! From groups of lines to a batch.

use drivetrain_core::{
    Result,
    batch::{Batch, BatchBuilder},
};

use super::Dataset;

impl Dataset {
    /// The sequences of these groups, in this order.
    pub(super) fn assemble(&self, groups: impl IntoIterator<Item = usize>) -> Result<Batch> {
        let mut builder = BatchBuilder::new();
        let mut columns = self.schema.columns();
        let mut starts = vec![0];
        for group in groups {
            let mut num_sequences = starts[starts.len() - 1];
            for record in &self.records[self.groups[group]..self.groups[group + 1]] {
                for sample in self.samples(record)?.iter() {
                    builder.push(&sample.tokens, Some(&sample.mask))?;
                    columns.push(sample);
                    num_sequences += 1;
                }
            }
            starts.push(num_sequences);
        }
        builder.groups(starts);
        for (name, column) in columns.build() {
            builder.column(name, column);
        }
        builder.build()
    }
}
