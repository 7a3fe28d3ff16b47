//! Builds the C++ shim against the libtorch that torch-sys found.

fn main() {
    drivetrain_libtorch_link::link();
    cxx_build::bridge("src/shim.rs")
        .std("c++17")
        .warnings(false)
        .define("USE_C10D_GLOO", None)
        // Where libtorch brings headers of gloo, those; its wheel does not.
        .includes(drivetrain_libtorch_link::include_folders())
        .include("cxx")
        .file("cxx/store.cc")
        .file("cxx/gloo.cc")
        .compile("drivetrain_c10d_shim");
    println!("cargo:rerun-if-changed=cxx");
}
