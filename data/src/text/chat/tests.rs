//! Templates of the kinds that models come with.

use std::fs;

use drivetrain_core::Result;
use serde_json::{Value, json};

use super::{super::special::SpecialTokens, ChatTemplate, Rendered};
use crate::line::Json;

const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn rendered(template: &str, messages: &Value) -> Result<Rendered> {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    let config = json!({"bos_token": "<s>", "eos_token": {"content": "</s>"}});
    fs::write(
        folder.path().join("tokenizer_config.json"),
        config.to_string(),
    )
    .unwrap();
    let special = SpecialTokens::open(folder.path()).unwrap();
    let messages: Vec<Json> = serde_json::from_value(messages.clone()).unwrap();
    ChatTemplate::open(folder.path(), &special)?.render(messages, &Json::Null)
}

fn said(template: &str, messages: &Value) -> Vec<String> {
    let rendered = rendered(template, messages).unwrap();
    let turns = rendered.turns.iter();
    turns
        .map(|turn| rendered.text[turn.clone()].to_owned())
        .collect()
}

fn talk() -> Value {
    json!([
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "second"},
    ])
}

#[test]
fn turns_are_found_where_their_words_occur_elsewhere_too() {
    let found = rendered(CHATML, &talk()).unwrap();
    assert_eq!(said(CHATML, &talk()), ["first", "second"]);
    let first = found.text.find("first").unwrap();
    assert_eq!(found.turns[0], first..first + 5);
    // Contents that begin or end like what is around them.
    let echo = json!([{"role": "assistant", "content": "<|im_end|>\n"}, {"role": "assistant", "content": ""}]);
    assert_eq!(said(CHATML, &echo), ["<|im_end|>\n", ""]);
}

#[test]
fn contents_that_the_template_trims_are_found() {
    let template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m['content'] | trim }}{{ eos_token }}{% endfor %}";
    let messages =
        json!([{"role": "user", "content": " a "}, {"role": "assistant", "content": " b c \n"}]);
    assert_eq!(said(template, &messages), ["b c"]);
}

/// Templates of reasoning models drop what earlier turns thought, so that a conversation's start reads otherwise
/// once more messages follow.
#[test]
fn turns_are_found_though_the_template_rewrites_the_past() {
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}{% if loop.last %}<think>\n{{ parts[0].split('<think>')[-1].strip('\\n') if parts | length > 1 else '' }}\n</think>\n\n{% endif %}{{ parts[-1].lstrip('\\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}";
    let messages = json!([
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nbecause"},
        {"role": "user", "content": "v"},
        {"role": "assistant", "content": "<think>\nhow\n</think>\n\nso"},
    ]);
    assert_eq!(
        said(template, &messages),
        ["because", "how\n</think>\n\nso"]
    );
}

#[test]
fn a_turn_that_the_template_leaves_out_is_an_error() {
    let template = "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}";
    let error = rendered(template, &talk()).unwrap_err();
    assert!(error.message().contains("leaves out"), "{error}");
    assert_eq!(error.context("field"), Some("messages[2].content"));
}

#[test]
fn generation_blocks_say_it_themselves() {
    let template = "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}\n{%- generation -%}\n {{ m.content }}{{ eos_token }} {%- endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}";
    let found = rendered(template, &talk()).unwrap();
    assert_eq!(said(template, &talk()), ["first</s>", "second</s>"]);
    assert!(!found.ends_are_found);
    assert_eq!(
        found.text,
        "[system]s[user]u[assistant]first</s>[user]first[assistant]second</s>"
    );
    let hostile = json!([{"role": "assistant", "content": "a\u{f0001}b"}]);
    assert!(
        rendered(template, &hostile)
            .unwrap_err()
            .message()
            .contains("marks")
    );
}

#[test]
fn blocks_are_trimmed_and_pythons_methods_work() {
    let template = "{% for m in messages %}\n    {% if m['role'].startswith('sys') %}\n<{{ m.content.strip().upper() }}>\n    {% endif %}\n    {% if loop.index > 2 %}{% break %}{% endif %}\n{% endfor %}\nend\n";
    assert_eq!(text_of_system(template), "<S>\nend");
}

fn text_of_system(template: &str) -> String {
    let messages = json!([{"role": "system", "content": " s "}]);
    rendered(template, &messages).unwrap().text
}

#[test]
fn json_is_pythons() {
    let template = "{{ {'a': ['<é>&\\'', 1, 2.0, none, true]} | tojson }}{{ [] | tojson }}";
    assert_eq!(
        text_of_system(template),
        r#"{"a": ["<é>&'", 1, 2.0, null, true]}[]"#
    );
    let template = "{{ {'a': [1]} | tojson(indent=2) }}";
    assert_eq!(text_of_system(template), "{\n  \"a\": [\n    1\n  ]\n}");
}

#[test]
fn the_day_is_always_the_same() {
    assert_eq!(
        text_of_system("{{ strftime_now('%d %b %Y, %A %H:%M %%') }}"),
        "26 Jul 2024, Friday 00:00 %"
    );
    let error = rendered(
        "{{ strftime_now('%Q') }}",
        &json!([{"role": "user", "content": ""}]),
    )
    .unwrap_err();
    assert!(error.to_string().contains("%Q"), "{error}");
}

#[test]
fn what_transformers_passes_is_there() {
    let template = "{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }} {{ bos_token }} {{ tools is defined }} {{ nothing is defined }}";
    assert_eq!(text_of_system(template), "True True False <s> True False");
}

/// Constructs that the templates of current models use: reversed slices, namespaces, tests of types.
#[test]
fn newer_constructs_are_understood() {
    let template = "{%- set ns = namespace(last=-1) -%}\n{%- for m in messages[::-1] -%}\n  {%- set index = (messages | length - 1) - loop.index0 -%}\n  {%- if ns.last < 0 and m.role == 'user' and m.content is string and not (m.content.startswith('<tool>') and m.content.endswith('</tool>')) -%}\n    {%- set ns.last = index -%}\n  {%- endif -%}\n{%- endfor -%}\n{%- for m in messages -%}\n  {%- if m.role == 'assistant' and loop.index0 > ns.last and m.reasoning is not defined -%}\n    {{- '<' ~ loop.index0 ~ '>' -}}\n  {%- endif -%}\n  {{- m['content'] + '|' -}}\n{%- endfor -%}\n{%- if add_generation_prompt is defined and add_generation_prompt is false -%}\n  {{- 'end' -}}\n{%- endif -%}\n{%- macro twice(x) -%}{{- x }}{{ x -}}{%- endmacro -%}\n{{- twice(messages[1:][0]['role']) -}}";
    assert_eq!(
        rendered(template, &talk()).unwrap().text,
        "s|u|first|first|<4>second|enduseruser"
    );
    assert_eq!(said(template, &talk()), ["first", "second"]);
}
