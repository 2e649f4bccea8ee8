//! The disk tier: pages written to it and read from it, what its drive does wrong, and whether that was noticed.

use crate::Missing;
use crate::machine::{Machine, Outcome, ensure};
use crate::memory::Place;
use crate::random::Random;
use crate::shape::Shape;
use crate::streaming::Streaming;
use crate::tally::kind;
use pagoda_core::fence::Failure;
use pagoda_core::ids::{BlockId, GroupId};
use pagoda_store::disk::io::ALIGN;
use pagoda_store::disk::io::fault::{Cause, Event, Fault, FaultyDisk, Site};
use pagoda_store::disk::{Error, Fingerprint, Lane, Recovered, Store};
use rustix::io::Errno;
use std::sync::Arc;

const FINGERPRINT: Fingerprint = *b"a model of tests";

/// What headers begin with, which tells them from other bytes of the file (docs/layout.md).
const HEADER: &[u8] = b"PAGODAPG";

/// The unit of the file of pages.
const UNIT: usize = ALIGN as usize;

const SPOILT_INDEX: &str = "at rest: a bit of the index";

/// How a drive treats requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Conduct {
    /// It serves them.
    Works,
    /// It may fail, and reports that.
    Fails,
    /// It may also report what it did not do, and stored bytes may change.
    Lies,
}

/// A store, and the drive under it.
pub(crate) struct Drive {
    pub(crate) disk: FaultyDisk,
    pub(crate) store: Arc<Store>,
    pub(crate) lane: Lane,
    pub(crate) conduct: Conduct,
    /// Whether the drive has lied, so that the index may be out of date and name pages that have been overwritten.
    pub(crate) lied: bool,
    /// Whether a sync has failed since the store was opened.
    sync_failed: bool,
    /// The pages as they were at some earlier time.
    earlier: Vec<u8>,
}

impl Drive {
    /// Opens a store for the first time.
    pub(crate) fn new(shape: &Shape, conduct: Conduct) -> Self {
        let disk = FaultyDisk::default();
        let (store, lane, _) = open(&disk, shape).expect("an empty disk without faults");
        Self { disk, store, lane, conduct, lied: false, sync_failed: false, earlier: Vec::new() }
    }
}

/// Opens the store of a disk.
fn open(disk: &FaultyDisk, shape: &Shape) -> Result<(Arc<Store>, Lane, Recovered), Error> {
    let (store, recovered) = Store::open(disk, shape.geometry(), FINGERPRINT, None)?;
    if shape.zeroes {
        store.zero_on_free()?;
    }
    let store = Arc::new(store);
    let lane = store.lane()?;
    Ok((store, lane, recovered))
}

/// Whether an event may leave an index that is out of date.
fn ages_the_index(event: &Event) -> bool {
    match event {
        Event::Happened(Cause::Fault(
            fault,
            Site::Sync | Site::IndexWrite | Site::IndexReplace | Site::IndexRead,
        )) => !fault.is_honest(),
        Event::Happened(Cause::Spoilt(why)) => *why == SPOILT_INDEX,
        _ => false,
    }
}

fn is_failed_sync(event: &Event) -> bool {
    matches!(event, Event::Happened(Cause::Fault(Fault::Errno(_), Site::Sync)))
}

impl Machine {
    /// Checks the result of a call that reads or writes pages: wrong bytes must be noticed, and errors must have a cause.
    pub(crate) fn judge<T>(&mut self, result: Result<T, Error>) -> Outcome<Result<T, Error>> {
        let events = self.drive.disk.events();
        self.note(&events, result.is_err());
        let wrong = events.iter().any(|event| matches!(event, Event::WrongBytes(_)));
        let failed =
            events.iter().any(|event| matches!(event, Event::Happened(Cause::Fault(Fault::Errno(_), _))));
        match &result {
            // An old index names old pages, which a lost write may have left in place. They are what was asked for, though
            // not what an honest drive would hold. Whoever reads them compares the rows.
            Ok(_) if wrong && self.drive.lied => {
                self.tally.see("pages read: as an earlier index names them", 1)
            }
            Ok(_) => ensure!(!wrong, "wrong bytes were taken for right ones: {events:?}"),
            Err(error) => {
                let stale = self.drive.lied && matches!(error, Error::Corrupt { .. });
                let broken = self.drive.lied && matches!(error, Error::Index(_));
                let unsynced = self.drive.sync_failed && matches!(error, Error::Unsynced { .. });
                ensure!(wrong || failed || stale || broken || unsynced, "without a cause: {error}");
                let typed =
                    unsynced || matches!(error, Error::Io { .. } | Error::Corrupt { .. } | Error::Index(_));
                ensure!(typed, "not what a drive can do: {error}");
                self.tally.see(kind(error), 1);
            }
        }
        Ok(result)
    }

