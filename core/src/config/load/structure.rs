//! Keys, types and ranges: every fault against the schema, and a tree repaired so that the rules can go on.

use std::collections::BTreeMap;

use jsonschema::{ValidationError, error::ValidationErrorKind};
use serde_json::Value;

use super::{
    schema::Schema,
    suggest,
    tree::{Node, Origin, Path},
};
use crate::Diagnostic;

/// Rounds of repair; each removes or adds at least one key of a level, and a job has three levels.
const MAX_ROUNDS: usize = 8;

/// Validates `value`, which lies at `prefix` of the tree. Faulty keys are removed from it and missing ones
/// filled with placeholders; their paths join `assumed`, so that no rule judges what nobody wrote.
pub(super) fn check(
    schema: &Schema,
    value: &mut Value,
    prefix: &Path,
    tree: &Node,
    assumed: &mut Vec<Path>,
) -> Vec<Diagnostic> {
    let validator = match jsonschema::validator_for(&schema.0) {
        Ok(validator) => validator,
        Err(error) => {
            let found = format!("the schema of these options is not valid: {error}");
            let remedy = "report this to the backend's authors";
            return vec![Diagnostic::error(
                "CFG-02",
                prefix.to_string(),
                found,
                remedy,
            )];
        }
    };
    let mut context = Context {
        schema,
        valid: schema.keys(),
        prefix,
        tree,
        meant: Vec::new(),
    };
    let mut faults = Vec::new();
    for round in 0..MAX_ROUNDS {
        let mut found: BTreeMap<Path, Vec<Found>> = BTreeMap::new();
        for error in validator.iter_errors(value) {
            for fault in context.faults(&error) {
                found.entry(fault.path.clone()).or_default().push(fault);
            }
        }
        if found.is_empty() {
            break;
        }
        for fault in found.values().flatten() {
            repair(value, &fault.path, fault.placeholder.clone());
            assumed.push(fault.path.under(prefix));
        }
        if round == 0 {
            assumed.extend(context.meant.iter().map(|p| p.under(prefix)));
            let missing_but_misspelt =
                |f: &Found| f.diagnostic.rule == "CFG-03" && context.meant.contains(&f.path);
            let reported = found.into_values().flatten();
            faults.extend(
                reported
                    .filter(|f| !missing_but_misspelt(f))
                    .map(|f| f.diagnostic),
            );
        }
    }
    faults
}

struct Found {
    path: Path,
    diagnostic: Diagnostic,
    /// What to put there instead of nothing.
    placeholder: Option<Value>,
}

struct Context<'a> {
    schema: &'a Schema,
    valid: Vec<Path>,
    prefix: &'a Path,
    tree: &'a Node,
    /// Keys that unknown ones probably meant.
    meant: Vec<Path>,
}

