//! Every way a file can be wrong, and that each is named.

use drivetrain_core::{Error, ErrorKind};
use drivetrain_data::Dataset;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::desk::Desk;

fn opened(desk: &Desk, bytes: &[u8]) -> Error {
    std::fs::write(desk.path("data.jsonl"), bytes).unwrap();
    Dataset::open(&desk.path("data.jsonl"), &desk.options()).expect_err("the file is faulty")
}

#[test]
fn faults_of_a_line_name_line_field_and_fault() {
    let desk = Desk::new();
    let cases: [(Value, &str, &str); 27] = [
        (json!({"tokens": []}), "tokens", "no tokens"),
        (json!({"tokens": "abc"}), "tokens", "wrong type"),
        (json!({"tokens": [1, "a"]}), "tokens", "wrong type"),
        (json!({"tokens": [1, 2.5]}), "tokens", "wrong type"),
        (json!({"tokens": [true]}), "tokens", "wrong type"),
        (json!({"tokens": null}), "tokens", "wrong type"),
        (
            json!({"tokens": [1, 2], "loss_mask": [1]}),
            "loss_mask",
            "an entry a token",
        ),
        (
            json!({"tokens": [1, 2], "loss_mask": 1}),
            "loss_mask",
            "wrong type",
        ),
        (
            json!({"tokens": [1, 2], "labels": [1]}),
            "labels",
            "an entry a token",
        ),
        (
            json!({"tokens": [1], "loss_mask": [1], "labels": [1]}),
            "labels",
            "give one",
        ),
        (
            json!({"tokens": [1], "text": "a"}),
            "text",
            "does not go with",
        ),
        (
            json!({"text": "ab", "loss_mask": [1, 1]}),
            "loss_mask",
            "does not go with",
        ),
        (json!({"text": ["a"]}), "text", "wrong type"),
        (json!({"prompt": "a"}), "completion", "missing"),
        (json!({"completion": "a"}), "prompt", "missing"),
        (
            json!({"prompt": 1, "completion": [2]}),
            "prompt",
            "wrong type",
        ),
        (
            json!({"prompt": "a", "completion": [2]}),
            "completion",
            "wrong type",
        ),
        (json!({"prompt": "a", "chosen": "b"}), "rejected", "missing"),
        (
            json!({"prompt": [3], "chosen": [3], "rejected": [4], "rewards": 1}),
            "rewards",
            "whose it is",
        ),
        (
            json!({"prompt": [3], "chosen": [3], "rejected": [4], "group": 1}),
            "group",
            "of its own",
        ),
        (
            json!({"tokens": [3, 4], "group": 1.5}),
            "group",
            "wrong type",
        ),
        (
            json!({"tokens": [3, 4], "source": "web"}),
            "source",
            "wrong type",
        ),
        (
            json!({"tokens": [3, 4], "loss_masks": [0, 1]}),
            "loss_masks",
            "misspelling",
        ),
        (
            json!({"tokens": [3, 4], "old_logprobs": [0, 1]}),
            "old_logprobs",
            "misspelling",
        ),
        (
            json!({"tokens": [3, 4], "weights": [1]}),
            "weights",
            "an entry a token",
        ),
        (
            json!({"tokens": [3, 4], "weights": [0.5, null]}),
            "weights",
            "no number for a scored",
        ),
        (
            json!({"tokens": [3, 4], "weights": [[1], [2, 3]]}),
            "weights",
            "wrong type",
        ),
    ];
    for (line, field, word) in cases {
        let error = desk.refused(&[json!({"tokens": [3]}), line.clone()]);
        assert_eq!(error.kind(), ErrorKind::Data, "{line}");
        assert!(error.message().contains(word), "{line}: {error}");
        assert_eq!(error.context("field"), Some(field), "{line}: {error}");
        assert!(
            error.context("location").unwrap().ends_with("data.jsonl:2"),
            "{error}"
        );
    }
}

#[test]
fn a_line_that_is_no_object_is_named() {
    let desk = Desk::new();
    let good = b"{\"tokens\":[3]}\n".to_vec();
    for (line, word) in [
        (&b"[1]"[..], "not a JSON object"),
        (b"{\"tokens\": [1, 2}", "not valid JSON"),
        (b"{\"tokens\": [1, 2]} x", "not valid JSON"),
        (b"{\"tokens\": [1], \"tokens\": [2]}", "not valid JSON"),
        (b"{\"text\": \"\xff\"}", "not UTF-8"),
        (b"{}", "no sequence"),
        (b"{\"txt\": \"a\"}", "no sequence"),
    ] {
        let error = opened(&desk, &[&good, line].concat());
        assert!(error.message().contains(word), "{error}");
        assert!(
            error.context("location").unwrap().ends_with("data.jsonl:2"),
            "{error}"
        );
    }
    let error = opened(&desk, b"{\"tokens\": [1, 2}\n");
    assert_eq!(error.context("column"), Some("17"));
    assert_eq!(
        opened(&desk, b"{\"text\": \"\xff\"}").context("byte"),
        Some("11")
    );
    assert!(
        opened(&desk, b"{\"txt\": \"a\"}")
            .to_string()
            .contains("did you mean `text`")
    );
    let deep = [b"{\"w\":".to_vec(), vec![b'['; 100_000]].concat();
    assert!(opened(&desk, &deep).message().contains("not valid JSON"));
}

