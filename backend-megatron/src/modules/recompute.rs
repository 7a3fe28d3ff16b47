//! What backward computes again instead of keeping it, module by module.

use drivetrain_core::config::{RecomputeConfig, RecomputeModule};

/// What one layer computes again.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Recompute {
    modules: Vec<RecomputeModule>,
    /// All but its input.
    pub(super) full: bool,
}

impl Recompute {
    /// What a job says of layer `index`.
    pub(crate) fn of_layer(config: &RecomputeConfig, index: usize) -> Self {
        Self {
            modules: config.modules.clone(),
            full: index < config.full_layers,
        }
    }

    /// Whether the output of such a module is dropped.
    pub(super) fn has(&self, module: RecomputeModule) -> bool {
        self.modules.contains(&module)
    }
}
