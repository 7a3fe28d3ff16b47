//! From text to token ids, with what is scored.

mod chat;
mod special;
mod tokenizer;

use std::{
    path::{Path, PathBuf},
    sync::OnceLock,
};

use drivetrain_core::{Error, Result};

use crate::line::{Json, Place, Sample};
use chat::ChatTemplate;
use special::SpecialTokens;
use tokenizer::{Encoded, TextTokenizer};

/// Longest text: tokenizers need some 400 bytes of memory a byte.
const MAX_TEXT_BYTES: usize = 4 << 20;

/// A folder's tokenizer and chat template, read when a line first needs them.
#[derive(Debug)]
pub(crate) struct LazyText {
    folder: PathBuf,
    tokenizer: OnceLock<Result<TextTokenizer>>,
    special: OnceLock<Result<SpecialTokens>>,
    chat: OnceLock<Result<ChatTemplate>>,
}

impl LazyText {
    pub(crate) fn new(folder: &Path) -> Self {
        Self {
            folder: folder.to_owned(),
            tokenizer: OnceLock::new(),
            special: OnceLock::new(),
            chat: OnceLock::new(),
        }
    }

    /// A whole text, all of it scored.
    pub(crate) fn document(&self, text: &str, place: Place<'_>) -> Result<Sample> {
        let mut tokens = self.encode(text, true, place)?.ids;
        self.end(&mut tokens, place)?;
        let mask = vec![true; tokens.len()];
        Ok(Sample::new(tokens, mask))
    }

    /// A prompt and what follows it, tokenized as one text. A token is scored if it reaches into the completion.
    /// An empty completion scores nothing.
    pub(crate) fn completion(
        &self,
        prompt: &str,
        completion: &str,
        place: Place<'_>,
    ) -> Result<Sample> {
        let encoded = self.encode(&format!("{prompt}{completion}"), true, place)?;
        let first = encoded
            .spans
            .iter()
            .position(|span| span.end > prompt.len())
            .unwrap_or(encoded.ids.len());
        let mut tokens = encoded.ids;
        if !completion.is_empty() {
            self.end(&mut tokens, place)?;
        }
        let mask = (0..tokens.len())
            .map(|position| position >= first)
            .collect();
        Ok(Sample::new(tokens, mask))
    }

    /// A conversation through the chat template; what the assistant says is scored, with the token that ends it.
    pub(crate) fn conversation(
        &self,
        messages: Vec<Json>,
        tools: &Json,
        place: Place<'_>,
    ) -> Result<Sample> {
        let special = self.special(place)?;
        let chat = self
            .chat
            .get_or_init(|| ChatTemplate::open(&self.folder, special));
        let chat = chat.as_ref().map_err(|error| located(error, place))?;
        let rendered = chat
            .render(messages, tools)
            .map_err(|error| located(&error, place))?;
        // The template writes the special tokens itself.
        let encoded = self.encode(&rendered.text, false, place)?;
        let tokenizer = self.tokenizer(place)?;
        let mut mask = vec![false; encoded.ids.len()];
        for turn in &rendered.turns {
            let mut last = None;
            for (position, span) in encoded.spans.iter().enumerate() {
                if span.start < turn.end && span.end > turn.start {
                    mask[position] = true;
                    last = Some(position);
                }
            }
            if let (Some(last), true) = (last, rendered.ends_are_found) {
                score_end_of_turn(&mut mask, last, &encoded, &rendered.text, tokenizer);
            }
        }
        Ok(Sample::new(encoded.ids, mask))
    }

    fn encode(&self, text: &str, with_special: bool, place: Place<'_>) -> Result<Encoded> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(place
                .error("the text is too long to be tokenized at once")
                .with("expected", format!("at most {MAX_TEXT_BYTES} bytes"))
                .with("found", format!("{} bytes", text.len()))
                .help("split the document into several lines"));
        }
        let tokenizer = self.tokenizer(place)?;
        tokenizer
            .encode(text, with_special)
            .map_err(|error| located(&error, place))
    }

    /// Appends the end-of-sequence token, where there is one and it is not there yet.
    fn end(&self, tokens: &mut Vec<u32>, place: Place<'_>) -> Result<()> {
        let tokenizer = self.tokenizer(place)?;
        let eos = self.special(place)?.eos_id(|token| tokenizer.id(token));
        if let Some(eos) = eos
            && tokens.last() != Some(&eos)
        {
            tokens.push(eos);
        }
        Ok(())
    }

    fn tokenizer(&self, place: Place<'_>) -> Result<&TextTokenizer> {
        let tokenizer = self
            .tokenizer
            .get_or_init(|| TextTokenizer::open(&self.folder));
        tokenizer.as_ref().map_err(|error| located(error, place))
    }

    fn special(&self, place: Place<'_>) -> Result<&SpecialTokens> {
        let special = self
            .special
            .get_or_init(|| SpecialTokens::open(&self.folder));
        special.as_ref().map_err(|error| located(error, place))
    }
}

/// Scores the special token right after a turn's last token, whitespace between them included: what the model
/// says to end its turn.
fn score_end_of_turn(
    mask: &mut [bool],
    last: usize,
    encoded: &Encoded,
    text: &str,
    tokenizer: &TextTokenizer,
) {
    for position in last + 1..mask.len() {
        if tokenizer.is_special(encoded.ids[position]) {
            mask[last + 1..=position].fill(true);
            return;
        }
        let piece = text.get(encoded.spans[position].clone()).unwrap_or("x");
        if !piece.trim().is_empty() {
            return;
        }
    }
}

fn located(error: &Error, place: Place<'_>) -> Error {
    error.duplicate().with("location", place.location())
}
