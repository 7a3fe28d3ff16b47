//! A sequence as a line gives it.

use drivetrain_core::batch::ColumnScope;
use indexmap::IndexMap;
use xxhash_rust::xxh3::Xxh3;

/// A value of one column for one sequence, row-major.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ColumnValue {
    pub(crate) scope: ColumnScope,
    pub(crate) trailing: Vec<usize>,
    pub(crate) values: Vec<f64>,
    /// Whether all values were written as integers.
    pub(crate) integral: bool,
}

/// One sequence.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sample {
    pub(crate) tokens: Vec<u32>,
    pub(crate) mask: Vec<bool>,
    pub(crate) columns: IndexMap<String, ColumnValue>,
}

impl Sample {
    pub(crate) fn new(tokens: Vec<u32>, mask: Vec<bool>) -> Self {
        debug_assert_eq!(tokens.len(), mask.len());
        Self {
            tokens,
            mask,
            columns: IndexMap::new(),
        }
    }

    /// Whether the token at `position` counts: a sequence's first never does.
    pub(crate) fn is_scored(&self, position: usize) -> bool {
        position > 0 && self.mask[position]
    }

    /// Whether any token counts.
    pub(crate) fn is_any_scored(&self) -> bool {
        (0..self.tokens.len()).any(|position| self.is_scored(position))
    }

    /// Cuts at `length` tokens.
    pub(crate) fn truncate(&mut self, length: usize) {
        self.tokens.truncate(length);
        self.mask.truncate(length);
        for column in self.columns.values_mut() {
            if column.scope == ColumnScope::Token {
                let width: usize = column.trailing.iter().product();
                column.values.truncate(length * width);
            }
        }
    }

    /// Bytes it takes in memory, about.
    pub(crate) fn num_bytes(&self) -> usize {
        let columns = self.columns.iter();
        let columns: usize = columns
            .map(|(n, c)| n.len() + 96 + 8 * c.values.len())
            .sum();
        size_of::<Self>() + 5 * self.tokens.len() + columns
    }

    /// Adds everything that training sees of it.
    pub(crate) fn hash(&self, hasher: &mut Xxh3) {
        hasher.update(&self.tokens.len().to_le_bytes());
        for (token, &scored) in self.tokens.iter().zip(&self.mask) {
            hasher.update(&token.to_le_bytes());
            hasher.update(&[u8::from(scored)]);
        }
        let mut columns: Vec<_> = self.columns.iter().collect();
        columns.sort_by_key(|(name, _)| *name);
        for (name, column) in columns {
            hasher.update(name.as_bytes());
            hasher.update(&column.values.len().to_le_bytes());
            for value in &column.values {
                hasher.update(&value.to_bits().to_le_bytes());
            }
        }
    }
}
