//! A job back to YAML.

use serde_json::Value;

use super::JobConfig;

/// The first line of what is written here.
const EMITTED: &str = "# Every key of a job as it ran, defaults and overrides included.\n";

/// Whether a text is [`JobConfig::to_yaml`]'s, so that nothing of a person's is lost with it.
pub(super) fn is_emitted(text: &str) -> bool {
    text.starts_with(EMITTED)
}

impl JobConfig {
    /// Every key of the job, defaults and overrides included, as YAML that loads to the same job.
    pub fn to_yaml(&self) -> String {
        let mut text = EMITTED.to_owned();
        // Serialising plain data with string keys into a JSON value cannot fail.
        let value = serde_json::to_value(self).unwrap_or_default();
        write(&value, 0, &mut text);
        text
    }
}

/// Sections as indented lines; everything within as JSON, which is YAML's flow style.
fn write(section: &Value, depth: usize, text: &mut String) {
    for (key, value) in section.as_object().into_iter().flatten() {
        let plain = key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
        let quoted = Value::from(key.as_str()).to_string();
        let key = if plain { key } else { &quoted };
        let indent = "  ".repeat(depth);
        match value {
            Value::Object(entries) if !entries.is_empty() => {
                text.push_str(&format!("{indent}{key}:\n"));
                write(value, depth + 1, text);
            }
            _ => text.push_str(&format!("{indent}{key}: {value}\n")),
        }
    }
}
