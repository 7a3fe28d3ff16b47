//! Checkpoints of a run, one at a time: training may go on while one is written.

use super::{ATTEMPTS_BLOB, DATA_BLOB, LAYOUT_BLOB, Observer, Trainer, finite};
use crate::{
    Error, ErrorKind, Result, checkpoint::SaveHandle, config::WhenBusy, engine::Engine,
    mesh::DeviceMesh,
};

/// Where a run's saves stand.
#[derive(Debug, Default)]
pub(super) struct Saves {
    /// The step of the last checkpoint.
    pub(super) last: Option<u64>,
    /// The save under way, and its step.
    pending: Option<(u64, SaveHandle)>,
    /// Saves that failed since the last that did not.
    failed: u32,
}

impl Saves {
    /// Whether a save is under way whose stage this rank has done.
    pub(super) fn is_ready(&self) -> bool {
        self.pending
            .as_ref()
            .is_some_and(|(_, save)| save.is_ready())
    }
}

impl Trainer<'_> {
    /// Saves a checkpoint unless that of this step is there.
    ///
    /// # Errors
    /// As [`Self::save`].
    pub fn save_once(&mut self, observer: &mut dyn Observer) -> Result<()> {
        self.finish_saves(observer)?;
        match self.saves.last == Some(self.engine.step()) {
            true => Ok(()),
            false => self.save(observer),
        }
    }

    /// Saves a checkpoint now and waits for it; drops the oldest beyond the number to keep.
    ///
    /// # Errors
    /// `File` naming the path, `NonFinite` naming the weight; then no checkpoint has appeared.
    pub fn save(&mut self, observer: &mut dyn Observer) -> Result<()> {
        self.finish_saves(observer)?;
        self.begin_save(false)?;
        self.go_on(true, observer)
    }

    /// Waits for the save under way, if there is one.
    ///
    /// # Errors
    /// Those of the communicator, and of a save that failed as the one before it did.
    pub fn finish_saves(&mut self, observer: &mut dyn Observer) -> Result<()> {
        self.settle(true, observer)
    }

    /// A save that is due now and then.
    pub(super) fn save_due(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let config = self.job.config.checkpoint;
        let step = self.engine.step();
        if self.saves.pending.is_some() && config.when_busy == WhenBusy::Skip {
            return observer.on_checkpoint_skipped(step);
        }
        self.finish_saves(observer)?;
        let begun = self.begin_save(config.asynchronous);
        self.tolerate(step, begun, observer)?;
        match config.asynchronous {
            true => Ok(()),
            false => self.finish_saves(observer),
        }
    }

    /// Goes on with the save under way: to its end if this is to `wait`, else one stage, which every rank has done.
    pub(super) fn settle(&mut self, wait: bool, observer: &mut dyn Observer) -> Result<()> {
        let Some(step) = self.saves.pending.as_ref().map(|(step, _)| *step) else {
            return Ok(());
        };
        let outcome = self.go_on(wait, observer);
        self.tolerate(step, outcome, observer)
    }

    /// A place that cannot be written may be one again: a failed save is told and the next one tried. A second in a
    /// row ends the run, as does any other error.
    fn tolerate(
        &mut self,
        step: u64,
        outcome: Result<()>,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        match outcome {
            Err(error) if error.kind() == ErrorKind::File && self.saves.failed == 0 => {
                self.saves.failed = 1;
                observer.on_checkpoint_failed(step, &error)
            }
            outcome => outcome,
        }
    }

    /// Takes this step's state: written when this ends, or `beside` the training.
    fn begin_save(&mut self, beside: bool) -> Result<()> {
        let Some((store, identity)) = &self.checkpoints else {
            return Ok(());
        };
        let step = self.engine.step();
        let writer = match beside {
            true => store.background_writer(step, &self.world, identity)?,
            false => store.writer(step, &self.world, identity)?,
        };
        let mut writer = finite::only(writer, step);
        writer.blob(DATA_BLOB, self.data.state())?;
        writer.blob(ATTEMPTS_BLOB, self.attempts.into())?;
        writer.blob(LAYOUT_BLOB, layout(&self.plan.mesh)?)?;
        self.saves.pending = Some((step, self.engine.save_state(writer)?));
        Ok(())
    }

    fn go_on(&mut self, wait: bool, observer: &mut dyn Observer) -> Result<()> {
        while let Some((step, save)) = self.saves.pending.take() {
            let save = save.advance().map_err(|error| of_save(error, step))?;
            if save.is_done() {
                (self.saves.last, self.saves.failed) = (Some(step), 0);
                self.prune();
                return observer.on_checkpoint(step);
            }
            self.saves.pending = Some((step, save));
            if !wait {
                break;
            }
        }
        Ok(())
    }

    /// Drops what is beyond the number to keep. What cannot be removed takes room and does no other harm.
    fn prune(&self) {
        if let Some((store, _)) = &self.checkpoints
            && self.world.rank() == 0
            && let Err(error) = store.prune(self.job.config.checkpoint.keep)
        {
            tracing::warn!("an old checkpoint is not removed: {error}");
        }
    }
}

fn layout(mesh: &DeviceMesh) -> Result<serde_json::Value> {
    serde_json::to_value(mesh).map_err(|cause| {
        let message = "the mesh is not JSON";
        Error::new(ErrorKind::Defect, "write_checkpoint", message).caused_by(cause)
    })
}

/// The step that was to be saved: another than that of the run by the time it is told.
fn of_save(error: Error, step: u64) -> Error {
    error.with("checkpoint", format!("step {step}"))
}
