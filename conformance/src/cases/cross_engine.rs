//! Backends beside each other: the same training under both, step by step.

use std::sync::Arc;

use drivetrain_core::{Result, engine::Backend, plan::MicrobatchLimit};

use super::five_steps::FiveSteps;
use crate::{
    fixture::model,
    suite::{Case, Findings, Layout, Needs, Subject},
};

/// This backend's layout and the other's ranks.
const LAYOUTS: [(usize, MicrobatchLimit, usize); 3] = [
    (1, MicrobatchLimit::All, 1),
    (2, MicrobatchLimit::Sequences(1), 2),
    (1, MicrobatchLimit::Tokens(16), 4),
];

pub(super) fn cases(backends: &[Arc<dyn Backend>]) -> Vec<Case> {
    let mut cases = Vec::new();
    for name in ["dense", "tied", "bias", "q3", "window", "mixtral", "q3_moe"] {
        for other in backends {
            for (ranks, limit, other_ranks) in LAYOUTS {
                let needs = |ranks| Needs {
                    layout: Layout::data(ranks),
                    ..Needs::model(&model(name))
                };
                if needs(other_ranks).unmet(other).is_some() {
                    continue;
                }
                let of = other.clone();
                let layout = Layout::data(ranks).limit(limit);
                cases.push(Case::new(
                    format!(
                        "engines/{name}/ranks{ranks}_beside_{}_ranks{other_ranks}",
                        other.name()
                    ),
                    Needs {
                        not: Some(other.name().to_owned()),
                        ..needs(ranks)
                    },
                    move |s, f| beside(name, layout, (&s.other(of.clone()), other_ranks), s, f),
                ));
            }
        }
    }
    cases
}

fn beside(
    name: &str,
    layout: Layout,
    (other, ranks): (&Subject, usize),
    subject: &Subject,
    findings: &mut Findings,
) -> Result<()> {
    let five = FiveSteps::of(name, subject)?;
    let found = five.train(subject, layout, findings)?;
    let expected = five.train(other, Layout::data(ranks), findings)?;
    // Each of the two may be off by its tolerance.
    five.check_beside(&found, &expected, 2.0, findings);
    Ok(())
}