#[test]
fn a_file_without_lines_is_an_error() {
    let desk = Desk::new();
    for empty in ["", "\n \n"] {
        let error = opened(&desk, empty.as_bytes());
        assert_eq!(error.kind(), ErrorKind::Data);
        assert!(error.message().contains("no lines"), "{error}");
    }
    let missing = Dataset::open(&desk.path("nowhere.jsonl"), &desk.options()).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::File);
    assert!(missing.context("file").unwrap().ends_with("nowhere.jsonl"));
    let folder = Dataset::open(&desk.path(""), &desk.options()).unwrap_err();
    assert_eq!(folder.kind(), ErrorKind::File);
}

#[test]
fn every_line_has_the_columns_of_the_first() {
    let desk = Desk::new();
    let first = json!({"tokens": [3, 4], "rewards": 1, "w": [1, 2]});
    for (other, field) in [
        (json!({"tokens": [3, 4], "rewards": 1}), "w"),
        (
            json!({"tokens": [3, 4], "rewards": 1, "w": [1, 2], "v": 1}),
            "v",
        ),
        (json!({"tokens": [3, 4], "rewards": 1, "w": 1}), "w"),
        (
            json!({"tokens": [3, 4], "rewards": 1, "w": [[1], [2]]}),
            "w",
        ),
    ] {
        let error = desk.refused(&[first.clone(), first.clone(), other]);
        assert!(
            error.message().contains("differ from those of line 1"),
            "{error}"
        );
        assert_eq!(error.context("field"), Some(field));
        assert!(
            error.context("location").unwrap().ends_with(":3"),
            "{error}"
        );
    }
}

/// Faults are told at once and in the file's order, however many cores read it.
#[test]
fn faults_of_several_lines_are_told_at_once() {
    let desk = Desk::new();
    let mut text = String::new();
    for line in 1..=20_000 {
        let id = if line == 9_000 || line % 7_001 == 0 {
            99
        } else {
            3
        };
        text.push_str(&format!("{{\"tokens\": [{id}, 4]}}\n"));
    }
    let error = opened(&desk, text.as_bytes());
    assert!(
        error.context("location").unwrap().ends_with(":7001"),
        "{error}"
    );
    let text = error.to_string();
    let also: Vec<_> = text.lines().filter(|l| l.contains("also: ")).collect();
    assert_eq!(also.len(), 2, "{error}");
    assert!(also[0].contains(":9000"), "{error}");
    assert!(also[1].contains(":14002"), "{error}");

    let many = opened(&desk, "{}\n".repeat(1000).as_bytes()).to_string();
    assert_eq!(many.lines().filter(|l| l.contains("also: ")).count(), 9);
}

/// A device that never ends, a file that has no lines, a pipe that nobody writes: told at once.
#[test]
fn what_is_no_file_of_lines_is_refused() {
    let desk = Desk::new();
    let error = Dataset::open("/dev/zero".as_ref(), &desk.options()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::File);
    assert!(error.to_string().contains("not a regular file"), "{error}");

    let sparse = std::fs::File::create(desk.path("sparse.jsonl")).unwrap();
    sparse.set_len(1 << 40).unwrap();
    let error = Dataset::open(&desk.path("sparse.jsonl"), &desk.options()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Data);
    assert_eq!(error.message(), "the line is too long");
    assert!(
        error.context("location").unwrap().ends_with(":1"),
        "{error}"
    );
}

#[test]
fn a_json_fault_has_one_place() {
    let error = opened(&Desk::new(), b"{\"tokens\": [1]}\n{\"tokens\": [1}\n");
    assert!(
        error.context("location").unwrap().ends_with(":2"),
        "{error}"
    );
    assert!(!error.to_string().contains("line 1"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn random_lines_never_panic(
        text in "[\\[\\]{}\":,a-z0-9.\\- \n\u{0}-\u{ff}]{0,60}",
        key in "tokens|text|messages|group|labels|chosen",
    ) {
        let desk = Desk::new();
        let lines = [
            text.clone(),
            format!("{{\"{key}\": {text}}}"),
            format!("{{\"tokens\": [1, 2], \"{key}\": \"{text}\"}}"),
        ];
        for line in lines {
            desk.write("data.jsonl", &line);
            if let Ok(dataset) = Dataset::open(&desk.path("data.jsonl"), &desk.options()) {
                prop_assert!(dataset.all(None).is_ok());
            }
        }
    }
}
