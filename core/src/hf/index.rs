//! Which file of a folder holds which tensor.

use std::{fmt, path::Path};

use indexmap::IndexMap;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

use super::{INDEX_FILE, SINGLE_FILE};
use crate::{Error, ErrorKind, Result, files::read_text};

/// Larger indices are hostile: a tensor takes about 100 bytes.
const MAX_INDEX_BYTES: u64 = 256 << 20;

/// What `model.safetensors.index.json` says.
#[derive(Debug, serde::Deserialize)]
pub(super) struct Index {
    /// Tensor to file name.
    weight_map: WeightMap,
}

impl Index {
    /// Reads the index of a folder; `None` where the weights are one file, which wins as it does in
    /// `transformers`.
    pub(super) fn read(folder: &Path) -> Result<Option<Self>> {
        if folder.join(SINGLE_FILE).exists() {
            return Ok(None);
        }
        let path = folder.join(INDEX_FILE);
        let fail = |message: &str| {
            Error::new(ErrorKind::File, "read_weights", message).with("file", path.display())
        };
        if !path.exists() {
            return Err(no_weights(folder));
        }
        let text = read_text(&path, MAX_INDEX_BYTES)
            .map_err(|e| fail("cannot read the index of the shards").caused_by(e))?;
        let index: Self = serde_json::from_str(&text)
            .map_err(|e| fail("the index of the shards is malformed").caused_by(e))?;
        for (tensor, file) in &index.weight_map.0 {
            let plain = Path::new(file)
                .file_name()
                .is_some_and(|name| name == file.as_str());
            if !plain || !file.ends_with(".safetensors") {
                return Err(
                    fail("the index names a file that is not a shard of this folder")
                        .with("tensor", tensor)
                        .with("found", file),
                );
            }
        }
        Ok(Some(index))
    }

    /// The shards' file names, in order, each once.
    pub(super) fn files(&self) -> Vec<&str> {
        let mut files: Vec<_> = self.weight_map.0.values().map(String::as_str).collect();
        files.sort_unstable();
        files.dedup();
        files
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.weight_map
            .0
            .iter()
            .map(|(tensor, file)| (tensor.as_str(), file.as_str()))
    }
}

fn no_weights(folder: &Path) -> Error {
    let message = format!("the folder has neither {SINGLE_FILE} nor {INDEX_FILE}");
    let error = Error::new(ErrorKind::File, "read_weights", message).with("file", folder.display());
    let pickled = folder.join("pytorch_model.bin").exists()
        || folder.join("pytorch_model.bin.index.json").exists();
    error.help(match pickled {
        true => "pickled weights are not read: convert them with save_pretrained(safe_serialization=True)",
        false => "give a folder that holds config.json and *.safetensors, as save_pretrained writes it",
    })
}

/// A map that refuses a tensor that comes twice, instead of keeping the last.
#[derive(Debug)]
struct WeightMap(IndexMap<String, String>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MapVisitor;
        impl<'de> Visitor<'de> for MapVisitor {
            type Value = WeightMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object from tensor to file name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
                let mut files = IndexMap::new();
                while let Some((tensor, file)) = map.next_entry::<String, String>()? {
                    if files.contains_key(&tensor) {
                        return Err(A::Error::custom(format!("tensor `{tensor}` comes twice")));
                    }
                    files.insert(tensor, file);
                }
                Ok(WeightMap(files))
            }
        }
        deserializer.deserialize_map(MapVisitor)
    }
}
