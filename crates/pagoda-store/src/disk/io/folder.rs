//! A directory of the file system, and what it turned out to support when it was tried.

use super::psync::Psync;
use super::{ALIGN, Access, Directory, File, IO_BYTES_MAX, Kind, Lane, Op, Pulse};
use crate::disk::Error;
use crate::{Slab, lock};
use rustix::fs::{self, AtFlags, FlockOperation, Mode, OFlags};
use std::collections::BTreeSet;
use std::fmt;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A killed process holds its lock until the kernel is done with the last of its I/O, as it should. So a lock is asked for
/// several times.
const LOCK_TRIES: u32 = 25;
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// A directory that only its owner can write to.
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
    fd: Arc<OwnedFd>,
    access: Access,
    pulse: Arc<Pulse>,
    /// The locked file: once it has lost its name, the directory is no longer ours.
    locked: Option<Arc<OnDisk>>,
}

/// An open file of a folder.
struct OnDisk {
    fd: Arc<OwnedFd>,
    uring: bool,
    /// Where others find it again, if it has a name.
    place: Option<Place>,
    pulse: Arc<Pulse>,
}

/// A name in a directory.
struct Place {
    directory: Arc<OwnedFd>,
    name: String,
}

/// Open files of pages. A forked child that kept one open would keep its lock or, if the file has no name, its space.
static OPEN: Mutex<BTreeSet<RawFd>> = Mutex::new(BTreeSet::new());

/// In a forked child: leaves files of pages to the parent.
///
/// # Safety
/// From now on, nothing in this process may use or drop folders and files of the parent.
pub unsafe fn abandon() {
    // The mutex is free, unless another thread opened or closed a file at that moment.
    let Ok(mut open) = OPEN.try_lock() else { return };
    while let Some(fd) = open.pop_first() {
        // SAFETY: it is open, nobody uses it any more, and its owner is not dropped, as the caller promises.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
    }
}

/// A file without a name in a directory, and how page I/O is done there. `pulse` shows others whether the drive answers.
///
/// Unlike the directory of a `Folder`, `parent` may be writable for others: it has a directory of our own in it until the
/// file is made.
pub fn scratch_in(parent: &Path, pulse: &Arc<Pulse>) -> Result<(Arc<dyn File>, Access), Error> {
    let path = parent.join(temporary());
    let made = Folder::open_watched(&path, pulse.clone()).and_then(|folder| {
        let file = folder.scratch().map_err(Error::io("making a file"))?;
        Ok((file, folder.access()))
    });
    // The directory is not needed any more; a failure to remove it is no further error.
    let _ = pulse.ask(|| fs::unlinkat(fs::CWD, &path, AtFlags::REMOVEDIR));
    made
}

/// Bytes of the file system of a directory: how many are free to the caller, and how many there are. `pulse` shows others
/// whether the drive answers.
pub fn space_in(directory: &Path, pulse: &Pulse) -> Result<(u64, u64), Error> {
    let stat = pulse.ask(|| fs::statvfs(directory)).map_err(io::Error::from);
    let stat = stat.map_err(Error::io("asking for the free space"))?;
    Ok((stat.f_bavail.saturating_mul(stat.f_frsize), stat.f_blocks.saturating_mul(stat.f_frsize)))
}

impl Folder {
    /// Opens `path`; creates it if only its last part is missing. Tries direct I/O and a ring with a real write and read.
    ///
    /// Fails if the path ends in a symbolic link, or in something that others own or may write to.
    pub fn open(path: &Path) -> Result<Self, Error> {
        Self::open_watched(path, Arc::default())
    }

    /// Like `open`, but shows others whether the drive answers, now and when a store is opened there.
    pub fn open_watched(path: &Path, pulse: Arc<Pulse>) -> Result<Self, Error> {
        Self::try_open(path, pulse).map_err(Error::io("opening the directory"))
    }

