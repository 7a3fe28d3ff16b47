//! `drivetrain inspect`.

use std::{path::PathBuf, process::ExitCode};

use crate::{
    core::{ErrorKind, Result, checkpoint::StateSlot},
    run::{CheckpointContents, Contents, FileContents, StoreContents, TensorContents, inspect},
    tables::table,
};
use clap::Args;
use indexmap::IndexMap;

use super::output::{json, line};

#[derive(Debug, Args)]
pub(super) struct InspectArgs {
    /// A checkpoint (step-...), a folder of checkpoints, or a Hugging Face folder
    folder: PathBuf,
    /// Read every value: a checkpoint's against its checksums; a model's, which has none, must be finite
    #[arg(long)]
    verify: bool,
    /// Print all of it as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &InspectArgs) -> Result<ExitCode> {
    let contents = inspect(&args.folder, args.verify)?;
    if args.json {
        json(&contents)?;
    } else {
        match &contents {
            Contents::Checkpoint(found) => checkpoint(found)?,
            Contents::Store(found) => store(found)?,
            Contents::Model(found) => {
                line(format!("{}: a Hugging Face folder", found.folder.display()))?;
                tensors(&found.tensors)?;
                files(&found.files)?;
                verdict(found.verified, "every value is finite")?;
            }
        }
    }
    Ok(match contents {
        Contents::Store(StoreContents { newest: None, .. }) => {
            ExitCode::from(ErrorKind::File.exit_code())
        }
        _ => ExitCode::SUCCESS,
    })
}

fn store(found: &StoreContents) -> Result<()> {
    line(format!(
        "{}: complete checkpoints of steps {:?}",
        found.folder.display(),
        found.steps
    ))?;
    for (path, why) in &found.incomplete {
        line(format!("{}: incomplete: {why}", path.display()))?;
    }
    match &found.newest {
        Some(newest) => checkpoint(newest),
        None => line("there is none to go on from"),
    }
}

fn checkpoint(found: &CheckpointContents) -> Result<()> {
    let identity = &found.identity;
    line(format!(
        "{}: step {}, written by {} on {} rank(s)",
        found.folder.display(),
        found.step,
        identity.backend,
        found.world_size
    ))?;
    line(format!(
        "model: {} (fingerprint {})",
        identity.summary, identity.model
    ))?;
    line(format!("data: {}", identity.data))?;
    for (name, value) in &found.blobs {
        line(format!("{name}: {value}"))?;
    }
    tensors(&found.tensors)?;
    files(&found.files)?;
    verdict(found.verified, "every checksum is right")
}

/// A row a parameter, whose slots lie alike.
fn tensors(tensors: &[TensorContents]) -> Result<()> {
    let mut rows: IndexMap<&str, Vec<&TensorContents>> = IndexMap::new();
    for tensor in tensors {
        rows.entry(&tensor.name).or_default().push(tensor);
    }
    let rows = rows.into_iter().map(|(name, slots)| {
        let distinct = |values: Vec<String>| {
            let mut values = values;
            values.dedup();
            values.join(" ")
        };
        let files: usize = slots[0].pieces.len();
        let bytes: u64 = slots.iter().map(|slot| slot.num_bytes()).sum();
        vec![
            name.to_owned(),
            slots
                .iter()
                .map(|t| slot_name(t.slot))
                .collect::<Vec<_>>()
                .join(" "),
            distinct(slots.iter().map(|t| format!("{:?}", t.shape)).collect()),
            distinct(slots.iter().map(|t| t.dtype.to_string()).collect()),
            bytes.to_string(),
            files.to_string(),
            ranks(slots[0]),
        ]
    });
    let header = ["tensor", "slots", "shape", "dtype", "bytes", "pieces", "in"];
    line(table(&header, rows.collect()))
}

/// The files that hold it, short: `rank-00000, rank-00001`, and no more than a few.
fn ranks(tensor: &TensorContents) -> String {
    const MOST: usize = 3;
    let mut names: Vec<&str> = (tensor.pieces.iter())
        .map(|piece| piece.file.trim_end_matches(".safetensors"))
        .collect();
    names.dedup();
    let more = names.len().saturating_sub(MOST);
    names.truncate(MOST);
    match more {
        0 => names.join(" "),
        more => format!("{} and {more} more", names.join(" ")),
    }
}

fn slot_name(slot: StateSlot) -> &'static str {
    match slot {
        StateSlot::Weight => "weight",
        StateSlot::ExpAvg => "exp_avg",
        StateSlot::ExpAvgSq => "exp_avg_sq",
    }
}

fn files(files: &[FileContents]) -> Result<()> {
    let rows = files.iter().map(|file| {
        vec![
            file.name.clone(),
            file.bytes.to_string(),
            file.pieces.to_string(),
        ]
    });
    line(table(&["file", "bytes", "tensors"], rows.collect()))
}

fn verdict(verified: Option<bool>, right: &str) -> Result<()> {
    match verified {
        Some(true) => line(right),
        _ => line("nothing was read of the values: --verify does"),
    }
}
