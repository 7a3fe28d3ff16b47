//! What a case found: every comparison with its error, tolerance and share.

use drivetrain_core::{Error, ErrorKind, Result};
use serde::Serialize;

use crate::compare::{Bound, Comparison, compare};

/// Comparisons of one case.
#[derive(Debug, Default)]
pub struct Findings {
    comparisons: Vec<Comparison>,
}

impl Findings {
    /// Compares numbers.
    pub fn check(
        &mut self,
        quantity: &str,
        of: &str,
        found: &[f64],
        expected: &[f64],
        bound: Bound<'_>,
    ) {
        self.comparisons
            .push(compare(quantity, of, found, expected, bound));
    }

    /// Compares one number.
    pub fn number(&mut self, quantity: &str, of: &str, found: f64, expected: f64, tolerance: f64) {
        let bound = Bound::Uniform(tolerance);
        self.check(quantity, of, &[found], &[expected], bound);
    }

    /// States a fact that must hold.
    pub fn fact(&mut self, what: &str, holds: bool) {
        let (found, expected) = (f64::from(u8::from(holds)), 1.0);
        let mut comparison = compare(what, "", &[found], &[expected], Bound::Exact);
        if !holds {
            comparison.fault = Some("does not hold".to_owned());
        }
        self.comparisons.push(comparison);
    }

    /// Takes over another's comparisons.
    pub fn extend(&mut self, other: Self) {
        self.comparisons.extend(other.comparisons);
    }

    /// Everything compared so far.
    pub fn comparisons(&self) -> &[Comparison] {
        &self.comparisons
    }

    /// The verdict.
    ///
    /// # Errors
    /// `Parity` with every comparison that failed; `Defect` if nothing was compared.
    pub fn verdict(&self) -> Result<()> {
        if self.comparisons.is_empty() {
            return Err(Error::new(
                ErrorKind::Defect,
                "conformance",
                "the case compared nothing",
            ));
        }
        let mut failed: Vec<_> = self.comparisons.iter().filter(|c| !c.passed()).collect();
        if failed.is_empty() {
            return Ok(());
        }
        let count = failed.len();
        failed.sort_by(|a, b| b.share.total_cmp(&a.share));
        let shown: Vec<_> = failed.iter().take(12).map(|c| format!("\n  {c}")).collect();
        let message = format!(
            "{count} of {} comparisons failed{}",
            self.comparisons.len(),
            shown.concat()
        );
        Err(Error::new(ErrorKind::Parity, "conformance", message))
    }
}

/// One case's outcome, as the report has it.
#[derive(Debug, Clone, Serialize)]
pub struct CaseReport {
    /// Backend.
    pub backend: String,
    /// Case.
    pub case: String,
    /// Whether it passed.
    pub passed: bool,
    /// The error, where it did not.
    pub error: Option<String>,
    /// Seconds it took.
    pub seconds: f64,
    /// Its comparisons.
    pub comparisons: Vec<Comparison>,
}
