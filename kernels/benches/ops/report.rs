//! Times an op by criterion and prints its share of a limit measured by the same clock.

use std::time::{Duration, Instant};

use criterion::Criterion;
use drivetrain_kernels::Cpu;
use drivetrain_kernels::ops::gemm::{Gemm, gemm};
use rustix::time::{ClockId, clock_gettime};

use crate::values;

/// What an op does, to be compared with what the machine can do.
#[derive(Clone, Copy)]
pub(crate) enum Work {
    /// FLOPs, against the GEMM rate.
    Flops(f64),
    /// Bytes read and written, against copying as many.
    Bytes(usize),
}

pub(crate) struct Report<'a> {
    pub(crate) cpu: Cpu,
    criterion: &'a mut Criterion,
    gemm_rate: f64,
}

impl<'a> Report<'a> {
    pub(crate) fn new(cpu: Cpu, criterion: &'a mut Criterion) -> Self {
        let dims = Gemm::nt(2048, 1376, 512);
        let (a, b) = (values(dims.m * dims.k), values(dims.n * dims.k));
        let mut c = vec![0.0; dims.m * dims.n];
        let seconds = best_of(cpu, 20, || gemm(cpu, &dims, &a, &b, &mut c));
        let gemm_rate = dims.flops() / seconds;
        println!(
            "{:?}, {} thread(s), GEMM {:.1} GFLOP/s",
            cpu.isa(),
            cpu.threads(),
            gemm_rate / 1e9
        );
        Self {
            cpu,
            criterion,
            gemm_rate,
        }
    }

    pub(crate) fn run(&mut self, name: &str, work: Work, mut op: impl FnMut(Cpu)) {
        let (cpu, mut best) = (self.cpu, Duration::MAX);
        self.criterion.bench_function(name, |bencher| {
            bencher.iter_custom(|rounds| {
                let start = now(cpu);
                for _ in 0..rounds {
                    let round = now(cpu);
                    op(cpu);
                    best = best.min(now(cpu) - round);
                }
                now(cpu) - start
            });
        });
        if best == Duration::MAX {
            return; // filtered out
        }
        let seconds = best.as_secs_f64();
        match work {
            Work::Flops(flops) => println!(
                "{name:<32} {:>8.3} ms  {:>7.1} GFLOP/s  {:>4.0}% of GEMM",
                1e3 * seconds,
                flops / seconds / 1e9,
                100.0 * flops / seconds / self.gemm_rate
            ),
            Work::Bytes(bytes) => {
                let limit = copy_seconds(cpu, bytes);
                println!(
                    "{name:<32} {:>8.3} ms  {:>7.1} GB/s     {:>4.0}% of copy",
                    1e3 * seconds,
                    bytes as f64 / seconds / 1e9,
                    100.0 * limit / seconds
                );
            }
        }
    }
}

/// Time to read half of `bytes` and write the other half.
fn copy_seconds(cpu: Cpu, bytes: usize) -> f64 {
    let from = values(bytes / 8);
    let mut to = vec![0.0; from.len()];
    let part = from.len().div_ceil(cpu.threads());
    best_of(cpu, 10, || {
        if cpu.threads() == 1 {
            return to.copy_from_slice(std::hint::black_box(&from));
        }
        std::thread::scope(|scope| {
            for (to, from) in to.chunks_mut(part).zip(from.chunks(part)) {
                scope.spawn(|| to.copy_from_slice(from));
            }
        });
    })
}

fn best_of(cpu: Cpu, rounds: usize, mut work: impl FnMut()) -> f64 {
    let mut best = Duration::MAX;
    for _ in 0..rounds {
        let start = now(cpu);
        work();
        best = best.min(now(cpu) - start);
    }
    best.as_secs_f64()
}

/// CPU time of this thread if all work runs on it, as that survives a busy machine; wall time otherwise.
fn now(cpu: Cpu) -> Duration {
    if cpu.threads() > 1 {
        static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
        return START.get_or_init(Instant::now).elapsed();
    }
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