    fn try_open(path: &Path, pulse: Arc<Pulse>) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = match pulse.ask(|| fs::mkdir(path, Mode::RWXU)) {
            Err(rustix::io::Errno::EXIST) => false,
            other => other.map(|()| true)?,
        };
        let fd = pulse.ask(|| fs::open(path, flags, Mode::empty())).map_err(|errno| {
            // For a link to a directory the system says that it is not a directory, which is hard to understand.
            let link = pulse.ask(|| path.is_symlink());
            if link { io::Error::other("a link: give the directory that it leads to") } else { errno.into() }
        })?;
        require_ours(&pulse, &fd, Mode::WGRP | Mode::WOTH, "directory")?;
        // Otherwise a loss of power could take the directory with everything that was synced in it. Not everybody may open
        // the parent.
        if made && let Ok(parent) = pulse.ask(|| fs::openat(&fd, "..", flags, Mode::empty())) {
            pulse.ask(|| fs::fsync(&parent))?;
        }
        let (fd, path) = (Arc::new(fd), path.to_owned());
        let mut folder = Self { path, fd, access: Access::default(), pulse, locked: None };
        folder.probe()?;
        Ok(folder)
    }

    /// The same directory, but with less than it supports.
    #[cfg(test)]
    pub(crate) fn with(&self, access: Access) -> Self {
        Self { access, pulse: Arc::default(), ..self.clone() }
    }

    /// Tries the fastest access with a real, aligned write and read, and records what does not work.
    fn probe(&mut self) -> io::Result<()> {
        if self.pulse.ask(|| is_memory(&*self.fd))? {
            self.access.refused.push("a drive: the directory is in memory".into());
        }
        let fd = Arc::new(self.nameless()?);
        match self.set_direct(&fd).and_then(|()| self.round_trip(&fd, &mut Psync(fd.clone()))) {
            Ok(()) => self.access.direct = true,
            Err(error) => self.access.refused.push(format!("O_DIRECT: {error}")),
        }
        let fd = Arc::new(self.nameless()?);
        if self.access.direct {
            self.set_direct(&fd)?;
        }
        match ring(fd.clone()).and_then(|mut lane| self.round_trip(&fd, &mut *lane)) {
            Ok(()) => self.access.uring = true,
            Err(error) => self.access.refused.push(format!("io_uring: {error}")),
        }
        Ok(())
    }

    fn create(&self, name: &str, extra: OFlags) -> io::Result<OwnedFd> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC | extra;
        let fd = self.pulse.ask(|| fs::openat(&self.fd, name, flags, Mode::RUSR | Mode::WUSR))?;
        require_file(&self.pulse, &fd)?;
        Ok(fd)
    }

    fn set_direct(&self, fd: impl AsFd) -> io::Result<()> {
        self.pulse.ask(|| set_direct(fd))
    }

    /// Writes two aligned pieces and reads them back. On a full drive, which accepts none, it reads what nobody has written.
    fn round_trip(&self, file: &OwnedFd, lane: &mut dyn Lane) -> io::Result<()> {
        let piece = ALIGN as usize;
        let memory = Slab::new(4 * piece)?;
        // SAFETY: the slab is this function's alone and lives to its end.
        let bytes = unsafe { std::slice::from_raw_parts_mut(memory.base(), 4 * piece) };
        for (index, byte) in bytes.iter_mut().enumerate() {
            *byte = (index % 251) as u8;
        }
        let (written, read) = bytes.split_at_mut(2 * piece);
        match self.run(lane, Kind::Write, written) {
            Err(error) if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => {
                // There may have been room for the first piece.
                self.pulse.ask(|| fs::ftruncate(file, 0).and_then(|()| fs::ftruncate(file, 2 * ALIGN)))?;
                written.fill(0);
            }
            other => other?,
        }
        self.run(lane, Kind::Read, read)?;
        if written == read { Ok(()) } else { Err(io::Error::other("what was written is not what was read")) }
    }

    /// Writes aligned pieces to the beginning of a file, or reads them.
    fn run(&self, lane: &mut dyn Lane, kind: Kind, bytes: &mut [u8]) -> io::Result<()> {
        let pieces = (0..).step_by(ALIGN as usize).zip(bytes.chunks_mut(ALIGN as usize));
        let mut ops: Vec<_> = pieces.map(|(at, piece)| Op::new(kind, at, piece)).collect();
        self.pulse.ask(|| lane.run(&mut ops));
        ops.into_iter().try_for_each(Op::outcome)
    }

    /// A new file whose name has already been removed.
    fn nameless(&self) -> io::Result<OwnedFd> {
        let name = temporary();
        let fd = self.create(&name, OFlags::EXCL)?;
        self.pulse.ask(|| fs::unlinkat(&self.fd, &name, AtFlags::empty()))?;
        Ok(fd)
    }

    fn pages(&self, fd: OwnedFd, place: Option<Place>) -> io::Result<OnDisk> {
        if self.access.direct {
            self.set_direct(&fd)?;
        }
        lock(&OPEN).insert(fd.as_raw_fd());
        Ok(OnDisk { fd: Arc::new(fd), uring: self.access.uring, place, pulse: self.pulse.clone() })
    }

    fn place(&self, name: &str) -> Place {
        Place { directory: self.fd.clone(), name: name.into() }
    }
}

