//! One persistent pool of threads. The caller is its first worker.

use std::any::Any;
use std::cell::UnsafeCell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle, Thread};

/// How often a waiting thread looks before it parks; some tens of microseconds.
const SPINS: u32 = 4096;

/// What a worker runs: its number is the argument.
type Job = dyn Fn(usize) + Sync;

const IDLE: u32 = 0;
const WORK: u32 = 1;
const STOP: u32 = 2;

/// How the caller reaches one worker.
#[repr(align(128))]
struct Mailbox {
    state: AtomicU32,
    /// Written by the caller while `state` is IDLE, read by the worker while it is WORK.
    call: UnsafeCell<Option<Call>>,
}

/// One call of [`Pool::run`], which lives until every worker has counted itself out of `running`.
#[derive(Clone, Copy)]
struct Call {
    job: *const Job,
    running: *const Running,
}

/// The workers that have not finished.
struct Running {
    count: AtomicUsize,
    caller: Thread,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `call` is handed over through `state` (release, acquire), and what it points to is Sync and outlives the
// worker's use of it.
unsafe impl Sync for Mailbox {}
// SAFETY: as above.
unsafe impl Send for Mailbox {}

/// Threads that wait for work.
pub(crate) struct Pool {
    workers: Vec<(Arc<Mailbox>, JoinHandle<()>)>,
    /// One call at a time.
    turn: Mutex<()>,
}

impl Pool {
    /// Starts `threads - 1` threads. If the system refuses one, returns how many there would be, the caller included, and
    /// why.
    pub(crate) fn new(threads: usize) -> Result<Self, (usize, io::Error)> {
        Self::start(threads, |index, mailbox| {
            let name = format!("pagoda-cpu-{index}");
            thread::Builder::new().name(name).spawn(move || work(&mailbox, index))
        })
    }

    fn start(
        threads: usize,
        mut spawn: impl FnMut(usize, Arc<Mailbox>) -> io::Result<JoinHandle<()>>,
    ) -> Result<Self, (usize, io::Error)> {
        let mut pool = Self { workers: Vec::new(), turn: Mutex::new(()) };
        for index in 1..threads {
            let mailbox = Arc::new(Mailbox { state: AtomicU32::new(IDLE), call: UnsafeCell::new(None) });
            // Dropping the pool ends the threads that were started.
            let handle = spawn(index, mailbox.clone()).map_err(|error| (index, error))?;
            pool.workers.push((mailbox, handle));
        }
        Ok(pool)
    }

    /// The most workers that a call may have, including the caller.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `job` once on each of `workers` threads, at least the caller's and at most all, and waits. A panic of
    /// any of them is resumed here, after all have ended.
    pub(crate) fn run(&self, workers: usize, job: &(dyn Fn(usize) + Sync)) {
        let others = self.workers.len().min(workers.saturating_sub(1));
        if others == 0 {
            return job(0);
        }
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let running =
            Running { count: AtomicUsize::new(others), caller: thread::current(), panic: Mutex::new(None) };
        // SAFETY: only the lifetime changes; this function does not end before the workers are done with it.
        let job_static =
            unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const Job>(job) };
        for (mailbox, handle) in &self.workers[..others] {
            // SAFETY: the worker is IDLE: it set that before it counted itself out of the call before.
            unsafe { *mailbox.call.get() = Some(Call { job: job_static, running: &raw const running }) };
            mailbox.state.store(WORK, Ordering::Release);
            handle.thread().unpark();
        }
        let own = catch_unwind(AssertUnwindSafe(|| job(0)));
        wait(|| running.count.load(Ordering::Acquire) == 0);
        drop(turn);
        if let Err(panic) = own {
            resume_unwind(panic);
        }
        if let Some(panic) = running.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for (mailbox, handle) in &self.workers {
            mailbox.state.store(STOP, Ordering::Release);
            handle.thread().unpark();
        }
        for (_, handle) in self.workers.drain(..) {
            // A worker catches the panics of its jobs, so it ends well.
            let _ = handle.join();
        }
    }
}

/// Returns once `done`: looks for a while, then parks. Whoever makes it true must unpark this thread afterwards.
fn wait(done: impl Fn() -> bool) {
    for _ in 0..SPINS {
        if done() {
            return;
        }
        std::hint::spin_loop();
    }
    while !done() {
        thread::park();
    }
}

/// The life of a worker.
fn work(mailbox: &Mailbox, index: usize) {
    loop {
        wait(|| mailbox.state.load(Ordering::Acquire) != IDLE);
        if mailbox.state.load(Ordering::Relaxed) == STOP {
            return;
        }
        // SAFETY: the state is WORK, so the caller has written the call and waits for `running` to reach 0.
        let Some(Call { job, running }) = (unsafe { *mailbox.call.get() }) else { continue };
        // SAFETY: as above.
        let result = catch_unwind(AssertUnwindSafe(|| unsafe { (*job)(index) }));
        // SAFETY: as above; this worker has not counted itself out.
        let running = unsafe { &*running };
        if let Err(panic) = result {
            *running.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
        }
        let caller = running.caller.clone();
        mailbox.state.store(IDLE, Ordering::Relaxed);
        // After this `running` may be gone.
        if running.count.fetch_sub(1, Ordering::Release) == 1 {
            caller.unpark();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_worker_runs_once_a_call() {
        let pool = Pool::new(3).unwrap();
        let counts = [const { AtomicUsize::new(0) }; 3];
        for call in 0..3000 {
            pool.run(1 + call % 3, &|worker| {
                counts[worker].fetch_add(1, Ordering::Relaxed);
            });
        }
        assert_eq!(counts.map(AtomicUsize::into_inner), [3000, 2000, 1000]);
    }

    #[test]
    fn parked_workers_wake() {
        let pool = Pool::new(2).unwrap();
        for _ in 0..5 {
            thread::sleep(std::time::Duration::from_millis(5));
            let count = AtomicUsize::new(0);
            pool.run(usize::MAX, &|_| {
                thread::sleep(std::time::Duration::from_millis(2));
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), 2);
        }
    }

    #[test]
    fn panics_propagate_and_the_pool_survives() {
        let pool = Pool::new(3).unwrap();
        for culprit in 0..3 {
            let panic = catch_unwind(AssertUnwindSafe(|| {
                pool.run(3, &|worker| assert_ne!(worker, culprit, "on purpose"));
            }));
            assert!(panic.is_err());
        }
        let count = AtomicUsize::new(0);
        pool.run(3, &|_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.into_inner(), 3);
    }

    #[test]
    fn a_thread_that_is_refused_leaves_none_behind() {
        let mut mailboxes = Vec::new();
        let refused = Pool::start(8, |index, mailbox| {
            if index == 4 {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            mailboxes.push(mailbox.clone());
            thread::Builder::new().spawn(move || work(&mailbox, index))
        });
        let (threads, why) = refused.err().expect("the fourth is refused");
        assert_eq!((threads, why.kind()), (4, io::ErrorKind::WouldBlock));
        assert_eq!(mailboxes.iter().map(Arc::strong_count).collect::<Vec<_>>(), [1; 3], "they have ended");
    }

    #[test]
    fn callers_take_turns() {
        let pool = Pool::new(2).unwrap();
        let count = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        pool.run(2, &|_| {
                            count.fetch_add(1, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(count.into_inner(), 3 * 500 * 2);
    }
}
