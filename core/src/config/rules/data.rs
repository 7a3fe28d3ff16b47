//! The data: files that are there, lengths that the model bears, validation that has something to read.

use std::path::Path;

use super::{Faults, Rule};

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "DATA-01",
        what: "sequences longer than the model was made for",
        reads: &["data.max_length"],
        check: |facts, faults| {
            if let (Some(length), Some(model)) = (facts.config.data.max_length, facts.model)
                && length > model.max_position_embeddings
            {
                faults.error(
                    "data.max_length",
                    format!(
                        "{length} tokens, but the model's max_position_embeddings is {}",
                        model.max_position_embeddings
                    ),
                    format!("write {} or less", model.max_position_embeddings),
                );
            }
        },
    },
    Rule {
        id: "DATA-02",
        what: "a data file that is not there",
        reads: &["data"],
        check: |facts, faults| {
            file("data.train", &facts.config.data.train, faults);
            if let Some(validation) = &facts.config.data.validation {
                file("data.validation", validation, faults);
            }
        },
    },
    Rule {
        id: "DATA-03",
        what: "validation passes without validation data",
        reads: &["data.validation", "validation"],
        check: |facts, faults| {
            let (every, data) = (facts.config.validation.every, &facts.config.data.validation);
            match (every, data) {
                (Some(every), None) => faults.error(
                    "validation.every",
                    format!("a pass every {every} steps, but there is no data.validation"),
                    "add `validation:` under `data:` (a jsonl file), or remove it",
                ),
                (None, Some(_)) => faults.warning(
                    "data.validation",
                    "given, but validation.every is not: it will not be read",
                    "add `every:` (steps between passes) under `validation:`",
                ),
                _ => {}
            }
        },
    },
];

fn file(path: &str, file: &Path, faults: &mut Faults) {
    let found = match std::fs::metadata(file) {
        Ok(meta) if meta.is_dir() => "is a folder",
        Ok(_) => return,
        Err(_) => "does not exist or cannot be read",
    };
    faults.error(
        path,
        format!("{} {found}", file.display()),
        "give a jsonl file; relative paths start from the config file's folder",
    );
}
