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
    cxx_build::bridge("src/shim.rs")
        .std("c++17")
        .warnings(false)
        .define("USE_C10D_GLOO", None)
        // Where libtorch brings headers of gloo, those; its wheel does not.
        .include(&include)
        .include(include.join("torch/csrc/api/include"))
        .include("cxx")
        .file("cxx/store.cc")
        .file("cxx/gloo.cc")
        .compile("drivetrain_c10d_shim");
    println!("cargo:rerun-if-changed=cxx");
    println!("cargo:rustc-link-lib=torch_cpu");
    println!("cargo:rustc-link-lib=c10");
}
