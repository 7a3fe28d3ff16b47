//! A run's output folder: held by one run at a time, and never another run's unasked.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{self, Read, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use drivetrain_core::{
    DType, Error, ErrorKind, Result,
    checkpoint::CheckpointStore,
    config::{CHECKPOINTS, JOB, JobSpec, METRICS, MODEL, TENSORBOARD},
    files::{free_bytes, write_atomic},
    metrics::{EventWriter, JsonlWriter, Kept},
};

use super::TrainOptions;

/// File that the run holds locked; it says who that is.
const LOCK: &str = ".lock";

/// The folder, locked until this is dropped.
#[derive(Debug)]
pub(super) struct OutputFolder {
    path: PathBuf,
    pub(super) store: CheckpointStore,
    /// Whether it was made for this run.
    made: bool,
    _lock: File,
}

impl OutputFolder {
    /// Makes the folder if it is not there, and locks it.
    pub(super) fn hold(path: &Path) -> Result<Self> {
        let failed =
            |cause: io::Error| cannot("cannot write to the output folder", path).caused_by(cause);
        let made = !path.exists();
        std::fs::create_dir_all(path).map_err(failed)?;
        let lock = loop {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false);
            let mut file = options.open(path.join(LOCK)).map_err(failed)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    let mut holder = String::new();
                    // Empty where the other run has not written it yet.
                    let _ = file.read_to_string(&mut holder);
                    return Err(cannot("another run is writing to the output folder", path)
                        .with("process", holder)
                        .help("wait for it, or choose another output"));
                }
                // A file system without locks.
                Err(TryLockError::Error(cause)) if cause.kind() == io::ErrorKind::Unsupported => {}
                Err(TryLockError::Error(cause)) => return Err(failed(cause)),
            }
            // Whoever held it may have removed it since it was opened: then it locks nothing.
            let is_there = std::fs::metadata(path.join(LOCK))
                .and_then(|there| Ok(there.ino() == file.metadata()?.ino()));
            if is_there.unwrap_or(false) {
                let pid = std::process::id().to_string();
                file.set_len(0)
                    .and_then(|()| file.write_all(pid.as_bytes()))
                    .map_err(failed)?;
                break file;
            }
        };
        Ok(Self {
            path: path.to_owned(),
            store: CheckpointStore::new(path.join(CHECKPOINTS)),
            made,
            _lock: lock,
        })
    }

    /// The step to go on from, if asked for. A run is never continued, nor its files replaced, unasked.
    pub(super) fn step_to_resume(&self, options: &TrainOptions) -> Result<Option<u64>> {
        let latest = self.store.latest()?;
        if options.resume {
            return latest.map(Some).ok_or_else(|| self.nothing_to_resume());
        }
        if options.overwrite {
            return Ok(None);
        }
        let (found, help) = if let Some(step) = latest {
            let help =
                "add --resume to continue it, --overwrite to lose it, or choose another output";
            (format!("a checkpoint of step {step}"), help)
        } else if !self.store.is_empty()? {
            let help = "add --overwrite to lose it, or choose another output";
            ("a damaged checkpoint".to_owned(), help)
        } else if self.path.join(MODEL).exists() {
            let help = "add --overwrite to lose it, or choose another output";
            ("a trained model".to_owned(), help)
        } else {
            // Of a run that left neither there is nothing to lose.
            return Ok(None);
        };
        Err(cannot("the output folder holds another run", &self.path)
            .with("found", found)
            .help(help))
    }

    /// What was looked for, and what is there instead.
    fn nothing_to_resume(&self) -> Error {
        let incomplete = self.store.scan().map(|scan| scan.incomplete);
        let found = match incomplete.as_deref() {
            _ if !self.store.root().exists() => "no such folder".to_owned(),
            Ok([(path, why), ..]) => format!("{}: {why}", path.display()),
            _ => "no folder of such a name".to_owned(),
        };
        let message = "no complete checkpoint to resume from";
        Error::new(ErrorKind::Checkpoint, "resume", message)
            .with("folder", self.store.root().display())
            .with(
                "expected",
                "a folder step-NNNNNNNN in it, with its manifest.json and all of its files",
            )
            .with("found", found)
            .help("leave --resume out to start anew, or point output: at the run to continue")
    }

    /// Whether the model, and a checkpoint where there are any, can be written at all.
    pub(super) fn check_space(&self, spec: &JobSpec) -> Result<()> {
        let parameters = spec.model.num_parameters() as u64;
        let dtype = spec.config.precision.export.unwrap_or(spec.model.dtype);
        let model = parameters * dtype.size() as u64;
        let master = match spec.config.precision.compute {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        // The weights and both moments.
        let checkpoint = match spec.config.checkpoint.every {
            Some(_) => parameters * 3 * master.size() as u64,
            None => 0,
        };
        match free_bytes(&self.path) {
            Some(free) if free < model + checkpoint => Err(cannot(
                "the file system has no room for what the run is to write",
                &self.path,
            )
            .with(
                "expected",
                format!("{model} bytes for the model, {checkpoint} for a checkpoint"),
            )
            .with("found", format!("{free} bytes free"))
            .help("free space there, or choose another output")),
            _ => Ok(()),
        }
    }

    /// Writes the job, and opens the metrics. A run that starts anew loses what is there.
    pub(super) fn begin(&self, spec: &JobSpec, kept: Option<Kept>) -> Result<JsonlWriter> {
        if kept.is_none() {
            self.store.clear()?;
            let model = self.path.join(MODEL);
            if model.is_dir() && !model.is_symlink() {
                std::fs::remove_dir_all(&model).map_err(|cause| {
                    cannot("cannot remove the old model", &model).caused_by(cause)
                })?;
            }
        }
        write_atomic(&self.path.join(JOB), spec.config.to_yaml().as_bytes())?;
        let metrics = JsonlWriter::open(&self.metrics(), kept.unwrap_or_default())?;
        if metrics.missing() > 0 {
            tracing::warn!(
                "{}: lacks {} of the steps before the one that the run goes on from",
                self.metrics().display(),
                metrics.missing()
            );
        }
        Ok(metrics)
    }

    /// Begins, or goes on with, TensorBoard's event files, where the job asks for them.
    pub(super) fn begin_events(
        &self,
        spec: &JobSpec,
        kept: Option<Kept>,
    ) -> Result<Option<EventWriter>> {
        let folder = self.path.join(TENSORBOARD);
        let step = kept.map(|kept| kept.step);
        let asked = spec.config.metrics.tensorboard;
        asked
            .then(|| EventWriter::create(&folder, step))
            .transpose()
    }

    pub(super) fn metrics(&self) -> PathBuf {
        self.path.join(METRICS)
    }
}

impl Drop for OutputFolder {
    fn drop(&mut self) {
        // Best effort: what stays is not locked. A folder that is not empty is not removed.
        let _ = std::fs::remove_file(self.path.join(LOCK));
        if self.made {
            let _ = std::fs::remove_dir(&self.path);
        }
    }
}

fn cannot(message: &str, path: &Path) -> Error {
    Error::new(ErrorKind::File, "prepare_output", message).with("folder", path.display())
}
