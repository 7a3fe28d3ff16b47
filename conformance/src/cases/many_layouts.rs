//! Many layouts: jobs drawn from a seed over all axes, cuts and ways to recompute, each held against one rank of the
//! same engine.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    sync::{Arc, Mutex, PoisonError},
};

use drivetrain_core::{
    Result, Severity,
    config::{ParallelConfig, check_job},
    plan::MicrobatchLimit,
};

use super::{
    five_steps::FiveSteps,
    layouts::{SELECTIVE, SELECTIVE_MOE},
};
use crate::{
    fixture::{Random, model},
    oracle::ReferenceBackend,
    suite::{Case, Findings, Layout, Needs, Subject},
    train::Trace,
};

/// Number of jobs.
const COUNT: usize = 240;

/// Most ranks of a job.
const MOST_RANKS: usize = 16;

/// Of the list: cases keep their names from run to run.
const SEED: u64 = 2022;

const FIXTURES: [&str; 8] = [
    "dense",
    "tied",
    "bias",
    "q3",
    "window",
    "single_kv_head",
    "mixtral",
    "q3_moe",
];

pub(super) fn cases() -> Vec<Case> {
    let case = |job: Job| {
        let needs = Needs {
            layout: job.layout,
            ..Needs::model(&model(job.fixture))
        };
        let name = format!("many_layouts/{}", job.name());
        Case::new(name, needs, move |s, f| beside_one_rank(job, s, f)).sampled()
    };
    jobs().into_iter().map(case).collect()
}

/// A fixture in a layout.
#[derive(Debug, Clone, Copy)]
struct Job {
    fixture: &'static str,
    layout: Layout,
}

/// Distinct jobs that core's rules find no fault in, whatever an engine claims.
fn jobs() -> Vec<Job> {
    let mut random = Random::new(SEED, "layouts");
    let subject = Subject::new(ReferenceBackend::replicated());
    let (mut jobs, mut names) = (Vec::new(), BTreeSet::new());
    while jobs.len() < COUNT {
        let job = Job::draw(&mut random);
        let fits = (2..=MOST_RANKS).contains(&job.layout.num_ranks());
        if fits && job.is_legal(&subject) && names.insert(job.name()) {
            jobs.push(job);
        }
    }
    jobs
}

impl Job {
    fn draw(random: &mut Random) -> Self {
        let mut one_of = |choices: &[usize]| choices[random.below(choices.len())];
        let fixture = FIXTURES[one_of(&[0, 1, 2, 3, 4, 5, 6, 6, 7, 7])];
        let tensor = one_of(&[1, 1, 2, 4]);
        let pipeline = one_of(&[1, 1, 2, 2, 3, 4]);
        let experts = model(fixture).moe.is_some();
        let expert = if experts { one_of(&[1, 2, 4]) } else { 1 };
        let parallel = ParallelConfig {
            data_parallel_size: one_of(&[1, 1, 2, 3, 4]),
            tensor_parallel_size: tensor,
            sequence_parallel: tensor > 1 && one_of(&[0, 1]) == 1,
            context_parallel_size: one_of(&[1, 1, 2, 4]),
            pipeline_parallel_size: pipeline,
            virtual_pipeline_size: if pipeline > 1 { one_of(&[1, 2]) } else { 1 },
            first_stage_layers: [None, Some(1)][if pipeline > 1 { one_of(&[0, 0, 1]) } else { 0 }],
            last_stage_layers: [None, Some(1)][if pipeline > 1 { one_of(&[0, 0, 1]) } else { 0 }],
            expert_parallel_size: expert,
            expert_tensor_parallel_size: [None, Some(1), Some(2)]
                [if experts { one_of(&[0, 1, 2]) } else { 0 }],
            ..ParallelConfig::default()
        };
        let limit = [
            MicrobatchLimit::All,
            MicrobatchLimit::Sequences(1),
            MicrobatchLimit::Sequences(2),
            MicrobatchLimit::Sequences(3),
            MicrobatchLimit::Tokens(16),
        ][one_of(&[0, 1, 2, 3, 4])];
        let layout = Layout::parallel(parallel)
            .limit(limit)
            .full_layers(one_of(&[0, 0, 0, 1, 2, 4]))
            .modules([&[], SELECTIVE, SELECTIVE_MOE][one_of(&[0, 0, 1, 2])]);
        Self { fixture, layout }
    }

    fn is_legal(&self, subject: &Subject) -> bool {
        let mut job = subject.job(&model(self.fixture));
        self.layout.lay_out(&mut job);
        let faults = check_job(&job, &*subject.backend);
        faults.iter().all(|d| d.severity != Severity::Error)
    }

