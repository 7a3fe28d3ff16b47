//! The conformance suite on this engine with `device: cuda`, over the emulator of `kernels/emulator`: the same cases,
//! truths and tolerances as on the CPU, and every access of memory by a kernel checked. The emulator is slow, so these
//! are some of the cases; `--all` runs every one (about an hour and a half of one core).

use std::{process::ExitCode, sync::Arc};

use drivetrain_conformance::Suite;

mod device;

/// Families, each axis, and what each launches that the others do not.
const SOME: [&str; 12] = [
    "golden/llama_gqa_rope3",
    "golden/qwen3_qknorm",
    "golden/mixtral_moe",
    "oracle/q3_moe/polynomial_entropy",
    "oracle/window/polynomial_entropy",
    "experts/q3_moe/router_f64/ranks2",
    "experts/mixtral/bias/tensor2_sequence",
    "experts/uneven/data2_tensor2_expert2",
    "layouts/bias/tp2_dp2_all",
    "layouts/tied/tp2_cp2_pp2_all",
    "layouts/q3/pp2_chunks2_micro1",
    "layouts/bias/selective_micro2",
];

fn main() -> ExitCode {
    let suite = Suite::new(vec![Arc::new(device::EMULATED)]);
    match std::env::args().any(|arg| arg == "--all") {
        true => suite.main(),
        false => suite.groups(&SOME).at_least(20).main(),
    }
}
