//! The transformer in libtorch, unit by unit.
//!
//! Shapes: B sequences, T packed tokens, D model, H query heads, K key/value heads, E head dim, F feed-forward,
//! V vocabulary, X experts, S scored tokens.

mod attention;
mod block;
mod experts;
mod head;
mod linear;
mod packed;
mod root;

pub(crate) use block::{Block, BlockShape};
pub(crate) use experts::Routing;
pub(crate) use head::{Head, Targets, TokenGradients, TokenScores};
pub(crate) use packed::{Packed, RopeTables};
pub(crate) use root::{Normed, Root, RootIndex};
