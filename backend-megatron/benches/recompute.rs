//! What each choice of recomputation keeps, beside the formulas of Korthikanti et al. 2022, and what it costs: CPU
//! seconds of forward and backward over those without recomputation, in turn (A B A B), the median of the pairs.
#![allow(missing_docs, reason = "a program")]

use std::time::Duration;

use drivetrain_core::{
    Result,
    batch::BatchTotals,
    config::RecomputeModule::{self, AttentionCore, MlpActivation, Norm},
    engine::{Engine, Guarded, WeightInit, build_engine},
    launch::run_ranks,
    metrics::process_cpu_seconds,
    objective::Nll,
};
use drivetrain_megatron::Megatron;

#[path = "../tests/common/recompute.rs"]
mod recompute;

use recompute::{LAYERS, Quick, RANKS, batch, job, model, paper};

type Choice = (&'static str, &'static [RecomputeModule], usize);

const CHOICES: [Choice; 7] = [
    ("norms", &[Norm], 0),
    ("MLP activation", &[MlpActivation], 0),
    ("norms, MLP activation", &[Norm, MlpActivation], 0),
    ("attention core", &[AttentionCore], 0),
    ("all of these", &[Norm, MlpActivation, AttentionCore], 0),
    ("2 layers whole", &[], LAYERS / 2),
    ("all layers whole", &[], LAYERS),
];

/// Bytes a layer with and without the choice, and the ratios of CPU seconds.
fn measure((_, modules, full): Choice, pairs: usize) -> Result<(u64, u64, Vec<f64>)> {
    let (source, batch) = (Quick(model()), batch());
    let totals = BatchTotals::count(&batch);
    let all = run_ranks(RANKS, Duration::from_secs(600), |world| {
        let build = |modules, full| {
            let init = WeightInit::Source(&source);
            build_engine(&Megatron, &job(modules, full), world.clone(), init).map(|(e, _)| e)
        };
        let (mut plain, mut chosen) = (build(&[], 0)?, build(modules, full)?);
        let cost = |engine: &mut Guarded| -> Result<f64> {
            world.barrier()?;
            let began = process_cpu_seconds();
            engine.forward_backward(&batch, &Nll::default(), &totals)?;
            world.barrier()?;
            let cost = process_cpu_seconds() - began;
            engine.zero_grad()?;
            Ok(cost)
        };
        let mut ratios = Vec::new();
        for pair in 0..=pairs {
            // Which is first alternates.
            let (a, b) = match pair % 2 {
                0 => (cost(&mut plain)?, cost(&mut chosen)?),
                _ => {
                    let b = cost(&mut chosen)?;
                    (cost(&mut plain)?, b)
                }
            };
            // The first pair warms up.
            if pair > 0 {
                ratios.push(b / a);
            }
        }
        let layer = |e: &Guarded| e.memory().saved_activations / LAYERS as u64;
        Ok((layer(&plain), layer(&chosen), ratios))
    })?;
    Ok(all.into_iter().next().unwrap_or_default())
}

fn main() {
    let pairs = std::env::args().skip(1).find_map(|a| a.parse().ok());
    let (paper, mib) = (paper(), f64::from(1 << 20));
    println!(
        "hidden 1024, 16 heads, ffn 2752, 1024 tokens, {LAYERS} layers, TP{RANKS} with sequence parallelism"
    );
    println!("the paper, MiB a layer and rank at 2 bytes:");
    for (what, bytes) in [
        ("tensor parallel alone", paper.tensor),
        ("with sequence parallelism", paper.sequence),
        ("and the attention core again", paper.selective),
        ("full", paper.full),
    ] {
        println!("  {what:30} {:6.2}", bytes / mib);
    }
    println!("ours, f32:");
    println!(
        "  {:24} {:>6}  {:>10}  CPU time",
        "computed again", "MiB", "to TP alone"
    );
    let row = |what: &str, bytes: u64, cost: f64| {
        let bytes = bytes as f64;
        println!(
            "  {what:24} {:6.2}  {:10.3}  {cost:.3}",
            bytes / mib,
            bytes / paper.tensor
        );
    };
    for (index, choice) in CHOICES.into_iter().enumerate() {
        let (plain, kept, mut ratios) = measure(choice, pairs.unwrap_or(9)).expect("the job runs");
        if index == 0 {
            row("nothing", plain, 1.0);
        }
        ratios.sort_by(f64::total_cmp);
        row(choice.0, kept, ratios[ratios.len() / 2]);
    }
}
