//! A number that tells two batches apart.

use xxhash_rust::xxh3::Xxh3;

use super::{Batch, ColumnScope};

impl Batch {
    /// Of tokens, cuts and columns: equal for equal batches, and for others all but certainly not.
    pub fn fingerprint(&self) -> u64 {
        let mut hash = Xxh3::new();
        hash.update(bytemuck::cast_slice(&self.tokens));
        for cuts in [&self.starts, &self.groups, &self.microbatches] {
            hash.update(&(cuts.len() as u64).to_le_bytes());
            for &cut in cuts {
                hash.update(&(cut as u64).to_le_bytes());
            }
        }
        for (name, column) in &self.columns {
            hash.update(&(name.len() as u64).to_le_bytes());
            hash.update(name.as_bytes());
            hash.update(&[
                column.dtype() as u8,
                u8::from(column.scope == ColumnScope::Token),
            ]);
            hash.update(&(column.width() as u64).to_le_bytes());
            hash.update(column.data.view().host_bytes().unwrap_or_default());
        }
        hash.digest()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::{BatchBuilder, Column, ColumnData};

    fn batch(sequences: &[&[u32]]) -> Batch {
        let mut builder = BatchBuilder::new();
        for tokens in sequences {
            builder.push(tokens, None).unwrap();
        }
        builder.build().unwrap()
    }

    #[test]
    fn whatever_differs_shows() {
        let first = batch(&[&[1, 2, 3], &[4]]);
        assert_eq!(first.fingerprint(), first.clone().fingerprint());
        let with = |name: &str, data: ColumnData| {
            let mut batch = first.clone();
            batch.set_column(name, Column::per_token(data)).unwrap();
            batch
        };
        let others = [
            first.clone(),
            batch(&[&[1, 2], &[3, 4]]),
            batch(&[&[1, 2, 3], &[5]]),
            batch(&[&[1, 2, 3], &[4], &[]]),
            first.clone().with_microbatches(vec![0, 1, 2]).unwrap(),
            first.clone().with_microbatches(vec![0, 0, 2]).unwrap(),
            with("a", ColumnData::I32(vec![0; 4])),
            with("b", ColumnData::I32(vec![0; 4])),
            with("a", ColumnData::I32(vec![0, 0, 0, 1])),
            with("a", ColumnData::F32(vec![0.0; 4])),
            with("a", ColumnData::F32(vec![0.0, -0.0, 0.0, 0.0])),
        ];
        for (i, one) in others.iter().enumerate() {
            for other in &others[..i] {
                assert_ne!(one.fingerprint(), other.fingerprint(), "{one:?} {other:?}");
            }
        }
    }
}
