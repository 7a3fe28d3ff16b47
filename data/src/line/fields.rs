//! From the fields of a line to its sequences: which kind of line it is, and what each kind means.

use drivetrain_core::Result;

use super::{
    columns,
    json::{Fields, Json},
    place::Place,
    sample::Sample,
};
use crate::text::LazyText;

/// Label of a token that is not scored.
const UNSCORED_LABEL: i64 = -100;

/// Fields with a meaning of their own, which never become columns.
const RESERVED: [&str; 11] = [
    "tokens",
    "loss_mask",
    "labels",
    "text",
    "prompt",
    "completion",
    "messages",
    "tools",
    "chosen",
    "rejected",
    "group",
];

/// Columns that the built-in objectives read: a name close to one is a misspelling.
const KNOWN_COLUMNS: [&str; 4] = [
    drivetrain_core::objective::ADVANTAGES,
    drivetrain_core::objective::OLD_LOG_PROBS,
    drivetrain_core::objective::REFERENCE_LOG_PROBS,
    drivetrain_core::objective::REWARDS,
];

/// The kinds of a line, each by the fields of which one must be there, and all it may have.
const KINDS: [(&[&str], &[&str]); 5] = [
    (&["tokens"], &["tokens", "loss_mask", "labels"]),
    (&["chosen", "rejected"], &["prompt", "chosen", "rejected"]),
    (&["messages"], &["messages", "tools"]),
    (&["prompt", "completion"], &["prompt", "completion"]),
    (&["text"], &["text"]),
];

/// The sequences of a line.
pub(super) fn read(
    mut fields: Fields,
    vocab_size: usize,
    text: &LazyText,
    place: Place<'_>,
) -> Result<Vec<Sample>> {
    let allowed = kind(&fields, place)?;
    let mut taken = Fields::new();
    for name in allowed {
        if let Some(value) = fields.shift_remove(*name) {
            taken.insert((*name).to_owned(), value);
        }
    }
    for name in fields.keys() {
        check_column_name(name, allowed, place)?;
    }
    let mut taken = Taken {
        fields: taken,
        vocab_size,
        text,
        place,
    };
    let mut samples = match allowed[0] {
        "tokens" => vec![taken.tokens()?],
        "messages" => vec![taken.messages()?],
        "text" => vec![taken.text()?],
        _ if allowed.contains(&"chosen") => taken.pair()?,
        _ => vec![taken.completion("completion")?],
    };
    for sample in &samples {
        check_tokens(sample, allowed[0], vocab_size, place)?;
    }
    for (field, value) in &fields {
        add_column(&mut samples, field, value, place)?;
    }
    Ok(samples)
}

fn kind(fields: &Fields, place: Place<'_>) -> Result<&'static [&'static str]> {
    for (keys, allowed) in KINDS {
        if !keys.iter().any(|key| fields.contains_key(*key)) {
            continue;
        }
        let stray = |name: &&str| fields.contains_key(*name) && !allowed.contains(name);
        return match RESERVED.iter().find(|name| stray(name)) {
            None => Ok(allowed),
            Some(stray) => Err(place
                .field_error(stray, "the field does not go with the others")
                .with(
                    "expected",
                    format!("with `{}`: {}", keys[0], allowed.join(", ")),
                )),
        };
    }
    let names: Vec<_> = fields.keys().map(String::as_str).collect();
    let nearest = names.iter().find_map(|name| nearest(name));
    let error = place
        .error("the line holds no sequence")
        .with(
            "expected",
            "tokens, text, prompt and completion, messages, or prompt, chosen and rejected",
        )
        .with(
            "found",
            if names.is_empty() {
                "{}".to_owned()
            } else {
                names.join(", ")
            },
        );
    Err(match nearest {
        Some(name) => error.help(format!("did you mean `{name}`?")),
        None => error,
    })
}

fn check_column_name(name: &str, allowed: &[&str], place: Place<'_>) -> Result<()> {
    let stem = column_stem(name, allowed).map_or(name, |(_, stem)| stem);
    match nearest(stem) {
        Some(known) if known != stem => Err(place
            .field_error(name, "the field looks like a misspelling")
            .help(format!(
                "did you mean `{known}`? A column of your own needs a name further off"
            ))),
        _ => Ok(()),
    }
}

/// The known name that differs from `name` by a letter or two.
fn nearest(name: &str) -> Option<&'static str> {
    let plain = name.to_lowercase().replace('-', "_");
    RESERVED
        .into_iter()
        .chain(KNOWN_COLUMNS)
        .map(|known| (strsim::damerau_levenshtein(known, &plain), known))
        .filter(|&(distance, known)| distance <= if known.len() > 6 { 2 } else { 1 })
        .min()
        .map(|(_, known)| known)
}

