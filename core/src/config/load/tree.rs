//! The file as a tree that remembers where each value was written.

use indexmap::IndexMap;
use serde_json::Value;

/// Where a value was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// This line of the file, counted from 1.
    Line(usize),
    /// A `--set` override.
    Set,
}

/// A value with its origin: its key's line in a mapping, its own in a sequence.
#[derive(Debug, Clone)]
pub(super) struct Node {
    pub(super) origin: Origin,
    pub(super) content: Content,
}

#[derive(Debug, Clone)]
pub(super) enum Content {
    Scalar(Value),
    Sequence(Vec<Node>),
    Mapping(IndexMap<String, Node>),
}

impl Node {
    pub(super) fn mapping(origin: Origin) -> Self {
        Self {
            origin,
            content: Content::Mapping(IndexMap::new()),
        }
    }

    pub(super) fn to_json(&self) -> Value {
        match &self.content {
            Content::Scalar(value) => value.clone(),
            Content::Sequence(items) => items.iter().map(Node::to_json).collect(),
            Content::Mapping(entries) => entries
                .iter()
                .map(|(key, node)| (key.clone(), node.to_json()))
                .collect(),
        }
    }

    /// The node at a path, if it was written.
    pub(super) fn find(&self, path: &Path) -> Option<&Node> {
        path.0
            .iter()
            .try_fold(self, |node, segment| node.child(segment))
    }

    /// Origin of the node at a path, or of its nearest ancestor below the root that was written.
    pub(super) fn nearest_origin(&self, path: &Path) -> Option<Origin> {
        let mut node = self;
        let mut origin = None;
        for segment in &path.0 {
            let Some(child) = node.child(segment) else {
                break;
            };
            origin = Some(child.origin);
            node = child;
        }
        origin
    }

    fn child(&self, segment: &str) -> Option<&Node> {
        match &self.content {
            Content::Mapping(entries) => entries.get(segment),
            Content::Sequence(items) => segment.parse().ok().and_then(|i: usize| items.get(i)),
            Content::Scalar(_) => None,
        }
    }
}

/// A place in the tree; list items are numbered from 0.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Path(pub(super) Vec<String>);

impl Path {
    /// From a JSON pointer (RFC 6901).
    pub(super) fn from_pointer(pointer: &str) -> Self {
        let segments = pointer.split('/').skip(1);
        Self(
            segments
                .map(|s| s.replace("~1", "/").replace("~0", "~"))
                .collect(),
        )
    }

    /// From `a.b[2]`, as diagnostics write it.
    pub(super) fn parse(text: &str) -> Self {
        let segments = text.split(['.', '[']).map(|s| s.trim_end_matches(']'));
        Self(
            segments
                .filter(|s| !s.is_empty())
                .map(str::to_owned)
                .collect(),
        )
    }

    #[must_use]
    pub(super) fn join(&self, segment: &str) -> Self {
        let mut segments = self.0.clone();
        segments.push(segment.to_owned());
        Self(segments)
    }

    #[must_use]
    pub(super) fn under(&self, prefix: &Path) -> Self {
        Self(prefix.0.iter().chain(&self.0).cloned().collect())
    }

    /// Whether one lies within the other.
    pub(super) fn overlaps(&self, other: &Path) -> bool {
        self.0.iter().zip(&other.0).all(|(a, b)| a == b)
    }
}

impl std::fmt::Display for Path {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, segment) in self.0.iter().enumerate() {
            if segment.parse::<usize>().is_ok() {
                write!(f, "[{segment}]")?;
            } else {
                let dot = if i > 0 { "." } else { "" };
                write!(f, "{dot}{segment}")?;
            }
        }
        Ok(())
    }
}
