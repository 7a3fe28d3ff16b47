//! Every kernel compiled for real, by the NVRTC that `cargo xtask setup` fetches: no GPU, no driver.

use drivetrain_kernels::cuda::{ARCHITECTURES, MODULES, Module, Nvrtc, Resources, Target};

fn nvrtc() -> Nvrtc {
    Nvrtc::load().unwrap_or_else(|error| {
        panic!(
            "THE CUDA SOURCES WERE NOT COMPILED: {error}\n`cargo xtask test` fetches NVRTC and names its folder; \
             without it, set DRIVETRAIN_CUDA_LIBRARIES yourself"
        )
    })
}

/// What keeps a kernel's data out of its registers.
fn faults(compiled: &[Resources]) -> Vec<String> {
    let slow = |r: &&Resources| r.spill_bytes > 0 || r.stack_bytes > 0;
    compiled
        .iter()
        .filter(slow)
        .map(|r| format!("{r:?}"))
        .collect()
}

#[test]
fn every_source_compiles_for_every_architecture_without_spills() {
    let nvrtc = nvrtc();
    // Architectures side by side: attention takes seconds for each.
    let faulty: Vec<String> = std::thread::scope(|scope| {
        let check = |sm| scope.spawn(move || check_architecture(nvrtc, sm));
        let running = ARCHITECTURES.map(check);
        running
            .into_iter()
            .flat_map(|thread| thread.join().expect("see above"))
            .collect()
    });
    assert!(
        faulty.is_empty(),
        "spills or local memory:\n{}",
        faulty.join("\n")
    );
}

/// Compiles all modules, prints what they take, and returns the faults.
fn check_architecture(nvrtc: Nvrtc, sm: u32) -> Vec<String> {
    let mut faulty = Vec::new();
    for module in MODULES {
        let compiled = nvrtc
            .compile(module, Target::Cubin(sm))
            .unwrap_or_else(|e| panic!("{e}"));
        assert!(
            compiled.image.starts_with(b"\x7fELF"),
            "{} for sm_{sm}",
            module.name
        );
        let mut found: Vec<&str> = compiled
            .resources
            .iter()
            .map(|r| r.kernel.as_str())
            .collect();
        let mut listed = module.kernels.to_vec();
        found.sort_unstable();
        listed.sort_unstable();
        assert_eq!(found, listed, "kernels of {} for sm_{sm}", module.name);
        for Resources {
            kernel,
            registers,
            shared_bytes,
            ..
        } in &compiled.resources
        {
            println!(
                "sm_{sm:<4} {kernel:<36} {registers:>4} registers {shared_bytes:>6} bytes shared"
            );
            assert!(*registers > 0, "the assembler's report was not understood");
        }
        for fault in faults(&compiled.resources) {
            faulty.push(format!("{} for sm_{sm}: {fault}", module.name));
        }
    }
    faulty
}

#[test]
fn ptx_for_devices_that_nvrtc_does_not_know_compiles_too() {
    for module in MODULES {
        let compiled = nvrtc()
            .compile(module, Target::Ptx(90))
            .unwrap_or_else(|e| panic!("{e}"));
        let text = String::from_utf8_lossy(&compiled.image);
        assert!(
            text.contains(".target sm_90") && text.ends_with('\0'),
            "{}",
            module.name
        );
    }
}

/// The check above can fail: a kernel that needs more registers than it may have, and one with an array that
/// is indexed at run time.
#[test]
fn a_spill_and_local_memory_are_found() {
    let module = Module {
        name: "greedy",
        source: "#include \"common.cuh\"
extern \"C\" __global__ void __launch_bounds__(1024, 2) greedy(In<float> x, Out<float> y) {
  float all[64];
  for (int i = 0; i < 64; i++) all[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
  float sum = 0.0f;
  for (int i = 0; i < 64; i++)
    for (int j = 0; j < 64; j++) sum += all[i] * expf(all[j]);
  y[threadIdx.x] = sum;
}
extern \"C\" __global__ void indexed(In<float> x, In<int> at, Out<float> y) {
  float all[16];
  for (int i = 0; i < 16; i++) all[i] = x[i];
  for (int i = 0; i < 64; i++) all[at[i] & 15] += 1.0f;
  y[threadIdx.x] = all[at[65] & 15];
}",
        kernels: &["greedy", "indexed"],
    };
    for sm in ARCHITECTURES {
        let compiled = nvrtc().compile(&module, Target::Cubin(sm)).unwrap();
        let faults = faults(&compiled.resources);
        assert!(
            faults.len() == 2,
            "sm_{sm}: {faults:?} of {:?}",
            compiled.resources
        );
    }
}

#[test]
fn an_error_in_a_source_names_the_file_and_the_line() {
    let module = Module {
        name: "wrong",
        source: "#include \"common.cuh\"\nextern \"C\" __global__ void f(Out<float> y) { y[0] = absent; }\n",
        kernels: &["f"],
    };
    let error = nvrtc()
        .compile(&module, Target::Cubin(90))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("wrong does not compile for sm_90"),
        "{error}"
    );
    assert!(
        error.contains("wrong.cu(2)") && error.contains("absent"),
        "{error}"
    );
}

#[test]
fn the_architectures_are_among_those_that_it_compiles_for() {
    let known = nvrtc().architectures().unwrap();
    assert!(
        ARCHITECTURES.iter().all(|sm| known.contains(sm)),
        "{known:?}"
    );
    assert!(nvrtc().version().unwrap() >= 12_000);
}
