//! A disk in memory that fails as it is told, and knows what a loss of power may leave of what was written. It also knows
//! what a drive that never fails would hold, so it can tell when it hands out other bytes, and why.

use super::{ALIGN, Access, Directory, File, Kind, Lane, Op, Pulse};
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// What goes wrong with one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fault {
    /// It fails with this errno.
    Errno(i32),
    /// It does the first half and says so.
    Short,
    /// It does the first half and says that it did all.
    Torn,
    /// It does nothing and says that it did all.
    Lost,
    /// One bit is flipped.
    Flip,
    /// It goes to, or comes from, `ALIGN` bytes further on.
    Misdirected,
}

impl Fault {
    /// Every kind.
    pub const ALL: [Self; 9] = [
        Self::Errno(Errno::NOSPC.raw_os_error()),
        Self::Errno(Errno::IO.raw_os_error()),
        Self::Errno(Errno::INTR.raw_os_error()),
        Self::Errno(Errno::AGAIN.raw_os_error()),
        Self::Short,
        Self::Torn,
        Self::Lost,
        Self::Flip,
        Self::Misdirected,
    ];

    /// Whether the drive reports what it really did.
    pub fn is_honest(self) -> bool {
        matches!(self, Self::Errno(_) | Self::Short)
    }
}

/// What an operation was for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Site {
    /// Opening a file or a queue, for which the system needs memory.
    Open,
    /// Reading pages.
    Read,
    /// Writing pages.
    Write,
    /// Zeroing pages.
    Zero,
    /// Syncing either file.
    Sync,
    /// Reading the index.
    IndexRead,
    /// Adding a line to the index.
    IndexWrite,
    /// Replacing the index.
    IndexReplace,
}

/// Why bytes are not what they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cause {
    /// An operation went wrong.
    Fault(Fault, Site),
    /// They changed where they are stored: `FaultyDisk::spoil` says how.
    Spoilt(&'static str),
}

/// One operation, and what goes wrong with it.
#[derive(Clone, Copy, Debug)]
struct Turn {
    fault: Option<Fault>,
    site: Site,
    operation: u64,
}

/// What happened to a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Something went wrong, noticed or not.
    Happened(Cause),
    /// A read handed out other bytes than a drive that never fails.
    WrongBytes(Cause),
}

/// A directory of this disk. Clones are the same disk.
#[derive(Clone, Debug, Default)]
pub struct FaultyDisk(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// Sorted by name, so that losses of power are reproducible.
    files: BTreeMap<String, Image>,
    scratched: usize,
    /// Operations so far, and the faults of future ones.
    operations: u64,
    faults: HashMap<u64, Fault>,
    events: Vec<Event>,
}

#[derive(Clone, Debug, Default)]
struct Image {
    live: Vec<u8>,
    /// What a drive that never fails would hold.
    right: Vec<u8>,
    /// Where `live` differs from `right`, by multiples of `ALIGN`: what went wrong there last.
    causes: BTreeMap<u64, Cause>,
    /// What certainly survives a loss of power, here and on a drive that never fails.
    durable: Vec<u8>,
    right_durable: Vec<u8>,
    /// What was written since the last sync.
    unsynced: Vec<Written>,
    /// Whether a sync has wrongly reported that these writes are durable.
    sync_lied: bool,
    locked: bool,
}

/// A write: where its bytes went and what they are; then the same as it claims to have written them.
#[derive(Clone, Debug)]
struct Written {
    at: usize,
    bytes: Vec<u8>,
    offset: usize,
    claimed: Vec<u8>,
}

/// A file, or a lane of it.
#[derive(Debug)]
struct Open {
    disk: FaultyDisk,
    name: String,
    locks: bool,
}

impl FaultyDisk {
    /// Makes the operation after `after` others go wrong.
    pub fn fail(&self, after: u64, fault: Fault) {
        let mut state = self.0.lock().unwrap();
        let at = state.operations + after;
        state.faults.insert(at, fault);
    }

    /// Operations so far.
    pub fn operations(&self) -> u64 {
        self.0.lock().unwrap().operations
    }

