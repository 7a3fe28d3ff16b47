//! Numbers that a step reports, with how to combine them.

mod all_reduce;
mod jsonl;
mod process;
mod tensorboard;

pub use jsonl::{JsonRecord, JsonlWriter, Kept};
pub use process::{peak_resident_bytes, process_cpu_seconds, reset_peak_resident, resident_bytes};
pub use tensorboard::{EventWriter, scalars};

use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

/// How the parts of a metric (micro-batches, ranks) combine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reduce {
    /// `sum / weight`, over all parts.
    Mean,
    /// The sum.
    Sum,
    /// The largest.
    Max,
    /// The smallest.
    Min,
}

/// One metric: for `Mean` a sum and its weight; for the others the value in `sum`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Metric {
    /// The sum, or the extreme.
    pub sum: f64,
    /// What a mean is divided by.
    pub weight: f64,
    /// How parts combine.
    pub reduce: Reduce,
}

impl Metric {
    /// Its value; a mean of nothing is 0.
    pub fn value(&self) -> f64 {
        match self.reduce {
            Reduce::Mean if self.weight == 0.0 => 0.0,
            Reduce::Mean => self.sum / self.weight,
            _ => self.sum,
        }
    }

    /// The combination of two parts. A NaN stays a NaN.
    #[must_use]
    pub fn merge(self, other: Self) -> Self {
        let extreme = |a: f64, b: f64, keep_a: bool| {
            if a.is_nan() || b.is_nan() {
                f64::NAN
            } else if keep_a {
                a
            } else {
                b
            }
        };
        let sum = match self.reduce {
            Reduce::Mean | Reduce::Sum => self.sum + other.sum,
            Reduce::Max => extreme(self.sum, other.sum, self.sum >= other.sum),
            Reduce::Min => extreme(self.sum, other.sum, self.sum <= other.sum),
        };
        Self {
            sum,
            weight: self.weight + other.weight,
            reduce: self.reduce,
        }
    }
}

/// Named metrics in the order they were recorded. Serialised as [`Metrics::to_json`]: values by name.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metrics(IndexMap<String, Metric>);

impl Metrics {
    /// Adds to a mean: `sum` over `weight` things.
    pub fn mean(&mut self, name: &str, sum: f64, weight: f64) {
        self.record(
            name,
            Metric {
                sum,
                weight,
                reduce: Reduce::Mean,
            },
        );
    }

    /// Adds to a sum.
    pub fn sum(&mut self, name: &str, value: f64) {
        self.record(
            name,
            Metric {
                sum: value,
                weight: 1.0,
                reduce: Reduce::Sum,
            },
        );
    }

    /// Raises a maximum.
    pub fn max(&mut self, name: &str, value: f64) {
        self.record(
            name,
            Metric {
                sum: value,
                weight: 1.0,
                reduce: Reduce::Max,
            },
        );
    }

    /// Lowers a minimum.
    pub fn min(&mut self, name: &str, value: f64) {
        self.record(
            name,
            Metric {
                sum: value,
                weight: 1.0,
                reduce: Reduce::Min,
            },
        );
    }

    /// Combines a part into the metric of this name.
    pub fn record(&mut self, name: &str, part: Metric) {
        match self.0.get_mut(name) {
            Some(metric) => *metric = metric.merge(part),
            None => {
                self.0.insert(name.to_owned(), part);
            }
        }
    }

    /// Combines all parts of another set.
    pub fn merge(&mut self, other: &Self) {
        for (name, part) in &other.0 {
            self.record(name, *part);
        }
    }

    /// A metric's value.
    pub fn value(&self, name: &str) -> Option<f64> {
        self.0.get(name).map(Metric::value)
    }

    /// All metrics.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Metric)> {
        self.0.iter().map(|(name, metric)| (name.as_str(), metric))
    }
}
