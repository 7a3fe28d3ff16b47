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

const FIXTURES: [&str; 9] = [
    "dense",
    "tied",
    "bias",
    "q3",
    "window",
    "single_kv_head",
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

/// Modules that are computed again where a layout says selective, of models with a dense layer and with experts.
pub(super) const SELECTIVE: &[RecomputeModule] = &[
    RecomputeModule::AttentionCore,
    RecomputeModule::Norm,
    RecomputeModule::MlpActivation,
];
pub(super) const SELECTIVE_MOE: &[RecomputeModule] = &[
    RecomputeModule::AttentionCore,
    RecomputeModule::Norm,
    RecomputeModule::MoeActivation,
];

/// Layouts by name in which each rank has the whole model.
pub(super) fn unsplit() -> Vec<(&'static str, Layout)> {
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
        ("recompute1", Layout::data(1).full_layers(1)),
        ("recompute3_ranks2", Layout::data(2).full_layers(3)),
        ("selective", Layout::data(1).modules(SELECTIVE)),
        ("selective_ranks2", Layout::data(2).modules(SELECTIVE)),
    ]
}

/// The layouts that split the model.
pub(super) fn meshes() -> Vec<(&'static str, Layout)> {
    // Data, tensor, context and pipeline ranks.
    let mesh = |[data, tensor, context, pipeline]: [usize; 4]| {
        Layout::parallel(ParallelConfig {
            data_parallel_size: data,
            tensor_parallel_size: tensor,
            context_parallel_size: context,
            pipeline_parallel_size: pipeline,
            ..ParallelConfig::default()
        })
    };
    let with = |mut layout: Layout, change: fn(&mut ParallelConfig)| {
        change(&mut layout.parallel);
        layout
    };
    let sequence = |layout| with(layout, |p| p.sequence_parallel = true);
    let chunks = |layout| with(layout, |p| p.virtual_pipeline_size = 2);
    let experts = |ranks, tensor: usize, layout: Layout| {
        let mut layout = layout;
        layout.parallel.expert_parallel_size = ranks;
        layout.parallel.expert_tensor_parallel_size = Some(tensor);
        layout
    };
    let tp2 = mesh([1, 2, 1, 1]);
    let pp2 = mesh([1, 1, 1, 2]);
    let all = mesh([1, 2, 2, 2]);
    vec![
        ("tp2", tp2),
        ("tp2_sp", sequence(tp2)),
        ("tp2_sp_selective", sequence(tp2).modules(SELECTIVE)),
        ("tp2_recompute3", tp2.full_layers(3)),
        ("tp4_sp", sequence(mesh([1, 4, 1, 1]))),
        ("cp2", mesh([1, 1, 2, 1])),
        ("cp4", mesh([1, 1, 4, 1])),
        ("tp2_sp_cp2", sequence(mesh([1, 2, 2, 1]))),
        ("pp2", pp2),
        ("pp2_recompute3", pp2.full_layers(3)),
        ("pp4", mesh([1, 1, 1, 4])),
        ("pp2_chunks2", chunks(pp2)),
        ("pp2_first3", with(pp2, |p| p.first_stage_layers = Some(3))),
        (
            "pp3_ends1",
            with(mesh([1, 1, 1, 3]), |p| {
                (p.first_stage_layers, p.last_stage_layers) = (Some(1), Some(1));
            }),
        ),
        ("tp2_dp2", mesh([2, 2, 1, 1])),
        ("tp2_sp_dp2", sequence(mesh([2, 2, 1, 1]))),
        ("pp2_dp2", mesh([2, 1, 1, 2])),
        ("pp2_chunks2_dp2", chunks(mesh([2, 1, 1, 2]))),
        ("cp2_dp2", mesh([2, 1, 2, 1])),
        ("tp2_cp2_pp2", all),
        ("tp2_sp_cp2_pp2_chunks2", chunks(sequence(all))),
        ("ep2", experts(2, 1, Layout::data(2))),
        (
            "ep2_selective",
            experts(2, 1, Layout::data(2)).modules(SELECTIVE_MOE),
        ),
        ("ep4", experts(4, 1, Layout::data(4))),
        ("ep2_dp4", experts(2, 1, Layout::data(4))),
        ("ep2_etp2", experts(2, 2, Layout::data(4))),
        ("ep2_tp2", experts(2, 1, tp2)),
        ("ep2_tp2_sp", experts(2, 1, sequence(tp2))),
        ("ep2_pp2", experts(2, 1, mesh([2, 1, 1, 2]))),
        ("ep2_cp2", experts(2, 1, mesh([1, 1, 2, 1]))),
        ("tp2_etp1", experts(1, 1, tp2)),
        ("etp2_dp2", experts(1, 2, Layout::data(2))),
        (
            "ep2_etp2_tp2_sp_dp2",
            experts(2, 2, sequence(mesh([2, 2, 1, 1]))),
        ),
        ("ep4_cp2_tp2", experts(4, 1, mesh([1, 2, 2, 1]))),
    ]
}

/// One of each axis, for the cases that ask more than where training ends.
pub(super) fn each_axis() -> Vec<(&'static str, Layout)> {
    let names = ["tp2_sp", "cp2", "pp2_chunks2", "tp2_dp2", "pp2_dp2", "ep2"];
    let mut each = meshes();
    each.retain(|(label, _)| names.contains(label));
    each
}

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for name in FIXTURES {
        for (label, layout) in unsplit().into_iter().chain(meshes()) {
            // Of what splits the model, one micro-batch and several.
            let split = layout.num_ranks() > layout.parallel.data_parallel_size;
            let cuts = CUTS
                .into_iter()
                .filter(|(cut, _)| !split || ["micro1", "all"].contains(cut));
            for (cut, limit) in cuts {
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
