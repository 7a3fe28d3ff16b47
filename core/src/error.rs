//! What went wrong, where, and what to do: the one error type of the contract.
//!
//! An [`Error`] carries a kind (which decides the exit code), the operation, a message, and context as
//! `key = value` pairs (file, line, tensor, rank, step, expected, found). Errors that list several faults at
//! once carry [`Diagnostic`]s.

use std::fmt;

use serde::Serialize;

/// The result of every fallible call of the contract.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The class of a failure. Decides the exit code of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The config or the arguments are wrong. Exit 2.
    Config,
    /// The engine does not claim this in its capability. Exit 2.
    Unsupported,
    /// The training data is wrong. Exit 3.
    Data,
    /// A file or folder is missing, malformed, or cannot be written. Exit 3.
    File,
    /// A checkpoint belongs to another model, data set or format. Exit 3.
    Checkpoint,
    /// A call came in an order that the contract forbids. Exit 1: a defect of the caller.
    CallOrder,
    /// A value that must be finite is not. Exit 4.
    NonFinite,
    /// A rank failed or left. Exit 4.
    RankLost,
    /// An operation did not end within its timeout. Exit 4.
    Timeout,
    /// The engine lost a rank after its commit point and refuses every call. Exit 4.
    Poisoned,
    /// The engines disagree beyond the tolerance. Exit 4.
    Parity,
    /// The device or a library it needs is absent or failed. Exit 4.
    Device,
    /// The user asked to stop. Exit 4.
    Interrupted,
    /// A defect of ours. Exit 1.
    Defect,
}

impl ErrorKind {
    /// A number for the wire between ranks of one program.
    pub fn code(self) -> i64 {
        self as i64
    }

    /// The kind of a [`Self::code`].
    pub fn from_code(code: i64) -> Self {
        const ALL: [ErrorKind; 14] = [
            ErrorKind::Config,
            ErrorKind::Unsupported,
            ErrorKind::Data,
            ErrorKind::File,
            ErrorKind::Checkpoint,
            ErrorKind::CallOrder,
            ErrorKind::NonFinite,
            ErrorKind::RankLost,
            ErrorKind::Timeout,
            ErrorKind::Poisoned,
            ErrorKind::Parity,
            ErrorKind::Device,
            ErrorKind::Interrupted,
            ErrorKind::Defect,
        ];
        ALL.into_iter()
            .find(|kind| kind.code() == code)
            .unwrap_or(Self::Defect)
    }

    /// The exit code of the program: 2 config, 3 data or file, 4 a fault at run time, 1 a defect.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Config | Self::Unsupported => 2,
            Self::Data | Self::File | Self::Checkpoint => 3,
            Self::NonFinite
            | Self::RankLost
            | Self::Timeout
            | Self::Poisoned
            | Self::Parity
            | Self::Device
            | Self::Interrupted => 4,
            Self::CallOrder | Self::Defect => 1,
        }
    }
}

/// A failure with everything a person needs at 2 a.m.
///
/// ```
/// use drivetrain_core::{Error, ErrorKind};
/// let error = Error::new(ErrorKind::File, "read_weights", "the header is truncated")
///     .with("file", "model.safetensors")
///     .with("expected", "8 bytes")
///     .help("download the file again");
/// assert_eq!(error.kind().exit_code(), 3);
/// ```
#[derive(Debug)]
pub struct Error(Box<Inner>);

