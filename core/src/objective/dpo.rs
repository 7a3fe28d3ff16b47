//! Direct preference optimization (Rafailov et al. 2023).

use super::{
    Evaluation, Objective, ObjectiveValue, REFERENCE_LOG_PROBS, Requirements, TokenOutputs,
    scored::{Scored, ScoredSequence},
};
use crate::{
    Error, ErrorKind, Result,
    batch::{Batch, BatchTotals},
};

/// Name of the total that counts the pairs of the global batch.
pub const DPO_PAIRS: &str = "dpo_pairs";

/// The mean over pairs of `-(1 - e) log sigmoid(h) - e log sigmoid(-h)` (Rafailov et al. 2023, equation 7; label
/// smoothing `e`: Mitchell 2023, conservative DPO), with `h = beta * (c - r)`, where c and r are the sums over
/// the scored tokens of `log_prob - reference_log_prob` of the chosen and of the rejected answer.
///
/// A pair is a group of two sequences, the chosen one first. A pair of which one answer has no scored token
/// says nothing: it is left out of the loss and of the count.
#[derive(Debug, Clone, PartialEq)]
pub struct Dpo {
    /// How strongly the policy is kept near the reference; 0.1 by default.
    pub beta: f64,
    /// Probability that a preference was labelled the wrong way round, below 0.5.
    pub label_smoothing: f64,
    /// Divides the logits.
    pub temperature: f64,
}

impl Default for Dpo {
    fn default() -> Self {
        Self {
            beta: 0.1,
            label_smoothing: 0.0,
            temperature: 1.0,
        }
    }
}

impl Objective for Dpo {
    fn name(&self) -> &str {
        "dpo"
    }

    fn requires(&self) -> Requirements {
        Requirements {
            temperature: self.temperature,
            columns: vec![REFERENCE_LOG_PROBS.to_owned()],
            ..Requirements::default()
        }
    }

    fn prepare(&self, global: &mut Batch, totals: &mut BatchTotals) -> Result<()> {
        let scored = Scored::new(self.name(), global);
        scored.check_columns(&self.requires())?;
        let pairs = scored_pairs(&scored)?.len() as f64;
        totals.named.insert(DPO_PAIRS.to_owned(), pairs);
        Ok(())
    }

    fn evaluate(
        &self,
        microbatch: &Batch,
        outputs: &TokenOutputs,
        totals: &BatchTotals,
    ) -> Result<ObjectiveValue> {
        let mut evaluation = Evaluation::new(self.name(), microbatch, outputs);
        let log_probs = evaluation.log_probs()?;
        let reference = evaluation.scored.column(REFERENCE_LOG_PROBS)?;
        let reward = |sequence: &ScoredSequence| {
            let sum: f64 = sequence
                .slots
                .iter()
                .map(|&t| log_probs[t] - reference[t])
                .sum();
            self.beta * sum
        };
        let pairs = scored_pairs(&evaluation.scored)?;
        let weight = pair_weight(pairs.len(), totals)?;
        let mut statistics = PairStatistics::default();
        for (chosen, rejected) in pairs {
            let (chosen_reward, rejected_reward) = (reward(&chosen), reward(&rejected));
            let (loss, derivative) = self.pair_loss(chosen_reward - rejected_reward);
            evaluation.add_loss(chosen.slots[0], weight * loss)?;
            let d_log_prob = weight * derivative * self.beta;
            for &slot in &chosen.slots {
                evaluation.add_d_log_prob(slot, d_log_prob)?;
            }
            for &slot in &rejected.slots {
                evaluation.add_d_log_prob(slot, -d_log_prob)?;
            }
            statistics.add(chosen_reward, rejected_reward);
        }
        statistics.record(&mut evaluation);
        Ok(evaluation.finish())
    }
}

impl Dpo {
    /// The loss of a pair and its derivative by the margin.
    fn pair_loss(&self, margin: f64) -> (f64, f64) {
        let (right, wrong) = (1.0 - self.label_smoothing, self.label_smoothing);
        (
            right * softplus(-margin) + wrong * softplus(margin),
            wrong * sigmoid(margin) - right * sigmoid(-margin),
        )
    }
}

/// The groups of two whose members both have a scored token.
fn scored_pairs(scored: &Scored<'_>) -> Result<Vec<(ScoredSequence, ScoredSequence)>> {
    let sequences = scored.sequences();
    let find = |index| {
        let at = sequences.binary_search_by_key(&index, |s| s.index).ok()?;
        Some(sequences[at].clone())
    };
    let mut pairs = Vec::new();
    for (index, group) in scored.batch().groups().windows(2).enumerate() {
        match group[1] - group[0] {
            0 => {}
            2 => pairs.extend(find(group[0]).zip(find(group[0] + 1))),
            other => {
                return Err(Error::new(
                    ErrorKind::Data,
                    "evaluate_objective",
                    "dpo compares groups of two sequences, the chosen one first",
                )
                .with("group", index)
                .with("sequence", group[0])
                .with("expected", "2 sequences")
                .with("found", other));
            }
        }
    }
    Ok(pairs)
}

fn pair_weight(found: usize, totals: &BatchTotals) -> Result<f64> {
    match totals.named.get(DPO_PAIRS) {
        Some(&pairs) if pairs > 0.0 => Ok(1.0 / pairs),
        _ if found == 0 => Ok(0.0),
        counted => Err(Error::new(
            ErrorKind::CallOrder,
            "evaluate_objective",
            "the totals count no pairs, but the micro-batch has some",
        )
        .with("totals.dpo_pairs", format!("{counted:?}"))
        .with("found", found)
        .help("call the objective's `prepare` on the global batch before it is cut")),
    }
}

#[derive(Debug, Default)]
struct PairStatistics {
    count: f64,
    right: f64,
    margin: f64,
    chosen: f64,
    rejected: f64,
}

impl PairStatistics {
    fn add(&mut self, chosen: f64, rejected: f64) {
        self.count += 1.0;
        self.right += f64::from(u8::from(chosen > rejected));
        self.margin += chosen - rejected;
        self.chosen += chosen;
        self.rejected += rejected;
    }

    fn record(&self, evaluation: &mut Evaluation<'_>) {
        let metrics = evaluation.metrics();
        metrics.mean("reward_accuracy", self.right, self.count);
        metrics.mean("reward_margin", self.margin, self.count);
        metrics.mean("chosen_reward", self.chosen, self.count);
        metrics.mean("rejected_reward", self.rejected, self.count);
    }
}

/// `log(1 + exp(x))` without overflow.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