    /// Removes faults that have not happened yet; returns how many.
    pub fn calm(&self) -> usize {
        std::mem::take(&mut self.0.lock().unwrap().faults).len()
    }

    /// What happened since the last call.
    pub fn events(&self) -> Vec<Event> {
        std::mem::take(&mut self.0.lock().unwrap().events)
    }

    /// The disk as another process finds it after this one was killed.
    pub fn killed(&self) -> Self {
        let files = self.0.lock().unwrap().files.clone();
        let unlocked = |(name, image)| (name, Image { locked: false, ..image });
        let files = files.into_iter().map(unlocked).collect();
        Self(Arc::new(Mutex::new(State { files, ..State::default() })))
    }

    /// The disk after a loss of power. Of what was not synced, those sectors are left for which `survives` returns true.
    pub fn power_lost(&self, mut survives: impl FnMut() -> bool) -> Self {
        let after = self.killed();
        for image in after.0.lock().unwrap().files.values_mut() {
            for Written { at, bytes, offset, claimed } in std::mem::take(&mut image.unsynced) {
                for start in (0..bytes.len().max(claimed.len())).step_by(SECTOR) {
                    let survives = survives();
                    let sector = |bytes: &[u8]| bytes.chunks(SECTOR).nth(start / SECTOR).map(<[u8]>::to_vec);
                    if let Some(sector) = sector(&bytes).filter(|_| survives) {
                        put(&mut image.durable, at + start, &sector);
                    }
                    if let Some(sector) = sector(&claimed).filter(|_| survives || image.sync_lied) {
                        put(&mut image.right_durable, offset + start, &sector);
                    }
                }
            }
            image.lose();
        }
        after
    }

    /// Access to the bytes of a file. Changes made here are durable, and no cause is recorded.
    pub fn with<T>(&self, name: &str, look: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        let mut state = self.0.lock().unwrap();
        let image = state.files.get_mut(name).expect("a file of that name");
        let before = image.live.clone();
        let result = look(&mut image.live);
        if image.live != before {
            image.be_durable();
        }
        result
    }

    /// Changes the bytes of a file in place, durably, and records why they are wrong.
    pub fn spoil(&self, name: &str, why: &'static str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut state = self.0.lock().unwrap();
        let image = state.files.get_mut(name).expect("a file of that name");
        let before = image.live.clone();
        change(&mut image.live);
        if image.live == before {
            return;
        }
        let (cause, unit) = (Cause::Spoilt(why), ALIGN as usize);
        for (at, (old, new)) in before.chunks(unit).zip(image.live.chunks(unit)).enumerate() {
            if old != new {
                image.causes.insert(at as u64, cause);
                let unsynced = image.unsynced.iter_mut().map(|written| (written.at, &mut written.bytes));
                for (start, bytes) in unsynced.chain([(0, &mut image.durable)]) {
                    for (place, byte) in (at * unit..).zip(new) {
                        if let Some(held) = place.checked_sub(start).and_then(|place| bytes.get_mut(place)) {
                            *held = *byte;
                        }
                    }
                }
            }
        }
        state.events.push(Event::Happened(cause));
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

    /// The next operation does it all or nothing: fails if a fault is due.
    fn admit(&mut self, site: Site) -> io::Result<()> {
        let Some(fault @ Fault::Errno(errno)) = self.next() else { return Ok(()) };
        self.events.push(Event::Happened(Cause::Fault(fault, site)));
        Err(io::Error::from_raw_os_error(errno))
    }

    /// Runs `act` on a file as the next operation. `act` also returns why bytes that it hands out are wrong, if they are.
    fn act<T>(
        &mut self,
        name: &str,
        site: Site,
        act: impl FnOnce(&mut Image, Turn) -> (io::Result<T>, Option<Cause>),
    ) -> io::Result<T> {
        // A sync is never half done.
        let fault = self.next().filter(|fault| (site, *fault) != (Site::Sync, Fault::Short));
        let turn = Turn { fault, site, operation: self.operations };
        let (result, wrong) = act(self.files.get_mut(name).expect("open"), turn);
        self.events.extend(turn.fault.map(|fault| Event::Happened(Cause::Fault(fault, site))));
        self.events.extend(wrong.map(Event::WrongBytes));
        result
    }
}

fn put(bytes: &mut Vec<u8>, offset: usize, written: &[u8]) {
    bytes.resize(bytes.len().max(offset + written.len()), 0);
    bytes[offset..offset + written.len()].copy_from_slice(written);
}

/// A drive writes this many bytes completely or not at all.
const SECTOR: usize = 512;

/// The multiples of `ALIGN` that a range touches.
fn units(offset: u64, bytes: usize) -> Range<u64> {
    offset / ALIGN..(offset + bytes as u64).div_ceil(ALIGN)
}

impl Turn {
    /// What goes wrong silently.
    fn lie(&self) -> Option<Cause> {
        let fault = self.fault.filter(|fault| !fault.is_honest())?;
        Some(Cause::Fault(fault, self.site))
    }

