//! Operations as `tracing` spans, for a timeline.

use tracing::Span;

use super::{Communicator, Intercept};
use crate::Result;

/// Makes a `tracing` span of every operation of a communicator and of its subgroups: the hook of an
/// [`Intercepted`](super::Intercepted). The span lasts from the call to the end of the wait, and is entered while the
/// rank starts the operation and while it waits: between them it computes. Where nobody listens it costs a test.
///
/// Its target is `drivetrain::collective`, its level `TRACE`, its fields `operation`, `group` (the label), `ranks` and
/// `bytes` (as of [`Intercept::before`]).
#[derive(Debug, Clone, Copy, Default)]
pub struct Traced;

impl Intercept for Traced {
    fn before(&self, _: &dyn Communicator, _: &'static str, _: usize) -> Result<()> {
        Ok(())
    }

    fn span(&self, group: &dyn Communicator, operation: &'static str, bytes: usize) -> Span {
        tracing::trace_span!(
            target: "drivetrain::collective",
            "collective",
            operation,
            group = group.label(),
            ranks = group.world_size(),
            bytes
        )
    }
}
