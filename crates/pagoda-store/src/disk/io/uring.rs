//! `io_uring`: one thread keeps several operations under way.

use super::{Kind, Lane, Op};
use io_uring::{IoUring, opcode, types};
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

/// Operations under way at once.
const DEPTH: u32 = 16;

pub(super) struct Ring {
    ring: IoUring,
    file: Arc<OwnedFd>,
    /// The errno with which the kernel refused operations.
    refused: Option<i32>,
}

impl Ring {
    pub(super) fn new(file: Arc<OwnedFd>) -> io::Result<Self> {
        Ok(Self { ring: IoUring::new(DEPTH)?, file, refused: None })
    }

    fn push(&mut self, index: usize, op: &mut Op<'_>) {
        let (kind, file) = (op.kind, types::Fd(self.file.as_raw_fd()));
        let (offset, bytes) = op.rest();
        let (address, len) = (bytes.as_mut_ptr(), bytes.len() as u32);
        let entry = match kind {
            Kind::Read => opcode::Read::new(file, address, len).offset(offset).build(),
            Kind::Write => opcode::Write::new(file, address, len).offset(offset).build(),
        };
        // SAFETY: the bytes are borrowed for all of `run`, which does not end before the kernel is done with them; the file is
        // open as long as the ring.
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(index as u64)) };
        pushed.expect("as many entries as operations under way");
    }
}

impl Lane for Ring {
    fn run(&mut self, ops: &mut [Op<'_>]) {
        if let Some(errno) = self.refused {
            return fail(ops, errno);
        }
        let mut waiting: Vec<usize> = (0..ops.len()).rev().collect();
        let mut under_way = 0;
        loop {
            while under_way < DEPTH
                && let Some(index) = waiting.pop()
            {
                self.push(index, &mut ops[index]);
                under_way += 1;
            }
            if under_way == 0 {
                return;
            }
            if let Err(error) = self.ring.submit_and_wait(1)
                && !matches!(
                    error.kind(),
                    io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock | io::ErrorKind::ResourceBusy
                )
            {
                if let Some(errno) = error.raw_os_error()
                    && self.ring.submission().len() == under_way as usize
                {
                    // The kernel took none of them. Those in the queue stay there: this ring is never entered again.
                    self.refused = Some(errno);
                    return fail(ops, errno);
                }
                // The kernel may still write to this memory, and nothing can keep it from that: it is impossible to go on.
                std::process::abort();
            }
            for entry in self.ring.completion() {
                under_way -= 1;
                let result = match entry.result() {
                    count @ 0.. => Ok(count as usize),
                    errno => Err(io::Error::from_raw_os_error(-errno)),
                };
                let index = entry.user_data() as usize;
                if !ops[index].advance(result) {
                    waiting.push(index);
                }
            }
        }
    }
}

/// Ends the operations that have no outcome yet.
fn fail(ops: &mut [Op<'_>], errno: i32) {
    let left = ops.iter_mut().filter(|op| op.outcome.is_none());
    left.for_each(|op| op.outcome = Some(Err(io::Error::from_raw_os_error(errno))));
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ring of {DEPTH}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{self, Mode, OFlags};
    use std::mem::ManuallyDrop;
    use std::os::fd::FromRawFd;

    /// As under a filter of system calls: every operation has the errno, the first time and from then on.
    #[test]
    fn what_the_kernel_refuses_fails() {
        let null = || fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap();
        // Some systems have no rings.
        let Ok(mut ring) = Ring::new(Arc::new(null())) else { return };
        // SAFETY: the ring closes it.
        let mut fd = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(ring.ring.as_raw_fd()) });
        rustix::io::dup2(null(), &mut fd).unwrap();
        for _ in 0..2 {
            let mut bytes = [[0; 8]; 3];
            let ops = bytes.iter_mut().map(|bytes| Op::new(Kind::Read, 0, bytes));
            let mut ops: Vec<_> = ops.collect();
            ring.run(&mut ops);
            for op in ops {
                let errno = op.outcome().unwrap_err().raw_os_error();
                assert_eq!(errno, Some(rustix::io::Errno::OPNOTSUPP.raw_os_error()));
            }
        }
    }

    /// As by Ctrl-Z and `fg`.
    #[test]
    fn a_process_that_is_stopped_while_it_waits_goes_on() {
        let (reader, mut writer) = io::pipe().unwrap();
        let Ok(mut ring) = Ring::new(Arc::new(reader.into())) else { return };
        let mut bytes = [0; 8];
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let mut ops = [Op::new(Kind::Read, 0, &mut bytes)];
                ring.run(&mut ops);
                ops.map(Op::outcome)
            });
            // Most probably it waits by then.
            std::thread::sleep(std::time::Duration::from_millis(20));
            // The kernel reports an interruption only when the same call has submitted nothing: not the first.
            let script = "for n in 1 2; do kill -STOP $PPID; sleep 0.01; kill -CONT $PPID; sleep 0.01; done";
            assert!(std::process::Command::new("sh").args(["-c", script]).status().unwrap().success());
            io::Write::write_all(&mut writer, &[7; 8]).unwrap();
            assert!(waiting.join().unwrap().iter().all(Result::is_ok));
        });
        assert_eq!(bytes, [7; 8]);
    }
}
