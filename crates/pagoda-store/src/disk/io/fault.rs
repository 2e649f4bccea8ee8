//! A disk in memory that fails as it is told, and knows what a loss of power may leave of what was written.

use super::{ALIGN, Access, Directory, File, Kind, Lane, Op};
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// What goes wrong with one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It fails with this errno.
    Errno(i32),
    /// It does the first half and says so.
    Short,
    /// It does the first half and says that it did all.
    Torn,
    /// It does nothing and says that it did all.
    Lost,
    /// One bit is another.
    Flip,
    /// It goes to, or comes from, `ALIGN` bytes further on.
    Misdirected,
}

impl Fault {
    pub(crate) const ALL: [Self; 9] = [
        Self::Errno(rustix::io::Errno::NOSPC.raw_os_error()),
        Self::Errno(rustix::io::Errno::IO.raw_os_error()),
        Self::Errno(rustix::io::Errno::INTR.raw_os_error()),
        Self::Errno(rustix::io::Errno::AGAIN.raw_os_error()),
        Self::Short,
        Self::Torn,
        Self::Lost,
        Self::Flip,
        Self::Misdirected,
    ];
}

/// A directory of this disk. Clones are the same disk.
#[derive(Clone, Debug, Default)]
pub(crate) struct FaultyDisk(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    files: HashMap<String, Image>,
    scratched: usize,
    /// Operations so far, and what happens to those to come.
    operations: u64,
    faults: HashMap<u64, Fault>,
}

#[derive(Clone, Debug, Default)]
struct Image {
    live: Vec<u8>,
    /// What a loss of power certainly leaves.
    durable: Vec<u8>,
    /// What was written since.
    unsynced: Vec<(u64, Vec<u8>)>,
    locked: bool,
}

/// A file, or a lane of it.
#[derive(Debug)]
struct Open {
    disk: FaultyDisk,
    name: String,
    locks: bool,
}

impl FaultyDisk {
    /// Lets the operation after `after` others go wrong.
    pub(crate) fn fail(&self, after: u64, fault: Fault) {
        let mut state = self.0.lock().unwrap();
        let at = state.operations + after;
        state.faults.insert(at, fault);
    }

    pub(crate) fn operations(&self) -> u64 {
        self.0.lock().unwrap().operations
    }

    /// Forgets faults that have not come yet; says how many.
    pub(crate) fn calm(&self) -> usize {
        std::mem::take(&mut self.0.lock().unwrap().faults).len()
    }

    /// The disk as another process finds it after this one was killed.
    pub(crate) fn killed(&self) -> Self {
        let files = self.0.lock().unwrap().files.clone();
        let unlocked = |(name, image)| (name, Image { locked: false, ..image });
        let files = files.into_iter().map(unlocked).collect();
        Self(Arc::new(Mutex::new(State { files, ..State::default() })))
    }

    /// The disk after a loss of power: of what was not synced, sectors that `survives` says.
    pub(crate) fn power_lost(&self, mut survives: impl FnMut() -> bool) -> Self {
        let after = self.killed();
        for image in after.0.lock().unwrap().files.values_mut() {
            let mut bytes = std::mem::take(&mut image.durable);
            for (offset, written) in std::mem::take(&mut image.unsynced) {
                for (index, sector) in written.chunks(512).enumerate() {
                    if survives() {
                        put(&mut bytes, offset as usize + index * 512, sector);
                    }
                }
            }
            (image.durable, image.live) = (bytes.clone(), bytes);
        }
        after
    }

    /// The bytes of a file, to look at and to spoil.
    pub(crate) fn with<T>(&self, name: &str, look: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        look(&mut self.0.lock().unwrap().files.get_mut(name).expect("a file of that name").live)
    }

    fn open(&self, name: &str, locks: bool) -> Arc<Open> {
        self.0.lock().unwrap().files.entry(name.into()).or_default();
        Arc::new(Open { disk: self.clone(), name: name.into(), locks })
    }
}

impl State {
    fn next(&mut self) -> Option<Fault> {
        self.operations += 1;
        self.faults.remove(&(self.operations - 1))
    }
}

fn put(bytes: &mut Vec<u8>, offset: usize, written: &[u8]) {
    bytes.resize(bytes.len().max(offset + written.len()), 0);
    bytes[offset..offset + written.len()].copy_from_slice(written);
}

impl Image {
    /// Writes as the fault lets it; says how much it claims to have written.
    fn write(&mut self, offset: u64, bytes: &[u8], fault: Option<Fault>) -> io::Result<usize> {
        let (mut at, mut kept) = (offset, bytes.to_vec());
        match fault {
            None => {}
            Some(Fault::Errno(errno)) => return Err(io::Error::from_raw_os_error(errno)),
            Some(Fault::Short | Fault::Torn) => kept.truncate(bytes.len().div_ceil(2)),
            Some(Fault::Lost) => kept.clear(),
            Some(Fault::Flip) => kept[bytes.len() / 3] ^= 4,
            Some(Fault::Misdirected) => at += ALIGN,
        }
        let claimed = if fault == Some(Fault::Short) { kept.len() } else { bytes.len() };
        put(&mut self.live, at as usize, &kept);
        self.unsynced.push((at, kept));
        Ok(claimed)
    }