    /// Counts what happened to the disk in a call, and notes how that may have affected the index.
    pub(crate) fn note(&mut self, events: &[Event], refused: bool) {
        self.tally.note(events, refused);
        if !events.is_empty() {
            self.remember(|| format!("{events:?}, {}", if refused { "refused" } else { "not refused" }));
        }
        self.drive.lied |= events.iter().any(ages_the_index);
        self.drive.sync_failed |= events.iter().any(is_failed_sync);
    }

    /// Writes blocks of memory to disk.
    pub(crate) fn write_pages(
        &mut self,
        group: GroupId,
        pages: &[(BlockId, Place)],
    ) -> Outcome<Result<(), Failure>> {
        let blocks: Vec<_> = pages.iter().map(|(block, _)| *block).collect();
        blocks.iter().try_for_each(|&block| self.require_unread(group, block))?;
        let memory = &self.memory;
        let result = self.drive.lane.write(group, &blocks, |page, range, target| {
            target.copy_from_slice(&memory.block(pages[page].1)[range.start as usize..range.end as usize]);
        });
        self.tally.see("pages written", pages.len() as u64);
        Ok(self.judge(result)?.map_err(|error| self.drive.store.failure(&error)))
    }

    /// Reads pages into blocks of memory.
    pub(crate) fn read_pages(
        &mut self,
        group: GroupId,
        pages: &[(BlockId, Place)],
    ) -> Outcome<Result<(), Failure>> {
        let blocks: Vec<_> = pages.iter().map(|(block, _)| *block).collect();
        let flip = self.flip_behind_checksums();
        let (memory, layers) = (&mut self.memory, self.shape.group(group).layers);
        let result = self.drive.lane.read(group, &blocks, 0..layers, |page, range, source| {
            let target = &mut memory.block_mut(pages[page].1)[range.start as usize..range.end as usize];
            target.copy_from_slice(source);
            target[0] ^= flip;
        });
        self.tally.see("pages read", pages.len() as u64);
        Ok(self.judge(result)?.map_err(|error| self.drive.store.failure(&error)))
    }

    /// Reads some layers of a page and compares the rows that hold these tokens.
    pub(crate) fn check_page(&mut self, group: GroupId, block: BlockId, rows: &[(usize, u64)]) -> Outcome {
        let shape = *self.shape.group(group);
        let layers = if self.random.once_in(2) {
            0..shape.layers
        } else {
            let layer = self.random.below(shape.layers);
            layer..layer + 1
        };
        let flip = self.flip_behind_checksums();
        let mut bytes = vec![0; shape.block_bytes()];
        let result = self.drive.lane.read(group, &[block], layers.clone(), |_, range, source| {
            bytes[range.start as usize..range.end as usize].copy_from_slice(source);
            bytes[range.start as usize] ^= flip;
        });
        if self.judge(result)?.is_ok() {
            for &(row, token) in rows {
                let right = layers.clone().all(|layer| shape.layer_holds(&bytes, layer, row, token));
                ensure!(right, "row {row} of block {block:?} on disk is not that of token {token}");
            }
            self.tally.see("checked: rows on disk", rows.len() as u64);
        }
        Ok(())
    }

    /// The bits to flip in verified bytes now and then, as a store without checksums would hand them out.
    fn flip_behind_checksums(&mut self) -> u8 {
        u8::from(self.missing == Some(Missing::Checksums) && self.random.once_in(8))
    }

    /// What may go wrong with an operation of the drive.
    fn faults(&self) -> Vec<Fault> {
        let no_memory = Fault::Errno(Errno::NOMEM.raw_os_error());
        let all = Fault::ALL.into_iter().chain([no_memory]);
        all.filter(|fault| match self.drive.conduct {
            Conduct::Works => false,
            Conduct::Fails => fault.is_honest(),
            Conduct::Lies => true,
        })
        .collect()
    }

    /// Makes something go wrong soon, or changes stored bytes.
    pub(crate) fn do_harm(&mut self) -> Outcome {
        let faults = self.faults();
        if self.drive.conduct == Conduct::Lies && self.random.once_in(2) {
            self.spoil();
        } else if let Some(fault) = self.random.pick(&faults) {
            self.drive.disk.fail(self.random.below(8) as u64, fault);
        }
        Ok(())
    }

