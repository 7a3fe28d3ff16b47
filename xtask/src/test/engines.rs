//! Which engines the workspace has, and whether their tests ran.

use super::report::Report;
use cargo_metadata::Package;
use std::collections::BTreeSet;

/// An engine's package; its suite is the test target `conformance`.
const ENGINES: [&str; 2] = ["drivetrain-fsdp", "drivetrain-megatron"];
const SUITE: &str = "conformance";
/// The package that offers the engines to users.
const FACADE: &str = "drivetrain";

/// A line for each engine of which no test, or no conformance case, ran.
pub(super) fn untested(packages: &[Package], report: &Report) -> Vec<String> {
    let names = packages
        .iter()
        .map(|package| package.name.as_str())
        .collect();
    untested_of(&names, |package, target| {
        report.ran(|ran| ran.package == package && target.is_none_or(|target| ran.name == target))
    })
}

/// `ran(package, target)` is the number of tests that ran in a package, or in one target of it.
fn untested_of(names: &BTreeSet<&str>, ran: impl Fn(&str, Option<&str>) -> u64) -> Vec<String> {
    let mut complaints = Vec::new();
    for engine in ENGINES {
        if !names.contains(engine) {
            if names.contains(FACADE) {
                complaints.push(format!("{engine}: no such package in the workspace"));
            }
            continue;
        }
        if ran(engine, None) == 0 {
            complaints.push(format!("{engine}: no test of the package ran"));
        }
        if ran(engine, Some(SUITE)) == 0 && names.contains("drivetrain-conformance") {
            complaints.push(format!(
                "{engine}: no conformance case ran (expected the test target \
                 {engine}/tests/{SUITE}.rs to select at least one)"
            ));
        }
    }
    complaints
}

/// Whether there is a program that can be built with the second engine alone.
pub(super) fn builds_without_libtorch(packages: &[Package]) -> bool {
    let facade = packages.iter().find(|package| package.name == FACADE);
    facade.is_some_and(|package| package.features.contains_key("megatron"))
}

/// Whether there are kernels for CUDA.
pub(super) fn has_cuda_sources(packages: &[Package]) -> bool {
    let kernels = packages
        .iter()
        .find(|package| package.name == "drivetrain-kernels");
    kernels.is_some_and(|package| package.features.contains_key("cuda"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [&str; 4] = [
        "drivetrain",
        "drivetrain-conformance",
        ENGINES[0],
        ENGINES[1],
    ];

    #[test]
    fn an_engine_needs_tests_and_conformance_cases() {
        let all = BTreeSet::from(ALL);
        assert_eq!(untested_of(&all, |_, _| 1), [""; 0]);
        let no_suite = untested_of(&all, |_, target| u64::from(target.is_none()));
        assert_eq!(no_suite.len(), 2, "{no_suite:?}");
        let one_silent = untested_of(&all, |package, _| u64::from(package != ENGINES[1]));
        assert_eq!(one_silent.len(), 2, "{one_silent:?}");
        assert!(
            one_silent
                .iter()
                .all(|complaint| complaint.starts_with(ENGINES[1]))
        );
    }

    #[test]
    fn an_engine_that_is_gone_is_a_complaint_once_the_facade_exists() {
        let (core, facade) = (
            BTreeSet::from(["drivetrain-core"]),
            BTreeSet::from(["drivetrain"]),
        );
        assert_eq!(untested_of(&core, |_, _| 0), [""; 0]);
        assert_eq!(untested_of(&facade, |_, _| 0).len(), 2);
    }
}
