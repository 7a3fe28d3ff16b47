//! Builds the C++ shim against the libtorch that torch-sys found.

fn main() {
    drivetrain_libtorch_link::link();
    cxx_build::bridge("src/shim/mod.rs")
        .std("c++17")
        .warnings(false)
        .opt_level(3)
        .includes(drivetrain_libtorch_link::include_folders())
        .include("src/shim")
        .file("src/shim/adamw.cc")
        .file("src/shim/autograd.cc")
        .file("src/shim/linear.cc")
        .file("src/shim/recompute.cc")
        .file("src/shim/rms_norm.cc")
        .file("src/shim/storage.cc")
        .compile("drivetrain_fsdp_shim");
    println!("cargo:rerun-if-changed=src/shim");
}
