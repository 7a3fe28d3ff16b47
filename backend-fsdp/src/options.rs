//! `backends.fsdp` of the config.

use drivetrain_core::config::JobConfig;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;

/// Options of this backend alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Options {
    /// Whether a block's whole weights are freed after its forward pass and gathered again before its backward
    /// pass (less memory for one more all-gather), or, as a number N, cut over groups of N ranks only, among which
    /// that all-gather then is. N divides the ranks of a shard group; 1 is `false`, all of them `true`.
    pub(crate) reshard_after_forward: Reshard,
    /// How many units' all-gathers are under way while one is computed, forward and backward; above 0, the
    /// reduce-scatter of one block is under way during the backward of the next too.
    pub(crate) prefetch: usize,
    /// Whether the micro-batches of a call add their gradients up before they are reduced over ranks, once: one
    /// reduce-scatter instead of one each, for a whole gradient in f32 on every rank.
    pub(crate) accumulate_unsharded: bool,
    /// Whether shards of masters, gradients and moments lie in host memory, where the optimizer then runs, and only what
    /// is gathered on the device. On `device: cpu` all memory is the host's, and nothing changes.
    pub(crate) cpu_offload: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            reshard_after_forward: Reshard::All(true),
            prefetch: 1,
            accumulate_unsharded: false,
            cpu_offload: false,
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

/// As it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(
    untagged,
    expecting = "reshard_after_forward is true, false or a number of ranks"
)]
pub(crate) enum Reshard {
    All(bool),
    Group(usize),
}

impl JsonSchema for Reshard {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Reshard".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": ["boolean", "integer"], "minimum": 1})
    }
}

/// What becomes of a block's whole weights after its forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AfterForward {
    /// They stay.
    Keep,
    /// They are freed; the shards make them whole again.
    Free,
    /// Each rank of a group of so many keeps its part of them.
    Group(usize),
}

impl Reshard {
    /// Where shards are cut over `num_shards` ranks; `None` where the number does not divide them.
    pub(crate) fn over(self, num_shards: usize) -> Option<AfterForward> {
        match self {
            Self::All(false) | Self::Group(1) => Some(AfterForward::Keep),
            Self::All(true) => Some(AfterForward::Free),
            Self::Group(n) if n == num_shards => Some(AfterForward::Free),
            Self::Group(n) if n > 0 && num_shards.is_multiple_of(n) => Some(AfterForward::Group(n)),
            Self::Group(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_means_what_pytorch_s_means() {
        let over = |reshard: Reshard| reshard.over(4);
        assert_eq!(over(Reshard::All(true)), Some(AfterForward::Free));
        assert_eq!(over(Reshard::All(false)), Some(AfterForward::Keep));
        assert_eq!(over(Reshard::Group(1)), Some(AfterForward::Keep));
        assert_eq!(over(Reshard::Group(2)), Some(AfterForward::Group(2)));
        assert_eq!(over(Reshard::Group(4)), Some(AfterForward::Free));
        for n in [0, 3, 8] {
            assert_eq!(over(Reshard::Group(n)), None, "{n}");
        }
    }
}