    /// Changes stored bytes.
    fn spoil(&mut self) {
        let (random, disk, earlier) = (&mut self.random, &self.drive.disk, &self.drive.earlier);
        match random.below(8) {
            0 | 1 => disk.spoil("pages", "at rest: a bit of a layer", |bytes| flip(bytes, false, random)),
            2 => disk.spoil("pages", "at rest: a bit of a header", |bytes| flip(bytes, true, random)),
            3 if random.once_in(4) => disk.spoil("index", SPOILT_INDEX, |bytes| {
                let places: Vec<_> = (0..bytes.len()).collect();
                if let Some(at) = random.pick(&places) {
                    bytes[at] ^= 1 << random.below(8);
                }
            }),
            3 | 4 => disk.spoil("pages", "at rest: two pages swapped", |bytes| {
                let units = units(bytes, random.once_in(2));
                let (Some(a), Some(b)) = (random.pick(&units), random.pick(&units)) else { return };
                (0..UNIT).for_each(|at| bytes.swap(a + at, b + at));
            }),
            5 | 6 => disk.spoil("pages", "at rest: an earlier page", |bytes| {
                let both = (0..earlier.len().min(bytes.len()) / UNIT).map(|at| at * UNIT..(at + 1) * UNIT);
                let changed: Vec<_> = both.filter(|at| bytes[at.clone()] != earlier[at.clone()]).collect();
                if !changed.is_empty() {
                    let at = &changed[random.below(changed.len())];
                    bytes[at.clone()].copy_from_slice(&earlier[at.clone()]);
                }
            }),
            _ => self.drive.earlier = disk.with("pages", |bytes| bytes.clone()),
        }
    }

    /// Opens the store of a disk that another process has left, and retries as long as the drive refuses. If it cannot be
    /// opened at all, starts a new one.
    pub(crate) fn open_drive(&mut self, disk: FaultyDisk) -> Outcome<Recovered> {
        self.drive.disk = disk;
        let faults = self.faults();
        for after in 0..6 {
            if let Some(fault) = self.random.pick(&faults).filter(|_| self.random.once_in(12)) {
                self.drive.disk.fail(after, fault);
            }
        }
        loop {
            let result = open(&self.drive.disk, &self.shape);
            let events = self.drive.disk.events();
            self.remember(|| {
                format!("opening came to {:?}", result.as_ref().map(|(.., recovered)| recovered))
            });
            let missed = |recovered: &Recovered| {
                let Recovered { lost, lost_lines, damaged_bytes, torn_bytes, .. } = recovered;
                lost.is_empty() && lost_lines + damaged_bytes + torn_bytes == 0
            };
            self.note(&events, !result.as_ref().is_ok_and(|(.., recovered)| missed(recovered)));
            let caused = |event: &Event| {
                matches!(event, Event::WrongBytes(_) | Event::Happened(Cause::Fault(Fault::Errno(_), _)))
            };
            match result {
                Ok((store, lane, recovered)) => {
                    (self.drive.store, self.drive.lane) = (store, lane);
                    self.drive.sync_failed = false;
                    self.streaming = Streaming::new(&self.drive.store, &mut self.random);
                    self.drive.earlier.clear();
                    return Ok(recovered);
                }
                Err(error) => {
                    ensure!(events.iter().any(caused), "without a cause: {error}");
                    self.tally.see(kind(&error), 1);
                    let typed = matches!(error, Error::Io { .. } | Error::Locked | Error::Index(_));
                    ensure!(typed, "not what a drive can do: {error}");
                    if matches!(error, Error::Index(_)) {
                        self.tally.see("restarts: from nothing", 1);
                        self.drive.disk = FaultyDisk::default();
                        self.forget_history();
                    }
                }
            }
        }
    }
}

/// Where in the file of pages something was written: headers, or parts of layers.
fn units(bytes: &[u8], headers: bool) -> Vec<usize> {
    let written = |at: &usize| {
        let unit = &bytes[*at..at + UNIT];
        unit.starts_with(HEADER) == headers && unit.iter().any(|&byte| byte != 0)
    };
    (0..bytes.len() / UNIT).map(|at| at * UNIT).filter(written).collect()
}

/// Flips one bit of what was written.
fn flip(bytes: &mut [u8], headers: bool, random: &mut Random) {
    if let Some(at) = random.pick(&units(bytes, headers)) {
        let at = at + random.below(UNIT);
        bytes[at] ^= 1 << random.below(8);
    }
}
