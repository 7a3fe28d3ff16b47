//! `backends.megatron` of the config.

use drivetrain_core::{
    Diagnostic,
    config::{DeviceConfig, JobConfig, JobSpec},
};
use schemars::JsonSchema;
use serde::Deserialize;

/// Options of this backend alone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Options {
    /// How ranks on devices talk.
    pub(crate) collectives: Collectives,
}

/// How ranks on devices talk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Collectives {
    /// Through the host's memory.
    #[default]
    Host,
    /// f32 from device to device; each rank has one of its own.
    Nccl,
}

impl Options {
    /// Reads them.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub(crate) fn read(config: &JobConfig) -> Result<Self, String> {
        match config.backends.get("megatron") {
            None => Ok(Self::default()),
            Some(map) => serde_json::from_value(serde_json::Value::Object(map.clone()))
                .map_err(|cause| cause.to_string()),
        }
    }

    /// What is wrong with them.
    pub(crate) fn faults(job: &JobSpec) -> Option<Diagnostic> {
        let fault = |found: String, remedy: &str| {
            Diagnostic::error("MEGATRON-02", "backends.megatron", found, remedy)
        };
        match Self::read(&job.config) {
            Err(found) => Some(fault(found, "the options are: collectives (host or nccl)")),
            Ok(options) => {
                let off_device = job.config.device == DeviceConfig::Cpu;
                (options.collectives == Collectives::Nccl && off_device).then(|| {
                    let found = "`collectives: nccl` with `device: cpu`".to_owned();
                    fault(found, "write `collectives: host`, or `device: cuda`")
                })
            }
        }
    }
}
