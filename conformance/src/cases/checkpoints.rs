//! State out of one engine and into another: the same layout continues bit for bit, any other within the
//! tolerance.

use std::sync::Arc;

use drivetrain_core::{
    ErrorKind, Result,
    batch::BatchTotals,
    engine::{Backend, Engine, StepOptions, WeightInit, Weights},
    objective::Nll,
    plan::MicrobatchLimit,
};

use super::{
    engine_state::{equal, not_refused},
    experts,
    five_steps::{FiveSteps, STEPS, optimizer},
    layouts::{each_axis, unsplit},
    step::oracle,
};
use crate::{
    fixture::model,
    state::{MemoryCheckpoint, MemoryState},
    suite::{Case, Findings, Layout, Needs, Rank, Subject},
    tolerance::{StepRecord, Tensors},
    train::{Trace, weights},
};

const SAVED_AT: usize = 3;

pub(super) fn cases(backends: &[Arc<dyn Backend>]) -> Vec<Case> {
    let mut cases = Vec::new();
    for name in ["dense", "tied", "bias", "q3", "mixtral", "no_layers"] {
        let needs = |layouts: &[Layout]| Needs {
            also: layouts[1..].to_vec(),
            layout: layouts[0],
            checkpoints: true,
            ..Needs::model(&model(name))
        };
        let one = Layout::default();
        let around = || unsplit().into_iter().chain(each_axis());
        for (label, layout) in around() {
            cases.push(Case::new(
                format!("checkpoint/{name}/{label}/resumes_bit_for_bit"),
                needs(&[layout]),
                move |s, f| resumes(&Run::new(name, s)?, layout, f),
            ));
            cases.push(Case::new(
                format!("checkpoint/{name}/from_reference_to_{label}"),
                needs(&[layout]),
                move |s, f| moves(&Run::new(name, s)?, (&oracle(s), one), (s, layout), f),
            ));
            cases.push(Case::new(
                format!("checkpoint/{name}/from_{label}_to_reference"),
                needs(&[layout]),
                move |s, f| moves(&Run::new(name, s)?, (s, layout), (&oracle(s), one), f),
            ));
        }
        // Each to the next and back: every layout is both a start and an end.
        let around: Vec<_> = around().collect();
        for (index, &(from_label, from)) in around.iter().enumerate() {
            let (to_label, to) = around[(index + 1) % around.len()];
            for ((a, from), (b, to)) in [
                ((from_label, from), (to_label, to)),
                ((to_label, to), (from_label, from)),
            ] {
                cases.push(Case::new(
                    format!("checkpoint/{name}/{a}_to_{b}"),
                    needs(&[from, to]),
                    move |s, f| moves(&Run::new(name, s)?, (s, from), (s, to), f),
                ));
            }
        }
        let two = Layout::data(2);
        for other in backends {
            let other = other.clone();
            if needs(&[two]).unmet(&other).is_none() {
                cases.push(Case::new(
                    format!("checkpoint/{name}/from_{}", other.name()),
                    needs(&[two]),
                    move |s, f| {
                        let from = s.other(other.clone());
                        if from.backend.name() == s.backend.name() {
                            return resumes(&Run::new(name, s)?, two, f);
                        }
                        moves(&Run::new(name, s)?, (&from, two), (s, two), f)
                    },
                ));
            }
        }
        cases.push(Case::new(
            format!("checkpoint/{name}/other_model_is_refused"),
            needs(&[one]),
            move |s, f| other_model(&Run::new(name, s)?, s, f),
        ));
    }
    for ranks in [1, 2] {
        let layout = Layout::data(ranks);
        let mut add = |what: &str, run: fn(&Run, Layout, &mut Findings) -> Result<()>| {
            let needs = Needs {
                layout,
                moe: experts::bias(),
                checkpoints: true,
                ..Needs::model(&model("mixtral"))
            };
            let name = format!("checkpoint/mixtral_bias/ranks{ranks}/{what}");
            cases.push(Case::new(name, needs, move |s, f| {
                run(&Run::new("mixtral", s)?, layout, f)
            }));
        };
        add("resumes_bit_for_bit", resumes);
        add("from_reference", |run, layout, f| {
            let subject = &run.subject;
            moves(
                run,
                (&oracle(subject), Layout::default()),
                (subject, layout),
                f,
            )
        });
        add("to_reference", |run, layout, f| {
            let subject = &run.subject;
            moves(
                run,
                (subject, layout),
                (&oracle(subject), Layout::default()),
                f,
            )
        });
    }
    cases
}

struct Run {
    five: Arc<FiveSteps>,
    subject: Subject,
}

/// What one rank saw: losses, norms, clip factors and learning rates of the steps it took.
type Steps = Vec<(f64, f64, f64, f64)>;

impl Run {
    fn new(name: &str, subject: &Subject) -> Result<Self> {
        Ok(Self {
            five: FiveSteps::of(name, subject)?,
            subject: subject.clone(),
        })
    }

