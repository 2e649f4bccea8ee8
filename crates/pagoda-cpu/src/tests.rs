//! Tests of the whole crate. They are part of it, not crates of their own, so that its kernels are compiled once for all of them.

mod append;
mod attention;
mod deterministic;
pub(crate) mod samples;
mod steady_state;
mod world;