impl Directory for Folder {
    fn path(&self) -> &Path {
        &self.path
    }

    fn access(&self) -> Access {
        self.access.clone()
    }

    fn scratch(&self) -> io::Result<Arc<dyn File>> {
        Ok(Arc::new(self.pages(self.nameless()?, None)?))
    }

    fn lock(&self, name: &str) -> io::Result<(Arc<dyn File>, Box<dyn Directory>)> {
        let file = self.pages(self.create(name, OFlags::empty())?, Some(self.place(name)))?;
        for tries_left in (0..LOCK_TRIES).rev() {
            match self.pulse.ask(|| fs::flock(&*file.fd, FlockOperation::NonBlockingLockExclusive)) {
                Err(rustix::io::Errno::WOULDBLOCK) if tries_left > 0 => std::thread::sleep(LOCK_PAUSE),
                other => {
                    other?;
                    break;
                }
            }
        }
        let file = Arc::new(file);
        file.require_place()?;
        Ok((file.clone(), Box::new(Self { locked: Some(file), ..self.clone() })))
    }

    fn read(&self, name: &str, limit: u64) -> io::Result<Option<Vec<u8>>> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = match self.pulse.ask(|| fs::openat(&self.fd, name, flags, Mode::empty())) {
            Err(rustix::io::Errno::NOENT) => return Ok(None),
            other => other?,
        };
        require_file(&self.pulse, &fd)?;
        let len = self.pulse.ask(|| fs::fstat(&fd))?.st_size as u64;
        if len > limit {
            let why = format!("{name} has {len} bytes: at most {limit}");
            return Err(io::Error::new(ErrorKind::FileTooLarge, why));
        }
        let (mut file, mut bytes) = (std::fs::File::from(fd), Vec::new());
        bytes.try_reserve_exact(len as usize)?;
        // Another process may have written it without syncing it, or renamed it into its place.
        self.pulse.ask(|| sync_bytes(&file).and_then(|()| Ok(fs::fsync(&self.fd)?)))?;
        self.pulse.ask(|| forget_cached(&file, 0..len))?;
        loop {
            let piece = (limit - bytes.len() as u64).min(IO_BYTES_MAX as u64);
            let mut piece = io::Read::take(&mut file, piece);
            if self.pulse.ask(|| io::Read::read_to_end(&mut piece, &mut bytes))? == 0 {
                return Ok(Some(bytes));
            }
        }
    }

    fn share(&self) -> Box<dyn Directory> {
        Box::new(self.clone())
    }

    fn pulse(&self) -> Arc<Pulse> {
        self.pulse.clone()
    }

    fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<Arc<dyn File>> {
        // Always the same name, so that what a killed process left of it is removed now.
        let fresh = format!("{name}.new");
        let _ = self.pulse.ask(|| fs::unlinkat(&self.fd, &fresh, AtFlags::empty()));
        let fd = self.create(&fresh, OFlags::EXCL)?;
        let (fd, pulse) = (Arc::new(fd), self.pulse.clone());
        let mut file = OnDisk { fd, uring: false, place: None, pulse };
        let replaced = file.write(0, bytes).and_then(|()| file.sync()).and_then(|()| {
            if let Some(locked) = &self.locked {
                locked.require_place()?;
            }
            self.pulse.ask(|| fs::renameat(&self.fd, &fresh, &self.fd, name))?;
            file.place = Some(self.place(name));
            Ok(self.pulse.ask(|| fs::fsync(&self.fd))?)
        });
        if let Err(error) = replaced {
            // What is left of it is of no use; a failure to remove it is no further error.
            let _ = self.pulse.ask(|| fs::unlinkat(&self.fd, &fresh, AtFlags::empty()));
            return Err(error);
        }
        Ok(Arc::new(file))
    }
}

