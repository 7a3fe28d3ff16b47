//! Comparators: unequal lengths and NaN fail; the worst element is named.

use serde::Serialize;

/// How far each element may be from its expected value.
#[derive(Debug, Clone, Copy)]
pub enum Bound<'a> {
    /// The same for every element.
    Uniform(f64),
    /// One for each element.
    Each(&'a [f64]),
    /// Equal bits.
    Exact,
}

/// The outcome of comparing one quantity.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// What was compared: `log_probs`, `gradient`, ...
    pub quantity: String,
    /// Of what: a parameter, a layout; may be empty.
    pub of: String,
    /// Error of the worst element (the one that uses most of its tolerance).
    pub error: f64,
    /// That element's tolerance.
    pub tolerance: f64,
    /// `error / tolerance`; infinite where either side is NaN or the lengths differ. Passed up to 1.
    pub share: f64,
    /// The worst element.
    pub index: usize,
    /// Its value.
    pub found: f64,
    /// What it should have been.
    pub expected: f64,
    /// Number of elements.
    pub len: usize,
    /// What is wrong, apart from the size of the error.
    pub fault: Option<String>,
}

impl Comparison {
    /// Whether every element is within its tolerance.
    pub fn passed(&self) -> bool {
        self.fault.is_none() && self.share <= 1.0
    }
}

impl std::fmt::Display for Comparison {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let verdict = if self.passed() { "ok" } else { "FAILED" };
        write!(f, "{verdict} {}", self.quantity)?;
        if !self.of.is_empty() {
            write!(f, " of {}", self.of)?;
        }
        if let Some(fault) = &self.fault {
            return write!(f, ": {fault}");
        }
        write!(
            f,
            ": error {:.3e}, tolerance {:.3e}, share {:.3} at [{}] of {} (found {:e}, expected {:e})",
            self.error, self.tolerance, self.share, self.index, self.len, self.found, self.expected
        )
    }
}

/// Compares element by element.
pub fn compare(
    quantity: &str,
    of: &str,
    found: &[f64],
    expected: &[f64],
    bound: Bound<'_>,
) -> Comparison {
    let mut worst = Comparison {
        quantity: quantity.to_owned(),
        of: of.to_owned(),
        error: 0.0,
        tolerance: 0.0,
        share: 0.0,
        index: 0,
        found: found.first().copied().unwrap_or(0.0),
        expected: expected.first().copied().unwrap_or(0.0),
        len: expected.len(),
        fault: None,
    };
    let bounds = match bound {
        Bound::Each(bounds) => bounds.len(),
        _ => expected.len(),
    };
    if found.len() != expected.len() || bounds != expected.len() {
        worst.share = f64::INFINITY;
        worst.fault = Some(format!(
            "{} elements found, {} expected, {bounds} bounds",
            found.len(),
            expected.len()
        ));
        return worst;
    }
    for (index, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let tolerance = match bound {
            Bound::Uniform(tolerance) => tolerance,
            Bound::Each(tolerances) => tolerances[index],
            Bound::Exact => 0.0,
        };
        let error = (found - expected).abs();
        let share = share(error, tolerance);
        let bits_differ = matches!(bound, Bound::Exact) && found.to_bits() != expected.to_bits();
        let share = if bits_differ { f64::INFINITY } else { share };
        if index == 0 || share > worst.share {
            worst = Comparison {
                error,
                tolerance,
                share,
                index,
                found,
                expected,
                ..worst
            };
        }
    }
    if worst.error.is_nan() || worst.tolerance.is_nan() {
        worst.fault = Some(format!(
            "element {} is not a number or not finite (found {:e}, expected {:e}, tolerance {:e})",
            worst.index, worst.found, worst.expected, worst.tolerance
        ));
    }
    worst
}

/// What part of the tolerance an error uses: infinite for a NaN, and for any error where none is allowed.
fn share(error: f64, tolerance: f64) -> f64 {
    if error.partial_cmp(&tolerance).is_none() {
        return f64::INFINITY;
    }
    if error == 0.0 {
        return 0.0;
    }
    error / tolerance
}

/// Largest magnitude; a NaN among the values is the result, so that a tolerance made of it fails.
pub fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |max, v| {
        if v.is_nan() || f64::is_nan(max) {
            f64::NAN
        } else {
            f64::max(max, v.abs())
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passed(found: &[f64], expected: &[f64], bound: Bound<'_>) -> bool {
        compare("x", "", found, expected, bound).passed()
    }

    #[test]
    fn lengths_must_agree() {
        assert!(!passed(&[1.0], &[1.0, 1.0], Bound::Uniform(9.0)));
        assert!(!passed(&[1.0, 1.0], &[1.0], Bound::Uniform(9.0)));
        assert!(!passed(&[], &[1.0], Bound::Uniform(9.0)));
        assert!(!passed(&[1.0], &[1.0], Bound::Each(&[])));
        assert!(passed(&[], &[], Bound::Uniform(0.0)));
    }

    #[test]
    fn nan_and_infinity_fail_wherever_they_are() {
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            for at in 0..3 {
                let mut values = [1.0; 3];
                values[at] = bad;
                assert!(!passed(&values, &[1.0; 3], Bound::Uniform(f64::MAX)));
                assert!(!passed(&[1.0; 3], &values, Bound::Uniform(f64::MAX)));
                assert!(!passed(&values, &values, Bound::Uniform(f64::MAX)));
            }
        }
        assert!(!passed(&[1.0], &[1.0], Bound::Uniform(f64::NAN)));
        assert!(largest(&[1.0, f64::NAN, -3.0]).is_nan());
    }

    #[test]
    fn a_nan_is_not_hidden_by_a_large_error_after_it() {
        let found = [f64::NAN, 5.0];
        let comparison = compare("x", "", &found, &[0.0; 2], Bound::Uniform(1.0));
        assert!(!comparison.passed());
        assert_eq!(comparison.index, 0);
    }

    #[test]
    fn the_worst_share_is_found_not_the_worst_error() {
        let bounds = [10.0, 0.1];
        let comparison = compare("x", "w", &[5.0, 0.2], &[0.0, 0.0], Bound::Each(&bounds));
        assert_eq!(comparison.index, 1);
        assert!((comparison.share - 2.0).abs() < 1e-12);
        assert!(!comparison.passed());
    }

    #[test]
    fn the_tolerance_itself_passes_and_more_does_not() {
        assert!(passed(&[1.5], &[1.0], Bound::Uniform(0.5)));
        assert!(!passed(&[1.5000001], &[1.0], Bound::Uniform(0.5)));
        assert!(passed(&[0.0], &[0.0], Bound::Uniform(0.0)));
        assert!(!passed(&[1e-300], &[0.0], Bound::Uniform(0.0)));
    }

    #[test]
    fn exact_means_bits() {
        assert!(passed(&[0.1, -2.0], &[0.1, -2.0], Bound::Exact));
        assert!(!passed(&[0.0], &[-0.0], Bound::Exact));
        assert!(!passed(&[0.1 + 0.2], &[0.3], Bound::Exact));
        assert!(!passed(&[f64::NAN], &[f64::NAN], Bound::Exact));
    }
}
