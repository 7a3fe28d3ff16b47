//! Text in, tokens out: jsonl data sets, tokenizers, chat templates, and models of the Hugging Face hub.
//!
//! [`Dataset::open`] reads a file once and says what is wrong with it, up to ten lines at once, before training starts;
//! [`Dataset::batches`] then gives the training loop its batches. Core itself takes tokens only.
//!
//! # Lines
//! | line | sequences | scored |
//! | --- | --- | --- |
//! | `{"tokens": [..]}` | the ids | all; or what `loss_mask` (0 or 1) or `labels` (-100: not) say |
//! | `{"text": ".."}` | as the tokenizer's post-processor has it, and the end-of-sequence token | all |
//! | `{"prompt": .., "completion": ..}` | both tokenized as one text, and the end-of-sequence token (or two lists of ids) | the completion |
//! | `{"messages": [..]}` | the conversation through the chat template | what the assistant says |
//! | `{"prompt": .., "chosen": .., "rejected": ..}` | a group of two completions | `chosen`, and `rejected` |
//!
//! Every other field that holds numbers becomes a column: a number is one of the sequence, a list has an entry
//! a token (`null` where the token is not scored). On a pair it is named `chosen_NAME` and `rejected_NAME`.
//! Lines in a row with the same `group` (a number or a string) are a group, which no batch splits.
#![forbid(unsafe_code)]

mod dataset;
mod hub;
mod line;
mod options;
mod text;

pub use dataset::{Dataset, EpochBatches};
pub use hub::Hub;
pub use options::DatasetOptions;