impl File for OnDisk {
    fn size(&self) -> io::Result<u64> {
        Ok(self.pulse.ask(|| fs::fstat(&*self.fd))?.st_size as u64)
    }

    fn write(&self, mut offset: u64, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let piece = &bytes[..bytes.len().min(IO_BYTES_MAX)];
            match self.pulse.ask(|| rustix::io::pwrite(&*self.fd, piece, offset)) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => (offset, bytes) = (offset + count as u64, &bytes[count..]),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.pulse.ask(|| sync_bytes(&self.fd))?;
        self.require_place()
    }

    fn discard(&self, range: Range<u64>) -> io::Result<()> {
        self.punch(&range).map(drop)
    }

    fn zero(&self, range: Range<u64>) -> io::Result<()> {
        if self.punch(&range)? { Ok(()) } else { self.write_zeros(range) }
    }

    fn forget(&self, range: Range<u64>) -> io::Result<()> {
        self.pulse.ask(|| forget_cached(&*self.fd, range))
    }

    fn lanes(&self) -> usize {
        // Some lanes verify and copy while the I/O of others is under way.
        8
    }

    fn lane(&self) -> io::Result<Box<dyn Lane>> {
        if self.uring { ring(self.fd.clone()) } else { Ok(Box::new(Psync(self.fd.clone()))) }
    }
}

impl OnDisk {
    /// Fails if others would find no file, or another one, in its place.
    fn require_place(&self) -> io::Result<()> {
        let Some(Place { directory, name }) = &self.place else { return Ok(()) };
        let ours = self.pulse.ask(|| fs::fstat(&*self.fd))?;
        match self.pulse.ask(|| fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)) {
            Ok(there) if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino) => Ok(()),
            Ok(_) | Err(rustix::io::Errno::NOENT) => {
                Err(io::Error::other("somebody has removed the file: nobody would find it again"))
            }
            Err(errno) => Err(errno.into()),
        }
    }

    /// Makes a hole; returns whether the file system can.
    fn punch(&self, range: &Range<u64>) -> io::Result<bool> {
        self.pulse.ask(|| punch(&self.fd, range))
    }

    /// Overwrites the existing part of an aligned range with zeros.
    fn write_zeros(&self, range: Range<u64>) -> io::Result<()> {
        let end = range.end.min(self.size()?.next_multiple_of(ALIGN));
        let zeros = Slab::new(IO_BYTES_MAX)?;
        // SAFETY: the slab is this function's alone, and nobody writes to it.
        let zeros = unsafe { std::slice::from_raw_parts(zeros.base(), IO_BYTES_MAX) };
        let cuts = (range.start..end).step_by(IO_BYTES_MAX);
        cuts.map(|at| (at, (end - at).min(IO_BYTES_MAX as u64) as usize))
            .try_for_each(|(at, bytes)| self.write(at, &zeros[..bytes]))
    }
}

