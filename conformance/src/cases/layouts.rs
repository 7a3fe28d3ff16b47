//! Ranks, micro-batches and recomputation: however the work is laid out, five steps end where the oracle's do.

use drivetrain_core::{
    Result,
    config::{ParallelConfig, RecomputeModule},
    plan::MicrobatchLimit,
};

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

const MODULES: &[RecomputeModule] = &[
    RecomputeModule::AttentionCore,
    RecomputeModule::Norm,
    RecomputeModule::MlpActivation,
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
    let parallel = ParallelConfig::default;
    let mesh = |[data, context, tensor]: [usize; 3], sequence_parallel| {
        Layout::parallel(ParallelConfig {
            data_parallel_size: data,
            context_parallel_size: context,
            tensor_parallel_size: tensor,
            sequence_parallel,
            ..parallel()
        })
    };
    let staged = |layout: Layout, stages, chunks, first| {
        Layout::parallel(ParallelConfig {
            pipeline_parallel_size: stages,
            virtual_pipeline_size: chunks,
            first_stage_layers: first,
            ..layout.parallel
        })
    };
    let experts = |layout: Layout, ranks, tensor| {
        Layout::parallel(ParallelConfig {
            expert_parallel_size: ranks,
            expert_tensor_parallel_size: Some(tensor),
            ..layout.parallel
        })
    };
    let modules = |layout: Layout, modules| Layout { modules, ..layout };
    let one = mesh([1, 1, 1], false);
    vec![
        ("tp2", mesh([1, 1, 2], false)),
        ("tp2_sp", mesh([1, 1, 2], true)),
        ("tp4_sp", mesh([1, 1, 4], true)),
        ("dp2_tp2_sp", mesh([2, 1, 2], true)),
        ("cp2", mesh([1, 2, 1], false)),
        ("cp4", mesh([1, 4, 1], false)),
        ("cp2_tp2_sp", mesh([1, 2, 2], true)),
        ("tp2_sp_modules", modules(mesh([1, 1, 2], true), MODULES)),
        ("pp2", staged(one, 2, 1, None)),
        ("pp4", staged(one, 4, 1, None)),
        ("pp2_chunks2", staged(one, 2, 2, None)),
        ("pp2_first3", staged(one, 2, 1, Some(3))),
        ("dp2_pp2", staged(mesh([2, 1, 1], false), 2, 1, None)),
        (
            "cp2_tp2_sp_pp2_chunks2",
            staged(mesh([1, 2, 2], true), 2, 2, None),
        ),
        ("dp2_ep2", experts(mesh([2, 1, 1], false), 2, 1)),
        ("dp4_ep2", experts(mesh([4, 1, 1], false), 2, 1)),
        ("dp2_ep1_etp2", experts(mesh([2, 1, 1], false), 1, 2)),
        ("tp2_ep2", experts(mesh([1, 1, 2], false), 2, 1)),
        ("dp2_tp2_sp_ep2_etp2", experts(mesh([2, 1, 2], true), 2, 2)),
        ("cp2_tp2_ep4", experts(mesh([1, 2, 2], false), 4, 1)),
        (
            "dp2_pp2_ep2",
            experts(staged(mesh([2, 1, 1], false), 2, 1, None), 2, 1),
        ),
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
