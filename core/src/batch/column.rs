//! Named per-token and per-sequence data that travels with a batch.

use crate::{DType, Error, ErrorKind, Result, View};

/// What a column's rows belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColumnScope {
    /// One row a token: `[T, ...]`.
    Token,
    /// One row a sequence: `[B, ...]`.
    Sequence,
}

/// A column's values.
#[derive(Debug, Clone, PartialEq)]
pub enum ColumnData {
    /// Real numbers (advantages, old log-probs, rewards).
    F32(Vec<f32>),
    /// Real numbers in full precision.
    F64(Vec<f64>),
    /// Ids.
    I64(Vec<i64>),
    /// Ids (routing).
    I32(Vec<i32>),
    /// Flags and masks.
    U8(Vec<u8>),
}

impl ColumnData {
    /// The values as a view.
    pub fn view(&self) -> View<'_> {
        match self {
            Self::F32(v) => v.into(),
            Self::F64(v) => v.into(),
            Self::I64(v) => v.into(),
            Self::I32(v) => v.into(),
            Self::U8(v) => v.into(),
        }
    }

    pub(super) fn rows(&self, width: usize, rows: &[std::ops::Range<usize>]) -> Self {
        fn take<T: Copy>(v: &[T], width: usize, rows: &[std::ops::Range<usize>]) -> Vec<T> {
            rows.iter()
                .flat_map(|r| &v[r.start * width..r.end * width])
                .copied()
                .collect()
        }
        match self {
            Self::F32(v) => Self::F32(take(v, width, rows)),
            Self::F64(v) => Self::F64(take(v, width, rows)),
            Self::I64(v) => Self::I64(take(v, width, rows)),
            Self::I32(v) => Self::I32(take(v, width, rows)),
            Self::U8(v) => Self::U8(take(v, width, rows)),
        }
    }
}

/// A named column: scope, trailing shape (`[]` for a scalar a row), values in row-major order.
#[derive(Debug, Clone, PartialEq)]
pub struct Column {
    /// What a row belongs to.
    pub scope: ColumnScope,
    /// Shape of a row.
    pub trailing: Vec<usize>,
    /// The values.
    pub data: ColumnData,
}

impl Column {
    /// A scalar a token.
    pub fn per_token(data: ColumnData) -> Self {
        Self {
            scope: ColumnScope::Token,
            trailing: Vec::new(),
            data,
        }
    }

    /// A scalar a sequence.
    pub fn per_sequence(data: ColumnData) -> Self {
        Self {
            scope: ColumnScope::Sequence,
            trailing: Vec::new(),
            data,
        }
    }

    /// Elements in a row.
    pub fn width(&self) -> usize {
        self.trailing.iter().product()
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.data.view().dtype()
    }

    /// The values as f64 (columns are always in host memory).
    pub fn to_f64(&self) -> Vec<f64> {
        self.data.view().to_f64().unwrap_or_default()
    }

    /// A loss mask is a 0 or 1 a token.
    pub(super) fn check_mask(&self) -> Result<()> {
        let fault = |found: String| {
            Err(Error::new(
                ErrorKind::Data,
                "set_column",
                "a loss mask must hold a 0 or a 1 for each token",
            )
            .with("column", super::LOSS_MASK)
            .with("expected", "u8, 0 or 1, one a token")
            .with("found", found))
        };
        match &self.data {
            ColumnData::U8(mask)
                if self.scope == ColumnScope::Token && self.trailing.is_empty() =>
            {
                match mask.iter().position(|&m| m > 1) {
                    None => Ok(()),
                    Some(token) => fault(format!("{} at token {token}", mask[token])),
                }
            }
            _ => fault(format!(
                "{}, {:?}, rows of {:?}",
                self.dtype(),
                self.scope,
                self.trailing
            )),
        }
    }

    pub(super) fn check(&self, name: &str, num_tokens: usize, num_sequences: usize) -> Result<()> {
        let rows = match self.scope {
            ColumnScope::Token => num_tokens,
            ColumnScope::Sequence => num_sequences,
        };
        let (expected, found) = (rows * self.width(), self.data.view().len());
        if expected == found {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Data,
            "set_column",
            "the column's length does not fit the batch",
        )
        .with("column", name)
        .with(
            "expected",
            format!("{rows} rows of {} = {expected}", self.width()),
        )
        .with("found", found))
    }
}
