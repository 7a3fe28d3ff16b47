//! Relative paths start from where they were written: the file's folder, or the current one for `--set`.

use std::path::{Path as FilePath, PathBuf};

use super::tree::{Node, Origin, Path};
use crate::config::JobConfig;

/// Makes the paths of a config absolute. A `model` that names no folder is left to the resolver as a hub id; what
/// it is as a folder is returned.
pub(super) fn make_absolute(config: &mut JobConfig, folder: &FilePath, tree: &Node) -> PathBuf {
    let base = |path: &str| match tree.nearest_origin(&Path::parse(path)) {
        Some(Origin::Set) => PathBuf::new(),
        _ => folder.to_owned(),
    };
    let absolute = |key: &str, path: &FilePath| {
        let joined = base(key).join(path);
        std::path::absolute(&joined).unwrap_or(joined)
    };
    config.output = absolute("output", &config.output);
    config.data.train = absolute("data.train", &config.data.train);
    if let Some(validation) = &mut config.data.validation {
        *validation = absolute("data.validation", validation);
    }
    let model = absolute("model", FilePath::new(&config.model));
    let is_path = config.model.starts_with(['.', '/']) || model.is_dir();
    if is_path && let Some(path) = model.to_str() {
        config.model = path.to_owned();
    }
    model
}
