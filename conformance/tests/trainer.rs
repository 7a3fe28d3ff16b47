//! The training loop under the oracle: what a stop in a skipped step leaves behind, and what its record says.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use drivetrain_conformance::{
    fixture::{self, batches},
    objective::{POISON, Poisoned},
    oracle::ReferenceBackend,
    suite::Subject,
};
use drivetrain_core::{
    Error, ErrorKind, Result,
    batch::{Column, ColumnData},
    checkpoint::{CheckpointStore, Identity, StateReader},
    communicator::{Communicator, LocalCommunicator, LocalOptions},
    config::{CheckpointConfig, JobSpec, WhenBusy},
    engine::{WeightInit, build_engine},
    objective::Nll,
    trainer::{CyclicSource, Observer, Outcome, StepRecord, Trainer},
};

/// Asks for a stop at the first skipped step, and keeps every record's line.
struct StopAtSkip<'a> {
    stop: &'a AtomicBool,
    lines: Vec<serde_json::Value>,
}

impl Observer for StopAtSkip<'_> {
    fn on_step(&mut self, record: &StepRecord) -> Result<()> {
        self.stop.fetch_or(record.skipped, Ordering::Relaxed);
        self.lines.push(serde_json::to_value(record).unwrap());
        Ok(())
    }
}

#[test]
fn a_stop_in_a_skipped_step_leaves_a_checkpoint_past_its_data() {
    let model = fixture::model("dense");
    let subject = Subject::new(ReferenceBackend::new());
    let job = subject.job(&model);
    let batch = |bad: u8| {
        let mut batch = batches::eight(model.vocab_size, 7).unwrap();
        let marks = vec![bad, bad, bad, 0, 0, 0, 0, 0];
        let marks = Column::per_sequence(ColumnData::U8(marks));
        batch.set_column(POISON, marks).unwrap();
        batch
    };
    let data = CyclicSource::new(vec![batch(0), batch(1), batch(0)]).unwrap();
    let world: Arc<dyn Communicator> =
        LocalCommunicator::world(1, LocalOptions::default())[0].clone();
    let weights = fixture::weights(&model, 7).unwrap();
    let init = WeightInit::Source(&weights);
    let (engine, plan) = build_engine(&*subject.backend, &job, world.clone(), init).unwrap();
    let (stop, nll) = (AtomicBool::new(false), Nll::default());
    let objective = Poisoned(&nll);
    let data = Box::new(data);
    let mut trainer = Trainer::new(&job, engine, &plan, &objective, data, world, &stop).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::new(folder.path());
    trainer.checkpoints = Some((store.clone(), Identity::new(&model, "cyclic")));
    let mut seen = StopAtSkip {
        stop: &stop,
        lines: Vec::new(),
    };
    let outcome = trainer.run(&mut seen).unwrap();

    assert_eq!(outcome, Outcome::Stopped { step: 1 });
    let checkpoint = store.open(1).unwrap();
    assert_eq!(
        checkpoint.blob("data").unwrap(),
        &serde_json::json!({"position": 2})
    );
    assert_eq!(checkpoint.blob("attempts").unwrap(), 2);
    let [good, skipped] = &seen.lines[..] else {
        panic!("{:?}", seen.lines)
    };
    assert!(good["grad_norm"].as_f64().unwrap() > 0.0 && good.get("non_finite").is_none());
    assert_eq!(
        (&skipped["step"], &skipped["skipped"]),
        (&1.into(), &true.into())
    );
    assert!(skipped["grad_norm"].is_null() && skipped["loss"].is_f64());
    let name = skipped["non_finite"]["grad_norm"].as_str().unwrap();
    assert!(["NaN", "inf"].contains(&name), "{name}");
}

/// What a run told, in order; `damage` is done before each step is told.
struct Told<'a> {
    events: Vec<String>,
    damage: &'a dyn Fn(u64),
}

impl Observer for Told<'_> {
    fn on_step(&mut self, record: &StepRecord) -> Result<()> {
        (self.damage)(record.step);
        self.events.push(format!("step {}", record.step));
        Ok(())
    }

    fn on_checkpoint(&mut self, step: u64) -> Result<()> {
        self.events.push(format!("saved {step}"));
        Ok(())
    }

    fn on_checkpoint_failed(&mut self, step: u64, error: &Error) -> Result<()> {
        assert_eq!(error.kind(), ErrorKind::File);
        assert!(error.context("file").is_some(), "{error}");
        self.events.push(format!("failed {step}"));
        Ok(())
    }

    fn on_checkpoint_skipped(&mut self, step: u64) -> Result<()> {
        self.events.push(format!("skipped {step}"));
        Ok(())
    }
}