impl Context<'_> {
    fn faults(&mut self, error: &ValidationError<'_>) -> Vec<Found> {
        let path = Path::from_pointer(error.instance_path().as_str());
        match error.kind() {
            ValidationErrorKind::AdditionalProperties { unexpected } => unexpected
                .iter()
                .map(|key| self.unknown(&path, key))
                .collect(),
            ValidationErrorKind::Required { property } => {
                vec![self.missing(path.join(property.as_str().unwrap_or_default()))]
            }
            kind => {
                let range = matches!(
                    kind,
                    ValidationErrorKind::Minimum { .. }
                        | ValidationErrorKind::Maximum { .. }
                        | ValidationErrorKind::ExclusiveMinimum { .. }
                        | ValidationErrorKind::ExclusiveMaximum { .. }
                );
                vec![self.wrong(path, error, range)]
            }
        }
    }

    fn unknown(&mut self, level: &Path, key: &str) -> Found {
        let path = level.join(key);
        let meant = suggest::key(key, level, &self.valid);
        let remedy = match &meant {
            Some(meant) if meant.0[..meant.0.len() - 1] == level.0[..] => {
                format!("write `{}`", meant.0[meant.0.len() - 1])
            }
            Some(meant) => {
                let (leaf, section) = (&meant.0[meant.0.len() - 1], &meant.0[..meant.0.len() - 1]);
                let home = Path(section.to_vec()).under(self.prefix);
                if home.0.is_empty() {
                    format!("`{leaf}` belongs at the top level")
                } else {
                    format!("`{leaf}` belongs under `{home}:`")
                }
            }
            None => self.list_keys(level),
        };
        self.meant.extend(meant);
        let found = "no such key";
        self.found("CFG-01", path, found.to_owned(), remedy, None)
    }

    fn list_keys(&self, level: &Path) -> String {
        let keys = self.schema.at(level).map(|n| &n["properties"]);
        let names: Vec<_> = keys
            .and_then(Value::as_object)
            .into_iter()
            .flat_map(|o| o.keys().map(String::as_str))
            .collect();
        if names.is_empty() {
            "remove it; there are no keys here".to_owned()
        } else {
            format!("remove it; the keys here are {}", names.join(", "))
        }
    }

    fn missing(&self, path: Path) -> Found {
        let node = self.schema.at(&path).unwrap_or(&Value::Null);
        let name = path.0.last().map_or("", String::as_str);
        let what = self.described(&path);
        let remedy = format!("add `{name}:` ({what}{})", self.schema.expected(node));
        let placeholder = self.schema.placeholder(node);
        self.found(
            "CFG-03",
            path,
            "missing".to_owned(),
            remedy,
            Some(placeholder),
        )
    }

    /// What the outer schema node of a key says it is.
    fn described(&self, path: &Path) -> String {
        let (parent, name) = (
            Path(path.0[..path.0.len() - 1].to_vec()),
            &path.0[path.0.len() - 1],
        );
        self.schema
            .at(&parent)
            .and_then(|n| n["properties"][name]["description"].as_str())
            .and_then(|d| d.split(['.', ';']).next())
            .map(|d| format!("{}; ", lower_first(&d.replace('\n', " "))))
            .unwrap_or_default()
    }

    fn wrong(&self, path: Path, error: &ValidationError<'_>, range: bool) -> Found {
        let node = self.schema.at(&path).unwrap_or(&Value::Null);
        let instance = error.instance().as_ref();
        let shown = show(instance);
        let allowed = self.schema.allowed(node);
        if range {
            let bounds: Vec<_> = [("minimum", "at least"), ("maximum", "at most")]
                .iter()
                .filter_map(|(key, word)| Some(format!("{word} {}", node.get(*key)?)))
                .collect();
            let remedy = format!("give {}", bounds.join(" and "));
            return self.found(
                "CFG-05",
                path,
                format!("{shown} is out of range"),
                remedy,
                None,
            );
        }
        match instance.as_str() {
            Some(word) if !allowed.is_empty() => {
                let list = allowed.join(", ");
                let remedy = match suggest::word(word, allowed.iter().map(String::as_str)) {
                    Some(near) => format!("write `{near}`; allowed are {list}"),
                    None => format!("choose one of {list}"),
                };
                let found = format!("`{word}` is not a choice");
                self.found("CFG-04", path, found, remedy, None)
            }
            _ => {
                let expected = self.schema.expected(node);
                let hint = match instance {
                    Value::String(s) if matches!(s.as_str(), "yes" | "no" | "on" | "off") => {
                        "; YAML 1.2 knows only true and false"
                    }
                    Value::Null => "; leave the key out for its default",
                    _ => "",
                };
                let found = format!("{shown} where {expected} is wanted");
                let remedy = format!("give {expected}{hint}");
                self.found("CFG-02", path, found, remedy, None)
            }
        }
    }

    fn found(
        &self,
        rule: &'static str,
        path: Path,
        found: String,
        remedy: String,
        placeholder: Option<Value>,
    ) -> Found {
        let full = path.under(self.prefix);
        let origin = self.tree.nearest_origin(&full);
        let mut diagnostic = Diagnostic::error(rule, full.to_string(), found, remedy);
        match origin {
            Some(Origin::Line(line)) => diagnostic.line = Some(line),
            Some(Origin::Set) => diagnostic.found.push_str(" (from --set)"),
            None => diagnostic.line = Some(1),
        }
        Found {
            path,
            diagnostic,
            placeholder,
        }
    }
}

/// Removes the value at a path, or puts another there. An item of a list takes its whole list with it.
fn repair(root: &mut Value, path: &Path, placeholder: Option<Value>) {
    let Some((last, parents)) = path.0.split_last() else {
        *root = placeholder.unwrap_or_else(|| Value::Object(serde_json::Map::new()));
        return;
    };
    let mut node = root;
    for (depth, segment) in parents.iter().enumerate() {
        let Value::Object(entries) = node else { return };
        if matches!(entries.get(segment), Some(Value::Array(_))) {
            entries.shift_remove(&path.0[depth]);
            return;
        }
        let Some(child) = entries.get_mut(segment) else {
            return;
        };
        node = child;
    }
    if let Value::Object(entries) = node {
        match placeholder {
            Some(value) => {
                entries.insert(last.clone(), value);
            }
            None => {
                entries.shift_remove(last);
            }
        }
    }
}

fn show(value: &Value) -> String {
    match value {
        Value::Null => "nothing".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "a section".to_owned(),
        Value::String(s) => format!("the text `{s}`"),
        other => format!("`{other}`"),
    }
}

fn lower_first(text: &str) -> String {
    let mut chars = text.chars();
    chars
        .next()
        .map(|c| c.to_lowercase().chain(chars).collect())
        .unwrap_or_default()
}
