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
    Result,
    batch::{Column, ColumnData},
    checkpoint::{CheckpointStore, Identity, StateReader},
    communicator::{Communicator, LocalCommunicator, LocalOptions},
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
