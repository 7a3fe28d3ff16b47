//! The CUDA sources, as they are compiled: by NVRTC for a device, by a C++ compiler for the emulator.

/// The source of an op.
#[derive(Debug, PartialEq, Eq)]
pub struct Module {
    /// The op's folder under `src/ops`.
    pub name: &'static str,
    /// `cuda.cu` of that folder.
    pub source: &'static str,
    /// Its kernels. Names are unique over all modules.
    pub kernels: &'static [&'static str],
}

/// The header that all of them include, by the name they include it under.
pub const HEADER: (&str, &str) = ("common.cuh", include_str!("common.cuh"));

/// Architectures that every source is compiled for in the tests, as 10 major + minor.
pub const ARCHITECTURES: [u32; 3] = [80, 90, 100];

macro_rules! modules {
    ($($constant:ident, $folder:literal: [$($kernel:literal),+ $(,)?];)+) => {
        $(
            pub(crate) static $constant: Module = Module {
                name: $folder,
                source: include_str!(concat!("../ops/", $folder, "/cuda.cu")),
                kernels: &[$($kernel),+],
            };
        )+
        /// Every module.
        pub static MODULES: &[&Module] = &[$(&$constant),+];
    };
}

modules! {
    ELEMENTWISE, "elementwise": [
        "axpy",
        "add",
        "scale",
        "f32_to_bf16",
        "bf16_to_f32",
        "sum_of_squares_partial",
        "sum_of_squares_total",
    ];
    RMS_NORM, "rms_norm": [
        "rms_norm_forward",
        "rms_norm_apply",
        "rms_norm_forward_residual",
        "rms_norm_backward_input",
        "rms_norm_backward_weight",
    ];
    LINEAR, "linear": ["linear_fill_bias", "linear_backward_bias"];
    SWIGLU, "swiglu": ["swiglu_forward", "swiglu_backward"];
    ADAMW, "adamw": ["adamw_update"];
    ROPE, "rope": ["rope_rotate"];
    EMBEDDING, "embedding": ["embedding_forward", "embedding_backward"];
    CROSS_ENTROPY, "cross_entropy": [
        "cross_entropy_forward",
        "cross_entropy_forward_partial",
        "cross_entropy_combine",
        "cross_entropy_backward",
    ];
    ATTENTION, "attention": [
        "attention_delta",
        "attention_fill",
        "attention_forward_64",
        "attention_backward_queries_64",
        "attention_backward_keys_64",
        "attention_forward_128",
        "attention_backward_queries_128",
        "attention_backward_keys_128",
        "attention_forward_256",
        "attention_backward_queries_256",
        "attention_backward_keys_256",
    ];
    PERMUTE, "permute": [
        "permute_sort",
        "permute_gather",
        "permute_gather_sum",
        "permute_unpermute_backward",
    ];
    ROUTER, "router": [
        "router_forward_f32",
        "router_backward_f32",
        "router_expert_loads_f32",
        "router_forward_f64",
        "router_backward_f64",
        "router_expert_loads_f64",
        "router_project_f64",
        "router_project_f64_backward",
    ];
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// That a module's list is that of its source is checked where it is compiled (`tests/nvrtc.rs`).
    #[test]
    fn kernels_have_names_of_their_own_and_every_source_is_a_module() {
        let mut names = BTreeSet::new();
        for kernel in MODULES.iter().flat_map(|module| module.kernels) {
            assert!(names.insert(*kernel), "{kernel} is the name of two kernels");
        }
        let ops = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ops");
        let with_source = std::fs::read_dir(ops).unwrap().filter_map(|entry| {
            let path = entry.unwrap().path();
            (path.join("cuda.cu").exists())
                .then(|| path.file_name().unwrap().to_str().unwrap().to_owned())
        });
        let names = MODULES.iter().map(|module| module.name.to_owned());
        assert_eq!(with_source.collect::<BTreeSet<_>>(), names.collect());
    }
}