/// Four steps of one rank with a save after each; what was told, the outcome, and the folder's checkpoints.
fn four_steps(
    checkpoint: CheckpointConfig,
    damage: &dyn Fn(&std::path::Path, u64),
) -> (Vec<String>, Result<Outcome>, Vec<u64>) {
    let model = fixture::model("dense");
    let subject = Subject::new(ReferenceBackend::new());
    let mut job: JobSpec = subject.job(&model);
    (job.config.steps, job.config.checkpoint) = (4, checkpoint);
    let batch = batches::eight(model.vocab_size, 7).unwrap();
    let data = Box::new(CyclicSource::new(vec![batch]).unwrap());
    let world: Arc<dyn Communicator> =
        LocalCommunicator::world(1, LocalOptions::default())[0].clone();
    let weights = fixture::weights(&model, 7).unwrap();
    let init = WeightInit::Source(&weights);
    let (engine, plan) = build_engine(&*subject.backend, &job, world.clone(), init).unwrap();
    let (stop, nll) = (AtomicBool::new(false), Nll::default());
    let mut trainer = Trainer::new(&job, engine, &plan, &nll, data, world, &stop).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::new(folder.path());
    trainer.checkpoints = Some((store.clone(), Identity::new(&model, "cyclic")));
    let mut told = Told {
        events: Vec::new(),
        damage: &|step| damage(folder.path(), step),
    };
    let outcome = trainer.run(&mut told);
    (told.events, outcome, store.list().unwrap())
}

fn every_step(asynchronous: bool, when_busy: WhenBusy) -> CheckpointConfig {
    CheckpointConfig {
        every: Some(1),
        keep: 2,
        asynchronous,
        when_busy,
    }
}

#[test]
fn a_checkpoint_is_written_while_the_next_step_is_made() {
    let (told, outcome, kept) = four_steps(every_step(false, WhenBusy::Wait), &|_, _| ());
    assert_eq!(outcome.unwrap(), Outcome::Finished { step: 4 });
    let waiting = [
        "step 1", "saved 1", "step 2", "saved 2", "step 3", "saved 3", "step 4", "saved 4",
    ];
    assert_eq!(told, waiting);
    assert_eq!(kept, [3, 4]);
    let (told, outcome, kept) = four_steps(every_step(true, WhenBusy::Wait), &|_, _| ());
    assert_eq!(outcome.unwrap(), Outcome::Finished { step: 4 });
    let beside = [
        "step 1", "step 2", "saved 1", "step 3", "saved 2", "step 4", "saved 3", "saved 4",
    ];
    assert_eq!(told, beside);
    assert_eq!(kept, [3, 4]);
}

#[test]
fn a_save_that_is_due_while_one_is_written_can_be_left_out() {
    let (told, outcome, kept) = four_steps(every_step(true, WhenBusy::Skip), &|_, _| ());
    outcome.unwrap();
    // A save takes two steps at least: its ranks' files, and its manifest.
    assert_eq!(told[..3], ["step 1", "step 2", "skipped 2"]);
    assert_eq!(told.last().unwrap(), "saved 4");
    assert_eq!(kept.last(), Some(&4));
    for step in 1..=4 {
        let [saved, skipped] =
            ["saved", "skipped"].map(|what| told.contains(&format!("{what} {step}")));
        assert!(saved || skipped, "{told:?}");
    }
}

/// Takes the folder away in which this step's save is being written.
fn lose(store: &std::path::Path, step: u64) {
    let staging = store.join(format!(".step-{step:08}.tmp"));
    std::fs::remove_dir_all(staging).unwrap();
}

#[test]
fn a_failed_save_is_told_at_the_next_step_and_a_second_in_a_row_ends_the_run() {
    let config = every_step(true, WhenBusy::Wait);
    let (told, outcome, kept) = four_steps(config, &|store, step| {
        if step == 2 {
            lose(store, 1);
        }
    });
    outcome.unwrap();
    assert_eq!(told[..4], ["step 1", "step 2", "failed 1", "step 3"]);
    assert_eq!(kept, [3, 4]);
    let (told, outcome, kept) = four_steps(config, &|store, step| {
        if step > 1 {
            lose(store, step - 1);
        }
    });
    assert_eq!(told, ["step 1", "step 2", "failed 1", "step 3"]);
    let error = outcome.unwrap_err();
    assert_eq!(
        (error.kind(), error.context("checkpoint")),
        (ErrorKind::File, Some("step 2"))
    );
    assert!(
        error
            .context("file")
            .unwrap()
            .contains(".step-00000002.tmp"),
        "{error}"
    );
    assert!(kept.is_empty());
    // The last one is nobody's to try again.
    let (told, outcome, kept) = four_steps(every_step(true, WhenBusy::Wait), &|store, step| {
        if step == 4 {
            std::fs::write(store.join(".step-00000004.tmp"), "in the way").unwrap();
        }
    });
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::File);
    assert_eq!(told.last().unwrap(), "failed 4");
    assert_eq!(kept.last(), Some(&3));
}