    /// The same without `Short`: files that are read or written as a whole continue after a short operation.
    fn whole(self) -> Self {
        Self { fault: self.fault.filter(|fault| *fault != Fault::Short), ..self }
    }

    /// Flips one bit, which the number of the operation selects.
    fn flip(&self, bytes: &mut [u8]) {
        if let Some(at) = (self.operation as usize * 7919).checked_rem(bytes.len()) {
            bytes[at] ^= 1 << (self.operation % 8);
        }
    }
}

impl Image {
    /// Writes as the fault allows; returns how much it claims to have written.
    fn write(&mut self, offset: u64, bytes: &[u8], turn: Turn) -> io::Result<usize> {
        let (mut at, mut kept) = (offset, bytes.to_vec());
        match turn.fault {
            None => {}
            Some(Fault::Errno(errno)) => return Err(io::Error::from_raw_os_error(errno)),
            Some(Fault::Short | Fault::Torn) => kept.truncate(bytes.len().div_ceil(2)),
            Some(Fault::Lost) => kept.clear(),
            Some(Fault::Flip) => turn.flip(&mut kept),
            Some(Fault::Misdirected) => at += ALIGN,
        }
        let claimed = if turn.fault == Some(Fault::Short) { kept.len() } else { bytes.len() };
        let written = Written {
            at: at as usize,
            bytes: kept,
            offset: offset as usize,
            claimed: bytes[..claimed].to_vec(),
        };
        put(&mut self.live, written.at, &written.bytes);
        put(&mut self.right, written.offset, &written.claimed);
        // A file is as long as was claimed, whatever became of its bytes.
        self.live.resize(self.live.len().max(self.right.len()), 0);
        if let Some(lie) = turn.lie() {
            let touched = units(offset, claimed).chain(units(at, written.bytes.len()));
            self.causes.extend(touched.map(|unit| (unit, lie)));
        }
        self.unsynced.push(written);
        Ok(claimed)
    }

    /// Reads as the fault allows; also returns why what it hands out is wrong, if it is.
    fn read(&self, offset: u64, bytes: &mut [u8], turn: Turn) -> (io::Result<usize>, Option<Cause>) {
        let at = if turn.fault == Some(Fault::Misdirected) { offset + ALIGN } else { offset } as usize;
        let there = &self.live[at.min(self.live.len())..];
        let mut count = bytes.len().min(there.len());
        let mut copied = count;
        match turn.fault {
            Some(Fault::Errno(errno)) => return (Err(io::Error::from_raw_os_error(errno)), None),
            Some(Fault::Short) => (count, copied) = (count.div_ceil(2), count.div_ceil(2)),
            Some(Fault::Torn) => copied = count / 2,
            Some(Fault::Lost) => copied = 0,
            _ => {}
        }
        bytes[..copied].copy_from_slice(&there[..copied]);
        if turn.fault == Some(Fault::Flip) {
            turn.flip(&mut bytes[..count]);
        }
        let right = &self.right[(offset as usize).min(self.right.len())..];
        let less = count < bytes.len().min(right.len()) && turn.fault != Some(Fault::Short);
        let wrong = (less || right.get(..count) != Some(&bytes[..count])).then(|| {
            let known = self.causes.range(units(offset, count)).next().map(|(_, cause)| *cause);
            turn.lie().or(known).unwrap_or(Cause::Spoilt("by hand"))
        });
        (Ok(count), wrong)
    }

