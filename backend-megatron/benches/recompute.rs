//! What each choice of recomputation and storage keeps, beside the formulas of Korthikanti et al. 2022, and what it
//! costs: CPU seconds of forward and backward over those of keeping all, in turn (A B A B), the median of the pairs.
//! Arguments: the number of pairs, and a part of a row's name to see only such rows.
#![allow(missing_docs, reason = "a program")]

use std::time::Duration;

use drivetrain_core::{
    DType, Result,
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

use recompute::{Choice, LAYERS, Quick, RANKS, batch, job, model, paper};

/// What is computed again: modules, and layers as a whole.
const AGAIN: [(&str, &[RecomputeModule], usize); 7] = [
    ("norms", &[Norm], 0),
    ("MLP activation", &[MlpActivation], 0),
    ("norms, MLP activation", &[Norm, MlpActivation], 0),
    ("attention core", &[AttentionCore], 0),
    ("all of these", &[Norm, MlpActivation, AttentionCore], 0),
    ("2 layers whole", &[], LAYERS / 2),
    ("all layers whole", &[], LAYERS),
];

/// Bytes a layer of two choices, and the ratios of the second's CPU seconds to the first's.
fn measure(choices: [Choice; 2], pairs: usize) -> Result<([u64; 2], Vec<f64>)> {
    let (source, batch) = (Quick(model()), batch());
    let totals = BatchTotals::count(&batch);
    let all = run_ranks(RANKS, Duration::from_secs(600), |world| {
        let build = |choice| {
            let init = WeightInit::Source(&source);
            build_engine(&Megatron, &job(choice), world.clone(), init).map(|(e, _)| e)
        };
        let (mut plain, mut chosen) = (build(choices[0])?, build(choices[1])?);
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
        Ok(([layer(&plain), layer(&chosen)], ratios))
    })?;
    Ok(all.into_iter().next().unwrap_or_default())
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let pairs = args.iter().find_map(|a| a.parse().ok());
    let is_name = |a: &&String| !a.starts_with('-') && a.parse::<usize>().is_err();
    let wanted = args.iter().find(is_name);
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
    let row = |what: &str, bytes: u64, cost: f64| {
        let bytes = bytes as f64;
        println!(
            "  {what:24} {:6.2}  {:10.3}  {cost:.3}",
            bytes / mib,
            bytes / paper.tensor
        );
    };
    let compare = |choices| {
        let measured = measure(choices, pairs.unwrap_or(9));
        let ([_, kept], mut ratios) = measured.expect("the job runs");
        ratios.sort_by(f64::total_cmp);
        (kept, ratios[ratios.len() / 2])
    };
    let all = Choice {
        modules: &[],
        full_layers: 0,
        saved: None,
    };
    for (name, saved) in [("f32", None), ("bf16", Some(DType::Bf16))] {
        println!("ours, {name}:");
        println!(
            "  {:24} {:>6}  {:>10}  CPU time",
            "computed again", "MiB", "to TP alone"
        );
        let plain = Choice { saved, ..all };
        let nothing = "nothing (to f32's)";
        let named =
            |what: &str| wanted.is_none_or(|w| format!("{name} {what}").contains(w.as_str()));
        if named(nothing) {
            let (kept, cost) = compare([all, plain]);
            row(nothing, kept, cost);
        }
        for (what, modules, full_layers) in AGAIN.into_iter().filter(|(what, ..)| named(what)) {
            let (kept, cost) = compare([
                plain,
                Choice {
                    modules,
                    full_layers,
                    saved,
                },
            ]);
            row(what, kept, cost);
        }
    }
}
