//! Tests of the whole crate. They are part of it, not crates of their own, so that its kernels are compiled once for all of them.

mod append;
mod attention;
mod deterministic;
#[cfg(target_arch = "x86_64")]
mod e4m3;
pub(crate) mod samples;
mod steady_state;
mod world;