/// Which of a pair, and the column's name.
fn column_stem<'a>(field: &'a str, allowed: &[&str]) -> Option<(usize, &'a str)> {
    if !allowed.contains(&"chosen") {
        return None;
    }
    let chosen = field.strip_prefix("chosen_").map(|stem| (0, stem));
    chosen.or_else(|| field.strip_prefix("rejected_").map(|stem| (1, stem)))
}

fn add_column(samples: &mut [Sample], field: &str, value: &Json, place: Place<'_>) -> Result<()> {
    if let [sample] = samples {
        return columns::add(sample, field, field, value, place);
    }
    match column_stem(field, &["chosen"]) {
        Some((which, name)) => columns::add(&mut samples[which], name, field, value, place),
        None => Err(place
            .field_error(field, "a column of a pair says whose it is")
            .with("expected", format!("chosen_{field} and rejected_{field}"))),
    }
}

fn check_tokens(sample: &Sample, field: &str, vocab_size: usize, place: Place<'_>) -> Result<()> {
    if sample.tokens.is_empty() {
        return Err(place.field_error(field, "the sequence has no tokens"));
    }
    let outside = |&id: &u32| id as usize >= vocab_size;
    match sample.tokens.iter().position(outside) {
        None => Ok(()),
        Some(position) => Err(place
            .field_error(
                field,
                "the tokenizer gives an id outside the model's vocabulary",
            )
            .with("position", position)
            .with("expected", format!("0 to {}", vocab_size - 1))
            .with("found", sample.tokens[position])
            .help("the tokenizer and the model do not belong together")),
    }
}

/// The fields of a line's kind.
struct Taken<'a> {
    fields: Fields,
    vocab_size: usize,
    text: &'a LazyText,
    place: Place<'a>,
}

