//! The JSON schema of a job, and questions to it.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::tree::Path;
use crate::{config::JobConfig, engine::Backend};

/// A JSON schema whose `$ref`s point into itself.
#[derive(Debug)]
pub(super) struct Schema(pub(super) Value);

impl Schema {
    /// The schema of [`JobConfig`], with the names of the backends filled in.
    pub(super) fn of_job(backends: &[&dyn Backend]) -> Self {
        let mut schema = schemars::schema_for!(JobConfig).to_value();
        let names: BTreeSet<_> = backends.iter().map(|b| b.name()).collect();
        if !names.is_empty() {
            schema["properties"]["backend"]["enum"] = json!(names);
        }
        Self::bounded(schema)
    }

    /// The schema of a backend's own options; of no option where it has none.
    pub(super) fn of_options(backend: &dyn Backend) -> Self {
        let none = || json!({"type": "object", "properties": {}, "additionalProperties": false});
        Self::bounded(
            backend
                .options_schema()
                .map_or_else(none, schemars::Schema::to_value),
        )
    }

    /// Whole numbers have 64 bits; the schema's own types know no bound.
    fn bounded(mut schema: Value) -> Self {
        fn bound(node: &mut Value) {
            match node {
                Value::Array(items) => items.iter_mut().for_each(bound),
                Value::Object(entries) => {
                    let is_whole = match entries.get("type") {
                        Some(Value::Array(types)) => types.contains(&"integer".into()),
                        other => other == Some(&"integer".into()),
                    };
                    if is_whole {
                        entries.entry("maximum").or_insert(u64::MAX.into());
                    }
                    entries.values_mut().for_each(bound);
                }
                _ => {}
            }
        }
        bound(&mut schema);
        Self(schema)
    }

    /// The schema of the value at a path, references resolved.
    pub(super) fn at(&self, path: &Path) -> Option<&Value> {
        path.0
            .iter()
            .try_fold(self.resolve(&self.0), |node, segment| {
                let child = match node["properties"].get(segment) {
                    Some(child) => child,
                    None => ["additionalProperties", "items"]
                        .iter()
                        .find_map(|k| node.get(*k).filter(|v| v.is_object()))?,
                };
                Some(self.resolve(child))
            })
    }

    /// Follows `$ref`, and an `anyOf` that only adds null. A description beside a `$ref` is on the outer node.
    fn resolve<'a>(&'a self, node: &'a Value) -> &'a Value {
        if let Some(reference) = node["$ref"].as_str() {
            return reference
                .strip_prefix('#')
                .and_then(|pointer| self.0.pointer(pointer))
                .unwrap_or(node);
        }
        node
    }

    /// Values that a node allows, where it lists them.
    pub(super) fn allowed(&self, node: &Value) -> Vec<String> {
        let node = self.resolve(node);
        let text = |v: &Value| v.as_str().map_or_else(|| v.to_string(), str::to_owned);
        let mut allowed: Vec<_> = node.get("const").iter().map(|v| text(v)).collect();
        allowed.extend(node["enum"].as_array().into_iter().flatten().map(text));
        for key in ["oneOf", "anyOf"] {
            for branch in node[key].as_array().into_iter().flatten() {
                allowed.extend(self.allowed(branch));
            }
        }
        allowed
    }

    /// What kind of value a node wants, in words.
    pub(super) fn expected(&self, node: &Value) -> String {
        let allowed = self.allowed(node);
        if !allowed.is_empty() {
            return format!("one of {}", allowed.join(", "));
        }
        let mut words = Vec::new();
        self.type_words(node, &mut words);
        if words.is_empty() {
            return "another value".to_owned();
        }
        words.join(" or ")
    }

    fn type_words(&self, node: &Value, words: &mut Vec<&'static str>) {
        let node = self.resolve(node);
        let one = node["type"].as_str().into_iter();
        let many = node["type"].as_array().into_iter().flatten();
        for name in one.chain(many.filter_map(Value::as_str)) {
            let word = match name {
                "integer" if node["minimum"].as_f64() == Some(0.0) => "a whole number, 0 or above",
                "integer" => "a whole number",
                "number" => "a number",
                "string" => "text",
                "boolean" => "true or false",
                "array" => "a list",
                "object" => "a section of `key: value` lines",
                _ => "null",
            };
            if !words.contains(&word) {
                words.push(word);
            }
        }
        for branch in node["anyOf"].as_array().into_iter().flatten() {
            self.type_words(branch, words);
        }
    }

    /// Every key with its path.
    pub(super) fn keys(&self) -> Vec<Path> {
        let mut keys = Vec::new();
        self.collect_keys(&self.0, &Path::default(), &mut keys);
        keys
    }

    fn collect_keys(&self, node: &Value, path: &Path, keys: &mut Vec<Path>) {
        for (name, child) in self.resolve(node)["properties"]
            .as_object()
            .into_iter()
            .flatten()
        {
            let path = path.join(name);
            self.collect_keys(child, &path, keys);
            keys.push(path);
        }
    }

    /// A value that passes, to stand in for a required one that is missing.
    pub(super) fn placeholder(&self, node: &Value) -> Value {
        let node = self.resolve(node);
        if let Some(first) = self.allowed(node).into_iter().next() {
            return first.into();
        }
        match node["type"].as_str() {
            Some("integer" | "number") => node.get("minimum").cloned().unwrap_or(1.into()),
            Some("boolean") => false.into(),
            Some("array") => json!([]),
            Some("object") => {
                let required = node["required"].as_array().into_iter().flatten();
                let names = required.filter_map(Value::as_str);
                names
                    .map(|n| (n.to_owned(), self.placeholder(&node["properties"][n])))
                    .collect()
            }
            _ => "".into(),
        }
    }
}
