//! The f64 oracle: an independent, slow and plain implementation of the models, their gradients and the
//! optimizer, itself checked against Hugging Face's values. As an engine it is called `reference`.

mod backend;
mod checkpoint;
mod defect;
mod engine;
mod matrix;
mod model;
mod ops;
mod optimizer;
mod plan;
mod router;
mod score;
mod tape;
mod weights;

pub use backend::ReferenceBackend;
pub use defect::Defect;
pub(crate) use engine::ROUTER_MARGIN;
pub(crate) use optimizer::{Element, StepSize};
