mod background;
mod damage;
mod layouts;
mod store;

use std::{ops::Range, path::Path, sync::Arc, time::Duration};

use serde_json::json;

use super::{CheckpointStore, Identity, StatePiece, StateSlot};
use crate::{Result, communicator::Communicator, launch::run_ranks, model::ModelSpec};

pub(super) const TIMEOUT: Duration = Duration::from_secs(20);

pub(super) fn model(hidden_size: usize) -> ModelSpec {
    let config = json!({
        "model_type": "llama", "vocab_size": 97, "hidden_size": hidden_size, "num_hidden_layers": 1,
        "num_attention_heads": 4, "intermediate_size": 6, "max_position_embeddings": 16,
    });
    ModelSpec::from_hf_config(&config.to_string(), Path::new("config.json")).unwrap()
}

pub(super) fn identity() -> Identity {
    Identity::new(&model(8), "data").written_by("test")
}

/// Odd bits, a NaN with a payload among them.
pub(super) fn value(element: usize) -> f32 {
    match element {
        5 => f32::from_bits(0xffa0_1234),
        6 => -0.0,
        n => (n as f32 + 0.1) / 3.0,
    }
}

pub(super) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Saves a `[97, 3]` tensor named `w` from as many ranks as there are lists of runs.
pub(super) fn save(store: &CheckpointStore, step: u64, runs: &[Vec<Range<usize>>]) -> Result<()> {
    run_ranks(runs.len(), TIMEOUT, |comm| {
        save_rank(store, step, &comm, &runs[comm.rank()])
    })?;
    Ok(())
}

pub(super) fn save_rank(
    store: &CheckpointStore,
    step: u64,
    comm: &Arc<dyn Communicator>,
    runs: &[Range<usize>],
) -> Result<()> {
    let mut writer = store.writer(step, comm, &identity())?;
    let data: Vec<f32> = runs.iter().cloned().flatten().map(value).collect();
    writer.piece(StatePiece {
        name: "w",
        slot: StateSlot::Weight,
        shape: &[97, 3],
        runs: runs.to_vec(),
        data: (&data).into(),
    })?;
    writer.blob("step", json!(step))?;
    writer.finish()?.finish()
}

/// Rows of `[97, 3]` over some ranks, the first ones taking one more.
pub(super) fn rows(num_ranks: usize) -> Vec<Vec<Range<usize>>> {
    let mut start = 0;
    (0..num_ranks)
        .map(|rank| {
            let end = start + 3 * (97 / num_ranks + usize::from(rank < 97 % num_ranks));
            let run = start..end;
            start = end;
            vec![run]
        })
        .collect()
}

/// Names of all entries of a folder.
pub(super) fn entries(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = (std::fs::read_dir(folder).unwrap())
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}
