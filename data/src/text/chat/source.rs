//! The template's text: where it is found, and marks around what it says the model generates.

use std::{
    ops::Range,
    path::{Path, PathBuf},
};

use drivetrain_core::{Error, ErrorKind, Result};
use serde_json::Value;

use crate::text::special::{read_object, read_text};

/// Characters (of a private plane) that the template writes around what it generates.
pub(super) type Marks = (char, char);
const MARKS: Marks = ('\u{f0000}', '\u{f0001}');

/// A chat template.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) file: PathBuf,
    pub(super) template: String,
    /// Where the template has `{% generation %}` blocks.
    pub(super) marks: Option<Marks>,
}

impl Source {
    /// `chat_template.jinja`, or else `chat_template` of `tokenizer_config.json`: a template, or a list of named
    /// ones of which `default` is taken.
    pub(super) fn open(folder: &Path) -> Result<Self> {
        let file = folder.join("chat_template.jinja");
        if let Some(template) = read_text(&file)? {
            return Ok(Self::new(file, &template));
        }
        let file = folder.join("tokenizer_config.json");
        let config = read_object(&file)?.unwrap_or_default();
        let template = match config.get("chat_template") {
            Some(Value::String(template)) => Some(template.as_str()),
            Some(Value::Array(named)) => named
                .iter()
                .find(|entry| entry.get("name").and_then(Value::as_str) == Some("default"))
                .and_then(|entry| entry.get("template"))
                .and_then(Value::as_str),
            _ => None,
        };
        match template {
            Some(template) => Ok(Self::new(file, template)),
            None => Err(Error::new(
                ErrorKind::File,
                "read_chat_template",
                "the model has no chat template",
            )
            .with("folder", folder.display())
            .with("expected", "chat_template.jinja, or chat_template in tokenizer_config.json")
            .help("base models often have none: take the template of the instruct model, or give prompt and completion")),
        }
    }

    fn new(file: PathBuf, template: &str) -> Self {
        let (marked, count) = mark_generation(template);
        Self {
            file,
            template: marked,
            marks: (count > 0).then_some(MARKS),
        }
    }
}

/// Replaces the tags `{% generation %}` and `{% endgeneration %}`, which Jinja itself does not know, by blocks
/// that write the marks and treat whitespace around them as the tags would.
fn mark_generation(template: &str) -> (String, usize) {
    let mut marked = String::with_capacity(template.len());
    let (mut rest, mut count) = (template, 0);
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else {
            break;
        };
        let (tag, end) = (&rest[start + 2..start + length], start + length + 2);
        let (open, inner) = split_sign(tag, str::strip_prefix);
        let (close, inner) = split_sign(inner, str::strip_suffix);
        let mark = match inner.trim() {
            "generation" => Some(MARKS.0),
            "endgeneration" => Some(MARKS.1),
            _ => None,
        };
        match mark {
            Some(mark) => {
                count += 1;
                marked.push_str(&rest[..start]);
                marked.push_str(&format!("{{%{open} if true %}}{mark}{{% endif {close}%}}"));
            }
            None => marked.push_str(&rest[..end]),
        }
        rest = &rest[end..];
    }
    marked.push_str(rest);
    (marked, count)
}

/// The whitespace sign (`-` or `+`) at one side of a tag, and what is left.
fn split_sign<'a>(
    tag: &'a str,
    strip: fn(&'a str, &'static str) -> Option<&'a str>,
) -> (&'static str, &'a str) {
    for sign in ["-", "+"] {
        if let Some(rest) = strip(tag, sign) {
            return (sign, rest);
        }
    }
    ("", tag)
}

/// The text without its marks, and what was between them; none if they do not come in pairs.
pub(super) fn take_marks(marked: &str, marks: Marks) -> Option<(String, Vec<Range<usize>>)> {
    let (mut text, mut turns, mut open) = (String::new(), Vec::new(), None);
    for character in marked.chars() {
        if character == marks.0 {
            if open.replace(text.len()).is_some() {
                return None;
            }
        } else if character == marks.1 {
            turns.push(open.take()?..text.len());
        } else {
            text.push(character);
        }
    }
    open.is_none().then_some((text, turns))
}
