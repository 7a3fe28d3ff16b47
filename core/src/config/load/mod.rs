//! YAML text to a [`JobSpec`], or every fault at once.
//!
//! Parse, apply `--set` overrides, validate against the schema of [`JobConfig`], repair what is faulty so that
//! the rules can go on, judge the rules, ask the backend. A rule is skipped when a key it reads was faulty.

mod overrides;
mod parse;
mod paths;
mod schema;
mod structure;
mod suggest;
#[cfg(test)]
mod tests;
mod tree;

use std::path::{Path as FilePath, PathBuf};

use self::{
    schema::Schema,
    tree::{Content, Node, Origin, Path},
};
use super::{JobConfig, JobSpec, emit::is_emitted, rules};
use crate::{
    Diagnostic, Error, ErrorKind, Result, Severity,
    engine::Backend,
    files::read_all,
    model::{ModelResolver, ModelSpec},
};

/// Largest config file.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Rules of the loader itself: id and what is wrong.
pub(super) const STRUCTURAL_RULES: [(&str, &str); 11] = [
    ("CFG-00", "the file is not YAML"),
    ("CFG-01", "unknown key"),
    ("CFG-02", "a value of the wrong type"),
    ("CFG-03", "a required key is missing"),
    ("CFG-04", "a value that is not among the allowed ones"),
    ("CFG-05", "a number out of range"),
    ("CFG-06", "a key is written twice"),
    (
        "CFG-07",
        "YAML that a job does not use: merge keys, tags, complex keys, several documents",
    ),
    ("CFG-08", "a malformed `--set`"),
    (
        "MODEL-01",
        "the model folder does not exist, or the hub id is not available",
    ),
    (
        "MODEL-02",
        "the model's config cannot be read or is not supported",
    ),
];

/// What a backend's own check looks at: a fault here would only echo there.
const READ_BY_BACKENDS: [&str; 8] = [
    "batch",
    "backends",
    "device",
    "logits_budget_bytes",
    "objective",
    "parallel",
    "precision",
    "recompute",
];

/// A config file's text and the folder that its relative paths start from.
#[derive(Debug, Clone)]
pub struct JobSource {
    text: String,
    folder: PathBuf,
    name: String,
    file: Option<PathBuf>,
}

impl JobSource {
    /// Reads a file.
    ///
    /// # Errors
    /// `Config` if it cannot be read.
    pub fn read(path: &FilePath) -> Result<Self> {
        // A pipe may bring a job; a device that never ends may not.
        let text = std::fs::File::open(path).and_then(|file| read_all(file, MAX_CONFIG_BYTES));
        let text = text.map_err(|e| {
            Error::new(ErrorKind::Config, "load_job", "cannot read the config file")
                .with("file", path.display())
                .help("give the path of a YAML file that describes a job")
                .caused_by(e)
        })?;
        Ok(Self {
            text,
            folder: path.parent().map(FilePath::to_owned).unwrap_or_default(),
            name: path.display().to_string(),
            file: Some(path.to_owned()),
        })
    }

    /// Takes text; its relative paths start from `folder`.
    pub fn text(text: impl Into<String>, folder: impl Into<PathBuf>) -> Self {
        Self {
            text: text.into(),
            folder: folder.into(),
            name: "(text)".to_owned(),
            file: None,
        }
    }

    /// What the job reads, in words, and where it is. A file that a run wrote may be written again.
    fn inputs(&self, config: &JobConfig, model: Option<&PathBuf>) -> Vec<(&'static str, PathBuf)> {
        let file = self.file.iter().filter(|_| !is_emitted(&self.text));
        let named = |what, path: &PathBuf| (what, path.clone());
        file.map(|path| named("the job's own file", path))
            .chain(model.map(|path| named("the model that is trained", path)))
            .chain([named("data.train", &config.data.train)])
            .chain(
                config
                    .data
                    .validation
                    .iter()
                    .map(|path| named("data.validation", path)),
            )
            .collect()
    }
}

