//! The training contract: an RL or fine-tuning framework writes its loop once, against [`engine::Engine`];
//! the word after `backend:` in its config decides which engine runs it.
//!
//! The handbook is the module [`manual`]: why things are as they are, and how to add to them.
//!
//! Shape legend, used throughout: B sequences, T packed tokens, D model, H query heads, K key/value heads,
//! E head dim, F feed-forward, V vocabulary, X experts; `local_` for a rank's share.
#![forbid(unsafe_code)]

pub mod batch;
pub mod checkpoint;
pub mod communicator;
pub mod config;
pub mod engine;
mod error;
pub mod files;
pub mod hf;
pub mod launch;
pub mod manual;
pub mod mesh;
pub mod metrics;
pub mod model;
pub mod moe;
pub mod objective;
pub mod optim;
pub mod plan;
mod staged_folder;
mod tensor;
mod tensor_file;
pub mod trace;
pub mod trainer;
pub mod weights;

pub use error::{Diagnostic, Error, ErrorKind, Result, Severity};
pub use tensor::{Buffer, DType, Device, DeviceSlice, View, ViewMut};
