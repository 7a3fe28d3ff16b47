//! A file's header: parsed whole and checked before any tensor is read.

use std::{collections::BTreeMap, fmt};

use safetensors::tensor::{Metadata, TensorInfo};
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

/// Tensors by name, in the order of their data, which they fill without a gap.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) tensors: Vec<(String, TensorInfo)>,
    /// Bytes of all data.
    pub(super) data_len: usize,
}

impl Header {
    /// Parses and checks the JSON of a header.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn parse(json: &[u8]) -> Result<Self, String> {
        let text =
            std::str::from_utf8(json).map_err(|e| format!("the header is not UTF-8: {e}"))?;
        let Entries(mut tensors) =
            serde_json::from_str(text).map_err(|e| format!("the header is malformed: {e}"))?;
        tensors.sort_by_key(|(_, info)| info.data_offsets);
        for (name, info) in &tensors {
            let elements = info
                .shape
                .iter()
                .try_fold(1usize, |n, &dim| n.checked_mul(dim));
            let bits = elements.and_then(|n| n.checked_mul(info.dtype.bitsize()));
            let (start, end) = info.data_offsets;
            if end.checked_sub(start).and_then(|n| n.checked_mul(8)) != bits || bits.is_none() {
                return Err(format!(
                    "the header gives tensor `{name}` bytes {start}..{end}, which do not fit {} {:?}",
                    info.dtype, info.shape
                ));
            }
        }
        // Finds holes and overlaps.
        let metadata = Metadata::new(None, tensors.clone())
            .map_err(|e| format!("the header is inconsistent: {e}"))?;
        Ok(Self {
            data_len: metadata.data_len(),
            tensors,
        })
    }
}

struct Entries(Vec<(String, TensorInfo)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(EntriesVisitor)
    }
}

struct EntriesVisitor;

impl<'de> Visitor<'de> for EntriesVisitor {
    type Value = Entries;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
        let mut seen = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            // A map would keep the last of two equal keys and say nothing.
            let info = match key.as_str() {
                "__metadata__" => {
                    map.next_value::<BTreeMap<String, String>>()?;
                    None
                }
                _ => Some(map.next_value::<TensorInfo>()?),
            };
            if seen.contains_key(&key) {
                return Err(A::Error::custom(format!("key `{key}` comes twice")));
            }
            seen.insert(key, info);
        }
        let tensors = seen
            .into_iter()
            .filter_map(|(key, info)| Some((key, info?)));
        Ok(Entries(tensors.collect()))
    }
}
