//! A job that was built in code is told what one who writes YAML is told.

use super::*;
use crate::{
    communicator::{LocalCommunicator, LocalOptions},
    config::check_job,
    engine::build_engine,
    model::MlpSpec,
};

/// The rules that a good job breaks once it is changed so.
fn broken(backend: &Claims, change: fn(&mut JobSpec)) -> Vec<&'static str> {
    let mut job = Desk::new().load(GOOD, &[]).unwrap().spec;
    change(&mut job);
    let faults = check_job(&job, backend);
    faults
        .iter()
        .filter(|d| d.severity == Severity::Error)
        .map(|d| d.rule)
        .collect()
}

#[test]
fn every_rule_but_those_of_files_holds_in_code() {
    assert_eq!(broken(&NARROW, |_| ()), [""; 0]);
    let gone = |job: &mut JobSpec| job.config.data.train = "nowhere".into();
    assert_eq!(broken(&NARROW, gone), [""; 0]);
    let mesh = |job: &mut JobSpec| {
        job.config.parallel.data_parallel_size = 4;
        job.config.parallel.data_replicate_size = 3;
    };
    assert_eq!(broken(&NARROW, mesh), ["DP-02", "DP-03"]);
    let heads = |job: &mut JobSpec| job.config.parallel.tensor_parallel_size = 3;
    assert_eq!(broken(&WIDE, heads), ["TP-02", "TP-03"]);
    let budget = |job: &mut JobSpec| job.config.logits_budget_bytes = 8 * 97 - 1;
    assert_eq!(broken(&NARROW, budget), ["LOGITS-01"]);
    let own = |job: &mut JobSpec| job.config.seed = 13;
    assert_eq!(broken(&NARROW, own), ["OWN-01"]);
}

#[test]
fn sizes_of_0_and_models_that_no_file_may_hold_are_faults() {
    let sizes = |job: &mut JobSpec| {
        job.config.parallel.data_parallel_size = 0;
        job.config.parallel.expert_tensor_parallel_size = Some(0);
        job.config.batch.micro_batch_size = Some(0);
    };
    assert_eq!(broken(&NARROW, sizes), ["CFG-05"; 3]);
    let model = |job: &mut JobSpec| {
        job.model.head_dim = 7;
        job.model.num_kv_heads = 3;
        job.model.layers[1].sliding_window = Some(0);
        job.model.layers[1].mlp = MlpSpec::Moe;
    };
    let found = broken(&NARROW, model);
    assert_eq!(found, ["MODEL-03", "MODEL-04", "MODEL-05", "MODEL-06"]);
}

#[test]
fn the_mesh_is_exact_and_an_engine_is_not_built_against_a_rule() {
    let mut job = Desk::new().load(GOOD, &[]).unwrap().spec;
    job.config.parallel.data_parallel_size = 4;
    job.config.parallel.data_replicate_size = 2;
    assert_eq!(job.mesh().unwrap().world_size(), 4);
    job.config.parallel.data_replicate_size = 3;
    assert_eq!(job.mesh().unwrap_err().kind(), ErrorKind::Config);
    let world = LocalCommunicator::world(1, LocalOptions::default());
    let build = |job: &JobSpec| {
        let world = world[0].clone();
        build_engine(&NARROW, job, world, WeightInit::Seed(1)).map(drop)
    };
    // It also asks for replicas, which the backend does not claim.
    let error = build(&job).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert_eq!(error.diagnostics().len(), 2);
    job.config.parallel = Default::default();
    job.model.head_dim = 7;
    assert_eq!(build(&job).unwrap_err().kind(), ErrorKind::Config);
}
