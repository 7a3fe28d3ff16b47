//! Data-parallel ranks and micro-batches: however a batch is cut, five steps end where the oracle's do.

use drivetrain_core::{Result, plan::MicrobatchLimit};

use super::{five_steps::FiveSteps, step::Layout};
use crate::{
    fixture::model,
    suite::{Case, Findings, Needs, Subject},
};

const FIXTURES: [&str; 8] = [
    "dense",
    "tied",
    "bias",
    "q3",
    "window",
    "mixtral",
    "q3_moe",
    "no_layers",
];

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for name in FIXTURES {
        for ranks in [1, 2, 4] {
            for (cut, limit) in [
                ("micro1", MicrobatchLimit::Sequences(1)),
                ("micro2", MicrobatchLimit::Sequences(2)),
                ("all", MicrobatchLimit::All),
                ("packed16", MicrobatchLimit::Tokens(16)),
            ] {
                let needs = Needs {
                    data_ranks: ranks,
                    ..Needs::model(&model(name))
                };
                let layout = Layout { ranks, limit };
                cases.push(Case::new(
                    format!("layouts/{name}/ranks{ranks}_{cut}"),
                    needs,
                    move |s, f| beside_oracle(name, layout, s, f),
                ));
            }
        }
    }
    cases
}

fn beside_oracle(
    name: &str,
    layout: Layout,
    subject: &Subject,
    findings: &mut Findings,
) -> Result<()> {
    let five = FiveSteps::of(name, subject)?;
    let found = five.train(subject, layout, findings)?;
    five.check(&found, findings);
    Ok(())
}
