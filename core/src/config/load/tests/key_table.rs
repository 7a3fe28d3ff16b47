//! The handbook's table of keys is made of the schema: it cannot be wrong for long.

use std::{fmt::Write, fs, path::Path as FilePath};

use serde_json::Value;

use super::super::{schema::Schema, tree::Path};
use crate::config::JobConfig;

const PAGE: &str = "src/manual/config.md";
const HEAD: &str = "# Keys of a job

What a YAML file may say, made of the types in `core/src/config` (`UPDATE_KEY_TABLE=1 cargo test -p drivetrain-core
key_table` writes this page). What else must hold between keys: [rules](crate::config). The columns that a loss reads
beside its keys: [writing an objective](crate::manual::writing_an_objective).

| Key | Value | Default | What |
|---|---|---|---|
";

#[test]
fn key_table_is_the_schema() {
    let page = FilePath::new(env!("CARGO_MANIFEST_DIR")).join(PAGE);
    let expected = format!("{HEAD}{}", rows());
    if std::env::var_os("UPDATE_KEY_TABLE").is_some() {
        fs::write(&page, &expected).unwrap();
    }
    let found = fs::read_to_string(&page).unwrap();
    assert_eq!(found, expected, "set UPDATE_KEY_TABLE=1 to write it");
}

fn rows() -> String {
    let schema = Schema::of_job(&[]);
    let defaults = serde_json::to_value(JobConfig::new("", "", 0, 0)).unwrap();
    let mut rows = String::new();
    section(&schema, &schema.0, &defaults, &Path::default(), &mut rows);
    rows
}

fn section(schema: &Schema, node: &Value, defaults: &Value, path: &Path, rows: &mut String) {
    let required = |name: &str| {
        let names = node["required"].as_array().into_iter().flatten();
        names.filter_map(Value::as_str).any(|n| n == name)
    };
    for (name, child) in node["properties"].as_object().into_iter().flatten() {
        let inner = schema.at(&path.join(name)).unwrap();
        let path = path.join(name);
        if inner["properties"].is_object() {
            section(schema, inner, &defaults[name], &path, rows);
            continue;
        }
        let text = |node: &Value| {
            node["description"]
                .as_str()
                .unwrap_or_default()
                .replace('\n', " ")
        };
        let what = Some(text(child))
            .filter(|t| !t.is_empty())
            .unwrap_or_else(|| text(inner));
        assert!(!what.is_empty(), "{path} says nothing");
        let default = match &defaults[name] {
            _ if required(name) => "required".to_owned(),
            Value::Null => "none".to_owned(),
            value => format!("`{}`", value.to_string().replace('"', "")),
        };
        let expected = schema.expected(child).replace('|', "or");
        writeln!(rows, "| `{path}` | {expected} | {default} | {what} |").unwrap();
    }
}