    /// Makes everything written so far durable, unless the fault makes that a lie.
    fn sync(&mut self, turn: Turn) -> io::Result<()> {
        if let Some(Fault::Errno(errno)) = turn.fault {
            // Systems may mark as written what a sync could not write. The next sync then succeeds without writing it.
            if turn.operation.is_multiple_of(2) {
                self.unsynced.clear();
            }
            return Err(io::Error::from_raw_os_error(errno));
        }
        self.sync_lied = turn.lie().is_some();
        if !self.sync_lied {
            for Written { at, bytes, offset, claimed } in std::mem::take(&mut self.unsynced) {
                put(&mut self.durable, at, &bytes);
                put(&mut self.right_durable, offset, &claimed);
            }
            self.durable.resize(self.live.len(), 0);
        }
        Ok(())
    }

    /// Makes everything written so far durable.
    fn be_durable(&mut self) {
        self.unsynced.clear();
        self.durable.clone_from(&self.live);
        self.right_durable.clone_from(&self.right);
    }

    /// Leaves only what is durable.
    fn lose(&mut self) {
        let len = self.durable.len().max(self.right_durable.len());
        self.durable.resize(len, 0);
        self.right_durable.resize(len, 0);
        if self.sync_lied {
            for unit in units(0, len) {
                self.causes.entry(unit).or_insert(Cause::Fault(Fault::Lost, Site::Sync));
            }
        }
        self.live.clone_from(&self.durable);
        self.right.clone_from(&self.right_durable);
        self.sync_lied = false;
    }
}

impl Directory for FaultyDisk {
    fn path(&self) -> &Path {
        Path::new("a disk with faults")
    }

    fn access(&self) -> Access {
        Access::default()
    }

    fn scratch(&self) -> io::Result<Arc<dyn File>> {
        let mut state = self.0.lock().unwrap();
        state.admit(Site::Open)?;
        state.scratched += 1;
        let name = format!("scratch {}", state.scratched);
        drop(state);
        Ok(self.open(&name, false))
    }

    fn lock(&self, name: &str) -> io::Result<(Arc<dyn File>, Box<dyn Directory>)> {
        let mut state = self.0.lock().unwrap();
        state.admit(Site::Open)?;
        if std::mem::replace(&mut state.files.entry(name.into()).or_default().locked, true) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        drop(state);
        Ok((self.open(name, true), self.share()))
    }

    fn read(&self, name: &str, limit: u64) -> io::Result<Option<Vec<u8>>> {
        let mut state = self.0.lock().unwrap();
        let Some(len) = state.files.get(name).map(|image| image.live.len()) else { return Ok(None) };
        if len as u64 > limit {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        state.act(name, Site::Sync, |image, turn| {
            let synced = image.sync(turn);
            if synced.is_ok() && !image.sync_lied {
                // And whatever was only in memory is gone.
                image.lose();
            }
            (synced, None)
        })?;
        let mut bytes = vec![0; state.files[name].live.len()];
        state.act(name, Site::IndexRead, |image, turn| {
            let (count, wrong) = image.read(0, &mut bytes, turn.whole());
            (count.map(|count| bytes.truncate(count)), wrong)
        })?;
        Ok(Some(bytes))
    }

    fn share(&self) -> Box<dyn Directory> {
        Box::new(self.clone())
    }

    fn pulse(&self) -> Arc<Pulse> {
        Arc::default()
    }

    fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<Arc<dyn File>> {
        let mut state = self.0.lock().unwrap();
        let known = state.files.contains_key(name);
        state.files.entry(name.into()).or_default();
        let replaced = state.act(name, Site::IndexReplace, |image, turn| {
            let mut fresh = Image::default();
            let result = fresh.write(0, bytes, turn.whole());
            if result.is_ok() {
                fresh.be_durable();
                *image = fresh;
            }
            (result, None)
        });
        if replaced.is_err() && !known {
            state.files.remove(name);
        }
        drop(state);
        replaced.map(|_| self.open(name, false) as Arc<dyn File>)
    }
}

impl File for Open {
    fn size(&self) -> io::Result<u64> {
        Ok(self.disk.0.lock().unwrap().files[&self.name].live.len() as u64)
    }

