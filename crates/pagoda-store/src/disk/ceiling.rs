//! The read bandwidth of a drive, with I/O like that of pages and without using the bytes: the ceiling for everything else.

use super::io::{File, IO_BYTES_MAX, Kind, Op, Pulse};
use super::{Error, Result};
use crate::Slab;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes that a lane asks for at once.
const PART_BYTES: u64 = 16 << 20;

/// Writes `size` bytes, rounded up to parts of 16 MiB, to a file. Then reads them in order, over and over, until `limit` has
/// passed, at least one part. Returns the bytes read and the time taken. `pulse` shows others whether the drive answers.
pub fn time_reads(file: &dyn File, size: u64, limit: Duration, pulse: &Pulse) -> Result<(u64, Duration)> {
    let parts = size.div_ceil(PART_BYTES).max(1);
    let timed = || {
        // In huge pages, like the memory that a store reads into: with small pages some drives are several times slower.
        let slab = Slab::new(file.lanes() * PART_BYTES as usize)?;
        // SAFETY: the slab is this call's alone and lives to its end.
        let memory = unsafe { std::slice::from_raw_parts_mut(slab.base(), slab.bytes()) };
        // Bytes that a drive cannot compress.
        for (n, byte) in memory.iter_mut().enumerate() {
            *byte = ((n as u32).wrapping_mul(0x9E37_79B1) >> 24) as u8;
        }
        let (written, asked) = (AtomicU64::new(0), AtomicU64::new(0));
        let next = || Some(written.fetch_add(1, Ordering::Relaxed)).filter(|&part| part < parts);
        in_parts(file, Kind::Write, memory, pulse, next)?;
        file.sync()?;
        file.forget(0..parts * PART_BYTES)?;
        let start = Instant::now();
        let next = || {
            let part = asked.fetch_add(1, Ordering::Relaxed);
            (part == 0 || start.elapsed() < limit).then_some(part % parts)
        };
        let read = in_parts(file, Kind::Read, memory, pulse, next)?;
        Ok((read * PART_BYTES, start.elapsed()))
    };
    timed().map_err(Error::io("timing the disk"))
}

