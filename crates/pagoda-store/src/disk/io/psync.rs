//! Positioned reads and writes, one after the other: depth comes from the number of threads.

use super::{Kind, Lane, Op};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

#[derive(Debug)]
pub(super) struct Psync(pub(super) Arc<OwnedFd>);

impl Lane for Psync {
    fn run(&mut self, ops: &mut [Op<'_>]) {
        for op in ops {
            loop {
                let kind = op.kind;
                let (offset, bytes) = op.rest();
                let result = match kind {
                    Kind::Read => rustix::io::pread(&*self.0, bytes, offset),
                    Kind::Write => rustix::io::pwrite(&*self.0, bytes, offset),
                };
                if op.advance(result.map_err(io::Error::from)) {
                    break;
                }
            }
        }
    }
}
