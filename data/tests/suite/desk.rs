//! A folder with a small tokenizer, and a data file in it.

use std::{fs, path::PathBuf, sync::Arc};

use drivetrain_core::{Error, Result, config::Overlong};
use drivetrain_data::{Dataset, DatasetOptions};
use serde_json::{Value, json};

/// BPE over letters, space and newline: a = 3 ... z = 28, space = 29, `ab` = 30, newline = 31.
pub(crate) const BOS: u32 = 0;
pub(crate) const EOS: u32 = 1;
pub(crate) const AB: u32 = 30;
pub(crate) const START: u32 = 32;
pub(crate) const END: u32 = 33;
pub(crate) const VOCAB: usize = 34;

pub(crate) struct Desk(tempfile::TempDir);

impl Desk {
    pub(crate) fn new() -> Self {
        let desk = Self(tempfile::tempdir().unwrap());
        desk.write("tokenizer.json", &tokenizer().to_string());
        desk.write(
            "tokenizer_config.json",
            &json!({"eos_token": {"content": "</s>"}, "bos_token": "<s>", "chat_template": CHATML})
                .to_string(),
        );
        desk
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    pub(crate) fn options(&self) -> DatasetOptions {
        DatasetOptions {
            vocab_size: VOCAB,
            max_length: 64,
            overlong: Overlong::Error,
            shuffle: true,
            tokenizer: self.0.path().to_owned(),
            cache_bytes: 1 << 20,
        }
    }

    /// Opens a file with these lines.
    pub(crate) fn open(&self, lines: &[Value], options: &DatasetOptions) -> Result<Arc<Dataset>> {
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        self.write("data.jsonl", &text);
        Dataset::open(&self.path("data.jsonl"), options).map(Arc::new)
    }

    pub(crate) fn refused(&self, lines: &[Value]) -> Error {
        let error = self
            .open(lines, &self.options())
            .expect_err("the data is faulty");
        assert_eq!(error.kind().exit_code(), 3, "{error}");
        error
    }
}

pub(crate) fn letters(text: &str) -> Vec<u32> {
    let id = |c| match c {
        ' ' => 29,
        '\n' => 31,
        c => c as u32 - 'a' as u32 + 3,
    };
    text.chars().map(id).collect()
}

const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn tokenizer() -> Value {
    let special = |(id, content): (u32, &str)| {
        json!({"id": id, "content": content, "single_word": false,
        "lstrip": false, "rstrip": false, "normalized": false, "special": true})
    };
    let mut vocab = serde_json::Map::new();
    for c in 'a'..='z' {
        vocab.insert(c.to_string(), letters(&c.to_string())[0].into());
    }
    for (word, id) in [
        (" ", 29),
        ("ab", AB),
        ("\n", 31),
        ("<unk>", 2),
        ("<s>", BOS),
        ("</s>", EOS),
    ] {
        vocab.insert(word.to_owned(), id.into());
    }
    let added = [
        (BOS, "<s>"),
        (EOS, "</s>"),
        (2, "<unk>"),
        (START, "<|im_start|>"),
        (END, "<|im_end|>"),
    ];
    json!({
        "version": "1.0",
        // A length that the file was saved with must not cut anything.
        "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "padding": null, "normalizer": null, "pre_tokenizer": null, "decoder": null,
        "added_tokens": added.map(special),
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}}},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": ["a b"]},
    })
}

/// A tokenizer over bytes, as GPT-2, Llama 3, Qwen and SmolLM have: a token an ASCII byte or half a character,
/// but ` a` and ` b` are one each.
pub(crate) fn byte_level() -> Value {
    let mut vocab = serde_json::Map::new();
    for byte in 0x21..0x7f_u8 {
        vocab.insert(char::from(byte).to_string(), u32::from(byte).into());
    }
    // Bytes that are no visible ASCII have stand-ins: space is U+0120, newline U+010A, and 0xc3 0xa9 are themselves.
    let others = [
        ("\u{120}", 32),
        ("\u{10a}", 10),
        ("\u{c3}", 0xc3),
        ("\u{a9}", 0xa9),
        ("\u{120}a", 1),
        ("\u{120}b", 2),
        ("<end>", 3),
    ];
    vocab.extend(others.map(|(token, id)| (token.to_owned(), id.into())));
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [{"id": 3, "content": "<end>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "pre_tokenizer": byte_level, "post_processor": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": ["\u{120} a", "\u{120} b"]},
    })
}
