//! Losses, written once: a function of a few numbers per token, with its derivatives.
//!
//! An engine knows no loss. An [`Objective`] says what it needs ([`Requirements`]); the engine computes just
//! that ([`TokenOutputs`]), the objective returns the loss and one derivative for each of these numbers
//! ([`ObjectiveValue`]), and the engine carries the derivatives backward. All of it is f64: T numbers are
//! nothing beside T x V logits.

mod aggregate;
mod builtin;
mod checked;
mod cispo;
mod clipped;
mod dpo;
mod evaluation;
mod group;
mod gspo;
mod nll;
mod ratio;
mod scored;
mod terms;
#[cfg(test)]
mod tests;

pub use aggregate::Aggregation;
pub use builtin::{BuiltinObjective, from_config};
pub(crate) use builtin::{Setting, settings};
pub use cispo::Cispo;
pub use clipped::ClippedSurrogate;
pub use dpo::{DPO_PAIRS, Dpo};
pub use group::group_advantages;
pub use gspo::Gspo;
pub use nll::Nll;
pub use ratio::Clip;
pub use terms::{KlTerm, Terms};

pub(crate) use checked::Checked;
use evaluation::Evaluation;

use std::fmt;

use enum_dispatch::enum_dispatch;

use crate::{
    Result,
    batch::{Batch, BatchTotals},
    metrics::Metrics,
};

/// Column of advantages, a number a token or a sequence.
pub const ADVANTAGES: &str = "advantages";
/// Column of the log-probs under the policy that made the rollouts, a number a token.
pub const OLD_LOG_PROBS: &str = "old_log_probs";
/// Column of the log-probs under the reference policy, a number a token.
pub const REFERENCE_LOG_PROBS: &str = "reference_log_probs";
/// Column of rewards, a number a sequence.
pub const REWARDS: &str = "rewards";

/// What an objective needs from the engine for every token.
#[derive(Debug, Clone, PartialEq)]
pub struct Requirements {
    /// Divides the logits before log-prob and entropy alike; above 0.
    pub temperature: f64,
    /// Entropy of the distribution that predicted each token, in nats.
    pub entropy: bool,
    /// Names a per-token `I64` column `[T, k]` of token ids whose log-probs are wanted (distillation).
    pub log_probs_at: Option<String>,
    /// A value head's output for each token.
    pub value: bool,
    /// Per-token or per-sequence columns that `evaluate` reads; the guard checks that they are there.
    pub columns: Vec<String>,
}

impl Default for Requirements {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            entropy: false,
            log_probs_at: None,
            value: false,
            columns: Vec::new(),
        }
    }
}

/// What the engine computed for a micro-batch. Slots of unscored tokens hold 0 and mean nothing.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TokenOutputs {
    /// `log p(token_t | tokens_<t)`, `[T]`.
    pub log_probs: Vec<f64>,
    /// Entropy of the distribution that predicted token t, `[T]`, where required.
    pub entropy: Option<Vec<f64>>,
    /// Log-probs at the required ids, `[T, k]`.
    pub log_probs_at: Option<Vec<f64>>,
    /// Value head, `[T]`.
    pub values: Option<Vec<f64>>,
}

impl TokenOutputs {
    /// Adds those of the tokens that follow.
    pub fn append(&mut self, next: TokenOutputs) {
        self.log_probs.extend(next.log_probs);
        for (all, next) in [
            (&mut self.entropy, next.entropy),
            (&mut self.log_probs_at, next.log_probs_at),
            (&mut self.values, next.values),
        ] {
            if let Some(next) = next {
                all.get_or_insert_default().extend(next);
            }
        }
    }
}

/// The loss of a micro-batch (its SUM over the global totals) and its derivatives.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ObjectiveValue {
    /// This micro-batch's share of the global loss.
    pub loss: f64,
    /// d loss / d log_prob, `[T]`; 0 where unscored.
    pub d_log_probs: Vec<f64>,
    /// d loss / d entropy, `[T]`, where entropy was required.
    pub d_entropy: Option<Vec<f64>>,
    /// d loss / d log_probs_at, `[T, k]`.
    pub d_log_probs_at: Option<Vec<f64>>,
    /// d loss / d value, `[T]`.
    pub d_values: Option<Vec<f64>>,
    /// Metrics of this micro-batch.
    pub metrics: Metrics,
}

/// A loss. Implement it to train with your own; it then runs under every engine and layout.
#[enum_dispatch]
pub trait Objective: Send + Sync + fmt::Debug {
    /// Name for metrics and errors.
    fn name(&self) -> &str;

    /// What `evaluate` needs.
    fn requires(&self) -> Requirements {
        Requirements::default()
    }

    /// Whether the derivatives do not depend on the outputs (NLL), so that an engine may compute them first.
    fn derivative_known(&self) -> bool {
        false
    }

    /// Runs once a step over the whole global batch, for whatever looks across sequences (group advantages),
    /// and may add columns and named totals.
    ///
    /// # Errors
    /// `Data` if a column is missing or a value in a scored slot is not finite.
    fn prepare(&self, _global: &mut Batch, _totals: &mut BatchTotals) -> Result<()> {
        Ok(())
    }

    /// The loss and its derivatives: a pure function. With [`Self::derivative_known`] the derivatives must not
    /// read `outputs`, whose vectors may then be all 0.
    ///
    /// # Errors
    /// `NonFinite` if a value in a scored slot is not finite.
    fn evaluate(
        &self,
        microbatch: &Batch,
        outputs: &TokenOutputs,
        totals: &BatchTotals,
    ) -> Result<ObjectiveValue>;
}
