//! Progress on stderr: a bar where a person watches, a line now and then elsewhere.

use std::io::IsTerminal;

use crate::core::{
    Error, Result,
    trainer::{Observer, StepRecord},
};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::output::{json, note};

/// Shows a run's steps.
#[derive(Debug)]
pub(super) struct Progress {
    bar: ProgressBar,
    steps: u64,
    json: bool,
    watched: bool,
    /// Whether stdout was found unwritable.
    broken: bool,
}

impl Progress {
    /// For a run of so many steps; with `json` each step's record is a line on stdout.
    pub(super) fn new(steps: u64, json: bool) -> Self {
        let watched = std::io::stderr().is_terminal();
        let bar = if watched {
            ProgressBar::new(steps)
        } else {
            ProgressBar::hidden()
        };
        if let Ok(style) =
            ProgressStyle::with_template("{bar:30} {pos}/{len} steps  {elapsed} (eta {eta})  {msg}")
        {
            bar.set_style(style);
        }
        Self {
            bar,
            steps,
            json,
            watched,
            broken: false,
        }
    }

    /// Shows a text beside the bar, or as a line.
    pub(super) fn say(&self, position: u64, text: &str) {
        self.bar.set_position(position);
        self.bar.set_message(text.to_owned());
        let every = (self.steps / 10).max(1);
        if !self.watched && !self.json && (position.is_multiple_of(every) || position <= 1) {
            note(format!("step {position}/{}  {text}", self.steps));
        }
    }

    /// A line that stays.
    pub(super) fn line(&self, text: &str) {
        if self.watched {
            self.bar.println(text);
        } else {
            note(text);
        }
    }

    /// A value on stdout, if wanted. A run does not end because nobody can read of it.
    fn print(&mut self, value: &impl Serialize) {
        if self.json
            && !self.broken
            && let Err(error) = json(value)
        {
            self.broken = true;
            self.line(&format!("no more steps are printed: {error}"));
        }
    }

    /// The end.
    pub(super) fn finish(&self) {
        self.bar.finish();
    }
}

impl Observer for Progress {
    fn on_step(&mut self, record: &StepRecord) -> Result<()> {
        self.print(record);
        if record.skipped {
            self.line(&format!(
                "step after {}: skipped, the gradient is not finite (norm {})",
                record.step, record.grad_norm
            ));
        }
        let text = format!(
            "loss {:.4}  grad_norm {:.3}  lr {:.2e}  {:.0} tokens/s",
            record.loss, record.grad_norm, record.learning_rate, record.tokens_per_second
        );
        self.say(record.step, &text);
        Ok(())
    }

    fn on_validation(&mut self, step: u64, loss: f64) -> Result<()> {
        self.print(&serde_json::json!({ "step": step, "validation_loss": loss }));
        self.line(&format!("step {step}: validation loss {loss:.4}"));
        Ok(())
    }

    fn on_checkpoint(&mut self, step: u64) -> Result<()> {
        self.line(&format!("step {step}: checkpoint saved"));
        Ok(())
    }

    fn on_checkpoint_failed(&mut self, step: u64, error: &Error) -> Result<()> {
        self.print(&serde_json::json!({ "step": step, "checkpoint_failed": error.to_string() }));
        self.line(&format!(
            "step {step}: the checkpoint was NOT saved; the run goes on and tries the next one: {error}"
        ));
        Ok(())
    }

    fn on_checkpoint_skipped(&mut self, step: u64) -> Result<()> {
        self.line(&format!(
            "step {step}: no checkpoint, the one before it is still being written"
        ));
        Ok(())
    }
}
