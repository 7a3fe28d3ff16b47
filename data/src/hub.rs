//! Models by hub id: the local cache of the Hugging Face hub, and downloads into it.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use drivetrain_core::{Error, ErrorKind, Result, model::ModelResolver};
use hf_hub::{
    Cache, Repo, RepoType,
    api::sync::{Api, ApiBuilder, ApiError, ApiRepo},
};
use serde_json::Value;

/// Files beside the weights that a model may have; the first must be there.
const FILES: [&str; 9] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
];
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// Finds models: a local folder, the hub's cache, or the hub.
///
/// An id is `name`, `owner/name`, or either with `@revision` (a branch, tag or commit; `main` if unsaid).
#[derive(Clone)]
pub struct Hub {
    cache: PathBuf,
    endpoint: String,
    token: Option<String>,
    /// Why the network is not used, if it is not.
    offline: Option<&'static str>,
    progress: bool,
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub")
            .field("cache", &self.cache)
            .field("endpoint", &self.endpoint)
            .field("has_token", &self.token.is_some())
            .field("offline", &self.offline)
            .finish_non_exhaustive()
    }
}

impl Hub {
    /// By the variables that other hub programs read: `HF_HOME` or `HF_HUB_CACHE` (where the cache is),
    /// `HF_ENDPOINT`, `HF_TOKEN` (or the token file that a login left in `HF_HOME`), `HF_HUB_OFFLINE`.
    pub fn from_env() -> Self {
        Self::from_variables(|name| std::env::var(name).ok().filter(|v| !v.is_empty()))
    }

    /// As [`Self::from_env`], from variables given otherwise.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Self {
        let home = variable("HF_HOME").map(PathBuf::from).unwrap_or_else(|| {
            let cache = variable("XDG_CACHE_HOME").map(PathBuf::from);
            let user = || PathBuf::from(variable("HOME").unwrap_or_default()).join(".cache");
            cache.unwrap_or_else(user).join("huggingface")
        });
        let cache = variable("HF_HUB_CACHE").map_or_else(|| home.join("hub"), PathBuf::from);
        let file_token = || std::fs::read_to_string(home.join("token")).ok();
        let token = variable("HF_TOKEN").or_else(file_token);
        let endpoint = variable("HF_ENDPOINT").unwrap_or("https://huggingface.co".to_owned());
        let on = |value: String| matches!(&*value.to_lowercase(), "1" | "on" | "yes" | "true");
        Self {
            // The client makes relative links within the cache, from absolute paths.
            cache: std::path::absolute(&cache).unwrap_or(cache),
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            token: token.map(|t| t.trim().to_owned()).filter(|t| !t.is_empty()),
            offline: variable("HF_HUB_OFFLINE")
                .is_some_and(on)
                .then_some("HF_HUB_OFFLINE is set"),
            progress: true,
        }
    }

    /// Uses no network: what `check` and `plan` need.
    #[must_use]
    pub fn cached_only(mut self) -> Self {
        self.offline.get_or_insert("this command uses no network");
        self
    }

    /// Whether downloads draw a progress bar (on a terminal); they do by default.
    #[must_use]
    pub fn with_progress(mut self, progress: bool) -> Self {
        self.progress = progress;
        self
    }

    /// The complete snapshot of a revision in the cache, if there is one.
    fn cached(&self, id: &Id<'_>) -> Option<PathBuf> {
        let repo = Cache::new(self.cache.clone()).repo(id.repo());
        let by_ref = repo
            .get(FILES[0])
            .and_then(|file| Some(file.parent()?.to_owned()));
        let folder = by_ref.unwrap_or_else(|| repo.pointer_path(id.revision));
        let weights = weight_files(&folder)?;
        let complete = weights.iter().all(|name| folder.join(name).is_file());
        (folder.join(FILES[0]).is_file() && complete).then_some(folder)
    }

    fn download(&self, id: &Id<'_>) -> Result<PathBuf> {
        let fail = |file: &str, error: &ApiError| self.explain(id, file, error);
        let api: Api = ApiBuilder::from_cache(Cache::new(self.cache.clone()))
            .with_endpoint(self.endpoint.clone())
            .with_token(self.token.clone())
            .with_progress(self.progress)
            .with_retries(2)
            .build()
            .map_err(|e| fail("", &e))?;
        let info = api.repo(id.repo()).info().map_err(|e| fail("", &e))?;
        let offered: Vec<_> = info.siblings.into_iter().map(|s| s.rfilename).collect();
        // Everything of one commit, even if the branch moves meanwhile.
        let pinned = Id {
            revision: &info.sha,
            ..*id
        };
        let repo = api.repo(pinned.repo());
        let mut folder = PathBuf::new();
        for name in FILES.iter().filter(|f| offered.iter().any(|o| o == *f)) {
            let path = self.fetch(&repo, id, name)?;
            folder = path.parent().map(Path::to_owned).unwrap_or_default();
        }
        if !offered.iter().any(|o| o == FILES[0]) {
            return Err(self
                .error(id, "the model has no config.json")
                .help("choose a model in Hugging Face form with safetensors weights"));
        }
        if offered.iter().any(|o| o == INDEX) {
            self.fetch(&repo, id, INDEX)?;
        } else if !offered.iter().any(|o| o == SINGLE) {
            return Err(self
                .error(id, "the model has no safetensors weights")
                .with("found", offered.join(", "))
                .help("choose a model with safetensors weights, or convert it with transformers"));
        } else {
            self.fetch(&repo, id, SINGLE)?;
        }
        let shards = weight_files(&folder).ok_or_else(|| {
            self.error(id, "the index of the weights cannot be read")
                .with("file", INDEX)
        })?;
        for name in &shards {
            self.fetch(&repo, id, name)?;
        }
        // The branch now stands for a complete snapshot.
        Cache::new(self.cache.clone())
            .repo(id.repo())
            .create_ref(&info.sha)
            .map_err(|e| self.error(id, "the cache cannot be written").caused_by(e))?;
        Ok(folder)
    }

    fn fetch(&self, repo: &ApiRepo, id: &Id<'_>, name: &str) -> Result<PathBuf> {
        repo.get(name).map_err(|e| self.explain(id, name, &e))
    }

    fn error(&self, id: &Id<'_>, message: &str) -> Error {
        Error::new(ErrorKind::File, "resolve_model", message)
            .with("model", id.name)
            .with("revision", id.revision)
            .with("endpoint", &self.endpoint)
    }

    /// What an answer of the hub means, and what to do.
    fn explain(&self, id: &Id<'_>, file: &str, error: &ApiError) -> Error {
        let mut cause = error;
        while let ApiError::TooManyRetries(inner) = cause {
            cause = inner;
        }
        let status = match cause {
            ApiError::RequestError(e) => match &**e {
                ureq::Error::StatusCode(status) => Some(*status),
                _ => None,
            },
            _ => None,
        };
        let (message, help) = match (status, cause) {
            (Some(401 | 403), _) if self.token.is_none() => (
                "the hub refuses: the model does not exist, or is private or gated",
                "check the id; for a private or gated model ask for access and set HF_TOKEN",
            ),
            (Some(401 | 403), _) => (
                "the hub refuses the token",
                "check that HF_TOKEN is valid and that its owner has access to the model",
            ),
            (Some(404), _) => (
                "the hub has no such model, revision or file",
                "check the id (`owner/name`) and the revision, or give a local folder",
            ),
            (Some(416), _) | (None, ApiError::InvalidResume) => (
                "what an earlier download left does not fit the file",
                "remove the *.part files under `blobs` in the cache, and try again",
            ),
            (Some(_), _) => ("the hub answers with an error", "try again later"),
            (None, ApiError::IoError(_)) => (
                "the download broke off, or the cache cannot be written",
                "check the disk (HF_HOME) and try again: a download continues where it stopped",
            ),
            _ => (
                "the hub cannot be reached or does not answer as a hub does",
                "check the network and HF_ENDPOINT, or give a local folder",
            ),
        };
        let found = self.error(id, message);
        let found = if file.is_empty() {
            found
        } else {
            found.with("file", file)
        };
        let found = match status {
            Some(status) => found.with("status", status),
            None => found.with("cause", error),
        };
        found.with("cache", self.cache.display()).help(help)
    }
}

