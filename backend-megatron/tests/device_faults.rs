//! A device that fails: the step ends on every rank, with an error that says what failed, and the weights stay.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
};

use drivetrain_conformance::{
    fixture::{batches, model, weights},
    suite::{Layout, Subject},
};
use drivetrain_core::{
    Error, ErrorKind, Result,
    batch::BatchTotals,
    config::DeviceConfig,
    engine::{Backend, Engine, ScoreRequest, StepOptions, WeightInit, Weights, build_engine},
    launch::run_ranks,
    objective::Nll,
    weights::MemoryWeights,
};
use drivetrain_kernels::{
    cuda::{CudaError, Device, Driver, Launch, Unified},
    ops::gemm::Gemm,
};
use drivetrain_megatron::{Megatron, MegatronOn};

mod device;

use device::{
    EMULATED, OnDevice,
    emulator::{Emulator, Order},
};

/// The emulator, until it breaks.
#[derive(Debug)]
struct Breaking {
    emulator: Emulator,
    launches: &'static AtomicUsize,
    broken: &'static AtomicBool,
}

impl Breaking {
    fn work(&self) -> Result<(), CudaError> {
        self.launches.fetch_add(1, SeqCst);
        match self.broken.load(SeqCst) {
            false => Ok(()),
            true => Err(CudaError::Call {
                what: "start a kernel".to_owned(),
                reason: "the device fell off the bus".to_owned(),
            }),
        }
    }
}

impl Driver for Breaking {
    fn allocate(&self, count: usize, size: usize) -> Result<u64, CudaError> {
        self.emulator.allocate(count, size)
    }

    unsafe fn free(&self, address: u64) {
        // SAFETY: the caller's.
        unsafe { self.emulator.free(address) }
    }

    fn allocate_unified(&self, count: usize, size: usize) -> Result<u64, CudaError> {
        self.emulator.allocate_unified(count, size)
    }

    unsafe fn free_unified(&self, address: u64) {
        // SAFETY: the caller's.
        unsafe { self.emulator.free_unified(address) }
    }

    unsafe fn zero(&self, address: u64, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        unsafe { self.emulator.zero(address, bytes) }
    }

    unsafe fn upload(&self, from: &[u8], to: u64) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        unsafe { self.emulator.upload(from, to) }
    }

    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        unsafe { self.emulator.download(from, to) }
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), CudaError> {
        self.work()?;
        // SAFETY: the caller's.
        unsafe { self.emulator.launch(launch) }
    }

    unsafe fn gemm(&self, dims: &Gemm, operands: [u64; 3]) -> Result<(), CudaError> {
        self.work()?;
        // SAFETY: the caller's.
        unsafe { self.emulator.gemm(dims, operands) }
    }

    fn synchronize(&self) -> Result<(), CudaError> {
        self.emulator.synchronize()
    }
}

/// A backend whose rank 1 breaks when `$broken` says so; its device's launches are counted.
macro_rules! breaking {
    ($backend:ident, $broken:ident, $launches:ident) => {
        static $broken: AtomicBool = AtomicBool::new(false);
        static $launches: AtomicUsize = AtomicUsize::new(0);
        static NEVER: AtomicBool = AtomicBool::new(false);
        fn open(rank: usize) -> Result<Unified, CudaError> {
            let driver = Breaking {
                emulator: Emulator::new(Order::Forward),
                launches: &$launches,
                broken: if rank == 1 { &$broken } else { &NEVER },
            };
            Ok(Unified::new(Device::new(Arc::new(driver))))
        }
        let $backend = OnDevice(MegatronOn(open));
    };
}

/// What failed, where, and what to do; of the rank that failed as of the others.
fn assert_says_all(error: &Error, operation: &str) {
    let text = error.to_string();
    assert_eq!(error.kind(), ErrorKind::Device, "{text}");
    for words in [
        operation,
        "rank = 1",
        "device = cuda",
        "fell off the bus",
        "help",
    ] {
        assert!(text.contains(words), "{words:?} in {text}");
    }
}

