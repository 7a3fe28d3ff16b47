//! The suite: cases chosen by what each backend claims, run under the usual test harness.

mod args;
mod case;
mod faulty;
mod findings;
mod layout;
mod subject;

use std::{
    collections::BTreeMap,
    io::Write,
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use drivetrain_core::{Error, ErrorKind, Result, config::MoeConfig, engine::Backend};
use libtest_mimic::{Failed, Trial};

pub use args::SuiteArgs;
pub use case::{Case, Claims, Needs};
pub use faulty::Fault;
pub use findings::{CaseReport, Findings};
pub use layout::Layout;
pub use subject::{Rank, Settings, Subject, Transport};

use crate::{cases, communicator::Launch, fixture::Random};

/// How many of the cases of which there are many a run takes.
pub const SAMPLE: usize = 40;

/// The suite for some backends.
#[derive(Debug)]
pub struct Suite {
    backends: Vec<Arc<dyn Backend>>,
    groups: Vec<String>,
    at_least: usize,
    transport: Transport,
}

/// How a run ended.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Every case that ran.
    pub cases: Vec<CaseReport>,
    /// (backend, reason) to the cases that were not asked for.
    pub skipped: BTreeMap<(String, String), Vec<String>>,
    /// Backends of which too few cases were asked, or which claim what no case judges.
    pub unjudged: Vec<String>,
    /// Whether only names were printed.
    pub listed: bool,
}

impl Outcome {
    /// Whether something ran and nothing failed.
    pub fn passed(&self) -> bool {
        let ran = self.listed || !self.cases.is_empty();
        ran && self.unjudged.is_empty() && self.cases.iter().all(|c| c.passed)
    }

    /// Prints the largest shares of tolerances, what was skipped and why (`verbose`: each reason), and what was too
    /// little; nothing where only names were printed.
    pub fn print(&self, verbose: bool) {
        if self.listed {
            return;
        }
        print_largest(self);
        print_skipped(self, verbose);
        for shortfall in &self.unjudged {
            say(format!("FAILED: {shortfall}"));
        }
        if self.cases.is_empty() {
            say("FAILED: no case was selected");
        }
    }
}

impl Suite {
    /// For these backends; of each at least one case must be selected.
    pub fn new(backends: Vec<Arc<dyn Backend>>) -> Self {
        Self {
            backends,
            groups: Vec::new(),
            at_least: 1,
            transport: Transport::default(),
        }
    }

    /// Only the cases whose names begin with one of these.
    #[must_use]
    pub fn groups(mut self, groups: &[&str]) -> Self {
        self.groups = groups.iter().map(|&g| g.to_owned()).collect();
        self
    }

    /// With ranks that this starts, instead of threads.
    #[must_use]
    pub fn over(mut self, launch: Launch) -> Self {
        self.transport = Transport::new(launch);
        self
    }

    /// Fails if fewer cases than this are selected of any backend: a guard against a capability or a rule
    /// that silently claims less than it did.
    #[must_use]
    pub fn at_least(mut self, cases: usize) -> Self {
        self.at_least = cases;
        self
    }

    /// Runs with the program's arguments; for a test target without a harness.
    pub fn main(self) -> ExitCode {
        let args = match SuiteArgs::parse(std::env::args().skip(1)) {
            Ok(args) => args,
            Err(fault) => {
                let _ = writeln!(std::io::stderr(), "{fault}");
                return ExitCode::from(2);
            }
        };
        match self.run(&args) {
            Ok(outcome) => {
                outcome.print(args.verbose);
                match outcome.passed() {
                    true => ExitCode::SUCCESS,
                    false => ExitCode::from(101),
                }
            }
            Err(error) => {
                let _ = writeln!(std::io::stderr(), "{error}");
                ExitCode::from(error.kind().exit_code())
            }
        }
    }

    /// Runs the selected cases and prints them as `cargo test` does. The verdict is the outcome, which
    /// [`Outcome::print`] prints: a run that is itself under test must not say that something failed.
    ///
    /// # Errors
    /// `File` if the report cannot be written.
    pub fn run(&self, args: &SuiteArgs) -> Result<Outcome> {
        let mut outcome = Outcome {
            listed: args.harness.list,
            ..Outcome::default()
        };
        let reports = Arc::new(Mutex::new(Vec::new()));
        let mut trials = Vec::new();
        for backend in &self.backends {
            let mut selected = Vec::new();
            let mut claims = self.claims(backend);
            let mut experts = self.claims_of_experts(backend);
            for case in self.cases() {
                match case.needs.unmet(backend) {
                    None => selected.push(case),
                    Some(reason) => {
                        let key = (backend.name().to_owned(), reason);
                        outcome.skipped.entry(key).or_default().push(case.name);
                    }
                }
            }
            if !args.settings.all {
                sample(&mut selected, args.settings.seed);
            }
            for case in &selected {
                claims.retain(|claim| !(claim.used)(&case.needs.layout));
                experts.retain(|claim| !(claim.used)(&case.needs.moe));
            }
            let count = selected.len();
            let subject = Subject {
                backend: backend.clone(),
                settings: args.settings,
                moe: MoeConfig::default(),
                transport: self.transport.clone(),
            };
            let trial = |case| trial(case, &subject, reports.clone());
            trials.extend(selected.into_iter().map(trial));
            let unjudged = claims.iter().map(|c| c.name);
            let unjudged = unjudged.chain(experts.iter().map(|c| c.name));
            outcome.unjudged.extend(unjudged.map(|claim| {
                let name = backend.name();
                format!("{name} claims {claim}, and no case was selected that puts it to work")
            }));
            if count < self.at_least {
                outcome.unjudged.push(format!(
                    "{}: {count} cases selected, at least {} expected",
                    backend.name(),
                    self.at_least
                ));
            }
        }
        if !args.harness.list {
            say(format!("seed {} (--seed N repeats it)", args.settings.seed));
        }
        // The reports hold the verdict.
        let _ = libtest_mimic::run(&args.harness, trials);
        let reports = std::mem::take(&mut *reports.lock().unwrap_or_else(PoisonError::into_inner));
        outcome.cases = reports;
        if let Some(path) = &args.report {
            let text = serde_json::to_string_pretty(&outcome.cases);
            let written = text
                .map_err(std::io::Error::other)
                .and_then(|text| std::fs::write(path, text));
            written.map_err(|cause| {
                Error::new(
                    ErrorKind::File,
                    "write_report",
                    "cannot write the conformance report",
                )
                .with("file", path.display())
                .caused_by(cause)
            })?;
        }
        Ok(outcome)
    }
}

