//! Which instructions the kernels use and over how many threads.

use std::ops::Range;

use pulp::Arch;

/// An instruction set the kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isa {
    /// What the target guarantees (SSE2 on x86-64, NEON on aarch64).
    Portable,
    /// AVX2 with FMA.
    Avx2,
    /// AVX-512 (F, BW, CD, DQ, VL).
    Avx512,
}

/// How kernels run: the instruction set found at run time, and the number of threads of this rank.
///
/// Results do not depend on the number of threads. They do depend on the instruction set, by rounding.
#[derive(Debug, Clone, Copy)]
pub struct Cpu {
    arch: Arch,
    threads: usize,
}

impl Cpu {
    /// The best instruction set of this machine over `threads` threads (0 counts as 1).
    ///
    /// With 1, everything runs on the calling thread. With more, work is spread over rayon's pool.
    pub fn new(threads: usize) -> Self {
        Self {
            arch: Arch::new(),
            threads: threads.max(1),
        }
    }

    /// A given instruction set, or `None` if this machine lacks it. GEMM alone keeps choosing for itself.
    pub fn with_isa(isa: Isa, threads: usize) -> Option<Self> {
        let arch = match isa {
            Isa::Portable => Arch::Scalar,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Arch::V3(pulp::x86::V3::try_new()?),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Arch::V4(pulp::x86::V4::try_new()?),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 => return None,
        };
        Some(Self {
            arch,
            threads: threads.max(1),
        })
    }

    /// The instruction set in use.
    pub fn isa(self) -> Isa {
        match self.arch {
            #[cfg(target_arch = "x86_64")]
            Arch::V3(_) => Isa::Avx2,
            #[cfg(target_arch = "x86_64")]
            Arch::V4(_) => Isa::Avx512,
            _ => Isa::Portable,
        }
    }

    /// The number of threads.
    pub fn threads(self) -> usize {
        self.threads
    }

    pub(crate) fn arch(self) -> Arch {
        self.arch
    }

    /// Calls `f` on ranges that cover `0..len`, one a thread, each starting at a multiple of `step`.
    ///
    /// Work below `step` items stays on the calling thread.
    pub(crate) fn for_ranges(self, len: usize, step: usize, f: impl Fn(Range<usize>) + Sync) {
        let steps = len.div_ceil(step.max(1));
        let parts = self.threads.min(steps);
        if parts <= 1 {
            return f(0..len);
        }
        let bound = |part: usize| (part * steps / parts * step).min(len);
        rayon::scope(|scope| {
            let f = &f;
            for part in 1..parts {
                scope.spawn(move |_| f(bound(part)..bound(part + 1)));
            }
            f(0..bound(1));
        });
    }

    /// Calls `f(worker, task)` for every task below `tasks`; workers take the next task when free, so
    /// tasks may be uneven. `worker < threads` names the worker's share of a scratch buffer.
    pub(crate) fn for_tasks(self, tasks: usize, f: impl Fn(usize, usize) + Sync) {
        let workers = self.threads.min(tasks);
        if workers <= 1 {
            return (0..tasks).for_each(|task| f(0, task));
        }
        let next = std::sync::atomic::AtomicUsize::new(0);
        let run = |worker| {
            loop {
                let task = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                if task >= tasks {
                    break;
                }
                f(worker, task);
            }
        };
        rayon::scope(|scope| {
            let run = &run;
            for worker in 1..workers {
                scope.spawn(move |_| run(worker));
            }
            run(0);
        });
    }
}

/// Calls the `#[inline(always)]` function `f<S: Simd>(simd, args..)` compiled for the instruction set of `cpu`.
///
/// Loops in `f` are vectorised for that set; `simd` gives explicit vectors where that is not enough.
macro_rules! dispatch {
    ($cpu:expr, $f:path, $($arg:expr),* $(,)?) => {
        match $cpu.arch() {
            #[cfg(target_arch = "x86_64")]
            pulp::Arch::V4(simd) => {
                let once = $crate::cpu::Once;
                simd.vectorize(
                    #[inline(always)]
                    || {
                        once.consume();
                        $f(simd, $($arg),*)
                    },
                )
            }
            #[cfg(target_arch = "x86_64")]
            pulp::Arch::V3(simd) => {
                let once = $crate::cpu::Once;
                simd.vectorize(
                    #[inline(always)]
                    || {
                        once.consume();
                        $f(simd, $($arg),*)
                    },
                )
            }
            #[cfg(target_arch = "aarch64")]
            pulp::Arch::Neon(simd) => $f(simd, $($arg),*),
            _ => $f(pulp::Scalar, $($arg),*),
        }
    };
}

/// Makes the closures of [`dispatch!`] callable once only. A closure that could be called again reaches
/// `vectorize` through a shim of the compiler, which is not always inlined; the body would then be compiled
/// without the instruction set, every intrinsic and fused multiply-add a call.
pub(crate) struct Once;

impl Once {
    #[inline(always)]
    pub(crate) fn consume(self) {}
}