    /// The fixture, then each setting that is not the default.
    fn name(&self) -> String {
        let p = &self.layout.parallel;
        let mut name = format!("{}/", self.fixture);
        let sizes = [
            ("tp", p.tensor_parallel_size),
            ("cp", p.context_parallel_size),
            ("pp", p.pipeline_parallel_size),
            ("vpp", p.virtual_pipeline_size),
            ("ep", p.expert_parallel_size),
            ("dp", p.data_parallel_size),
        ];
        for (axis, size) in sizes.into_iter().filter(|(_, size)| *size > 1) {
            let _ = write!(name, "{axis}{size}_");
        }
        let given = [
            ("etp", p.expert_tensor_parallel_size),
            ("first", p.first_stage_layers),
            ("last", p.last_stage_layers),
        ];
        for (key, value) in given {
            let _ = value.map(|n| write!(name, "{key}{n}_"));
        }
        if p.sequence_parallel {
            name.push_str("sp_");
        }
        if !self.layout.modules.is_empty() {
            name.push_str("selective_");
        }
        if self.layout.full_layers > 0 {
            let _ = write!(name, "full{}_", self.layout.full_layers);
        }
        name.push_str(&match self.layout.limit {
            MicrobatchLimit::All => "all".to_owned(),
            MicrobatchLimit::Sequences(n) => format!("micro{n}"),
            MicrobatchLimit::Tokens(n) => format!("packed{n}"),
        });
        name
    }
}

type Cache = Mutex<BTreeMap<(String, &'static str, u64), Arc<Trace>>>;

/// What one rank makes of a fixture, by engine.
static ALONE: Cache = Mutex::new(BTreeMap::new());

fn alone(
    fixture: &'static str,
    five: &FiveSteps,
    subject: &Subject,
    findings: &mut Findings,
) -> Result<Arc<Trace>> {
    let key = (
        format!("{:?} {}", subject.backend, subject.backend.name()),
        fixture,
        subject.settings.seed,
    );
    let lock = || ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = lock().get(&key) {
        return Ok(known.clone());
    }
    let new = Arc::new(five.train(subject, Layout::default(), findings)?);
    Ok(lock().entry(key).or_insert(new).clone())
}

/// Log-probs, loss, every gradient, grad_norm, and weights at the end.
fn beside_one_rank(job: Job, subject: &Subject, findings: &mut Findings) -> Result<()> {
    let five = FiveSteps::of(job.fixture, subject)?;
    let one = alone(job.fixture, &five, subject, findings)?;
    let found = five.train(subject, job.layout, findings)?;
    // Each of the two may be off by its tolerance.
    five.check_beside(&found, &one, 2.0, findings);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_many_and_every_axis_is_among_them_often() {
        let jobs = jobs();
        assert_eq!(jobs.len(), COUNT);
        let names: BTreeSet<_> = jobs.iter().map(Job::name).collect();
        assert_eq!(names.len(), COUNT);
        let often = |what: &str, used: fn(&Job) -> bool| {
            let count = jobs.iter().filter(|job| used(job)).count();
            assert!(count >= 10, "{what}: {count} of {COUNT}");
        };
        often("tp", |j| j.layout.parallel.tensor_parallel_size > 1);
        often("sp", |j| j.layout.parallel.sequence_parallel);
        often("cp", |j| j.layout.parallel.context_parallel_size > 1);
        often("pp", |j| j.layout.parallel.pipeline_parallel_size > 1);
        often("vpp", |j| j.layout.parallel.virtual_pipeline_size > 1);
        often("first", |j| j.layout.parallel.first_stage_layers.is_some());
        often("last", |j| j.layout.parallel.last_stage_layers.is_some());
        often("dp", |j| j.layout.parallel.data_parallel_size > 1);
        often("ep", |j| j.layout.parallel.expert_parallel_size > 1);
        often("etp", |j| j.layout.parallel.expert_tensor_size() > 1);
        often("selective", |j| !j.layout.modules.is_empty());
        often("full", |j| j.layout.full_layers > 0);
        often("whole", |j| j.layout.limit == MicrobatchLimit::All);
        often("packed", |j| j.layout.limit == MicrobatchLimit::Tokens(16));
        for ranks in [2, 4, 6, 8, 12, 16] {
            let count = jobs.iter().filter(|j| j.layout.num_ranks() == ranks);
            assert!(count.count() > 0, "{ranks} ranks");
        }
        for fixture in FIXTURES {
            let count = jobs.iter().filter(|j| j.fixture == fixture);
            assert!(count.count() >= 10, "{fixture}");
        }
    }
}