    fn job(&self, subject: &Subject, layout: Layout) -> drivetrain_core::config::JobSpec {
        let mut job = subject.job(&self.five.model);
        job.config.optimizer = optimizer();
        layout.lay_out(&mut job);
        job
    }

    fn steps(&self, rank: &mut Rank, range: std::ops::Range<usize>) -> Result<Steps> {
        let mut steps = Vec::new();
        for global in &self.five.batches[range] {
            let totals = BatchTotals::count(global);
            let share = rank.share(global, MicrobatchLimit::Sequences(2))?;
            let report = rank
                .engine
                .forward_backward(&share, &Nll::default(), &totals)?;
            let step = rank.engine.optim_step(&StepOptions::default())?;
            steps.push((
                report.loss,
                step.grad_norm,
                step.clip_factor,
                step.learning_rate,
            ));
        }
        Ok(steps)
    }

    /// Steps up to the save, and the checkpoint.
    fn save(&self, subject: &Subject, layout: Layout) -> Result<(Steps, MemoryCheckpoint)> {
        let state = MemoryState::new();
        let job = self.job(subject, layout);
        let steps = subject.run_from(&job, &self.five.weights, |rank| {
            let steps = self.steps(rank, 0..SAVED_AT)?;
            rank.engine.save_state(state.writer())?.finish()?;
            Ok(steps)
        })?;
        let first = steps.into_iter().next().expect("at least one rank");
        Ok((first, state.complete(job.mesh()?.world_size())?))
    }

    /// The rest of the steps, from a checkpoint, and the weights at the end.
    fn resume(
        &self,
        subject: &Subject,
        layout: Layout,
        checkpoint: &MemoryCheckpoint,
    ) -> Result<(Steps, Tensors)> {
        let job = self.job(subject, layout);
        let ends = subject.run(
            &job,
            || WeightInit::Deferred,
            |rank| {
                rank.engine.load_state(checkpoint)?;
                if rank.engine.step() != SAVED_AT as u64 {
                    return Err(not_refused("a checkpoint without its step count"));
                }
                let steps = self.steps(rank, SAVED_AT..STEPS)?;
                Ok((steps, weights(&mut rank.engine, &Weights::Policy)?))
            },
        )?;
        Ok(ends.into_iter().next().expect("at least one rank"))
    }
}

fn resumes(run: &Run, layout: Layout, findings: &mut Findings) -> Result<()> {
    let subject = &run.subject;
    let job = run.job(subject, layout);
    let whole = subject.run_from(&job, &run.five.weights, |rank| {
        let steps = run.steps(rank, 0..STEPS)?;
        Ok((steps, weights(&mut rank.engine, &Weights::Policy)?))
    })?;
    let (steps, expected) = &whole[0];
    let (_, checkpoint) = run.save(subject, layout)?;
    let three = run.five.model.parameters().len() * 3;
    let slots = checkpoint.iter().count();
    findings.fact(
        "every parameter has a weight and two moments",
        slots == three,
    );
    let (resumed, found) = run.resume(subject, layout, &checkpoint)?;
    let same = resumed == steps[SAVED_AT..];
    findings.fact(
        "losses, norms and rates after resuming are the same bits",
        same,
    );
    equal(findings, "weights after resuming", &found, expected);
    // Resuming from weights alone must not look the same, or the moments were never read.
    let cold = checkpoint.without_moments();
    let (_, cold) = run.resume(subject, layout, &cold)?;
    findings.fact("the moments matter", cold != found);
    Ok(())
}

fn moves(
    run: &Run,
    (from, from_layout): (&Subject, Layout),
    (to, to_layout): (&Subject, Layout),
    findings: &mut Findings,
) -> Result<()> {
    let (mut steps, checkpoint) = run.save(from, from_layout)?;
    let (rest, weights) = run.resume(to, to_layout, &checkpoint)?;
    steps.extend(rest);
    let found = Trace {
        log_probs: None,
        losses: steps.iter().map(|s| s.0).collect(),
        grad_norms: steps.iter().map(|s| s.1).collect(),
        steps: steps
            .iter()
            .map(|s| StepRecord {
                gradients: Tensors::new(),
                clip_factor: s.2,
                learning_rate: s.3,
            })
            .collect(),
        weights,
        ..Trace::default()
    };
    run.five.check(&found, findings);
    Ok(())
}

fn other_model(run: &Run, subject: &Subject, findings: &mut Findings) -> Result<()> {
    let (_, checkpoint) = run.save(subject, Layout::default())?;
    let mut other = run.five.model.clone();
    other.vocab_size += 1;
    let job = subject.job(&other);
    let refusals = subject.run(
        &job,
        || WeightInit::Deferred,
        |rank| Ok(rank.engine.load_state(&checkpoint).err().map(|e| e.kind())),
    )?;
    let refused = refusals[0] == Some(ErrorKind::Checkpoint);
    findings.fact("another model's checkpoint is refused as such", refused);
    Ok(())
}