impl Drop for OnDisk {
    fn drop(&mut self) {
        let is_of_pages = lock(&OPEN).remove(&self.fd.as_raw_fd());
        if is_of_pages && self.place.is_some() {
            // A child that was forked meanwhile also has the file open, and would keep the lock with it.
            let _ = fs::flock(&*self.fd, FlockOperation::Unlock);
        }
    }
}

impl fmt::Debug for OnDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.fd)
    }
}

#[cfg(target_os = "linux")]
fn ring(fd: Arc<OwnedFd>) -> io::Result<Box<dyn Lane>> {
    Ok(Box::new(super::uring::Ring::new(fd)?))
}

#[cfg(not(target_os = "linux"))]
fn ring(_: Arc<OwnedFd>) -> io::Result<Box<dyn Lane>> {
    Err(ErrorKind::Unsupported.into())
}

#[cfg(target_os = "linux")]
fn set_direct(fd: impl AsFd) -> io::Result<()> {
    let flags = fs::fcntl_getfl(&fd)?;
    Ok(fs::fcntl_setfl(&fd, flags | OFlags::DIRECT)?)
}

#[cfg(not(target_os = "linux"))]
fn set_direct(_: impl AsFd) -> io::Result<()> {
    Err(ErrorKind::Unsupported.into())
}

/// Brings the bytes of a file to its drive, for good.
#[cfg(target_os = "linux")]
fn sync_bytes(fd: impl AsFd) -> io::Result<()> {
    Ok(fs::fdatasync(fd)?)
}

/// Brings the bytes of a file to its drive, for good. On macOS, fsync(2) would leave them in the drive's cache.
#[cfg(not(target_os = "linux"))]
fn sync_bytes(fd: impl AsFd) -> io::Result<()> {
    Ok(fs::fcntl_fullfsync(fd)?)
}

/// Makes the system forget what it has cached of a file: after a failed sync the drive may not have those bytes.
#[cfg(target_os = "linux")]
fn forget_cached(fd: impl AsFd, range: Range<u64>) -> io::Result<()> {
    // A length of 0 would mean everything that follows.
    let Some(len) = std::num::NonZeroU64::new(range.end - range.start) else { return Ok(()) };
    Ok(fs::fadvise(fd, range.start, Some(len), fs::Advice::DontNeed)?)
}

#[cfg(not(target_os = "linux"))]
fn forget_cached(_: impl AsFd, _: Range<u64>) -> io::Result<()> {
    Ok(())
}

/// Whether a directory's content is only in memory.
#[cfg(target_os = "linux")]
fn is_memory(fd: impl AsFd) -> io::Result<bool> {
    const TMPFS: u32 = 0x0102_1994;
    const RAMFS: u32 = 0x8584_58f6;
    Ok(matches!(fs::fstatfs(fd)?.f_type as u32, TMPFS | RAMFS))
}

#[cfg(not(target_os = "linux"))]
fn is_memory(_: impl AsFd) -> io::Result<bool> {
    Ok(false)
}

/// Makes a hole in a file; returns whether the file system can.
#[cfg(target_os = "linux")]
fn punch(fd: &OwnedFd, range: &Range<u64>) -> io::Result<bool> {
    let flags = fs::FallocateFlags::PUNCH_HOLE | fs::FallocateFlags::KEEP_SIZE;
    match fs::fallocate(fd, flags, range.start, range.end - range.start) {
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => Ok(false),
        other => Ok(other.map(|()| true)?),
    }
}

#[cfg(not(target_os = "linux"))]
fn punch(_: &OwnedFd, _: &Range<u64>) -> io::Result<bool> {
    Ok(false)
}

