//! Builds the C++ shim against the libtorch that torch-sys found.

use std::{env, path::PathBuf};

fn main() {
    drivetrain_libtorch_link::link();
    let lib =
        PathBuf::from(env::var("DEP_TCH_LIBTORCH_LIB").expect("torch-sys is a direct dependency"));
    let include = lib
        .parent()
        .expect("libtorch's lib folder has a parent")
        .join("include");
    cxx_build::bridge("src/shim/mod.rs")
        .std("c++17")
        .warnings(false)
        .opt_level(3)
        .include(&include)
        .include(include.join("torch/csrc/api/include"))
        .include("src/shim")
        .file("src/shim/adamw.cc")
        .file("src/shim/autograd.cc")
        .file("src/shim/linear.cc")
        .file("src/shim/recompute.cc")
        .file("src/shim/rms_norm.cc")
        .file("src/shim/storage.cc")
        .compile("drivetrain_fsdp_shim");
    println!("cargo:rerun-if-changed=src/shim");
    println!("cargo:rustc-link-lib=torch_cpu");
    println!("cargo:rustc-link-lib=c10");
}
