//! The handbook: what was decided, why, and how to add to it.
//!
//! | read | when you |
//! |---|---|
//! | [`contract`] | want to know what this library promises, and why it is shaped so |
//! | [`house`] | look for the place of a thing: crates, folders, who may use whom, words, reading order |
//! | [`config`] | write a job's YAML: every key, its default, what it does |
//! | [`batches`] | meet micro-batches, masks, totals, or wonder what a loss is divided by |
//! | [`experts`] | train a mixture of experts: the router's losses, its bias, what counts |
//! | [`ranks`] | meet meshes, collectives, the commit point of a step, or a lost rank |
//! | [`state`] | read or write weights, checkpoints, Hugging Face folders |
//! | [`monitoring`] | want to see what a run does: metrics, TensorBoard, a timeline of a step, what a file holds |
//! | [`numerics`] | ask in what precision, in what order, and how exactly |
//! | [`tolerances`] | ask how far two right engines may be apart |
//! | [`engines`] | want the design of the two engines, side by side |
//! | [`writing_an_engine`] | add an engine |
//! | [`writing_an_objective`] | add a loss |
//! | [`errors`] | meet an exit code, or write an error |

#[doc = include_str!("contract.md")]
pub mod contract {}

#[doc = include_str!("house.md")]
pub mod house {}

#[doc = include_str!("config.md")]
pub mod config {}

#[doc = include_str!("batches.md")]
pub mod batches {}

#[doc = include_str!("experts.md")]
pub mod experts {}

#[doc = include_str!("ranks.md")]
pub mod ranks {}

#[doc = include_str!("state.md")]
pub mod state {}

#[doc = include_str!("monitoring.md")]
pub mod monitoring {}

#[doc = include_str!("numerics.md")]
pub mod numerics {}

#[doc = include_str!("tolerances.md")]
pub mod tolerances {}

#[doc = include_str!("engines.md")]
pub mod engines {}

#[doc = include_str!("writing_an_engine.md")]
pub mod writing_an_engine {}

#[doc = include_str!("writing_an_objective.md")]
pub mod writing_an_objective {}

#[doc = include_str!("errors.md")]
pub mod errors {}
