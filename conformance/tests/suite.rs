//! The suite's own promises: nothing selected is a failure, and so is less than was asked for.

use std::sync::Arc;

use drivetrain_conformance::{Suite, SuiteArgs, oracle::ReferenceBackend};
use drivetrain_core::{
    Diagnostic, Result,
    communicator::Communicator,
    config::JobSpec,
    engine::{Backend, Capability, Engine, WeightInit},
    plan::TrainPlan,
};

/// The oracle, claiming something else.
#[derive(Debug)]
struct Claiming(Capability);

impl Backend for Claiming {
    fn name(&self) -> &str {
        "claiming"
    }

    fn capability(&self) -> Capability {
        self.0.clone()
    }

    fn check(&self, job: &JobSpec) -> Vec<Diagnostic> {
        ReferenceBackend::new().check(job)
    }

    fn plan(&self, job: &JobSpec) -> Result<TrainPlan> {
        ReferenceBackend::new().plan(job)
    }

    fn build(
        &self,
        plan: &TrainPlan,
        world: Arc<dyn Communicator>,
        init: WeightInit<'_>,
    ) -> Result<Box<dyn Engine>> {
        ReferenceBackend::new().build(plan, world, init)
    }
}

fn args(filter: &str) -> SuiteArgs {
    let args = ["--quiet", filter].map(str::to_owned);
    SuiteArgs::parse(args).expect("the arguments are right")
}

#[test]
fn a_backend_that_claims_nothing_fails() {
    let suite = Suite::new(vec![Arc::new(Claiming(Capability::default()))]);
    let outcome = suite.run(&args("")).expect("no report is written");
    assert!(!outcome.passed());
}

#[test]
fn a_filter_that_selects_nothing_fails() {
    let suite = Suite::new(vec![Arc::new(ReferenceBackend::new())]);
    let outcome = suite
        .run(&args("no case has this name"))
        .expect("no report is written");
    assert!(outcome.cases.is_empty() && !outcome.passed());
}

#[test]
fn fewer_cases_than_promised_fail() {
    let suite = Suite::new(vec![Arc::new(ReferenceBackend::new())]).at_least(1_000_000);
    let outcome = suite
        .run(&args("golden/llama_mha/scores"))
        .expect("no report is written");
    assert!(outcome.cases.iter().all(|c| c.passed) && !outcome.passed());
}

#[test]
fn unclaimed_things_are_refused_and_the_rest_passes() {
    let claims = Capability {
        families: ReferenceBackend::new().capability().families,
        compute: ReferenceBackend::new().capability().compute,
        reduce: ReferenceBackend::new().capability().reduce,
        devices: ReferenceBackend::new().capability().devices,
        ..Capability::default()
    };
    let suite = Suite::new(vec![Arc::new(Claiming(claims))]);
    let outcome = suite.run(&args("refusals/")).expect("no report is written");
    let failed: Vec<_> = outcome.cases.iter().filter(|c| !c.passed).collect();
    assert!(outcome.passed(), "{failed:#?}");
    let refused = |name: &str| outcome.cases.iter().any(|c| c.case == name);
    assert!(refused("refusals/snapshot") && refused("refusals/job_data_parallel"));
}

#[test]
fn the_report_holds_every_comparison() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("report.json");
    let mut args = args("golden/llama_mha/gradients");
    args.report = Some(path.clone());
    let suite = Suite::new(vec![Arc::new(ReferenceBackend::new())]);
    assert!(suite.run(&args).expect("the report is written").passed());
    let text = std::fs::read_to_string(&path).expect("a report");
    let report: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let comparisons = report[0]["comparisons"].as_array().expect("a list");
    assert!(comparisons.len() > 20, "{}", comparisons.len());
    assert!(comparisons[0]["share"].as_f64().expect("a number") < 1.0);
    args.report = Some(folder.path().join("no such folder").join("report.json"));
    assert!(suite.run(&args).is_err());
}