impl ModelResolver for Hub {
    fn resolve(&self, model: &str) -> Result<PathBuf> {
        if Path::new(model).is_dir() {
            return Ok(PathBuf::from(model));
        }
        let Some(id) = Id::parse(model) else {
            return Err(
                Error::new(ErrorKind::Config, "resolve_model", "no such model folder")
                    .with("model", model)
                    .help("give a folder that holds config.json and *.safetensors, or a hub id `owner/name`"),
            );
        };
        if let Some(folder) = self.cached(&id) {
            return Ok(folder);
        }
        if let Some(why) = self.offline {
            return Err(self.error(&id, "no such folder, and the hub's cache does not hold the model")
                .with("cache", self.cache.display())
                .with("offline", why)
                .help("train or score once with a network, which downloads it, or give a local folder"));
        }
        self.download(&id)
    }
}

/// A hub id.
#[derive(Debug, Clone, Copy)]
struct Id<'a> {
    name: &'a str,
    revision: &'a str,
}

impl<'a> Id<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let (name, revision) = text.split_once('@').unwrap_or((text, "main"));
        let word = |w: &str| {
            !w.is_empty()
                && !w.starts_with('.')
                && w.bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        };
        let parts: Vec<_> = name.split('/').collect();
        let valid = parts.len() <= 2
            && parts.iter().all(|p| word(p))
            && revision.split('/').all(word)
            && !revision.contains("..");
        valid.then_some(Self { name, revision })
    }

    fn repo(&self) -> Repo {
        Repo::with_revision(
            self.name.to_owned(),
            RepoType::Model,
            self.revision.to_owned(),
        )
    }
}

/// The files of a folder's weights: those that the index names, or the single one. `None` where the index is
/// not one, or names files outside the folder.
fn weight_files(folder: &Path) -> Option<Vec<String>> {
    let index = folder.join(INDEX);
    if !index.exists() {
        return Some(vec![SINGLE.to_owned()]);
    }
    let json: Value = serde_json::from_slice(&std::fs::read(index).ok()?).ok()?;
    let mut names = Vec::new();
    for name in json["weight_map"].as_object()?.values() {
        let name = name
            .as_str()
            .filter(|n| !n.contains(['/', '\\']) && !n.starts_with('.'))?;
        if !names.iter().any(|n| n == name) {
            names.push(name.to_owned());
        }
    }
    (!names.is_empty()).then_some(names)
}
