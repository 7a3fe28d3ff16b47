//! An objective whose results are held against their shapes, so that no engine has to.

use super::{Objective, ObjectiveValue, Requirements, TokenOutputs};
use crate::{
    Error, ErrorKind, Result,
    batch::{Batch, BatchTotals, Column},
};

/// Another objective, refused where a derivative is missing or has not one element for each output.
///
/// Derivatives that are not finite pass: the step that they lead to is skipped, on every rank alike.
#[derive(Debug)]
pub(crate) struct Checked<'a>(pub(crate) &'a dyn Objective);

impl Objective for Checked<'_> {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn requires(&self) -> Requirements {
        self.0.requires()
    }

    fn derivative_known(&self) -> bool {
        self.0.derivative_known()
    }

    fn prepare(&self, global: &mut Batch, totals: &mut BatchTotals) -> Result<()> {
        self.0.prepare(global, totals)
    }

    fn evaluate(
        &self,
        microbatch: &Batch,
        outputs: &TokenOutputs,
        totals: &BatchTotals,
    ) -> Result<ObjectiveValue> {
        let value = self.0.evaluate(microbatch, outputs, totals)?;
        let requires = self.0.requires();
        let tokens = microbatch.num_tokens();
        let at = requires.log_probs_at.as_deref();
        let ids = tokens
            * at.and_then(|name| microbatch.column(name))
                .map_or(0, Column::width);
        let fields = [
            ("d_log_probs", true, Some(&value.d_log_probs), tokens),
            (
                "d_entropy",
                requires.entropy,
                value.d_entropy.as_ref(),
                tokens,
            ),
            (
                "d_log_probs_at",
                at.is_some(),
                value.d_log_probs_at.as_ref(),
                ids,
            ),
            ("d_values", requires.value, value.d_values.as_ref(), tokens),
        ];
        for (field, required, derivative, expected) in fields {
            let found = derivative.map(Vec::len);
            if required && found != Some(expected) {
                return Err(self.misshapen(field, expected, found));
            }
        }
        Ok(value)
    }
}

impl Checked<'_> {
    fn misshapen(&self, field: &str, expected: usize, found: Option<usize>) -> Error {
        let found = found.map_or("none".to_owned(), |n| n.to_string());
        Error::new(
            ErrorKind::Defect,
            "evaluate_objective",
            "the objective must give one derivative for each output that it required",
        )
        .with("objective", self.name())
        .with("field", field)
        .with("expected", format!("{expected} elements"))
        .with("found", found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::BatchBuilder;

    /// Requires entropy and gives what it is told to.
    #[derive(Debug)]
    struct Given(ObjectiveValue);

    impl Objective for Given {
        fn name(&self) -> &str {
            "given"
        }

        fn requires(&self) -> Requirements {
            Requirements {
                entropy: true,
                ..Requirements::default()
            }
        }

        fn evaluate(&self, _: &Batch, _: &TokenOutputs, _: &BatchTotals) -> Result<ObjectiveValue> {
            Ok(self.0.clone())
        }
    }

    fn refused(d_log_probs: usize, d_entropy: Option<usize>) -> Option<String> {
        let mut builder = BatchBuilder::new();
        builder.push(&[1, 2, 3], None).unwrap();
        let batch = builder.build().unwrap();
        let given = Given(ObjectiveValue {
            d_log_probs: vec![f64::INFINITY; d_log_probs],
            d_entropy: d_entropy.map(|n| vec![0.0; n]),
            ..ObjectiveValue::default()
        });
        let outputs = TokenOutputs::default();
        let error = Checked(&given)
            .evaluate(&batch, &outputs, &BatchTotals::default())
            .err()?;
        assert_eq!(error.kind(), ErrorKind::Defect);
        error.context("field").map(str::to_owned)
    }

    #[test]
    fn a_derivative_of_another_shape_is_refused() {
        assert_eq!(refused(3, Some(3)), None);
        assert_eq!(refused(2, Some(3)).as_deref(), Some("d_log_probs"));
        assert_eq!(refused(3, Some(4)).as_deref(), Some("d_entropy"));
        assert_eq!(refused(3, None).as_deref(), Some("d_entropy"));
    }
}
