//! What a job must satisfy beyond keys, types and ranges: one table a topic, one row a rule.

mod batch;
mod capability;
mod data;
mod experts;
mod moe;
mod objective;
mod optimizer;
mod parallel;
mod run;

use std::path::PathBuf;

use super::{JobConfig, JobSpec, load::STRUCTURAL_RULES};
use crate::{
    Diagnostic, Severity,
    engine::{Backend, Capability},
    model::{MODEL_RULES, ModelSpec},
};

/// What the rules look at.
pub(super) struct Facts<'a> {
    pub(super) config: &'a JobConfig,
    /// `None` where it could not be read.
    pub(super) model: Option<&'a ModelSpec>,
    /// `None` where the name is unknown.
    pub(super) backend: Option<&'a dyn Backend>,
    pub(super) backends: &'a [&'a dyn Backend],
    /// What the job reads that its output must not overwrite, in words, and where it is.
    pub(super) inputs: &'a [(&'static str, PathBuf)],
}

/// One rule. It runs only where every key it reads was well-formed; one that judges each key by itself names
/// none, and what it finds at a key that was not well-formed is dropped.
struct Rule {
    id: &'static str,
    what: &'static str,
    reads: &'static [&'static str],
    check: fn(&Facts<'_>, &mut Faults),
}

const TABLES: [&[Rule]; 9] = [
    batch::RULES,
    parallel::RULES,
    experts::RULES,
    moe::RULES,
    capability::RULES,
    optimizer::RULES,
    objective::RULES,
    data::RULES,
    run::RULES,
];

/// What these look for is on the disk of whoever writes YAML; a job built in code may have no files.
const RULES_OF_FILES: [&str; 3] = ["DATA-02", "OUT-01", "OUT-02"];

/// Every rule's id with what it finds: the loader's, the model's, then those of the tables.
pub fn rule_list() -> impl Iterator<Item = (&'static str, &'static str)> {
    let table = TABLES.iter().flat_map(|t| t.iter().map(|r| (r.id, r.what)));
    STRUCTURAL_RULES.into_iter().chain(MODEL_RULES).chain(table)
}

/// Runs every rule whose keys are sound. Lines are filled in later.
pub(super) fn judge(facts: &Facts<'_>, is_sound: &dyn Fn(&str) -> bool) -> Vec<Diagnostic> {
    let mut found = Vec::new();
    for rule in TABLES.iter().flat_map(|table| table.iter()) {
        if rule.reads.iter().all(|path| is_sound(path)) {
            let faults = rule.judge(facts);
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

/// Every fault of a job that was built in code, the backend's own check included: what one who writes YAML is
/// told, but for the rules that look at files.
pub fn check_job(job: &JobSpec, backend: &dyn Backend) -> Vec<Diagnostic> {
    judge_job(job, backend).0
}

/// As [`check_job`], and whether the job asks for what the backend does not claim.
pub(crate) fn judge_job(job: &JobSpec, backend: &dyn Backend) -> (Vec<Diagnostic>, bool) {
    // The other rules divide by sizes.
    let mut found = sizes(&job.config);
    if !found.is_empty() {
        return (found, false);
    }
    let facts = Facts {
        config: &job.config,
        model: Some(&job.model),
        backend: Some(backend),
        backends: &[],
        inputs: &[],
    };
    let mut unclaimed = false;
    found.extend(job.model.check());
    for rule in TABLES.iter().flat_map(|table| table.iter()) {
        if !RULES_OF_FILES.contains(&rule.id) {
            let faults = rule.judge(&facts);
            unclaimed |= faults.unclaimed;
            found.extend(faults.found);
        }
    }
    add_own(&mut found, backend.check(job));
    (found, unclaimed)
}

/// Adds what a backend found, but for paths that core has spoken on: there it would repeat it.
pub(super) fn add_own(found: &mut Vec<Diagnostic>, own: Vec<Diagnostic>) {
    let said: Vec<_> = found.iter().map(|d| (d.severity, d.path.clone())).collect();
    let new = |d: &Diagnostic| !said.contains(&(d.severity, d.path.clone()));
    found.extend(own.into_iter().filter(new));
}

/// Sizes of 0, which the schema of a file refuses.
fn sizes(config: &JobConfig) -> Vec<Diagnostic> {
    let (p, batch) = (&config.parallel, &config.batch);
    let sizes = [
        ("parallel.data_parallel_size", p.data_parallel_size),
        ("parallel.data_replicate_size", p.data_replicate_size),
        ("parallel.tensor_parallel_size", p.tensor_parallel_size),
        ("parallel.context_parallel_size", p.context_parallel_size),
        ("parallel.pipeline_parallel_size", p.pipeline_parallel_size),
        ("parallel.virtual_pipeline_size", p.virtual_pipeline_size),
        ("parallel.expert_parallel_size", p.expert_parallel_size),
        (
            "parallel.expert_tensor_parallel_size",
            p.expert_tensor_size(),
        ),
        ("batch.global_batch_size", batch.global_batch_size),
        (
            "batch.micro_batch_size",
            batch.micro_batch_size.unwrap_or(1),
        ),
        (
            "batch.micro_batch_tokens",
            batch.micro_batch_tokens.unwrap_or(1),
        ),
    ];
    let zero = |(path, _): (&str, usize)| Diagnostic::error("CFG-05", path, "0", "write 1 or more");
    sizes
        .into_iter()
        .filter(|(_, size)| *size == 0)
        .map(zero)
        .collect()
}

impl Rule {
    fn judge(&self, facts: &Facts<'_>) -> Faults {
        let mut faults = Faults {
            rule: self.id,
            found: Vec::new(),
            unclaimed: false,
        };
        (self.check)(facts, &mut faults);
        faults
    }
}

/// Where a rule puts what it finds.
struct Faults {
    rule: &'static str,
    found: Vec<Diagnostic>,
    /// Whether one is a request that the backend does not claim.
    unclaimed: bool,
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
        faults.unclaimed = true;
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
