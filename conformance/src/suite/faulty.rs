//! A rank that is lost at a chosen operation.

use std::sync::{
    Arc,
    atomic::{AtomicI64, Ordering},
};

use drivetrain_core::{
    Error, ErrorKind, Result,
    communicator::{Communicator, Intercept},
};

/// Far from zero: not armed.
const NEVER: i64 = i64::MAX / 2;

/// Counts operations down once armed; at zero the rank is lost: every member's calls fail from then on.
#[derive(Debug)]
pub struct Fault {
    world: Arc<dyn Communicator>,
    left: AtomicI64,
}

impl Fault {
    /// Of this world's rank, not armed.
    pub fn new(world: Arc<dyn Communicator>) -> Self {
        Self {
            world,
            left: AtomicI64::new(NEVER),
        }
    }

    /// Lets `operations` more pass, on the world and all its subgroups together.
    pub fn arm(&self, operations: i64) {
        self.left.store(operations, Ordering::SeqCst);
    }

    /// Whether the rank was lost.
    pub fn struck(&self) -> bool {
        self.left.load(Ordering::SeqCst) < 0
    }
}

impl Intercept for Fault {
    fn before(&self, group: &dyn Communicator, operation: &'static str, _: usize) -> Result<()> {
        if self.left.fetch_sub(1, Ordering::SeqCst) > 0 {
            return Ok(());
        }
        self.left.store(-1, Ordering::SeqCst);
        let message = "the rank is lost, as planned";
        let error =
            Error::new(ErrorKind::RankLost, operation, message).with("rank", self.world.rank());
        group.abort(&error);
        self.world.abort(&error);
        Err(error)
    }
}
