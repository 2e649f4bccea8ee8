//! The thread that copies blocks between slabs while the caller goes on.

use crate::Slab;
use pagoda_core::fence::Completion;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A byte range's start: a slab by number, and an offset in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Index of the slab, as given to `Mover::new`.
    pub slab: usize,
    /// Bytes from its start.
    pub offset: u64,
}

/// One copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Where the bytes are.
    pub from: Place,
    /// Where they go.
    pub to: Place,
    /// How many.
    pub bytes: u64,
}

struct Job {
    transfers: Vec<Transfer>,
    completion: Completion,
}

/// A background thread over a set of slabs. Jobs run in the order they were sent; dropping the mover finishes them first.
#[derive(Debug)]
pub struct Mover {
    slabs: Vec<Arc<Slab>>,
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    waiter: Waiter,
}

/// Sleeps until copies have arrived, without holding on to the mover.
#[derive(Clone, Debug, Default)]
pub struct Waiter(Arc<(Mutex<()>, Condvar)>);

impl Mover {
    /// Starts the thread.
    pub fn new(slabs: Vec<Arc<Slab>>) -> std::io::Result<Self> {
        let (jobs, inbox) = channel::<Job>();
        let waiter = Waiter::default();
        let (shared, signal) = (slabs.clone(), waiter.0.clone());
        let work = move || {
            for job in inbox {
                for transfer in &job.transfers {
                    copy(&shared, transfer);
                }
                // Under the lock, so that a waiter cannot look and fall asleep in between.
                let _guard = signal.0.lock().unwrap_or_else(PoisonError::into_inner);
                job.completion.finish(job.transfers.len() as u32);
                signal.1.notify_all();
            }
        };
        let thread = std::thread::Builder::new().name("pagoda-mover".into()).spawn(work)?;
        Ok(Self { slabs, jobs: Some(jobs), thread: Some(thread), waiter })
    }

    /// Copies in the background; `completion` finishes when all bytes have arrived.
    ///
    /// # Safety
    /// Until then nobody may write what is read here, nor touch what is written here.
    ///
    /// # Panics
    /// When a transfer leaves its slab.
    pub unsafe fn send(&self, transfers: Vec<Transfer>, completion: Completion) {
        transfers.iter().for_each(|transfer| self.check(transfer));
        let jobs = self.jobs.as_ref().expect("lives until drop");
        jobs.send(Job { transfers, completion }).expect("the thread lives until drop");
    }

    /// Copies now.
    ///
    /// # Safety
    /// As for `send`, until this returns.
    ///
    /// # Panics
    /// When the transfer leaves its slab.
    pub unsafe fn copy_now(&self, transfer: &Transfer) {
        self.check(transfer);
        copy(&self.slabs, transfer);
    }

    /// What sleeps until a job has finished.
    pub fn waiter(&self) -> Waiter {
        self.waiter.clone()
    }

    fn check(&self, transfer: &Transfer) {
        for place in [transfer.from, transfer.to] {
            let end = place.offset.checked_add(transfer.bytes);
            let inside = end.is_some_and(|end| end <= self.slabs[place.slab].bytes() as u64);
            assert!(inside, "{transfer:?} leaves its slab");
        }
    }
}

impl Waiter {
    /// Sleeps until `completion` has finished or `limit` has passed; says whether it has finished.
    pub fn wait(&self, completion: &Completion, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut guard = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        while completion.copied().is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            guard = self.0.1.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// Copies within checked bounds.
fn copy(slabs: &[Arc<Slab>], transfer: &Transfer) {
    let Transfer { from, to, bytes } = *transfer;
    // SAFETY: `check` has seen both ranges inside their slabs, which live as long as the caller's `Arc`s; that nobody
    // races on them and that they do not overlap is what the senders promise.
    unsafe {
        let source = slabs[from.slab].base().add(from.offset as usize);
        let target = slabs[to.slab].base().add(to.offset as usize);
        std::ptr::copy_nonoverlapping(source, target, bytes as usize);
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            // It panics nowhere: `send` has checked the bounds.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slabs() -> Vec<Arc<Slab>> {
        (0..2).map(|_| Arc::new(Slab::new(1 << 16).unwrap())).collect()
    }

    fn transfer(from: u64, to: u64, bytes: u64) -> Transfer {
        Transfer { from: Place { slab: 0, offset: from }, to: Place { slab: 1, offset: to }, bytes }
    }

    #[test]
    fn a_finished_job_has_moved_its_bytes() {
        let slabs = slabs();
        let mover = Mover::new(slabs.clone()).unwrap();
        for round in 1..100u8 {
            // SAFETY: the mover has no job now.
            unsafe { slabs[0].base().write_bytes(round, 4096) };
            let completion = Completion::new();
            // SAFETY: nobody touches either range until the completion.
            unsafe { mover.send(vec![transfer(0, 8, 2048), transfer(2048, 8192, 2048)], completion.clone()) };
            assert!(mover.waiter().wait(&completion, Duration::from_secs(60)));
            assert_eq!(completion.copied(), Some(2));
            // SAFETY: finished.
            unsafe {
                assert_eq!(slabs[1].base().add(8 + 2047).read(), round);
                assert_eq!(slabs[1].base().add(8192 + 2047).read(), round);
                assert_eq!(slabs[1].base().add(8 + 2048).read(), 0);
            }
        }
    }

    #[test]
    fn waiting_gives_up() {
        let mover = Mover::new(slabs()).unwrap();
        assert!(!mover.waiter().wait(&Completion::new(), Duration::from_millis(1)));
    }

    #[test]
    fn dropping_finishes_what_was_sent() {
        let completion = Completion::new();
        let mover = Mover::new(slabs()).unwrap();
        // SAFETY: nobody touches the slabs.
        unsafe { mover.send(vec![transfer(0, 0, 1 << 16)], completion.clone()) };
        drop(mover);
        assert_eq!(completion.copied(), Some(1));
    }

    #[test]
    #[should_panic(expected = "leaves its slab")]
    fn refuses_to_leave_a_slab() {
        let mover = Mover::new(slabs()).unwrap();
        // SAFETY: it panics before it copies.
        unsafe { mover.copy_now(&transfer(1, 0, 1 << 16)) };
    }
}
