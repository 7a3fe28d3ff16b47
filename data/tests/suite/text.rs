//! Text, prompts and conversations through a tokenizer.

use drivetrain_core::{ErrorKind, batch::Batch};
use drivetrain_data::DatasetOptions;
use serde_json::{Value, json};

use crate::desk::{AB, BOS, Desk, END, EOS, START, byte_level, letters};

fn read(desk: &Desk, lines: &[Value]) -> Batch {
    desk.open(lines, &desk.options())
        .unwrap()
        .all(None)
        .unwrap()
}

/// Tokens of a sequence, and those of them that are scored.
fn sequence(batch: &Batch, index: usize) -> (Vec<u32>, Vec<u32>) {
    let range = batch.sequence(index);
    let scored = batch.scored();
    let ids = range
        .clone()
        .filter(|&t| scored[t])
        .map(|t| batch.tokens()[t]);
    (batch.tokens()[range.clone()].to_vec(), ids.collect())
}

#[test]
fn text_gets_bos_and_eos() {
    let desk = Desk::new();
    let batch = read(&desk, &[json!({"text": "abc de"}), json!({"text": ""})]);
    let expected: Vec<_> = [vec![BOS, AB], letters("c de"), vec![EOS]].concat();
    assert_eq!(
        sequence(&batch, 0),
        (expected.clone(), expected[1..].to_vec())
    );
    assert_eq!(sequence(&batch, 1).0, [BOS, EOS]);
    // An end that is there already is not added again.
    assert_eq!(
        sequence(&read(&desk, &[json!({"text": "c</s>"})]), 0).0,
        [vec![BOS], letters("c"), vec![EOS]].concat()
    );
}

#[test]
fn eos_is_the_tokenizers_or_else_the_models() {
    let desk = Desk::new();
    let last = |desk: &Desk| read(desk, &[json!({"text": "c"})]).tokens().last().copied();
    desk.write("config.json", &json!({"eos_token_id": [9, 8]}).to_string());
    assert_eq!(last(&desk), Some(EOS));
    desk.write("tokenizer_config.json", "{}");
    assert_eq!(last(&desk), Some(9));
    desk.write("config.json", "{}");
    assert_eq!(last(&desk), Some(letters("c")[0]));
    desk.write(
        "special_tokens_map.json",
        &json!({"eos_token": "</s>"}).to_string(),
    );
    assert_eq!(last(&desk), Some(EOS));
}

#[test]
fn completions_are_scored_and_prompts_are_not() {
    let desk = Desk::new();
    let batch = read(
        &desk,
        &[
            json!({"prompt": "cd", "completion": " e"}),
            // `ab` is one token that begins in the prompt: it holds all of the answer there is.
            json!({"prompt": "xa", "completion": "b"}),
            json!({"prompt": "", "completion": "c"}),
            json!({"prompt": [5, 6], "completion": [7, 8]}),
        ],
    );
    let (tokens, scored) = sequence(&batch, 0);
    assert_eq!(tokens, [vec![BOS], letters("cd e"), vec![EOS]].concat());
    assert_eq!(scored, [letters(" e"), vec![EOS]].concat());
    assert_eq!(
        sequence(&batch, 1),
        (vec![BOS, letters("x")[0], AB, EOS], vec![AB, EOS])
    );
    assert_eq!(sequence(&batch, 2).1, [letters("c"), vec![EOS]].concat());
    assert_eq!(sequence(&batch, 3), (vec![5, 6, 7, 8], vec![7, 8]));
}

#[test]
fn pairs_of_text_share_the_prompt() {
    let desk = Desk::new();
    let batch = read(
        &desk,
        &[json!({"prompt": "c", "chosen": "d", "rejected": "ef"})],
    );
    assert_eq!(batch.groups(), [0, 2]);
    assert_eq!(
        sequence(&batch, 0),
        (
            [vec![BOS], letters("cd"), vec![EOS]].concat(),
            [letters("d"), vec![EOS]].concat()
        )
    );
    assert_eq!(sequence(&batch, 1).1, [letters("ef"), vec![EOS]].concat());
}

