//! A conversation through a chat template, and where in the text the assistant speaks.

mod environment;
mod source;

use std::{collections::BTreeMap, ops::Range, path::Path};

use drivetrain_core::{Error, ErrorKind, Result};
use minijinja::{
    Environment,
    value::{Serde, Value},
};
use serde::Serialize;

use super::special::SpecialTokens;
use crate::line::{Fields, Json};
use source::Source;

/// A conversation as text.
#[derive(Debug, PartialEq)]
pub(super) struct Rendered {
    pub(super) text: String,
    /// Bytes of `text` that the assistant says, in order.
    pub(super) turns: Vec<Range<usize>>,
    /// Whether a turn's end token, if any, is yet to be found after it; a template that marks what it generates
    /// has it inside.
    pub(super) ends_are_found: bool,
}

/// A compiled chat template.
#[derive(Debug)]
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    source: Source,
    special: BTreeMap<String, String>,
}

#[derive(Serialize)]
struct Context<'a> {
    messages: &'a [Json],
    tools: &'a Json,
    documents: Option<()>,
    add_generation_prompt: bool,
    #[serde(flatten)]
    special: &'a BTreeMap<String, String>,
}

impl ChatTemplate {
    /// Reads the folder's template.
    pub(super) fn open(folder: &Path, special: &SpecialTokens) -> Result<Self> {
        let source = Source::open(folder)?;
        let environment = environment::compile(source.template.clone()).map_err(|cause| {
            Error::new(
                ErrorKind::File,
                "read_chat_template",
                "the chat template does not compile",
            )
            .with("file", source.file.display())
            .caused_by(cause)
        })?;
        Ok(Self {
            environment,
            source,
            special: special.texts.clone(),
        })
    }

    /// The conversation as text.
    ///
    /// # Errors
    /// `Data` if a message has no role, an assistant's content is no text, or the template refuses.
    pub(super) fn render(&self, mut messages: Vec<Json>, tools: &Json) -> Result<Rendered> {
        let assistant = assistant_turns(&messages)?;
        let text = self.text(&messages, tools)?;
        if let Some(marks) = self.source.marks {
            let (text, turns) = source::take_marks(&text, marks).ok_or_else(|| {
                self.failed("the template's marks of what it generates do not match")
            })?;
            return Ok(Rendered {
                text,
                turns,
                ends_are_found: false,
            });
        }
        let turns = assistant
            .into_iter()
            .map(|index| self.turn(&mut messages, index, tools, &text))
            .collect::<Result<_>>()?;
        Ok(Rendered {
            text,
            turns,
            ends_are_found: true,
        })
    }

    /// Where message `index` speaks in `text`: what changes when its content does. This holds whatever the
    /// template does with a content (trims it, drops earlier reasoning) and whatever comes after.
    fn turn(
        &self,
        messages: &mut [Json],
        index: usize,
        tools: &Json,
        text: &str,
    ) -> Result<Range<usize>> {
        let absent = |c: &char| !text.contains(*c);
        let probe = ('\u{100000}'..='\u{10fffd}')
            .find(absent)
            .ok_or_else(|| self.failed("the conversation uses every private character"))?;
        let Json::Object(message) = &mut messages[index] else {
            return Err(no_message(index));
        };
        let content = message.insert("content".to_owned(), Json::Text(probe.to_string()));
        let probed = self.text(messages, tools);
        if let (Json::Object(message), Some(content)) = (&mut messages[index], content) {
            message.insert("content".to_owned(), content);
        }
        let probed = probed?;
        if !probed.contains(probe) {
            return Err(self
                .failed("the chat template leaves out what the assistant says")
                .with("field", format!("messages[{index}].content")));
        }
        let same = |(a, b): &(char, char)| a == b;
        let start: usize = text
            .chars()
            .zip(probed.chars())
            .take_while(same)
            .map(|(c, _)| c.len_utf8())
            .sum();
        let after: usize = text[start..]
            .chars()
            .rev()
            .zip(probed.chars().rev())
            .take_while(same)
            .map(|(c, _)| c.len_utf8())
            .sum();
        Ok(start..text.len() - after)
    }

    fn text(&self, messages: &[Json], tools: &Json) -> Result<String> {
        let context = Context {
            messages,
            tools,
            documents: None,
            add_generation_prompt: false,
            special: &self.special,
        };
        self.environment
            .get_template(environment::NAME)
            .and_then(|template| template.render(Value::from(Serde(context))))
            .map_err(|cause| {
                self.failed("the chat template refuses the messages")
                    .caused_by(cause)
            })
    }

    fn failed(&self, message: &str) -> Error {
        Error::new(ErrorKind::Data, "render_messages", message)
            .with("template", self.source.file.display())
    }
}

/// The indices of the assistant's messages, after checking what all messages must have.
fn assistant_turns(messages: &[Json]) -> Result<Vec<usize>> {
    let mut turns = Vec::new();
    for (index, message) in messages.iter().enumerate() {
        let Json::Object(message) = message else {
            return Err(no_message(index));
        };
        let role = match message.get("role") {
            Some(Json::Text(role)) => role,
            other => return Err(bad_part(message, other, index, "role")),
        };
        match message.get("content") {
            Some(Json::Text(_)) if role == "assistant" => turns.push(index),
            // Other roles' contents may be lists of parts, where the template knows them.
            Some(Json::Text(_) | Json::List(_)) if role != "assistant" => {}
            other => return Err(bad_part(message, other, index, "content")),
        }
    }
    Ok(turns)
}

fn no_message(index: usize) -> Error {
    Error::new(
        ErrorKind::Data,
        "render_messages",
        "a message is not an object",
    )
    .with("field", format!("messages[{index}]"))
}

fn bad_part(message: &Fields, part: Option<&Json>, index: usize, name: &str) -> Error {
    let found = match part {
        Some(value) => value.describe(),
        None => format!(
            "only {}",
            message
                .keys()
                .map(String::as_str)
                .collect::<Vec<_>>()
                .join(", ")
        ),
    };
    Error::new(ErrorKind::Data, "render_messages", "a message lacks a part")
        .with("field", format!("messages[{index}].{name}"))
        .with("expected", "a string")
        .with("found", found)
}

#[cfg(test)]
mod tests;