/// A job that passed every check.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadedJob {
    /// The config, paths made absolute, and the model.
    pub spec: JobSpec,
    /// The folder that holds the model.
    pub model_folder: PathBuf,
    /// Index of the backend among those given to [`load_job`].
    pub backend: usize,
    /// What to look at.
    pub warnings: Vec<Diagnostic>,
}

/// Loads a job and checks it wholly: its file, the rules of core, and [`Backend::check`].
///
/// `overrides` are `key.path=value`, the value as YAML. Relative paths of the file start from the file's
/// folder, those of an override from the current one. Reads the model's config and looks at files, but at no
/// weights, and reaches no network unless `resolver` does.
///
/// # Errors
/// `Config` with one [`Diagnostic`] a fault, sorted by line.
pub fn load_job(
    source: &JobSource,
    overrides: &[String],
    backends: &[&dyn Backend],
    resolver: &dyn ModelResolver,
) -> Result<LoadedJob> {
    let mut draft = Draft::new(source, overrides, backends);
    let spec = draft.judge(source, backends, resolver);
    draft.finish(source, spec)
}

/// A job in the making.
struct Draft {
    tree: Node,
    config: Option<JobConfig>,
    backend: Option<usize>,
    diagnostics: Vec<Diagnostic>,
    /// Paths whose values nobody wrote as they stand in `config`.
    assumed: Vec<Path>,
}

impl Draft {
    fn new(source: &JobSource, overrides: &[String], backends: &[&dyn Backend]) -> Self {
        let parsed = parse::parse(&source.text);
        let mut draft = Self {
            tree: parsed.root,
            config: None,
            backend: None,
            diagnostics: parsed.faults,
            assumed: parsed.doubtful,
        };
        if parsed.broken {
            return draft;
        }
        for text in overrides {
            overrides::apply(&mut draft.tree, text, &mut draft.diagnostics);
        }
        draft.check_structure(backends);
        draft
    }

    fn check_structure(&mut self, backends: &[&dyn Backend]) {
        let mut value = self.tree.to_json();
        if matches!(&self.tree.content, Content::Scalar(serde_json::Value::Null)) {
            value = serde_json::json!({});
        }
        let schema = Schema::of_job(backends);
        let root = Path::default();
        let faults = structure::check(&schema, &mut value, &root, &self.tree, &mut self.assumed);
        self.diagnostics.extend(faults);
        for backend in backends {
            let prefix = Path::default().join("backends").join(backend.name());
            let given = value
                .get_mut("backends")
                .and_then(|b| b.get_mut(backend.name()));
            if let Some(options) = given {
                let schema = Schema::of_options(*backend);
                let faults =
                    structure::check(&schema, options, &prefix, &self.tree, &mut self.assumed);
                self.diagnostics.extend(faults);
            }
        }
        self.backend = backends
            .iter()
            .position(|b| Some(b.name()) == value["backend"].as_str());
        match serde_json::from_value(value) {
            Ok(config) => self.config = Some(config),
            // The schema is derived from the same types; what it cannot say (numbers beyond 64 bits) ends here.
            Err(error) => self.diagnostics.push(Diagnostic::error(
                "CFG-02",
                "",
                error.to_string(),
                "correct this value",
            )),
        }
    }

    /// The semantic checks; the job, if nothing stands against it.
    fn judge(
        &mut self,
        source: &JobSource,
        backends: &[&dyn Backend],
        resolver: &dyn ModelResolver,
    ) -> Option<(JobSpec, PathBuf)> {
        let mut config = self.config.take()?;
        self.backend_names(backends);
        let as_folder = paths::make_absolute(&mut config, &source.folder, &self.tree);
        let model = self.read_model(&config, &as_folder, resolver);
        let assumed = &self.assumed;
        let is_sound = |path: &str| {
            let path = Path::parse(path);
            !assumed.iter().any(|a| a.overlaps(&path))
        };
        let backend = self
            .backend
            .filter(|_| is_sound("backend"))
            .map(|i| backends[i]);
        let inputs = source.inputs(&config, model.as_ref().map(|(_, folder)| folder));
        let facts = rules::Facts {
            inputs: &inputs,
            config: &config,
            model: model.as_ref().map(|(spec, _)| spec),
            backend,
            backends,
        };
        let mut found = rules::judge(&facts, &is_sound);
        let (model, folder) = match model {
            Some(model) => model,
            None => {
                self.place(&mut found);
                return None;
            }
        };
        let spec = JobSpec { config, model };
        if let Some(backend) = backend
            && READ_BY_BACKENDS.iter().all(|section| is_sound(section))
        {
            rules::add_own(&mut found, backend.check(&spec));
        }
        self.place(&mut found);
        Some((spec, folder))
    }

