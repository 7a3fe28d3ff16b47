//! YAML text to a tree, with every duplicate key and foreign construct reported.

use std::{borrow::Cow, collections::BTreeMap};

use saphyr::{Scalar, ScalarStyle, Tag};
use saphyr_parser::{Event, Parser, Span};
use serde_json::{Number, Value};

use super::tree::{Content, Node, Origin, Path};
use crate::Diagnostic;

/// Deeper nesting than any config has.
const MAX_DEPTH: usize = 64;
/// Most nodes that aliases may add.
const MAX_ALIASED_NODES: usize = 10_000;

/// What a text holds.
#[derive(Debug)]
pub(super) struct Parsed {
    /// The tree; an empty mapping where the text is not YAML.
    pub(super) root: Node,
    /// Faults found on the way, lines filled in.
    pub(super) faults: Vec<Diagnostic>,
    /// Paths of which the value meant is unknown.
    pub(super) doubtful: Vec<Path>,
    /// Whether the text could not be read to its end.
    pub(super) broken: bool,
}

/// Parses one document.
pub(super) fn parse(text: &str) -> Parsed {
    let mut builder = Builder::default();
    let result = builder.read(text);
    let broken = result.is_err();
    if let Err(fault) = result {
        builder.faults.push(*fault);
    }
    let root = match builder.root {
        Some(root) if !broken => root,
        _ => Node::mapping(Origin::Line(1)),
    };
    Parsed {
        root,
        faults: builder.faults,
        doubtful: builder.doubtful,
        broken,
    }
}

/// A fault after which the rest of the text cannot be understood.
type Fatal<T> = Result<T, Box<Diagnostic>>;

#[derive(Debug, Default)]
struct Builder {
    root: Option<Node>,
    stack: Vec<Frame>,
    anchors: BTreeMap<usize, Node>,
    aliased_nodes: usize,
    faults: Vec<Diagnostic>,
    doubtful: Vec<Path>,
}

/// A collection that is open, and for a mapping the key that awaits its value.
#[derive(Debug)]
struct Frame {
    node: Node,
    anchor: usize,
    key: Option<(String, usize)>,
}

impl Builder {
    fn read(&mut self, text: &str) -> Fatal<()> {
        for event in Parser::new_from_str(text) {
            let (event, span) = event.map_err(|e| {
                let remedy = "write one YAML mapping, two spaces a level; quote text that holds `: `, `#` or a tab";
                fatal("CFG-00", *e.marker(), format!("this is not YAML: {}", e.info()), remedy)
            })?;
            self.event(event, span)?;
        }
        Ok(())
    }

    fn event(&mut self, event: Event<'_>, span: Span) -> Fatal<()> {
        let line = span.start.line();
        match event {
            Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentEnd => Ok(()),
            Event::DocumentStart(_) if self.root.is_some() => Err(fatal(
                "CFG-07",
                span.start,
                "a second document starts here".to_owned(),
                "keep one job a file",
            )),
            Event::DocumentStart(_) => Ok(()),
            Event::Scalar(text, style, anchor, tag) => {
                self.scalar(text, style, anchor, tag.as_deref(), span)
            }
            Event::Alias(anchor) => {
                let node = self.alias(anchor, span)?;
                self.add(node, 0, span)
            }
            Event::SequenceStart(anchor, tag) => {
                self.open(Content::Sequence(Vec::new()), anchor, tag.as_deref(), span)
            }
            Event::MappingStart(anchor, tag) => {
                let content = Node::mapping(Origin::Line(line)).content;
                self.open(content, anchor, tag.as_deref(), span)
            }
            Event::SequenceEnd | Event::MappingEnd => match self.stack.pop() {
                Some(frame) => self.add(frame.node, frame.anchor, span),
                None => Ok(()),
            },
        }
    }

    fn scalar(
        &mut self,
        text: Cow<'_, str>,
        style: ScalarStyle,
        anchor: usize,
        tag: Option<&Tag>,
        span: Span,
    ) -> Fatal<()> {
        let line = span.start.line();
        if self.awaits_key() {
            let key = text.into_owned();
            if key == "<<" {
                let remedy = "write the keys out; anchors and aliases of whole values are read";
                return Err(fatal(
                    "CFG-07",
                    span.start,
                    "a merge key `<<`, which YAML 1.2 does not have".to_owned(),
                    remedy,
                ));
            }
            if let Some(frame) = self.stack.last_mut() {
                frame.key = Some((key, line));
            }
            return Ok(());
        }
        self.refuse_tag(tag, line);
        let value = resolve(text, style, tag).unwrap_or_else(|found| {
            let path = self.path();
            let mut fault =
                Diagnostic::error("CFG-02", path.to_string(), found, "write a finite number");
            fault.line = Some(line);
            self.faults.push(fault);
            self.doubtful.push(path);
            Value::Number(0.into())
        });
        let node = Node {
            origin: Origin::Line(line),
            content: Content::Scalar(value),
        };
        self.add(node, anchor, span)
    }

    fn open(
        &mut self,
        content: Content,
        anchor: usize,
        tag: Option<&Tag>,
        span: Span,
    ) -> Fatal<()> {
        if self.awaits_key() {
            return Err(complex_key(span));
        }
        if self.stack.len() == MAX_DEPTH {
            return Err(fatal(
                "CFG-00",
                span.start,
                format!("values nest deeper than {MAX_DEPTH} levels"),
                "a job has three levels",
            ));
        }
        self.refuse_tag(tag, span.start.line());
        self.stack.push(Frame {
            node: Node {
                origin: Origin::Line(span.start.line()),
                content,
            },
            anchor,
            key: None,
        });
        Ok(())
    }

