//! The program as a user runs it: every command, and what it says to bad input.

mod bad_input;
mod check;
mod compare;
mod inspect;
mod kills;
mod monitor;
mod own_engine;
mod places;
#[cfg(feature = "gloo")]
mod processes;
mod resume;
mod score;
mod streams;
mod support;
mod train;