    /// `backends` may name engines of another build, so an unknown name alone does not stop a job.
    fn backend_names(&mut self, backends: &[&dyn Backend]) {
        let known: Vec<_> = backends.iter().map(|b| b.name()).collect();
        let path = Path::default().join("backends");
        let Some(Content::Mapping(entries)) = self.tree.find(&path).map(|n| &n.content) else {
            return;
        };
        let mut found = Vec::new();
        for name in entries.keys().filter(|n| !known.contains(&n.as_str())) {
            let path = path.join(name).to_string();
            let list = known.join(", ");
            found.push(match suggest::word(name, known.iter().copied()) {
                Some(near) => Diagnostic::error(
                    "CFG-01",
                    path,
                    "no such backend",
                    format!("write `{near}`; the backends here are {list}"),
                ),
                None => Diagnostic::warning(
                    "CFG-01",
                    path,
                    "options of a backend that this program does not have",
                    format!("remove them, unless another program reads them; the backends here are {list}"),
                ),
            });
        }
        self.place(&mut found);
    }

    fn read_model(
        &mut self,
        config: &JobConfig,
        as_folder: &FilePath,
        resolver: &dyn ModelResolver,
    ) -> Option<(ModelSpec, PathBuf)> {
        let path = Path::default().join("model");
        if self.assumed.iter().any(|a| a.overlaps(&path)) {
            return None;
        }
        let resolved = resolver.resolve(&config.model).map_err(|e| ("MODEL-01", e));
        let read = resolved.and_then(|folder| {
            let spec = ModelSpec::from_folder(&folder).map_err(|e| ("MODEL-02", e))?;
            Ok((spec, folder))
        });
        match read {
            Ok(model) => Some(model),
            Err((rule, error)) => {
                let mut what = error.summary();
                if rule == "MODEL-01" && as_folder != FilePath::new(&config.model) {
                    what.push_str(&format!(
                        "; as a folder it is {}, which is not there",
                        as_folder.display()
                    ));
                }
                let mut found = vec![Diagnostic::error(
                    rule,
                    path.to_string(),
                    what,
                    error
                        .remedy()
                        .unwrap_or("give a folder that holds a supported model"),
                )];
                self.place(&mut found);
                None
            }
        }
    }

    /// Fills in where each was written, and keeps them.
    fn place(&mut self, found: &mut Vec<Diagnostic>) {
        for mut diagnostic in found.drain(..) {
            match self.tree.nearest_origin(&Path::parse(&diagnostic.path)) {
                Some(Origin::Line(line)) => diagnostic.line = Some(line),
                Some(Origin::Set) => diagnostic.found.push_str(" (from --set)"),
                None => {}
            }
            self.diagnostics.push(diagnostic);
        }
    }

    fn finish(self, source: &JobSource, spec: Option<(JobSpec, PathBuf)>) -> Result<LoadedJob> {
        let mut diagnostics = self.diagnostics;
        diagnostics.sort_by_key(|d| (d.line.unwrap_or(usize::MAX), d.rule));
        let sound = diagnostics.iter().all(|d| d.severity != Severity::Error);
        match (spec, self.backend) {
            (Some((spec, model_folder)), Some(backend)) if sound => Ok(LoadedJob {
                spec,
                model_folder,
                backend,
                warnings: diagnostics,
            }),
            _ => Err(Error::diagnosed("load_job", diagnostics).with("file", &source.name)),
        }
    }
}
