//! Hugging Face folders: read as a [`WeightSource`](crate::weights::WeightSource), written as a
//! [`WeightSink`](crate::weights::WeightSink).

mod contents;
mod folder;
mod index;
#[cfg(test)]
mod tests;
mod writer;

pub use contents::{HfContents, HfTensor};
pub use folder::HfFolder;
pub use writer::{HfWriter, HfWriterOptions};

/// The weights of a folder that is not sharded.
const SINGLE_FILE: &str = "model.safetensors";
/// Says which shard holds which tensor.
const INDEX_FILE: &str = "model.safetensors.index.json";