    fn alias(&mut self, anchor: usize, span: Span) -> Fatal<Node> {
        if self.awaits_key() {
            return Err(complex_key(span));
        }
        let Some(node) = self.anchors.get(&anchor).cloned() else {
            let found = "an alias within the value it stands for".to_owned();
            return Err(fatal("CFG-07", span.start, found, "write the value out"));
        };
        self.aliased_nodes = self.aliased_nodes.saturating_add(count(&node));
        if self.aliased_nodes > MAX_ALIASED_NODES {
            let found = format!("aliases stand for more than {MAX_ALIASED_NODES} values");
            return Err(fatal("CFG-07", span.start, found, "write the values out"));
        }
        Ok(node)
    }

    /// Puts a complete node where it belongs.
    fn add(&mut self, mut node: Node, anchor: usize, span: Span) -> Fatal<()> {
        if anchor > 0 {
            self.anchors.insert(anchor, node.clone());
        }
        let path = self.path();
        let Some(frame) = self.stack.last_mut() else {
            self.root = Some(node);
            return Ok(());
        };
        match &mut frame.node.content {
            Content::Sequence(items) => items.push(node),
            Content::Mapping(entries) => {
                let Some((key, line)) = frame.key.take() else {
                    return Err(complex_key(span));
                };
                node.origin = Origin::Line(line);
                if let Some(first) = entries.get(&key) {
                    let first_line = match first.origin {
                        Origin::Line(line) => line,
                        Origin::Set => 0,
                    };
                    let mut fault = Diagnostic::error(
                        "CFG-06",
                        path.to_string(),
                        format!("`{key}` is written twice; first on line {first_line}"),
                        "keep one of them",
                    );
                    fault.line = Some(line);
                    self.faults.push(fault);
                    self.doubtful.push(path);
                } else {
                    entries.insert(key, node);
                }
            }
            Content::Scalar(_) => {}
        }
        Ok(())
    }

    fn awaits_key(&self) -> bool {
        self.stack
            .last()
            .is_some_and(|f| matches!(f.node.content, Content::Mapping(_)) && f.key.is_none())
    }

    /// Where the next value goes.
    fn path(&self) -> Path {
        let segment = |frame: &Frame| match (&frame.node.content, &frame.key) {
            (Content::Sequence(items), _) => Some(items.len().to_string()),
            (_, key) => key.as_ref().map(|(name, _)| name.clone()),
        };
        Path(self.stack.iter().filter_map(segment).collect())
    }

    fn refuse_tag(&mut self, tag: Option<&Tag>, line: usize) {
        let Some(tag) = tag.filter(|t| !t.is_yaml_core_schema()) else {
            return;
        };
        let path = self.path();
        let mut fault = Diagnostic::error(
            "CFG-07",
            path.to_string(),
            format!("the tag `{}{}`", tag.handle, tag.suffix),
            "remove it; a job has plain values",
        );
        fault.line = Some(line);
        self.faults.push(fault);
        self.doubtful.push(path);
    }
}

/// A scalar by YAML 1.2's core schema. A float without a fraction is a whole number, so that `steps: 1e3` is.
fn resolve(text: Cow<'_, str>, style: ScalarStyle, tag: Option<&Tag>) -> Result<Value, String> {
    if style == ScalarStyle::Plain
        && tag.is_none()
        && text.bytes().all(|b| b.is_ascii_digit())
        && let Ok(whole) = text.parse::<u64>()
    {
        return Ok(whole.into());
    }
    let shown = text.clone();
    let tag = tag.filter(|t| t.is_yaml_core_schema()).map(Cow::Borrowed);
    let scalar = Scalar::parse_from_cow_and_metadata(text, style, tag.as_ref())
        .ok_or_else(|| format!("`{shown}` is not what its tag says"))?;
    Ok(match scalar {
        Scalar::Null => Value::Null,
        Scalar::Boolean(b) => b.into(),
        Scalar::Integer(i) => i.into(),
        Scalar::String(s) => s.into_owned().into(),
        Scalar::FloatingPoint(f) => {
            let f = f.into_inner();
            if f.fract() == 0.0 && f.abs() < 9e15 {
                (f as i64).into()
            } else {
                let number = Number::from_f64(f).ok_or_else(|| format!("`{shown}`"))?;
                Value::Number(number)
            }
        }
    })
}

fn count(node: &Node) -> usize {
    1 + match &node.content {
        Content::Scalar(_) => 0,
        Content::Sequence(items) => items.iter().map(count).sum(),
        Content::Mapping(entries) => entries.values().map(count).sum(),
    }
}

fn complex_key(span: Span) -> Box<Diagnostic> {
    fatal(
        "CFG-07",
        span.start,
        "a key that is not a plain word".to_owned(),
        "write `key: value`",
    )
}

fn fatal(
    rule: &'static str,
    at: saphyr::Marker,
    found: String,
    remedy: &'static str,
) -> Box<Diagnostic> {
    let found = format!("{found} (column {})", at.col() + 1);
    let mut fault = Diagnostic::error(rule, "", found, remedy);
    fault.line = Some(at.line());
    Box::new(fault)
}
