//! What a rank does, as `tracing` spans, for a timeline.
//!
//! All are of level `TRACE`, and cost a test where nobody listens. Targets: `drivetrain::step`, a step of the trainer
//! (fields `rank`, `step`), within which are all the others; `drivetrain::phase`, a part of it (`what`);
//! `drivetrain::compute`, a unit of the model (`what`, `layer`); `drivetrain::collective`, an operation of a
//! communicator ([`Traced`](crate::communicator::Traced)); and the event `drivetrain::memory` at a step's end.

use tracing::{Span, span::EnteredSpan};

use crate::{engine::MemoryReport, metrics::resident_bytes};

/// A rank's step, from here until the guard is dropped.
pub fn step(rank: usize, step: u64) -> EnteredSpan {
    tracing::trace_span!(target: "drivetrain::step", "step", rank, step).entered()
}

/// A part of a step.
pub fn phase(what: &'static str) -> EnteredSpan {
    tracing::trace_span!(target: "drivetrain::phase", "phase", what).entered()
}

/// A unit of the model that is not a layer, such as the head.
pub fn compute(what: &'static str) -> EnteredSpan {
    tracing::trace_span!(target: "drivetrain::compute", "compute", what).entered()
}

/// A layer's unit, such as its attention.
pub fn compute_layer(what: &'static str, layer: usize) -> EnteredSpan {
    tracing::trace_span!(target: "drivetrain::compute", "compute", what, layer).entered()
}

/// What a rank holds, and what its process does, in bytes.
pub(crate) fn memory(report: impl FnOnce() -> MemoryReport) {
    // The report may take a walk over what the engine holds.
    if Span::current().is_none() {
        return;
    }
    let report = report();
    tracing::trace!(
        target: "drivetrain::memory",
        parameters = report.parameters,
        gradients = report.gradients,
        optimizer = report.optimizer,
        snapshots = report.snapshots,
        peak_activations = report.peak_activations,
        resident = resident_bytes().unwrap_or(0),
    );
}