/// Lets lanes of a file read or write parts of it, each in its part of `memory`, until `next` returns none. Returns how many
/// parts.
fn in_parts(
    file: &dyn File,
    kind: Kind,
    memory: &mut [u8],
    pulse: &Pulse,
    next: impl Fn() -> Option<u64> + Sync,
) -> io::Result<u64> {
    let lane = |bytes: &mut [u8]| -> io::Result<u64> {
        let (mut lane, mut done) = (file.lane()?, 0);
        while let Some(part) = next() {
            let pieces = bytes.chunks_mut(IO_BYTES_MAX).enumerate();
            let at = |piece: usize| part * PART_BYTES + (piece * IO_BYTES_MAX) as u64;
            let mut ops: Vec<_> = pieces.map(|(n, piece)| Op::new(kind, at(n), piece)).collect();
            pulse.ask(|| lane.run(&mut ops));
            ops.into_iter().try_for_each(Op::outcome)?;
            if kind == Kind::Read {
                // If I/O goes through the cache of the system, the next read would come from there.
                file.forget(at(0)..at(0) + PART_BYTES)?;
            }
            done += 1;
        }
        Ok(done)
    };
    let lane = &lane;
    thread::scope(|scope| {
        let parts = memory.chunks_mut(PART_BYTES as usize);
        let spawn = |bytes| thread::Builder::new().spawn_scoped(scope, move || lane(bytes));
        let lanes = parts.map(spawn).collect::<io::Result<Vec<_>>>()?;
        lanes.into_iter().map(|lane| lane.join().expect("a lane does not panic")).sum()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::io::fault::{Fault, FaultyDisk};
    use crate::disk::io::{Access, Directory, Folder, Lane};
    use std::ops::Range;
    use std::sync::{Arc, Mutex};

    #[test]
    fn all_is_written_and_one_part_is_read_at_least() {
        let disk = FaultyDisk::default();
        let file = disk.scratch().unwrap();
        let (bytes, time) = time_reads(&*file, PART_BYTES + 1, Duration::ZERO, &Pulse::default()).unwrap();
        assert!(bytes == PART_BYTES && time > Duration::ZERO);
        disk.with("scratch 1", |file| {
            assert_eq!(file.len() as u64, 2 * PART_BYTES);
            assert!(
                file.chunks(4096).all(|page| page.iter().any(|&byte| byte != 0)),
                "a hole reads too fast"
            );
        });
    }

    /// Through the cache of the system, which can tell whether it has a byte.
    #[cfg(target_os = "linux")]
    #[test]
    fn what_the_system_has_in_memory_is_not_read() {
        use rustix::io::{Errno, ReadWriteFlags, preadv2};
        let place = std::env::temp_dir().join(format!("pagoda-ceiling-{}", std::process::id()));
        let folder = Folder::open(&place).unwrap().with(Access::default());
        let (file, _held) = folder.lock("parts").unwrap();
        let opened = std::fs::File::open(place.join("parts")).unwrap();
        let cached = |part: u64| {
            let (mut byte, at) = ([0], part * PART_BYTES);
            let mut bytes = [std::io::IoSliceMut::new(&mut byte)];
            preadv2(&opened, &mut bytes, at, ReadWriteFlags::NOWAIT)
        };
        file.write(0, &[1]).unwrap();
        if cached(0) == Ok(1) {
            time_reads(&*file, 3 * PART_BYTES, Duration::ZERO, &Pulse::default()).unwrap();
            assert_eq!([0, 2].map(cached), [Err(Errno::AGAIN); 2]);
        }
        std::fs::remove_dir_all(&place).unwrap();
    }

    #[test]
    fn a_drive_that_refuses_is_an_error() {
        // Two queues, 16 writes, a sync, two queues, 16 reads.
        for after in [0, 1, 9, 17, 18, 19, 20, 29, 36] {
            let disk = FaultyDisk::default();
            let file = disk.scratch().unwrap();
            disk.fail(after, Fault::Errno(5));
            let timed = time_reads(&*file, 1, Duration::ZERO, &Pulse::default());
            assert!(
                matches!(timed, Err(Error::Io { operation: "timing the disk", .. })),
                "after {after}: {timed:?}"
            );
        }
    }

    /// Does nothing in no time, and notes what it was asked for, in order: pieces, and what it was to forget.
    #[derive(Clone, Debug, Default)]
    struct Noting(Arc<Mutex<Vec<(Kind, u64)>>>, Arc<Mutex<Vec<Range<u64>>>>);

    impl Lane for Noting {
        fn run(&mut self, ops: &mut [Op<'_>]) {
            self.0.lock().unwrap().extend(ops.iter().map(|op| (op.kind, op.offset)));
            ops.iter_mut().for_each(|op| assert!(op.advance(Ok(IO_BYTES_MAX))));
        }
    }

    impl File for Noting {
        fn size(&self) -> io::Result<u64> {
            unreachable!()
        }
        fn write(&self, _: u64, _: &[u8]) -> io::Result<()> {
            unreachable!()
        }
        fn sync(&self) -> io::Result<()> {
            Ok(())
        }
        fn discard(&self, _: Range<u64>) -> io::Result<()> {
            unreachable!()
        }
        fn zero(&self, _: Range<u64>) -> io::Result<()> {
            unreachable!()
        }
        fn forget(&self, range: Range<u64>) -> io::Result<()> {
            self.1.lock().unwrap().push(range);
            Ok(())
        }
        fn lanes(&self) -> usize {
            1
        }
        fn lane(&self) -> io::Result<Box<dyn Lane>> {
            Ok(Box::new(self.clone()))
        }
    }

    /// Past its end there is nothing to read, and it is read very fast.
    #[test]
    fn a_file_that_is_read_over_and_over_is_read_from_its_beginning_to_its_end() {
        for (size, parts) in [(0, 1), (2 * PART_BYTES, 2)] {
            let file = Noting::default();
            let limit = Duration::from_millis(5);
            let (bytes, took) = time_reads(&file, size, limit, &Pulse::default()).unwrap();
            assert!(took >= limit);
            let (asked, forgotten) = (file.0.lock().unwrap(), file.1.lock().unwrap());
            let order = |kind| (0..parts * PART_BYTES).step_by(IO_BYTES_MAX).map(move |at| (kind, at));
            let pieces = (bytes / IO_BYTES_MAX as u64) as usize;
            assert!(
                order(Kind::Write).chain(order(Kind::Read).cycle().take(pieces)).eq(asked.iter().copied())
            );
            let read = (0..parts).map(|part| part * PART_BYTES..(part + 1) * PART_BYTES).cycle();
            let all = std::iter::once(0..parts * PART_BYTES).chain(read);
            assert!(all.take(1 + (bytes / PART_BYTES) as usize).eq(forgotten.iter().cloned()));
        }
    }
}