#[test]
fn a_device_that_fails_in_a_pass_fails_all_ranks_alike() {
    breaking!(backend, BROKEN, LAUNCHES);
    let (subject, model) = (Subject::new(backend), model("odd_heads"));
    let batch = batches::eight(model.vocab_size, 3).unwrap();
    let (start, totals) = (weights(&model, 3).unwrap(), BatchTotals::count(&batch));
    let mut job = subject.job(&model);
    let layout = Layout::data(2);
    layout.lay_out(&mut job);
    let ranks = subject.run_from(&job, &start, |rank| {
        let share = rank.share(&batch, layout.limit)?;
        let engine = &mut rank.engine;
        engine.forward_backward(&share, &Nll::default(), &totals)?;
        assert!(LAUNCHES.load(SeqCst) > 50, "the kernels did not run");
        engine.zero_grad()?;
        rank.world.barrier()?;
        BROKEN.store(true, SeqCst);
        rank.world.barrier()?;
        let scored = engine
            .forward(&share, &ScoreRequest::default())
            .unwrap_err();
        let passed = engine
            .forward_backward(&share, &Nll::default(), &totals)
            .unwrap_err();
        let mut sink = MemoryWeights::new();
        let exported = engine
            .export_weights(&Weights::Policy, &mut sink)
            .unwrap_err();
        Ok([
            (scored, "forward"),
            (passed, "forward_backward"),
            (exported, "export_weights"),
        ])
    });
    for (error, operation) in ranks.unwrap().iter().flatten() {
        assert_says_all(error, operation);
    }
}

#[test]
fn a_device_that_fails_before_the_commit_point_leaves_the_step_open_on_all_ranks() {
    breaking!(backend, BROKEN, LAUNCHES);
    let (subject, model) = (Subject::new(backend), model("odd_heads"));
    let batch = batches::eight(model.vocab_size, 3).unwrap();
    let (start, totals) = (weights(&model, 3).unwrap(), BatchTotals::count(&batch));
    let mut job = subject.job(&model);
    let layout = Layout::data(2);
    layout.lay_out(&mut job);
    let ranks = subject.run_from(&job, &start, |rank| {
        let share = rank.share(&batch, layout.limit)?;
        let engine = &mut rank.engine;
        engine.forward_backward(&share, &Nll::default(), &totals)?;
        let before = LAUNCHES.load(SeqCst);
        assert!(before > 50, "the kernels did not run");
        rank.world.barrier()?;
        BROKEN.store(true, SeqCst);
        rank.world.barrier()?;
        let error = engine.optim_step(&StepOptions::default()).unwrap_err();
        Ok((error, engine.step()))
    });
    for (error, step) in ranks.unwrap() {
        assert_says_all(&error, "optim_step");
        assert_eq!(step, 0);
    }
}

/// Where the feature is missing, the rule says so before anything runs; where the driver is, building says which
/// files were tried, on every rank.
#[test]
fn cuda_without_its_feature_or_without_a_driver_is_an_error_that_says_so() {
    let subject = Subject::new(Megatron);
    let mut job = subject.job(&model("odd_heads"));
    Layout::data(2).lay_out(&mut job);
    job.config.device = DeviceConfig::Cuda;
    let timeout = std::time::Duration::from_secs(60);
    let built = run_ranks(2, timeout, |world| {
        Ok(build_engine(&Megatron, &job, world, WeightInit::Seed(1)).map(drop))
    });
    for outcome in built.unwrap() {
        #[cfg(feature = "cuda")]
        if drivetrain_kernels::cuda::Gpu::count().is_ok_and(|count| count > 0) {
            outcome.unwrap();
            continue;
        }
        let error = outcome.unwrap_err();
        let text = error.to_string();
        let (kind, words): (_, &[&str]) = match cfg!(feature = "cuda") {
            true => (
                ErrorKind::Device,
                &["libcuda.so.1", "/usr/lib64", "device: cpu"],
            ),
            false => (
                ErrorKind::Unsupported,
                &["DEV-01", "write `cpu`", "feature", "`cuda`"],
            ),
        };
        assert_eq!(error.kind(), kind, "{text}");
        for words in words {
            assert!(text.contains(words), "{words:?} in {text}");
        }
    }
}

