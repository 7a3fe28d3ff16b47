//! A training step (forward, backward, clip, AdamW) under both engines: same work, 2 thread ranks of 1 thread.
//! Criterion's time is wall time from the ranks' common start to their common end; CPU seconds and the share of
//! the GEMM rate are printed beside it.
#![allow(missing_docs, reason = "criterion's macros define the entry points")]

use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use drivetrain_benches::{SIZES, measure, run_steps};

const ENGINES: [&str; 2] = ["fsdp", "megatron"];
const RANKS: usize = 2;

fn engine_step(c: &mut Criterion) {
    for size in SIZES {
        let mut group = c.benchmark_group(format!("engine_step/{}", size.name));
        group.sample_size(10).warm_up_time(Duration::from_millis(1));
        group.throughput(Throughput::Elements(
            size.scored.iter().sum::<usize>() as u64
        ));
        for engine in ENGINES {
            group.bench_function(engine, |b| {
                b.iter_custom(|steps| {
                    let (_, costs) = run_steps(size, engine, RANKS, 1, &[], steps as usize)
                        .expect("the benchmark's job runs under both engines");
                    costs.iter().map(|c| c.0).sum()
                });
            });
        }
        group.finish();
        for engine in ENGINES {
            let cost = measure(size, engine, RANKS, 1, &[], 1, 3).expect("as above");
            println!(
                "{:8} {engine:9} {:.3} CPU s/step, {:.0}% of one core's GEMM rate a core",
                size.name,
                cost.cpu_s_step,
                cost.mfu_core * 100.0
            );
        }
    }
}

criterion_group!(benches, engine_step);
criterion_main!(benches);
