//! `backends.fsdp` of the config.

use drivetrain_core::config::JobConfig;
use schemars::JsonSchema;
use serde::Deserialize;

/// Options of this backend alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Options {
    /// Whether a block's whole weights are freed after its forward pass and gathered again before its backward
    /// pass. Less memory for one more all-gather a step.
    pub(crate) reshard_after_forward: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            reshard_after_forward: true,
        }
    }
}

impl Options {
    /// Reads them; the message says what is wrong.
    pub(crate) fn read(config: &JobConfig, backend: &str) -> Result<Self, String> {
        match config.backends.get(backend) {
            None => Ok(Self::default()),
            Some(map) => serde_json::from_value(serde_json::Value::Object(map.clone()))
                .map_err(|cause| cause.to_string()),
        }
    }
}
