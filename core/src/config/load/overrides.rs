//! `--set key.path=value`.

use super::{
    parse::parse,
    tree::{Content, Node, Origin, Path},
};
use crate::Diagnostic;

/// Writes an override into the tree; its value is YAML.
pub(super) fn apply(root: &mut Node, text: &str, faults: &mut Vec<Diagnostic>) {
    let Some((key, value)) = text.split_once('=') else {
        faults.push(Diagnostic::error(
            "CFG-08",
            text,
            "an override without `=` (from --set)",
            "write `--set key.path=value`",
        ));
        return;
    };
    let path = Path::parse(key.trim());
    if path.0.is_empty() {
        faults.push(Diagnostic::error(
            "CFG-08",
            text,
            "an override without a key (from --set)",
            "write `--set key.path=value`",
        ));
        return;
    }
    let mut parsed = parse(value);
    if parsed.broken || !parsed.faults.is_empty() {
        faults.extend(parsed.faults.into_iter().map(|fault| {
            let found = format!("`{value}`: {} (from --set)", fault.found);
            // A value that no file may have either is what it is there.
            let rule = if fault.rule == "CFG-02" {
                "CFG-02"
            } else {
                "CFG-08"
            };
            Diagnostic::error(rule, path.to_string(), found, fault.remedy)
        }));
        return;
    }
    mark(&mut parsed.root);
    if value.trim().is_empty() {
        parsed.root.content = Content::Scalar(serde_json::Value::Null);
    }
    insert(root, &path.0, parsed.root);
}

fn mark(node: &mut Node) {
    node.origin = Origin::Set;
    match &mut node.content {
        Content::Scalar(_) => {}
        Content::Sequence(items) => items.iter_mut().for_each(mark),
        Content::Mapping(entries) => entries.values_mut().for_each(mark),
    }
}

fn insert(node: &mut Node, path: &[String], value: Node) {
    let [first, rest @ ..] = path else {
        *node = value;
        return;
    };
    if let (Content::Sequence(items), Ok(index)) = (&mut node.content, first.parse::<usize>())
        && let Some(item) = items.get_mut(index)
    {
        return insert(item, rest, value);
    }
    if !matches!(node.content, Content::Mapping(_)) {
        *node = Node::mapping(Origin::Set);
    }
    if let Content::Mapping(entries) = &mut node.content {
        let child = entries
            .entry(first.clone())
            .or_insert_with(|| Node::mapping(Origin::Set));
        insert(child, rest, value);
    }
}
