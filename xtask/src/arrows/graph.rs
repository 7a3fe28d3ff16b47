//! Arrows between the packages of the workspace.

use anyhow::Result;
use cargo_metadata::DependencyKind;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Whom a package may depend on.
enum May {
    Only(&'static [&'static str]),
    All,
}

/// Every package of the workspace and its arrows (normal, build and dev alike). The engines'
/// dev-dependency on the suite is in [`DEV_ARROWS`].
const ARROWS: &[(&str, May)] = &[
    ("drivetrain-core", May::Only(&[])),
    ("drivetrain-data", May::Only(&["drivetrain-core"])),
    ("drivetrain-kernels", May::Only(&["drivetrain-core"])),
    ("drivetrain-collectives", May::Only(&["drivetrain-core"])),
    ("drivetrain-c10d", May::Only(&["drivetrain-core"])),
    (
        "drivetrain-fsdp",
        May::Only(&["drivetrain-core", "drivetrain-collectives"]),
    ),
    (
        "drivetrain-megatron",
        May::Only(&[
            "drivetrain-core",
            "drivetrain-kernels",
            "drivetrain-collectives",
        ]),
    ),
    ("drivetrain-conformance", May::Only(&["drivetrain-core"])),
    ("drivetrain-tuner", May::Only(&["drivetrain-core"])),
    (
        "drivetrain-rl",
        May::Only(&["drivetrain-core", "drivetrain-data"]),
    ),
    ("drivetrain-benches", May::All),
    ("drivetrain", May::All),
    ("drivetrain-python", May::All),
    ("drivetrain-libtorch-link", May::Only(&[])),
    ("xtask", May::Only(&[])),
];

/// Allowed in `[dev-dependencies]` only.
const DEV_ARROWS: &[(&str, &str)] = &[
    ("drivetrain-collectives", "drivetrain-conformance"),
    ("drivetrain-c10d", "drivetrain-conformance"),
    ("drivetrain-fsdp", "drivetrain-conformance"),
    ("drivetrain-megatron", "drivetrain-conformance"),
];

/// A package under `examples/` stands for a stranger's: it sees the contract and the suite.
const EXAMPLE_ARROWS: May = May::Only(&["drivetrain-core", "drivetrain-conformance"]);

/// Build-script piece that whoever links libtorch needs, and that says nothing of the design.
const LINK: &str = "drivetrain-libtorch-link";
/// Packages that bring libtorch in.
const LIBTORCH: [&str; 2] = ["tch", "torch-sys"];
/// Dependencies from outside that core must not have: they would tie the contract to an engine.
const NOT_IN_CORE: [&str; 3] = ["tch", "torch-sys", "cudarc"];

/// A package of the workspace.
#[derive(Debug)]
pub(super) struct Package {
    name: String,
    is_example: bool,
    dependencies: Vec<(String, DependencyKind)>,
}

pub(super) fn read(root: &Path) -> Result<Vec<Package>> {
    let examples = root.join("examples");
    let package = |package: &cargo_metadata::Package| Package {
        name: package.name.to_string(),
        is_example: package.manifest_path.as_std_path().starts_with(&examples),
        dependencies: package
            .dependencies
            .iter()
            .map(|dependency| (dependency.name.clone(), dependency.kind))
            .collect(),
    };
    Ok(crate::workspace::packages()?.iter().map(package).collect())
}

pub(super) fn violations(packages: &[Package]) -> Vec<String> {
    let members: BTreeSet<&str> = packages
        .iter()
        .map(|package| package.name.as_str())
        .collect();
    let mut found = Vec::new();
    for package in packages {
        let name = package.name.as_str();
        let row = ARROWS
            .iter()
            .find(|(from, _)| *from == name)
            .map(|(_, may)| may);
        let Some(may) = row.or(package.is_example.then_some(&EXAMPLE_ARROWS)) else {
            found.push(format!(
                "{name} is not in the table of arrows: add its row in xtask/src/arrows/graph.rs"
            ));
            continue;
        };
        for (to, kind) in &package.dependencies {
            if members.contains(to.as_str()) && !is_allowed(name, may, to, *kind) {
                found.push(format!(
                    "{name} --{kind}--> {to} is not an arrow of the design"
                ));
            }
            if name == "drivetrain-core" && NOT_IN_CORE.contains(&to.as_str()) {
                found.push(format!(
                    "{name} --{kind}--> {to}: core is free of engines and devices"
                ));
            }
        }
    }
    found.extend(missing_link_arguments(packages));
    found
}

fn is_allowed(from: &str, may: &May, to: &str, kind: DependencyKind) -> bool {
    let by_row = match may {
        May::All => true,
        May::Only(allowed) => allowed.contains(&to),
    };
    let is_dev = kind == DependencyKind::Development;
    let is_link = to == LINK && kind == DependencyKind::Build;
    by_row || is_link || (is_dev && DEV_ARROWS.contains(&(from, to)))
}

