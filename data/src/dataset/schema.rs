//! The columns that every line of a file has.

use drivetrain_core::{
    Result,
    batch::{Column, ColumnData, ColumnScope},
};
use indexmap::IndexMap;

use crate::line::{ColumnValue, Place, Sample};

/// The columns by name, in the order of the first line.
#[derive(Debug, Default)]
pub(super) struct Schema {
    columns: IndexMap<String, Shape>,
    /// The line that set them.
    first_line: Option<usize>,
}

#[derive(Debug, Clone, PartialEq)]
struct Shape {
    scope: ColumnScope,
    trailing: Vec<usize>,
    /// Whether all lines' values are integers.
    integral: bool,
}

impl Schema {
    /// Takes the columns of the first sample, and holds every later one against them.
    ///
    /// # Errors
    /// `Data` naming the line, the column, and the line it differs from.
    pub(super) fn admit(&mut self, sample: &Sample, place: Place<'_>) -> Result<()> {
        let Some(first_line) = self.first_line else {
            self.first_line = Some(place.line);
            let shapes = sample
                .columns
                .iter()
                .map(|(name, value)| (name.clone(), Shape::of(value)));
            self.columns = shapes.collect();
            return Ok(());
        };
        let differs = |name: &str, expected: String, found: String| {
            place
                .field_error(
                    name,
                    format!("the line's columns differ from those of line {first_line}"),
                )
                .with("expected", expected)
                .with("found", found)
                .help("every line of a file has the same columns")
        };
        for (name, value) in &sample.columns {
            let found = Shape::of(value);
            let Some(shape) = self.columns.get_mut(name) else {
                return Err(differs(name, "no such column".to_owned(), found.describe()));
            };
            if (shape.scope, &shape.trailing) != (found.scope, &found.trailing) {
                return Err(differs(name, shape.describe(), found.describe()));
            }
            shape.integral &= found.integral;
        }
        match self
            .columns
            .iter()
            .find(|(name, _)| !sample.columns.contains_key(*name))
        {
            Some((name, shape)) => {
                Err(differs(name, shape.describe(), "no such column".to_owned()))
            }
            None => Ok(()),
        }
    }

    /// Columns to fill.
    pub(super) fn columns(&self) -> Columns<'_> {
        Columns {
            schema: self,
            values: vec![Vec::new(); self.columns.len()],
        }
    }
}

impl Shape {
    fn of(value: &ColumnValue) -> Self {
        Self {
            scope: value.scope,
            trailing: value.trailing.clone(),
            integral: value.integral,
        }
    }

    fn describe(&self) -> String {
        match (self.scope, self.trailing.as_slice()) {
            (ColumnScope::Sequence, _) => "a number a sequence".to_owned(),
            (ColumnScope::Token, []) => "a number a token".to_owned(),
            (ColumnScope::Token, trailing) => format!("an array {trailing:?} a token"),
        }
    }
}

/// The columns of a batch in the making.
#[derive(Debug)]
pub(super) struct Columns<'a> {
    schema: &'a Schema,
    values: Vec<Vec<f64>>,
}

impl<'a> Columns<'a> {
    /// Appends the sample's values.
    pub(super) fn push(&mut self, sample: &Sample) {
        for (name, values) in self.schema.columns.keys().zip(&mut self.values) {
            values.extend(&sample.columns[name].values);
        }
    }

    /// The columns by name: `I64` where the whole file has integers only, else `F64`.
    pub(super) fn build(self) -> impl Iterator<Item = (&'a str, Column)> {
        self.schema
            .columns
            .iter()
            .zip(self.values)
            .map(|((name, shape), values)| {
                let data = if shape.integral {
                    ColumnData::I64(values.iter().map(|&v| v as i64).collect())
                } else {
                    ColumnData::F64(values)
                };
                let column = Column {
                    scope: shape.scope,
                    trailing: shape.trailing.clone(),
                    data,
                };
                (name.as_str(), column)
            })
    }
}