    fn write(&self, mut offset: u64, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let mut state = self.disk.0.lock().unwrap();
            let written = state
                .act(&self.name, Site::IndexWrite, |image, turn| (image.write(offset, bytes, turn), None));
            match written {
                Ok(count) => (offset, bytes) = (offset + count as u64, &bytes[count..]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.disk.0.lock().unwrap();
        state.act(&self.name, Site::Sync, |image, turn| (image.sync(turn), None))
    }

    fn discard(&self, range: Range<u64>) -> io::Result<()> {
        let mut state = self.disk.0.lock().unwrap();
        let image = state.files.get_mut(&self.name).expect("open");
        let end = image.live.len().min(range.end as usize);
        let zeros = vec![0; end.saturating_sub(range.start as usize)];
        let turn = Turn { fault: None, site: Site::Write, operation: 0 };
        image.write(range.start, &zeros, turn).map(drop)
    }

    fn zero(&self, range: Range<u64>) -> io::Result<()> {
        self.disk.0.lock().unwrap().admit(Site::Zero)?;
        self.discard(range)
    }

    fn forget(&self, _: Range<u64>) -> io::Result<()> {
        Ok(())
    }

    fn lanes(&self) -> usize {
        2
    }

    fn lane(&self) -> io::Result<Box<dyn Lane>> {
        self.disk.0.lock().unwrap().admit(Site::Open)?;
        Ok(Box::new(Open { disk: self.disk.clone(), name: self.name.clone(), locks: false }))
    }
}

impl Lane for Open {
    fn run(&mut self, ops: &mut [Op<'_>]) {
        for op in ops {
            loop {
                let mut state = self.disk.0.lock().unwrap();
                let kind = op.kind;
                let (offset, bytes) = op.rest();
                let result = match kind {
                    Kind::Read => {
                        state.act(&self.name, Site::Read, |image, turn| image.read(offset, bytes, turn))
                    }
                    Kind::Write => state
                        .act(&self.name, Site::Write, |image, turn| (image.write(offset, bytes, turn), None)),
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

#[cfg(test)]
mod tests {
    use super::{ALIGN, Cause, Directory, Event, Fault, FaultyDisk, Kind, Lane, Op};

    fn run(lane: &mut dyn Lane, kind: Kind, offset: u64, bytes: &mut [u8]) {
        let mut ops = [Op::new(kind, offset, bytes)];
        lane.run(&mut ops);
        ops.into_iter().try_for_each(Op::outcome).unwrap();
    }

    /// Also after a loss of power, which undoes what was not durable: exactly what is wrong is reported as wrong.
    #[test]
    fn wrong_bytes_stay_wrong_until_they_are_written_over() {
        let unit = ALIGN as usize;
        let disk = FaultyDisk::default();
        let (file, _) = disk.lock("pages").unwrap();
        let mut lane = file.lane().unwrap();
        // One bit of the second unit, in a byte that both have; then both are swapped before a sync, which makes that durable.
        let mut first = vec![3; unit];
        run(&mut *lane, Kind::Write, 0, &mut first);
        disk.fail(0, Fault::Flip);
        let mut second = first.clone();
        second[0] = 4;
        run(&mut *lane, Kind::Write, ALIGN, &mut second);
        disk.spoil("pages", "swapped", |bytes| bytes.rotate_left(unit));
        file.sync().unwrap();
        run(&mut *lane, Kind::Write, 2 * ALIGN, &mut [5; ALIGN as usize]);
        for disk in [disk.killed(), disk.power_lost(|| false), disk.power_lost(|| true)] {
            let mut lane = disk.lock("pages").unwrap().0.lane().unwrap();
            let mut wrong = |unit: u64| {
                run(&mut *lane, Kind::Read, unit * ALIGN, &mut [0; ALIGN as usize]);
                disk.events()
            };
            let swapped = [Event::WrongBytes(Cause::Spoilt("swapped"))];
            assert_eq!((wrong(0), wrong(1)), (swapped.to_vec(), swapped.to_vec()));
            assert_eq!(wrong(2), []);
        }
    }
}