fn talk() -> Value {
    json!({"messages": [
        {"role": "user", "content": "cd"}, {"role": "assistant", "content": "e"},
        {"role": "user", "content": "f"}, {"role": "assistant", "content": "gh"}]})
}

#[test]
fn conversations_score_what_the_assistant_says_and_its_end() {
    let desk = Desk::new();
    let (tokens, scored) = sequence(&read(&desk, &[talk()]), 0);
    let turn = |role: &str, said: &str| {
        [
            vec![START],
            letters(role),
            letters("\n"),
            letters(said),
            vec![END],
            letters("\n"),
        ]
        .concat()
    };
    let parts = [
        ("user", "cd"),
        ("assistant", "e"),
        ("user", "f"),
        ("assistant", "gh"),
    ];
    assert_eq!(tokens, parts.map(|(role, said)| turn(role, said)).concat());
    assert_eq!(
        scored,
        [letters("e"), vec![END], letters("gh"), vec![END]].concat()
    );
}

#[test]
fn the_template_of_its_own_file_comes_first() {
    let desk = Desk::new();
    let before = desk.open(&[talk()], &desk.options()).unwrap().identity();
    let template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}";
    desk.write("chat_template.jinja", template);
    let after = desk.open(&[talk()], &desk.options()).unwrap();
    let batch = after.all(None).unwrap();
    assert_eq!(
        sequence(&batch, 0).1,
        [letters("e"), vec![EOS], letters("gh"), vec![EOS]].concat()
    );
    assert_ne!(after.identity(), before);
}

#[test]
fn of_several_templates_the_default_is_taken() {
    let desk = Desk::new();
    let templates = json!([{"name": "tool_use", "template": "x"}, {"name": "default", "template": "{% for m in messages %}{{ m.content }}{% endfor %}"}]);
    desk.write(
        "tokenizer_config.json",
        &json!({"chat_template": templates}).to_string(),
    );
    assert_eq!(
        sequence(&read(&desk, &[talk()]), 0),
        (letters("cdefgh"), letters("egh"))
    );
}

#[test]
fn faults_of_messages_are_named() {
    let desk = Desk::new();
    for (messages, field, word) in [
        (json!([]), "messages", "wrong type"),
        (json!("hello"), "messages", "wrong type"),
        (json!(["hello"]), "messages[0]", "not an object"),
        (
            json!([{"role": 1, "content": "a"}]),
            "messages[0].role",
            "lacks a part",
        ),
        (
            json!([{"role": "user", "content": "a"}, {"content": "a"}]),
            "messages[1].role",
            "lacks a part",
        ),
        (
            json!([{"role": "assistant"}]),
            "messages[0].content",
            "lacks a part",
        ),
        (
            json!([{"role": "assistant", "content": null}]),
            "messages[0].content",
            "lacks a part",
        ),
    ] {
        let error = desk.refused(&[json!({"messages": messages})]);
        assert_eq!(error.kind(), ErrorKind::Data);
        assert_eq!(error.context("field"), Some(field), "{error}");
        assert!(error.message().contains(word), "{error}");
        assert!(
            error.context("location").unwrap().ends_with(":1"),
            "{error}"
        );
    }
}

#[test]
fn what_the_template_refuses_says_why() {
    let desk = Desk::new();
    desk.write(
        "chat_template.jinja",
        "{{ raise_exception('roles must alternate') }}",
    );
    let error = desk.refused(&[talk()]);
    assert!(
        error.to_string().contains("roles must alternate"),
        "{error}"
    );
    assert!(
        error
            .context("template")
            .unwrap()
            .ends_with("chat_template.jinja")
    );
    desk.write("chat_template.jinja", "{% for m in %}");
    assert_eq!(desk.refused(&[talk()]).kind(), ErrorKind::File);
    std::fs::remove_file(desk.path("chat_template.jinja")).unwrap();
    desk.write("tokenizer_config.json", "{}");
    let error = desk.refused(&[talk()]);
    assert!(error.message().contains("no chat template"), "{error}");
    assert!(
        error.context("location").unwrap().ends_with(":1"),
        "{error}"
    );
}

