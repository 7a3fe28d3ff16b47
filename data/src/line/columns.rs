//! From a field of numbers to a column.

use drivetrain_core::{Result, batch::ColumnScope};

use super::{
    json::Json,
    place::Place,
    sample::{ColumnValue, Sample},
};

/// Adds the field `field` as the column `name`: a number is one of the sequence, a list has a row a token.
pub(super) fn add(
    sample: &mut Sample,
    name: &str,
    field: &str,
    value: &Json,
    place: Place<'_>,
) -> Result<()> {
    let mut values = Vec::new();
    let mut integral = true;
    let shape = flatten(value, &mut values, &mut integral).ok_or_else(|| {
        place
            .type_error(field, "a number, or a list with an entry a token", value)
            .help("fields that hold no numbers are not read; remove it, or look for a misspelling")
    })?;
    let (scope, trailing) = match shape.split_first() {
        None => (ColumnScope::Sequence, Vec::new()),
        Some((&rows, trailing)) => {
            if rows != sample.tokens.len() {
                return Err(place
                    .field_error(field, "the list does not have an entry a token")
                    .with("expected", sample.tokens.len())
                    .with("found", rows));
            }
            (ColumnScope::Token, trailing.to_vec())
        }
    };
    let column = ColumnValue {
        scope,
        trailing,
        values,
        integral,
    };
    check_finite(sample, &column, field, place)?;
    sample.columns.insert(name.to_owned(), column);
    Ok(())
}

/// Appends the numbers in row-major order; the shape, or none where it is no regular array of numbers.
fn flatten(value: &Json, values: &mut Vec<f64>, integral: &mut bool) -> Option<Vec<usize>> {
    match value {
        Json::Integer(number) => values.push(*number as f64),
        Json::Flag(flag) => values.push(f64::from(u8::from(*flag))),
        Json::Number(number) => {
            *integral = false;
            values.push(*number);
        }
        Json::Integers(list) => {
            values.extend(list.iter().map(|&n| n as f64));
            return Some(vec![list.len()]);
        }
        Json::Flags(list) => {
            values.extend(list.iter().map(|&f| f64::from(u8::from(f))));
            return Some(vec![list.len()]);
        }
        Json::Numbers(list) => {
            *integral = false;
            values.extend(list);
            return Some(vec![list.len()]);
        }
        Json::List(list) => {
            let mut inner: Option<Vec<usize>> = None;
            for item in list {
                let shape = flatten(item, values, integral)?;
                if inner.get_or_insert_with(|| shape.clone()) != &shape {
                    return None;
                }
            }
            let mut shape = vec![list.len()];
            shape.extend(inner?);
            return Some(shape);
        }
        Json::Null | Json::Text(_) | Json::Object(_) => return None,
    }
    Some(Vec::new())
}

fn check_finite(
    sample: &Sample,
    column: &ColumnValue,
    field: &str,
    place: Place<'_>,
) -> Result<()> {
    let width: usize = column.trailing.iter().product();
    let bad = column.values.iter().enumerate().find(|(index, value)| {
        let selected =
            column.scope == ColumnScope::Sequence || sample.is_scored(index / width.max(1));
        selected && !value.is_finite()
    });
    match bad {
        None => Ok(()),
        Some((index, _)) => Err(place
            .field_error(field, "no number for a scored token")
            .with("position", index / width.max(1))
            .with("found", "null")),
    }
}