impl Taken<'_> {
    fn tokens(&mut self) -> Result<Sample> {
        let tokens = self.required("tokens")?;
        let tokens = self.ids("tokens", &tokens)?;
        let mask = match (self.fields.get("loss_mask"), self.fields.get("labels")) {
            (None, None) => vec![true; tokens.len()],
            (Some(mask), None) => self.loss_mask(mask, tokens.len())?,
            (None, Some(labels)) => self.labels(labels, &tokens)?,
            (Some(_), Some(_)) => {
                return Err(self.place.field_error(
                    "labels",
                    "loss_mask and labels say the same thing: give one",
                ));
            }
        };
        Ok(Sample::new(tokens, mask))
    }

    fn text(&mut self) -> Result<Sample> {
        let text = self.string("text")?;
        self.text.document(&text, self.place)
    }

    fn messages(&mut self) -> Result<Sample> {
        let messages = match self.required("messages")? {
            Json::List(messages) if !messages.is_empty() => messages,
            other => {
                let expected = "a list of {\"role\": .., \"content\": ..}";
                return Err(self.place.type_error("messages", expected, &other));
            }
        };
        let tools = self.fields.shift_remove("tools").unwrap_or(Json::Null);
        self.text.conversation(messages, &tools, self.place)
    }

    fn pair(&mut self) -> Result<Vec<Sample>> {
        let prompt = self.required("prompt")?;
        self.fields.insert("prompt".to_owned(), prompt.clone());
        let chosen = self.completion("chosen")?;
        self.fields.insert("prompt".to_owned(), prompt);
        Ok(vec![chosen, self.completion("rejected")?])
    }

    fn completion(&mut self, field: &'static str) -> Result<Sample> {
        match (self.required("prompt")?, self.required(field)?) {
            (Json::Text(prompt), Json::Text(completion)) => {
                self.text.completion(&prompt, &completion, self.place)
            }
            (Json::Text(_), other) => Err(self.place.type_error(field, "a string", &other)),
            (prompt, completion) => {
                let mut tokens = self.ids("prompt", &prompt)?;
                let mut mask = vec![false; tokens.len()];
                tokens.extend(self.ids(field, &completion)?);
                mask.resize(tokens.len(), true);
                Ok(Sample::new(tokens, mask))
            }
        }
    }

    fn required(&mut self, field: &'static str) -> Result<Json> {
        self.fields
            .shift_remove(field)
            .ok_or_else(|| self.place.field_error(field, "the field is missing"))
    }

    fn string(&mut self, field: &'static str) -> Result<String> {
        match self.required(field)? {
            Json::Text(text) => Ok(text),
            other => Err(self.place.type_error(field, "a string", &other)),
        }
    }

    /// Token ids, each in the vocabulary.
    fn ids(&self, field: &str, value: &Json) -> Result<Vec<u32>> {
        let Json::Integers(list) = value else {
            return Err(self.place.type_error(field, "a list of token ids", value));
        };
        let id = |(position, &id): (usize, &i64)| match u32::try_from(id) {
            Ok(token) if (token as usize) < self.vocab_size => Ok(token),
            _ => Err(self.out_of_vocabulary(field, position, id)),
        };
        list.iter().enumerate().map(id).collect()
    }

    fn out_of_vocabulary(&self, field: &str, position: usize, id: i64) -> drivetrain_core::Error {
        self.place
            .field_error(field, "the id is outside the model's vocabulary")
            .with("position", position)
            .with(
                "expected",
                format!("0 to {}", self.vocab_size.saturating_sub(1)),
            )
            .with("found", id)
            .help("the data was made with another tokenizer, or is damaged")
    }

    fn loss_mask(&self, value: &Json, length: usize) -> Result<Vec<bool>> {
        let mask = match value {
            Json::Flags(mask) => mask.clone(),
            Json::Integers(mask) => {
                if let Some(position) = mask.iter().position(|m| !matches!(m, 0 | 1)) {
                    return Err(self
                        .place
                        .field_error("loss_mask", "a mask selects: it holds 0 and 1")
                        .with("position", position)
                        .with("found", mask[position]));
                }
                mask.iter().map(|&m| m == 1).collect()
            }
            other => {
                return Err(self
                    .place
                    .type_error("loss_mask", "a list of 0 and 1", other));
            }
        };
        self.same_length("loss_mask", mask.len(), length)?;
        Ok(mask)
    }

    /// Labels as Hugging Face has them: unshifted, the token itself or -100.
    fn labels(&self, value: &Json, tokens: &[u32]) -> Result<Vec<bool>> {
        let Json::Integers(labels) = value else {
            return Err(self
                .place
                .type_error("labels", "a list of ids and -100", value));
        };
        self.same_length("labels", labels.len(), tokens.len())?;
        let scored = |(position, (&label, &token)): (usize, (&i64, &u32))| {
            match label {
            UNSCORED_LABEL => Ok(false),
            _ if label == i64::from(token) => Ok(true),
            _ if label < 0 || label as usize >= self.vocab_size => {
                Err(self.out_of_vocabulary("labels", position, label))
            }
            _ => Err(self
                .place
                .field_error("labels", "the label is not the token at its position")
                .with("position", position)
                .with("expected", format!("{token}, or {UNSCORED_LABEL}"))
                .with("found", label)
                .help("labels are not shifted: labels[i] is tokens[i], or -100 where it is not scored")),
        }
        };
        labels.iter().zip(tokens).enumerate().map(scored).collect()
    }

    fn same_length(&self, field: &str, found: usize, expected: usize) -> Result<()> {
        if found == expected {
            return Ok(());
        }
        Err(self
            .place
            .field_error(field, "the list does not have an entry a token")
            .with("expected", expected)
            .with("found", found))
    }
}