/// A name that no other file has: this process makes each name once, and `EXCL` refuses files that another process left.
fn temporary() -> String {
    static MADE: AtomicU32 = AtomicU32::new(0);
    let made = MADE.fetch_add(1, Ordering::Relaxed);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    format!(".pagoda-{}-{made}-{:x}", std::process::id(), now.as_nanos())
}

/// Refuses what is not a file of ours with one name.
fn require_file(pulse: &Pulse, fd: &OwnedFd) -> io::Result<()> {
    let stat = require_ours(pulse, fd, Mode::RWXG | Mode::RWXO, "file")?;
    if !fs::FileType::from_raw_mode(stat.st_mode as _).is_file() {
        return Err(io::Error::other("not a file"));
    }
    if stat.st_nlink != 1 {
        return Err(io::Error::other(format!("a file with {} names: 1 is expected", stat.st_nlink)));
    }
    Ok(())
}

/// Refuses what another user owns, or what gives others any of the rights `denied`.
fn require_ours(pulse: &Pulse, fd: &OwnedFd, denied: Mode, what: &str) -> io::Result<fs::Stat> {
    let (stat, user) = (pulse.ask(|| fs::fstat(fd))?, rustix::process::geteuid().as_raw());
    if stat.st_uid != user {
        return Err(io::Error::other(format!("a {what} of user {}: this process is {user}", stat.st_uid)));
    }
    let mode = Mode::from_raw_mode(stat.st_mode as _) & (Mode::RWXU | Mode::RWXG | Mode::RWXO);
    if mode.intersects(denied) {
        return Err(io::Error::other(format!(
            "a {what} of mode {:o}: others have rights that they must not have",
            mode.as_raw_mode()
        )));
    }
    Ok(stat)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory of a test, which removes it.
    fn made(test: &str) -> (PathBuf, Folder) {
        let place = std::env::temp_dir().join(format!("pagoda-{test}-{}", std::process::id()));
        let folder = Folder::open(&place).unwrap();
        (place, folder)
    }

    #[test]
    fn a_file_of_several_pieces_is_what_was_written() {
        let (place, folder) = made("pieces");
        let mut counts = Vec::new();
        for len in [1, 2 * IO_BYTES_MAX, 2 * IO_BYTES_MAX + 5] {
            let bytes: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
            let before = folder.pulse.answered();
            folder.replace("index", &bytes).unwrap();
            assert!(folder.read("index", len as u64).unwrap().unwrap() == bytes);
            counts.push(folder.pulse.answered() - before);
            assert_eq!(folder.read("index", len as u64 - 1).unwrap_err().kind(), ErrorKind::FileTooLarge);
        }
        assert_eq!(folder.pulse.awaited(), None);
        let first = counts[0];
        assert_eq!(counts, [first, first + 2, first + 4], "a slow drive answers for each piece");
        std::fs::remove_dir_all(&place).unwrap();
    }

    /// More than are under way at once, one of them at the end of the file, and one past it.
    #[test]
    fn a_lane_runs_any_number_of_operations() {
        let (place, folder) = made("lanes");
        for uring in [false, folder.access.uring] {
            let file = folder.with(Access { uring, ..Access::default() }).scratch().unwrap();
            let mut lane = file.lane().unwrap();
            assert_eq!(format!("{lane:?}").starts_with("Ring"), uring, "as is said");
            let mut run = |kind, bytes: &mut [u8]| {
                let pieces = (0..).step_by(8).zip(bytes.chunks_mut(8));
                let mut ops: Vec<_> = pieces.map(|(at, piece)| Op::new(kind, at, piece)).collect();
                lane.run(&mut ops);
                ops.into_iter().try_for_each(Op::outcome).unwrap();
            };
            let mut written: Vec<u8> = (1..=250).cycle().take(500).collect();
            run(Kind::Write, &mut written);
            let mut read = [7; 512];
            run(Kind::Read, &mut read);
            written.resize(512, 0);
            assert!(read[..] == written, "{file:?}, uring: {uring}");
        }
        std::fs::remove_dir(&place).unwrap();
    }

    #[test]
    fn a_range_is_zeroed_with_holes_and_without() {
        let (place, folder) = made("zeros");
        type Zero = fn(&OnDisk, Range<u64>) -> io::Result<()>;
        for (zero, makes_holes) in [(<OnDisk as File>::zero as Zero, true), (OnDisk::write_zeros, false)] {
            let fd = Arc::new(folder.nameless().unwrap());
            let (own, pulse) = (fd.clone(), Arc::default());
            let file = OnDisk { fd: own, uring: false, place: None, pulse };
            let len = 3 * IO_BYTES_MAX;
            file.write(0, &vec![7; len]).unwrap();
            let range = ALIGN..len as u64 - 2 * ALIGN;
            zero(&file, range.clone()).unwrap();
            zero(&file, len as u64..len as u64 + 8 * ALIGN).unwrap();
            let mut bytes = vec![1; len + 1];
            assert_eq!(rustix::io::pread(&*fd, &mut bytes, 0).unwrap(), len, "it grows no file");
            bytes.pop();
            assert!((0..).zip(bytes).all(|(at, byte)| byte == if range.contains(&at) { 0 } else { 7 }));
            let blocks = || fs::fstat(&fd).unwrap().st_blocks;
            let taken = blocks();
            if file.punch(&range).unwrap() {
                assert_eq!(blocks() == taken, makes_holes, "space is given back where that is possible");
            }
        }
        // Past the cache of the system, writes are aligned, and somebody may have cut the file short.
        let file = folder.pages(folder.nameless().unwrap(), None).unwrap();
        fs::ftruncate(&file.fd, ALIGN + 5).unwrap();
        file.write_zeros(0..4 * ALIGN).unwrap();
        std::fs::remove_dir(&place).unwrap();
    }

    /// Otherwise bytes that are to be zeroed would stay.
    #[cfg(target_os = "linux")]
    #[test]
    fn whether_a_file_system_has_holes_is_known() {
        // Files of procfs have none.
        let fd = fs::open("/proc/self/comm", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap();
        assert!(!punch(&fd, &(0..ALIGN)).unwrap());
        let (place, folder) = made("holes");
        let fd = folder.nameless().unwrap();
        let flags = fs::FallocateFlags::PUNCH_HOLE | fs::FallocateFlags::KEEP_SIZE;
        assert_eq!(punch(&fd, &(0..ALIGN)).unwrap(), fs::fallocate(&fd, flags, 0, ALIGN).is_ok());
        std::fs::remove_dir(&place).unwrap();
    }

    /// Otherwise pages would go a slower way, and nobody would notice.
    #[test]
    fn what_works_is_found_and_what_does_not_has_a_reason() {
        let (place, folder) = made("found");
        let (file, memory) = (folder.nameless().unwrap(), Slab::new(ALIGN as usize).unwrap());
        // SAFETY: the slab is this function's alone, and nobody writes to it.
        let page = unsafe { std::slice::from_raw_parts(memory.base(), ALIGN as usize) };
        let direct = set_direct(&file).is_ok() && rustix::io::pwrite(&file, page, 0).is_ok();
        let Access { direct: found, uring, refused } = folder.access();
        assert_eq!((found, uring), (direct, ring(Arc::new(file)).is_ok()));
        let why = |start: &str| refused.iter().any(|reason| reason.starts_with(start));
        assert_eq!((why("O_DIRECT: "), why("io_uring: ")), (!direct, !uring), "{refused:?}");
        std::fs::remove_dir(&place).unwrap();
    }

    /// Takes writes, and does none of them.
    #[derive(Debug)]
    struct Deaf(Psync);

    impl Lane for Deaf {
        fn run(&mut self, ops: &mut [Op<'_>]) {
            let (writes, reads): (Vec<_>, Vec<_>) = ops.iter_mut().partition(|op| op.kind == Kind::Write);
            writes.into_iter().for_each(|op| assert!(op.advance(Ok(ALIGN as usize))));
            reads.into_iter().for_each(|op| self.0.run(std::slice::from_mut(op)));
        }
    }

    #[test]
    fn a_way_that_loses_bytes_or_fails_is_refused() {
        let (place, folder) = made("deaf");
        let file = Arc::new(folder.nameless().unwrap());
        let lost = folder.round_trip(&file, &mut Deaf(Psync(file.clone()))).unwrap_err();
        assert_eq!(lost.to_string(), "what was written is not what was read");
        let closed_to_writes =
            fs::open("/dev/zero", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let failed = folder.round_trip(&file, &mut Psync(Arc::new(closed_to_writes))).unwrap_err();
        assert_eq!(failed.raw_os_error(), Some(rustix::io::Errno::BADF.raw_os_error()));
        std::fs::remove_dir(&place).unwrap();
    }

    /// Otherwise a program that outlives the process would keep its lock, and the space of files without a name.
    #[cfg(target_os = "linux")]
    #[test]
    fn programs_that_are_started_meanwhile_have_none_of_the_files() {
        let (place, folder) = made("programs");
        let _open =
            (folder.lock("pages").unwrap(), folder.scratch().unwrap(), folder.replace("index", b"").unwrap());
        let files = |process: u32| {
            let of = format!("/proc/{process}/fd");
            let listed =
                std::process::Command::new("ls").args(["-l", &of, "/proc/self/fd"]).output().unwrap();
            String::from_utf8(listed.stdout).unwrap().matches(place.to_str().unwrap()).count()
        };
        assert_eq!(files(std::process::id()), 4, "those of this process: three files and the directory");
        std::fs::remove_dir_all(&place).unwrap();
    }

    #[test]
    fn space_is_in_bytes() {
        let place = std::env::temp_dir();
        let (free, all) = space_in(&place, &Pulse::default()).unwrap();
        let df = std::process::Command::new("df").arg("-Pk").arg(&place).output().unwrap();
        let df = String::from_utf8(df.stdout).unwrap();
        let kib =
            |column: usize| df.lines().nth(1).unwrap().split_whitespace().nth(column).unwrap().parse::<u64>();
        assert_eq!(all, kib(1).unwrap() << 10);
        // Others write at the same time.
        assert!(free.abs_diff(kib(3).unwrap() << 10) <= all / 8, "{free} of {all}: {df}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn pages_pass_the_cache_of_the_system_where_that_is_said() {
        let (place, folder) = made("direct");
        let file = folder.pages(folder.nameless().unwrap(), None).unwrap();
        let flags = fs::fcntl_getfl(&*file.fd).unwrap();
        assert_eq!(flags.contains(OFlags::DIRECT), folder.access.direct, "{:?}", folder.access);
        std::fs::remove_dir(&place).unwrap();
    }

    /// As a child has it that is forked at that moment.
    #[test]
    fn a_lock_goes_with_its_file_although_somebody_else_has_that_open() {
        let (place, folder) = made("lock");
        let created = || folder.create("pages", OFlags::empty()).unwrap();
        let lock = |fd: &OwnedFd| fs::flock(fd, FlockOperation::NonBlockingLockExclusive);
        let file = folder.pages(created(), Some(folder.place("pages"))).unwrap();
        lock(&file.fd).unwrap();
        let (child, other) = (rustix::io::dup(&*file.fd).unwrap(), created());
        assert_eq!(lock(&other), Err(rustix::io::Errno::WOULDBLOCK));
        drop(file);
        lock(&other).unwrap();
        drop(child);
        std::fs::remove_dir_all(&place).unwrap();
    }
}