/// Whoever links libtorch, even through another package of ours, must say so in its own manifest:
/// else its programs start with "cannot open shared object file".
fn missing_link_arguments(packages: &[Package]) -> Vec<String> {
    let by_name: BTreeMap<&str, &Package> = packages
        .iter()
        .map(|package| (package.name.as_str(), package))
        .collect();
    let mut found = Vec::new();
    for package in packages
        .iter()
        .filter(|package| links_libtorch(package, &by_name))
    {
        let has = |name: &str, is_build: bool| {
            package.dependencies.iter().any(|(to, kind)| {
                to == name
                    && *kind != DependencyKind::Development
                    && (*kind == DependencyKind::Build) == is_build
            })
        };
        if !has("torch-sys", false) {
            found.push(format!(
                "{} links libtorch without torch-sys as a dependency",
                package.name
            ));
        }
        if !has(LINK, true) {
            found.push(format!(
                "{} links libtorch without {LINK} in its build.rs",
                package.name
            ));
        }
    }
    found
}

fn links_libtorch(package: &Package, by_name: &BTreeMap<&str, &Package>) -> bool {
    // The graph of packages is acyclic but for dev arrows, which are followed one step only.
    package.dependencies.iter().any(|(to, _)| {
        LIBTORCH.contains(&to.as_str())
            || by_name
                .get(to.as_str())
                .is_some_and(|to| links_as_library(to, by_name))
    })
}

fn links_as_library(package: &Package, by_name: &BTreeMap<&str, &Package>) -> bool {
    package
        .dependencies
        .iter()
        .filter(|(_, kind)| *kind == DependencyKind::Normal)
        .any(|(to, _)| {
            LIBTORCH.contains(&to.as_str())
                || by_name
                    .get(to.as_str())
                    .is_some_and(|to| links_as_library(to, by_name))
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use DependencyKind::{Build, Development, Normal};

    fn package(name: &str, dependencies: &[(&str, DependencyKind)]) -> Package {
        let dependencies = dependencies
            .iter()
            .map(|(to, kind)| ((*to).to_owned(), *kind));
        Package {
            name: name.to_owned(),
            is_example: name.starts_with("example"),
            dependencies: dependencies.collect(),
        }
    }

    /// A workspace without fault, and `planted` in place of the package of its name.
    fn with(planted: Package) -> Vec<String> {
        let core = ("drivetrain-core", Normal);
        let link = [("torch-sys", Normal), (LINK, Build)];
        let mut packages = vec![
            package("drivetrain-core", &[]),
            package("drivetrain-kernels", &[core]),
            package(
                "drivetrain-fsdp",
                &[&[core, ("tch", Normal)], &link[..]].concat(),
            ),
            package(
                "drivetrain-megatron",
                &[
                    core,
                    ("drivetrain-kernels", Normal),
                    ("drivetrain-conformance", Development),
                ],
            ),
            package("drivetrain-conformance", &[core]),
            package(
                "drivetrain",
                &[&[core, ("drivetrain-fsdp", Normal)], &link[..]].concat(),
            ),
            package(LINK, &[]),
        ];
        packages.retain(|package| package.name != planted.name);
        packages.push(planted);
        violations(&packages)
    }

    #[test]
    fn the_design_passes_and_so_does_a_strangers_engine() {
        let core_and_suite = [
            ("drivetrain-core", Normal),
            ("drivetrain-conformance", Development),
        ];
        assert_eq!(with(package("example-bigram", &core_and_suite)), [""; 0]);
    }

    #[test]
    fn each_planted_arrow_is_one_violation() {
        let planted = [
            ("drivetrain-megatron", "drivetrain-fsdp", Normal),
            ("drivetrain-megatron", "drivetrain-conformance", Normal),
            ("drivetrain-conformance", "drivetrain-kernels", Normal),
            ("drivetrain-conformance", "drivetrain-megatron", Development),
            ("drivetrain-core", "drivetrain-conformance", Development),
            ("drivetrain-core", "cudarc", Normal),
            ("drivetrain-kernels", "drivetrain-conformance", Development),
            ("drivetrain-kernels", LINK, Normal),
            ("example-bigram", "drivetrain-megatron", Development),
        ];
        for (from, to, kind) in planted {
            let found = with(package(from, &[(to, kind)]));
            let arrow = format!("{from} --{kind}--> {to}");
            let hits = found
                .iter()
                .filter(|violation| violation.starts_with(&arrow))
                .count();
            assert_eq!(hits, 1, "{arrow}: {found:?}");
        }
    }

    #[test]
    fn an_unknown_package_is_a_violation() {
        let found = with(package("drivetrain-stranger", &[]));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("not in the table of arrows"));
    }

    #[test]
    fn linking_libtorch_through_another_package_needs_both_lines() {
        let found = with(package("drivetrain", &[("drivetrain-fsdp", Normal)]));
        assert_eq!(found.len(), 2, "{found:?}");
        let half = [("drivetrain-fsdp", Normal), ("torch-sys", Normal)];
        let found = with(package("drivetrain", &half));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains(LINK));
    }
}