impl Suite {
    /// What a backend claims that some layout must put to work; nothing where only some groups are wanted.
    fn claims(&self, backend: &Arc<dyn Backend>) -> Vec<&'static layout::LayoutClaim> {
        let claims = backend.capability();
        let claimed =
            |claim: &&layout::LayoutClaim| self.groups.is_empty() && (claim.claimed)(&claims);
        layout::CLAIMS.iter().filter(claimed).collect()
    }

    /// The same of what it claims about experts.
    fn claims_of_experts(&self, backend: &Arc<dyn Backend>) -> Vec<&'static layout::MoeClaim> {
        let moe = backend.capability().moe.unwrap_or_default();
        let claimed = |claim: &&layout::MoeClaim| self.groups.is_empty() && (claim.claimed)(&moe);
        layout::MOE_CLAIMS.iter().filter(claimed).collect()
    }

    fn cases(&self) -> Vec<Case> {
        let mut cases = cases::all(&self.backends);
        cases.retain(|case| {
            self.groups.is_empty() || self.groups.iter().any(|g| case.name.starts_with(g))
        });
        cases
    }
}

/// Keeps [`SAMPLE`] of the cases of which there are many, drawn by the seed.
fn sample(cases: &mut Vec<Case>, seed: u64) {
    let many = cases.iter().filter(|case| case.sampled);
    let mut drawn: Vec<_> = many
        .map(|case| (Random::new(seed, &case.name).next_u64(), case.name.clone()))
        .collect();
    drawn.sort();
    drawn.truncate(SAMPLE);
    cases.retain(|case| !case.sampled || drawn.iter().any(|(_, name)| *name == case.name));
}

fn trial(case: Case, subject: &Subject, reports: Arc<Mutex<Vec<CaseReport>>>) -> Trial {
    let subject = subject.with_moe(case.needs.moe);
    let name = format!("{}::{}", subject.backend.name(), case.name);
    Trial::test(name, move || {
        let report = run_case(&case, &subject);
        let error = report.error.clone();
        reports
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(report);
        error.map_or(Ok(()), |error| Err(Failed::from(error)))
    })
}

/// Runs one case; a panic is a failure.
pub fn run_case(case: &Case, subject: &Subject) -> CaseReport {
    let began = Instant::now();
    let mut findings = Findings::default();
    let run = std::panic::AssertUnwindSafe(|| case.run(subject, &mut findings));
    let error = match std::panic::catch_unwind(run) {
        Ok(result) => result.err().map(|e| e.to_string()),
        Err(panic) => Some(match panic.downcast_ref::<String>() {
            Some(message) => format!("panicked: {message}"),
            None => "panicked".to_owned(),
        }),
    };
    CaseReport {
        backend: subject.backend.name().to_owned(),
        case: case.name.clone(),
        passed: error.is_none(),
        error,
        seconds: began.elapsed().as_secs_f64(),
        comparisons: findings.comparisons().to_vec(),
    }
}

/// A line on stdout. Unlike `println!` it does not panic where nobody reads: the verdict is the outcome, wherever this
/// ends up.
fn say(text: impl std::fmt::Display) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

fn print_largest(outcome: &Outcome) {
    let mut worst: BTreeMap<(&str, &str), (&CaseReport, f64)> = BTreeMap::new();
    for case in &outcome.cases {
        for comparison in case.comparisons.iter().filter(|c| c.tolerance > 0.0) {
            let key = (case.backend.as_str(), comparison.quantity.as_str());
            let most = worst.entry(key).or_insert((case, comparison.share));
            if comparison.share > most.1 {
                *most = (case, comparison.share);
            }
        }
    }
    if !worst.is_empty() {
        say("largest share of a tolerance used:");
        for ((backend, quantity), (case, share)) in worst {
            say(format!(
                "  {backend:12} {quantity:14} {share:7.3}  in {}",
                case.case
            ));
        }
    }
}

fn print_skipped(outcome: &Outcome, verbose: bool) {
    let mut unasked: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for ((backend, reason), cases) in &outcome.skipped {
        let (reasons, sum) = unasked.entry(backend).or_default();
        (*reasons, *sum) = (*reasons + 1, *sum + cases.len());
        if verbose {
            say(format!(
                "not asked of {backend}, which {reason}: {} cases",
                cases.len()
            ));
        }
    }
    if !verbose {
        for (backend, (reasons, cases)) in unasked {
            say(format!(
                "not asked of {backend}: {cases} cases, for {reasons} reasons (--verbose names them)"
            ));
        }
    }
}