#[test]
fn a_template_that_does_not_end_is_stopped() {
    let desk = Desk::new();
    desk.write(
        "chat_template.jinja",
        "{% for a in range(10000) %}{% for b in range(10000) %}{{ b }}{% endfor %}{% endfor %}",
    );
    let error = desk.refused(&[talk()]);
    assert_eq!(error.kind(), ErrorKind::Data);
    assert!(error.to_string().contains("fuel"), "{error}");
}

#[test]
fn a_text_that_would_fill_the_memory_is_refused() {
    let desk = Desk::new();
    let error = desk.refused(&[json!({"text": "a".repeat((4 << 20) + 1)})]);
    assert_eq!(error.kind(), ErrorKind::Data);
    assert_eq!(error.context("found"), Some("4194305 bytes"), "{error}");
}

#[test]
fn text_without_a_tokenizer_says_what_to_do() {
    let desk = Desk::new();
    std::fs::remove_file(desk.path("tokenizer.json")).unwrap();
    let error = desk.refused(&[json!({"tokens": [3]}), json!({"text": "a"})]);
    assert_eq!(error.kind(), ErrorKind::File);
    assert!(
        error.context("file").unwrap().ends_with("tokenizer.json"),
        "{error}"
    );
    assert!(
        error.context("location").unwrap().ends_with(":2"),
        "{error}"
    );
    assert!(
        desk.open(&[json!({"tokens": [3, 4]})], &desk.options())
            .is_ok()
    );
    desk.write("tokenizer.json", "{}");
    assert!(
        desk.refused(&[json!({"text": "a"})])
            .message()
            .contains("not a tokenizer")
    );
}

#[test]
fn a_tokenizer_larger_than_the_model_is_an_error() {
    let desk = Desk::new();
    let options = DatasetOptions {
        vocab_size: 10,
        ..desk.options()
    };
    let error = desk.open(&[json!({"text": "cz"})], &options).unwrap_err();
    assert_eq!(error.context("position"), Some("2"));
    assert!(
        error.message().contains("outside the model's vocabulary"),
        "{error}"
    );
}

/// A tokenizer over bytes says where its tokens are without the space they begin with, and two tokens may stand
/// for one character.
#[test]
fn byte_level_tokens_are_scored_as_others_are() {
    let desk = Desk::new();
    desk.write("tokenizer.json", &byte_level().to_string());
    let template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<end>\n{% endfor %}";
    let config = json!({"eos_token": "<end>", "chat_template": template});
    desk.write("tokenizer_config.json", &config.to_string());
    let options = DatasetOptions {
        vocab_size: 256,
        ..desk.options()
    };
    let lines = [
        json!({"prompt": "b: ", "completion": "a\u{e9}"}),
        json!({"prompt": "b:", "completion": "  a"}),
        json!({"messages": [
            {"role": "user", "content": " a"},
            {"role": "assistant", "content": " b\u{e9}  "},
            {"role": "user", "content": "\u{e9}"},
        ]}),
    ];
    let batch = desk.open(&lines, &options).unwrap().all(None).unwrap();
    let bytes = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
    // The space of the prompt is in the token ` a`, which reaches into the completion.
    let expected = [bytes("b:"), vec![1], bytes("\u{e9}"), vec![3]].concat();
    assert_eq!(
        sequence(&batch, 0),
        (expected.clone(), expected[2..].to_vec())
    );
    assert_eq!(sequence(&batch, 1).1, [32, 1, 3]);
    let (tokens, scored) = sequence(&batch, 2);
    let ends = [
        bytes("u:"),
        vec![1, 3],
        bytes("\na:"),
        vec![2],
        bytes("\u{e9}  "),
        vec![3],
    ]
    .concat();
    assert_eq!(tokens[..ends.len()], ends);
    assert_eq!(scored, [vec![2], bytes("\u{e9}  "), vec![3]].concat());
}
