//! The run itself: output, checkpoints, validation passes, timeout, memory for logits.

use std::path::Path;

use super::Rule;
use crate::{
    config::{CHECKPOINTS, JOB, METRICS, MODEL, WhenBusy},
    files::real,
};

/// Longest timeout: 100 days.
const MAX_TIMEOUT_SECONDS: f64 = 8_640_000.0;

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "OUT-01",
        what: "an output folder that cannot be made",
        reads: &["output"],
        check: |facts, faults| {
            let output = &facts.config.output;
            if output.as_os_str().is_empty() {
                faults.error("output", "an empty path", "name a folder");
                return;
            }
            let existing = output
                .ancestors()
                .find(|p| p.exists())
                .unwrap_or(Path::new("/"));
            let Ok(meta) = std::fs::metadata(existing) else {
                return;
            };
            if !meta.is_dir() {
                faults.error(
                    "output",
                    format!("{} is not a folder", existing.display()),
                    "name a folder, new or existing",
                );
            } else if meta.permissions().readonly() {
                faults.error(
                    "output",
                    format!("{} cannot be written", existing.display()),
                    "name a folder that you may write",
                );
            }
        },
    },
    Rule {
        id: "OUT-02",
        what: "an output that would overwrite what the job reads",
        reads: &["output"],
        check: |facts, faults| {
            let output = real(&facts.config.output);
            let at = |name: &str| real(&output.join(name));
            for (what, path) in facts.inputs {
                let path = real(path);
                if path == output
                    || [JOB, METRICS].iter().any(|name| path == at(name))
                    || [MODEL, CHECKPOINTS]
                        .iter()
                        .any(|name| path.starts_with(at(name)))
                {
                    faults.error(
                        "output",
                        format!("{} would be overwritten, which is {what}", path.display()),
                        "name another folder",
                    );
                }
            }
        },
    },
    Rule {
        id: "TIME-01",
        what: "a timeout beyond any use",
        reads: &["timeout_seconds"],
        check: |facts, faults| {
            let seconds = facts.config.timeout_seconds;
            if seconds > MAX_TIMEOUT_SECONDS {
                faults.error(
                    "timeout_seconds",
                    format!("{seconds:?} seconds"),
                    format!("write {MAX_TIMEOUT_SECONDS} or less"),
                );
            }
        },
    },
    Rule {
        id: "LOGITS-01",
        what: "a budget that does not hold one token's logits and their gradient",
        reads: &["logits_budget_bytes"],
        check: |facts, faults| {
            let Some(model) = facts.model else { return };
            // f32 logits and their gradient.
            let row = model.vocab_size as u64 * 8;
            let budget = facts.config.logits_budget_bytes;
            if budget < row {
                faults.error(
                    "logits_budget_bytes",
                    format!(
                        "{budget} bytes, but one token's logits over {} words and their gradient take {row}",
                        model.vocab_size
                    ),
                    format!("write {row} or more; {} holds 256 tokens", row * 256),
                );
            }
        },
    },
    Rule {
        id: "CKPT-01",
        what: "checkpoints that the backend does not offer",
        reads: &["checkpoint"],
        check: |facts, faults| {
            if facts.config.checkpoint.every.is_some() {
                facts.require(
                    faults,
                    "checkpoint.every",
                    "checkpoints",
                    "write `null`",
                    |c| c.checkpoints,
                );
            }
        },
    },
    Rule {
        id: "CKPT-02",
        what: "a period longer than the run (warning)",
        reads: &["checkpoint", "validation", "steps"],
        check: |facts, faults| {
            let (config, steps) = (facts.config, facts.config.steps);
            for (path, every) in [
                ("checkpoint.every", config.checkpoint.every),
                ("validation.every", config.validation.every),
            ] {
                if let Some(every) = every
                    && every > steps
                {
                    faults.warning(
                        path,
                        format!("every {every} steps, but the run has only {steps}"),
                        format!("write {steps} or less"),
                    );
                }
            }
        },
    },
    Rule {
        id: "CKPT-03",
        what: "what a save does while one is being written, where training waits for each",
        reads: &["checkpoint"],
        check: |facts, faults| {
            let checkpoint = &facts.config.checkpoint;
            if checkpoint.when_busy == WhenBusy::Skip && !checkpoint.asynchronous {
                faults.error(
                    "checkpoint.when_busy",
                    "`skip`, but training waits for each save",
                    "remove it, or write `checkpoint.asynchronous: true`",
                );
            }
        },
    },
];