    fn read(&self, offset: u64, bytes: &mut [u8], fault: Option<Fault>) -> io::Result<usize> {
        let at = if fault == Some(Fault::Misdirected) { offset + ALIGN } else { offset } as usize;
        let there = &self.live[at.min(self.live.len())..];
        let mut count = bytes.len().min(there.len());
        match fault {
            Some(Fault::Errno(errno)) => return Err(io::Error::from_raw_os_error(errno)),
            Some(Fault::Short) => count = count.div_ceil(2),
            Some(Fault::Torn) => {
                bytes[..count / 2].copy_from_slice(&there[..count / 2]);
                return Ok(count);
            }
            Some(Fault::Lost) => return Ok(count),
            _ => {}
        }
        bytes[..count].copy_from_slice(&there[..count]);
        if fault == Some(Fault::Flip) && count > 0 {
            bytes[count / 3] ^= 4;
        }
        Ok(count)
    }
}

impl Directory for FaultyDisk {
    fn access(&self) -> Access {
        Access::default()
    }

    fn scratch(&self) -> io::Result<Arc<dyn File>> {
        let mut state = self.0.lock().unwrap();
        state.scratched += 1;
        let name = format!("scratch {}", state.scratched);
        drop(state);
        Ok(self.open(&name, false))
    }

    fn lock(&self, name: &str) -> io::Result<Arc<dyn File>> {
        let mut state = self.0.lock().unwrap();
        if std::mem::replace(&mut state.files.entry(name.into()).or_default().locked, true) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        drop(state);
        Ok(self.open(name, true))
    }

    fn read(&self, name: &str, limit: u64) -> io::Result<Option<Vec<u8>>> {
        let mut state = self.0.lock().unwrap();
        let fault = state.next();
        let Some(image) = state.files.get(name) else { return Ok(None) };
        assert!(image.live.len() as u64 <= limit);
        let mut bytes = vec![0; image.live.len()];
        if !bytes.is_empty() {
            let count = image.read(0, &mut bytes, fault)?;
            bytes.truncate(count);
        }
        Ok(Some(bytes))
    }

    fn share(&self) -> io::Result<Box<dyn Directory>> {
        Ok(Box::new(self.clone()))
    }

    fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<Arc<dyn File>> {
        let mut image = Image::default();
        let mut state = self.0.lock().unwrap();
        let fault = state.next();
        image.write(0, bytes, fault.filter(|fault| *fault != Fault::Short))?;
        image.durable.clone_from(&image.live);
        image.unsynced.clear();
        state.files.insert(name.into(), image);
        drop(state);
        Ok(self.open(name, false))
    }
}

impl File for Open {
    fn write(&self, mut offset: u64, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let mut state = self.disk.0.lock().unwrap();
            let fault = state.next();
            match state.files.get_mut(&self.name).expect("open").write(offset, bytes, fault) {
                Ok(count) => (offset, bytes) = (offset + count as u64, &bytes[count..]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.disk.0.lock().unwrap();
        if let Some(Fault::Errno(errno)) = state.next() {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let image = state.files.get_mut(&self.name).expect("open");
        image.durable.clone_from(&image.live);
        image.unsynced.clear();
        Ok(())
    }

    fn discard(&self, range: Range<u64>) -> io::Result<()> {
        let mut state = self.disk.0.lock().unwrap();
        let image = state.files.get_mut(&self.name).expect("open");
        let end = image.live.len().min(range.end as usize);
        let zeros = vec![0; end.saturating_sub(range.start as usize)];
        image.write(range.start, &zeros, None).map(drop)
    }

    fn zero(&self, range: Range<u64>) -> io::Result<()> {
        if let Some(Fault::Errno(errno)) = self.disk.0.lock().unwrap().next() {
            return Err(io::Error::from_raw_os_error(errno));
        }
        self.discard(range)
    }

    fn lanes(&self) -> usize {
        2
    }

    fn lane(&self) -> io::Result<Box<dyn Lane>> {
        Ok(Box::new(Open { disk: self.disk.clone(), name: self.name.clone(), locks: false }))
    }
}

impl Lane for Open {
    fn run(&mut self, ops: &mut [Op<'_>]) {
        for op in ops {
            loop {
                let mut state = self.disk.0.lock().unwrap();
                let fault = state.next();
                let image = state.files.get_mut(&self.name).expect("open");
                let kind = op.kind;
                let (offset, bytes) = op.rest();
                let result = match kind {
                    Kind::Read => image.read(offset, bytes, fault),
                    Kind::Write => image.write(offset, bytes, fault),
                };
                if op.advance(result) {
                    break;
                }
            }
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if self.locks
            && let Some(image) = self.disk.0.lock().unwrap().files.get_mut(&self.name)
        {
            image.locked = false;
        }
    }
}
