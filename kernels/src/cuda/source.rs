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
    SWIGLU, "swiglu": ["swiglu_forward", "swiglu_backward"];
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_kernel_is_listed_once_and_every_source_is_a_module() {
        let mut names = BTreeSet::new();
        for module in MODULES {
            let marker = "extern \"C\" __global__ void";
            let found = module.source.split(marker).skip(1).map(|after| {
                let end = after.find("(In").or_else(|| after.find("(Out"));
                let end = end
                    .or_else(|| after.find("(InOut"))
                    .or_else(|| after.find("(float"));
                let head =
                    &after[..end.expect("a kernel's first parameter is a buffer or a factor")];
                head.rsplit(|c: char| c.is_whitespace()).next().unwrap()
            });
            let found: Vec<&str> = found.collect();
            let listed: BTreeSet<_> = module.kernels.iter().copied().collect();
            assert_eq!(
                found.iter().copied().collect::<BTreeSet<_>>(),
                listed,
                "{}",
                module.name
            );
            assert_eq!(found.len(), module.kernels.len(), "{}", module.name);
            for kernel in found {
                assert!(names.insert(kernel), "{kernel} is the name of two kernels");
            }
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