#[test]
fn what_the_kernels_do_not_take_is_a_fault_before_anything_runs() {
    let subject = Subject::new(EMULATED);
    let mut job = subject.job(&model("mixtral"));
    let found = |job: &_| EMULATED.check(job).len();
    job.model.head_dim = 264;
    if let Some(moe) = &mut job.model.moe {
        moe.num_experts = 1025;
    }
    assert_eq!(found(&job), 0);
    job.config.device = DeviceConfig::Cuda;
    assert_eq!(found(&job), 2);
    for fault in EMULATED.check(&job) {
        assert_eq!((fault.rule, fault.path.as_str()), ("MEGATRON-01", "device"));
    }
    job.model.head_dim = 256;
    if let Some(moe) = &mut job.model.moe {
        moe.num_experts = 1024;
    }
    assert_eq!(found(&job), 0);
}

#[test]
fn options_that_make_no_sense_are_faults_before_anything_runs() {
    use serde_json::json;

    let subject = Subject::new(Megatron);
    let mut job = subject.job(&model("odd_heads"));
    let mut found = |options: serde_json::Value, device| {
        let options = options.as_object().expect("options are a map").clone();
        job.config.backends.insert("megatron".to_owned(), options);
        job.config.device = device;
        let faults = Megatron.check(&job).into_iter();
        faults.map(|fault| fault.rule).collect::<Vec<_>>()
    };
    let (cpu, cuda) = (DeviceConfig::Cpu, DeviceConfig::Cuda);
    assert!(found(json!({}), cpu).is_empty());
    assert!(found(json!({"collectives": "nccl"}), cuda).is_empty());
    assert!(found(json!({"collectives": "host"}), cpu).is_empty());
    assert_eq!(found(json!({"collectives": "nccl"}), cpu), ["MEGATRON-02"]);
    assert_eq!(
        found(json!({"collectives": "smoke"}), cuda),
        ["MEGATRON-02"]
    );
    assert_eq!(found(json!({"colectives": "nccl"}), cuda), ["MEGATRON-02"]);
}

/// On devices that are there, without what NCCL needs (with a GPU, a second one for the second rank): every rank has the
/// error.
#[cfg(feature = "cuda")]
#[test]
fn nccl_without_its_devices_or_library_is_an_error_on_every_rank() {
    let subject = Subject::new(EMULATED);
    let mut job = subject.job(&model("odd_heads"));
    Layout::data(2).lay_out(&mut job);
    let options = serde_json::json!({"collectives": "nccl"});
    let options = options.as_object().expect("options are a map").clone();
    job.config.device = DeviceConfig::Cuda;
    job.config.backends.insert("megatron".to_owned(), options);
    if drivetrain_kernels::cuda::Gpu::count().is_ok_and(|count| count > 1) {
        println!("this machine has what it takes");
        return;
    }
    let timeout = std::time::Duration::from_secs(60);
    let built = run_ranks(2, timeout, |world| {
        Ok(build_engine(&EMULATED, &job, world, WeightInit::Seed(1)).map(drop))
    });
    for outcome in built.unwrap() {
        let error = outcome.unwrap_err();
        let text = error.to_string();
        assert_eq!(error.kind(), ErrorKind::Device, "{text}");
        let says = text.contains("libcuda.so.1") || text.contains("no two ranks on one device");
        assert!(says && text.contains("collectives: host"), "{text}");
    }
}
