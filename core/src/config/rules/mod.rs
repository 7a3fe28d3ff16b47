//! What a job must satisfy beyond keys, types and ranges: one table a topic, one row a rule.

mod batch;
mod capability;
mod data;
mod experts;
mod objective;
mod optimizer;
mod parallel;
mod run;

use super::{JobConfig, JobSpec, load::STRUCTURAL_RULES};
use crate::{
    Diagnostic, Severity,
    engine::{Backend, Capability},
    model::ModelSpec,
};

/// What the rules look at.
pub(super) struct Facts<'a> {
    pub(super) config: &'a JobConfig,
    /// `None` where it could not be read.
    pub(super) model: Option<&'a ModelSpec>,
    /// `None` where the name is unknown.
    pub(super) backend: Option<&'a dyn Backend>,
    pub(super) backends: &'a [&'a dyn Backend],
}

/// One rule. It runs only where every key it reads was well-formed; one that judges each key by itself names
/// none, and what it finds at a key that was not well-formed is dropped.
struct Rule {
    id: &'static str,
    what: &'static str,
    reads: &'static [&'static str],
    check: fn(&Facts<'_>, &mut Faults),
}

const TABLES: [&[Rule]; 8] = [
    batch::RULES,
    parallel::RULES,
    experts::RULES,
    capability::RULES,
    optimizer::RULES,
    objective::RULES,
    data::RULES,
    run::RULES,
];

/// Every rule's id with what it finds: the loader's, then those of the tables.
pub fn rule_list() -> impl Iterator<Item = (&'static str, &'static str)> {
    let table = TABLES.iter().flat_map(|t| t.iter().map(|r| (r.id, r.what)));
    STRUCTURAL_RULES.into_iter().chain(table)
}

/// Runs every rule whose keys are sound. Lines are filled in later.
pub(super) fn judge(facts: &Facts<'_>, is_sound: &dyn Fn(&str) -> bool) -> Vec<Diagnostic> {
    let mut found = Vec::new();
    for rule in TABLES.iter().flat_map(|table| table.iter()) {
        if rule.reads.iter().all(|path| is_sound(path)) {
            let mut faults = Faults {
                rule: rule.id,
                found: Vec::new(),
            };
            (rule.check)(facts, &mut faults);
            found.extend(
                faults
                    .found
                    .into_iter()
                    .filter(|fault| is_sound(&fault.path)),
            );
        }
    }
    found
}

/// What a job asks for that a backend does not claim. These rules look at no file, so that whoever builds a
/// [`JobSpec`] in code is told the same as one who writes YAML.
pub fn check_claims(job: &JobSpec, backend: &dyn Backend) -> Vec<Diagnostic> {
    let facts = Facts {
        config: &job.config,
        model: Some(&job.model),
        backend: Some(backend),
        backends: &[],
    };
    let mut found = Vec::new();
    for rule in capability::RULES {
        let mut faults = Faults {
            rule: rule.id,
            found: Vec::new(),
        };
        (rule.check)(&facts, &mut faults);
        found.extend(faults.found);
    }
    found
}

/// Where a rule puts what it finds.
struct Faults {
    rule: &'static str,
    found: Vec<Diagnostic>,
}

impl Faults {
    fn error(&mut self, path: &str, found: impl Into<String>, remedy: impl Into<String>) {
        self.found
            .push(Diagnostic::error(self.rule, path, found, remedy));
    }

    fn warning(&mut self, path: &str, found: impl Into<String>, remedy: impl Into<String>) {
        self.found.push(Diagnostic {
            severity: Severity::Warning,
            ..Diagnostic::error(self.rule, path, found, remedy)
        });
    }
}

impl Facts<'_> {
    /// Asks the chosen backend's capability, and where it lacks `claim`, says so and who has it.
    fn require(
        &self,
        faults: &mut Faults,
        path: &str,
        what: &str,
        otherwise: &str,
        claim: impl Fn(&Capability) -> bool,
    ) {
        let Some(backend) = self.backend else { return };
        if claim(&backend.capability()) {
            return;
        }
        let others: Vec<_> = self
            .backends
            .iter()
            .filter(|b| claim(&b.capability()))
            .map(|b| format!("`{}`", b.name()))
            .collect();
        let remedy = match &others[..] {
            [] => format!("{otherwise}; no backend here offers it"),
            names => format!(
                "{otherwise}, or choose a backend that offers it: {}",
                names.join(", ")
            ),
        };
        faults.error(
            path,
            format!("backend `{}` does not offer {what}", backend.name()),
            remedy,
        );
    }

    /// Ranks that get data of their own.
    fn data_ranks(&self) -> usize {
        self.config.parallel.data_parallel_size
    }
}

#[cfg(test)]
mod tests;
