//! Ranks, micro-batches and recomputation: however the work is laid out, five steps end where the oracle's do.

use drivetrain_core::{Result, plan::MicrobatchLimit};

use super::five_steps::FiveSteps;
use crate::{
    fixture::model,
    suite::{Case, Findings, Layout, Needs, Subject},
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

const CUTS: [(&str, MicrobatchLimit); 4] = [
    ("micro1", MicrobatchLimit::Sequences(1)),
    ("micro2", MicrobatchLimit::Sequences(2)),
    ("all", MicrobatchLimit::All),
    ("packed16", MicrobatchLimit::Tokens(16)),
];

/// Layouts by name: what is proven of one is proven of all, here and in the cases of checkpoints.
pub(super) fn layouts() -> Vec<(&'static str, Layout)> {
    let recompute = |layout: Layout, full_layers| Layout {
        full_layers,
        ..layout
    };
    let hsdp = |ranks, replicas| {
        let mut layout = Layout::data(ranks);
        layout.parallel.data_replicate_size = replicas;
        layout
    };
    vec![
        ("ranks1", Layout::data(1)),
        ("ranks2", Layout::data(2)),
        ("ranks4", Layout::data(4)),
        ("replicas2_shards1", hsdp(2, 2)),
        ("replicas2_shards2", hsdp(4, 2)),
        ("recompute1", recompute(Layout::data(1), 1)),
        ("recompute3_ranks2", recompute(Layout::data(2), 3)),
    ]
}

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for name in FIXTURES {
        for (label, layout) in layouts() {
            for (cut, limit) in CUTS {
                let layout = layout.limit(limit);
                let needs = Needs {
                    layout,
                    ..Needs::model(&model(name))
                };
                cases.push(Case::new(
                    format!("layouts/{name}/{label}_{cut}"),
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
