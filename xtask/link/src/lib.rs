//! Linker arguments for every package that makes a program out of libtorch.
//!
//! Cargo does not pass link arguments of a dependency on to its dependents. So each package with a
//! binary, test, example, benchmark or cdylib that links libtorch, however far down its dependency
//! tree, has three lines of its own:
//!
//! ```toml
//! [dependencies]
//! torch-sys = { workspace = true, optional = true }  # direct: cargo tells only direct dependents
//! [build-dependencies]                                #   where libtorch lies
//! drivetrain-libtorch-link = { workspace = true }
//! ```
//!
//! and a `build.rs` that is `fn main() { drivetrain_libtorch_link::link() }`.
//! `cargo xtask arrows` reports a package that links libtorch and lacks one of them.

use std::path::{Path, PathBuf};

/// Prints the `cargo:` lines that add libtorch's folder to the run-time search path of everything
/// this package links. Does nothing when the package is built without `torch-sys`.
pub fn link() {
    // `links = "tch"` of torch-sys names the variable.
    println!("cargo:rerun-if-env-changed=DEP_TCH_LIBTORCH_LIB");
    if let Ok(folder) = std::env::var("DEP_TCH_LIBTORCH_LIB") {
        for argument in link_arguments(Path::new(&folder)) {
            println!("cargo:rustc-link-arg={argument}");
        }
    }
}

/// For a shim in C++ of this package's own: links what it calls, and returns where libtorch's headers lie.
///
/// # Panics
/// Without `torch-sys` as a direct dependency.
pub fn include_folders() -> [PathBuf; 2] {
    println!("cargo:rustc-link-lib=torch_cpu");
    println!("cargo:rustc-link-lib=c10");
    let lib = std::env::var("DEP_TCH_LIBTORCH_LIB").expect("torch-sys is a direct dependency");
    let include = Path::new(&lib).with_file_name("include");
    [include.join("torch/csrc/api/include"), include]
}

fn link_arguments(libtorch_lib: &Path) -> Vec<String> {
    let mut arguments = vec![format!("-Wl,-rpath,{}", libtorch_lib.display())];
    // rustc links with --as-needed. No symbol of libtorch_cuda is referred to (it registers itself
    // when loaded), so it would be dropped and CUDA would seem to be absent.
    if libtorch_lib.join("libtorch_cuda.so").exists() {
        arguments.push("-Wl,--push-state,--no-as-needed,-ltorch_cuda,--pop-state".to_owned());
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuda_is_kept_only_where_it_exists() {
        let folder = std::env::temp_dir().join(format!("libtorch-link-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let without = link_arguments(&folder);
        std::fs::write(folder.join("libtorch_cuda.so"), "").unwrap();
        let with = link_arguments(&folder);
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(without, [format!("-Wl,-rpath,{}", folder.display())]);
        assert_eq!(with.len(), 2);
        assert!(with[1].contains("--no-as-needed,-ltorch_cuda"));
    }
}
