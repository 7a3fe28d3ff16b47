//! `drivetrain export`.

use std::{path::PathBuf, process::ExitCode};

use crate::{
    core::{
        DType, Error, ErrorKind, Result,
        checkpoint::{Checkpoint, CheckpointStore, Identity},
        hf::{HfWriter, HfWriterOptions},
        model::{ModelResolver, ModelSpec},
    },
    data::Hub,
    run::export_checkpoint,
};
use clap::Args;

#[derive(Debug, Args)]
pub(super) struct ExportArgs {
    /// The checkpoint's folder (step-...), or the folder of checkpoints for the newest
    #[arg(long)]
    checkpoint: PathBuf,
    /// The model it was trained from: a Hugging Face folder or hub id; config and tokenizer come from it
    #[arg(long)]
    model: String,
    /// The folder to write
    #[arg(long)]
    out: PathBuf,
    /// Element type: f32, bf16 or f16; the model's own if unsaid
    #[arg(long, value_parser = dtype)]
    dtype: Option<DType>,
}

pub(super) fn run(args: &ExportArgs) -> Result<ExitCode> {
    let folder = Hub::from_env().resolve(&args.model)?;
    let model = ModelSpec::from_folder(&folder)?;
    let store = CheckpointStore::new(&args.checkpoint);
    let checkpoint = match store.latest()? {
        Some(step) => store.open(step)?,
        None => Checkpoint::open(&args.checkpoint)?,
    };
    Identity::new(&model, "").accept_model(checkpoint.identity())?;
    let step = checkpoint.step();
    let options = HfWriterOptions {
        dtype: args.dtype,
        source_folder: Some(folder),
        finite: true,
        ..HfWriterOptions::default()
    };
    let mut writer = HfWriter::new(&args.out, &model, options)?;
    export_checkpoint(&checkpoint, step, &model, &mut writer)?;
    super::output::line(format!("step {step} exported to {}", args.out.display()))?;
    Ok(ExitCode::SUCCESS)
}

fn dtype(text: &str) -> std::result::Result<DType, Error> {
    match text {
        "f32" => Ok(DType::F32),
        "bf16" => Ok(DType::Bf16),
        "f16" => Ok(DType::F16),
        other => Err(
            Error::new(ErrorKind::Config, "export", "not an element type to export")
                .with("found", other)
                .with("expected", "f32, bf16 or f16"),
        ),
    }
}