#[derive(Debug)]
struct Inner {
    kind: ErrorKind,
    operation: &'static str,
    message: String,
    context: Vec<(&'static str, String)>,
    help: Option<String>,
    diagnostics: Vec<Diagnostic>,
    others: Vec<String>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
    secondary: bool,
}

impl Error {
    /// An error of `kind` in `operation` (a verb in snake case).
    pub fn new(kind: ErrorKind, operation: &'static str, message: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            kind,
            operation,
            message: message.into(),
            context: Vec::new(),
            help: None,
            diagnostics: Vec::new(),
            others: Vec::new(),
            source: None,
            secondary: false,
        }))
    }

    /// An error that lists faults found at once.
    pub fn diagnosed(operation: &'static str, diagnostics: Vec<Diagnostic>) -> Self {
        let count = diagnostics
            .iter()
            .filter(|d| d.severity == Severity::Error)
            .count();
        let mut error = Self::new(
            ErrorKind::Config,
            operation,
            format!("{count} fault(s) found"),
        );
        error.0.diagnostics = diagnostics;
        error
    }

    /// An error that lists what was asked for and is not claimed.
    pub fn unclaimed(operation: &'static str, diagnostics: Vec<Diagnostic>) -> Self {
        let mut error = Self::diagnosed(operation, diagnostics);
        error.0.kind = ErrorKind::Unsupported;
        error
    }

    /// Adds a `key = value` pair; the first value given for a key stays.
    #[must_use]
    pub fn with(mut self, key: &'static str, value: impl fmt::Display) -> Self {
        if !self.0.context.iter().any(|(k, _)| *k == key) {
            self.0.context.push((key, value.to_string()));
        }
        self
    }

    /// Says what to do about it.
    #[must_use]
    pub fn help(mut self, remedy: impl Into<String>) -> Self {
        self.0.help = Some(remedy.into());
        self
    }

    /// Keeps the cause.
    #[must_use]
    pub fn caused_by(
        mut self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// Tells of other faults of the same kind that were found with this one.
    #[must_use]
    pub fn and(mut self, others: impl IntoIterator<Item = Self>) -> Self {
        let others = others.into_iter().map(|other| other.summary());
        self.0.others.extend(others);
        self
    }

    /// Marks it as the echo of another rank's error.
    #[must_use]
    pub fn secondary(mut self) -> Self {
        self.0.secondary = true;
        self
    }

    /// Whether it is the echo of another rank's error, which says more.
    pub fn is_secondary(&self) -> bool {
        self.0.secondary
    }

    /// The class of the failure.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The operation that failed.
    pub fn operation(&self) -> &'static str {
        self.0.operation
    }

    /// The message without context.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// What to do about it, where the error says.
    pub fn remedy(&self) -> Option<&str> {
        self.0.help.as_deref()
    }

    /// The message and its context on one line.
    pub fn summary(&self) -> String {
        let context = self.0.context.iter().map(|(k, v)| format!("; {k} = {v}"));
        std::iter::once(self.0.message.clone())
            .chain(context)
            .collect()
    }

    /// The value of a context key.
    pub fn context(&self, key: &str) -> Option<&str> {
        self.0
            .context
            .iter()
            .find(|(k, _)| *k == key)
            .map(|(_, v)| v.as_str())
    }

    /// The faults, where the error lists several.
    pub fn diagnostics(&self) -> &[Diagnostic] {
        &self.0.diagnostics
    }

    /// A copy for another rank or thread; the source becomes text.
    #[must_use]
    pub fn duplicate(&self) -> Self {
        let inner = &self.0;
        Self(Box::new(Inner {
            kind: inner.kind,
            operation: inner.operation,
            message: inner.message.clone(),
            context: inner.context.clone(),
            help: inner.help.clone(),
            diagnostics: inner.diagnostics.clone(),
            others: inner.others.clone(),
            source: inner.source.as_ref().map(|s| s.to_string().into()),
            secondary: inner.secondary,
        }))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &self.0;
        write!(f, "{}: {}", inner.operation, inner.message)?;
        for (key, value) in &inner.context {
            write!(f, "\n  {key} = {value}")?;
        }
        for diagnostic in &inner.diagnostics {
            write!(f, "\n{diagnostic}")?;
        }
        let mut source = inner
            .source
            .as_ref()
            .map(|s| s.as_ref() as &dyn std::error::Error);
        while let Some(cause) = source {
            write!(f, "\n  cause: {cause}")?;
            source = cause.source();
        }
        if let Some(help) = &inner.help {
            write!(f, "\n  help: {help}")?;
        }
        for other in &inner.others {
            write!(f, "\n  also: {other}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0
            .source
            .as_ref()
            .map(|s| s.as_ref() as &(dyn std::error::Error + 'static))
    }
}

/// Whether a diagnostic stops the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The job cannot run.
    Error,
    /// The job runs, but probably not as meant.
    Warning,
}

/// One fault of a job, found before anything runs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Diagnostic {
    /// Stable rule id, such as `TP-02`.
    pub rule: &'static str,
    /// Whether it stops the job.
    pub severity: Severity,
    /// The config path, such as `parallel.tensor_parallel_size`.
    pub path: String,
    /// The line of the YAML file, counted from 1; `None` where a default or an override is at fault.
    pub line: Option<usize>,
    /// What was found, as a sentence.
    pub found: String,
    /// What would be right.
    pub remedy: String,
}

impl Diagnostic {
    /// A fault that stops the job; its line is filled in from the config file later.
    pub fn error(
        rule: &'static str,
        path: impl Into<String>,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            rule,
            severity: Severity::Error,
            path: path.into(),
            line: None,
            found: found.into(),
            remedy: remedy.into(),
        }
    }

    /// Something to look at that does not stop the job.
    pub fn warning(
        rule: &'static str,
        path: impl Into<String>,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            severity: Severity::Warning,
            ..Self::error(rule, path, found, remedy)
        }
    }
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            Severity::Error => "error",
            Severity::Warning => "warning",
        };
        let line = self.line.map(|l| format!("line {l}, ")).unwrap_or_default();
        write!(
            f,
            "{severity}[{}] {line}{}: {}\n  remedy: {}",
            self.rule, self.path, self.found, self.remedy
        )
    }
}
