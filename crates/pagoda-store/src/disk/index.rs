//! The index of a named cache: a log of what is kept under which key.
//!
//! Each line is written twice, so that one damaged place loses nothing. A line that is cut short at the end was never
//! acknowledged, since the second copy is only written when the first is safe. The log is rewritten when it is opened, when
//! most of it is about things that are no longer kept, and after a failure that may have left anything in it.

use super::format::{Fingerprint, IndexHeader, Line, Lines, Record, first_generation, put_bytes};
use super::io::{Directory, File};
use super::segment::Geometry;
use super::{Error, Result};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

const NAME: &str = "index";

/// Most bytes of an index; 100 GB of pages take a few megabytes. In this crate's unit tests small enough to be filled.
const BYTES_MAX: u64 = if cfg!(test) { 8 << 20 } else { 4 << 30 };

/// The log is only rewritten once it has this many bytes more than what is kept takes. What is kept leaves as many bytes
/// free, so that a key can always be forgotten.
const SPARE_BYTES: u64 = 1 << 20;

/// How often each line is written.
const COPIES: u64 = 2;

/// What a key stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its pages, in the caller's order.
    pub pages: Vec<Record>,
    /// Other data of the caller's.
    pub meta: Vec<u8>,
}

/// What reopening found, besides the entries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Keys that are gone, and why.
    pub lost: Vec<(Vec<u8>, String)>,
    /// How many lines have lost both copies.
    pub lost_lines: u64,
    /// Bytes that belong to no line but have a line after them.
    pub damaged_bytes: u64,
    /// Bytes after the last whole line.
    pub torn_bytes: u64,
    /// Why the index could not be rewritten. It will be before anything is added.
    pub unwritten: Option<String>,
}

impl Recovered {
    /// What a store does without, apart from the lost keys.
    pub(super) fn refused(&self) -> impl Iterator<Item = String> {
        let &Self { lost_lines, damaged_bytes, .. } = self;
        let damaged = match lost_lines {
            0 => format!("{damaged_bytes} damaged bytes of the index: second copies say what they said"),
            _ => format!("{lost_lines} line(s) of the index, which are damaged: keys may be missing"),
        };
        let damaged = (lost_lines + damaged_bytes > 0).then_some(damaged);
        damaged.into_iter().chain(self.unwritten.iter().map(|why| format!("a new index: {why}")))
    }
}

/// The index of an open store.
#[derive(Debug)]
pub(super) struct Index {
    directory: Box<dyn Directory>,
    /// None until it has been rewritten.
    file: Option<Arc<dyn File>>,
    header: IndexHeader,
    /// Where the next line goes, and its number.
    end: u64,
    number: u32,
    /// The log is rewritten when it would grow beyond this.
    limit: u64,
    entries: BTreeMap<Vec<u8>, Entry>,
}

impl Index {
    /// Reads the index of `directory`, or begins one if there are no bytes of pages. Only the holder of the directory's lock
    /// may call this. geometry: becomes that of the existing pages.
    pub(super) fn open(
        directory: &dyn Directory,
        fingerprint: &Fingerprint,
        geometry: &mut Geometry,
        bytes_of_pages: u64,
    ) -> Result<(Self, Recovered)> {
        let bytes = directory.read(NAME, BYTES_MAX).map_err(Error::io("reading the index"))?;
        let mut header = IndexHeader {
            fingerprint: *fingerprint,
            epoch: 0,
            salt: 0,
            lines: 0,
            geometry: geometry.describe(),
        };
        let (mut entries, mut recovered) = (BTreeMap::new(), Recovered::default());
        let is_new = bytes.is_none();
        if is_new && bytes_of_pages > 0 {
            let why = format!("it is gone, and {bytes_of_pages} bytes of pages mean nothing without it");
            return Err(Error::Index(format!("{why}; remove the directory to begin anew")));
        }
        if let Some(bytes) = bytes {
            let (stored, start) = IndexHeader::parse(&bytes)?;
            let hex =
                |bytes: &Fingerprint| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
            if stored.fingerprint != *fingerprint {
                let what = "the fingerprint of model and formats";
                let arguments =
                    "spec, formats, page_size, center, rotate, k_norms, retention, headroom and model";
                let (stored, wanted) = (hex(&stored.fingerprint), hex(fingerprint));
                return Err(Error::Mismatch { what, arguments, stored, wanted });
            }
            *geometry = geometry.as_in(&stored.geometry)?;
            header.geometry = stored.geometry.clone();
            (entries, recovered) = replay(&bytes, &stored, start);
            require_memory(&entries, geometry, bytes_of_pages)?;
            header.epoch = stored.epoch + 1;
            recovered.lost.extend(remove_impossible(&mut entries, geometry, first_generation(header.epoch)));
        }
        let mut index =
            Self { directory: directory.share(), file: None, header, end: 0, number: 0, limit: 0, entries };
        match index.rewrite() {
            // Entries can still be read, even if the drive is full.
            Err(error) if !is_new => recovered.unwritten = Some(error.to_string()),
            other => other?,
        }
        Ok((index, recovered))
    }

    /// Replaces the log with one of what is kept and nothing else.
    fn rewrite(&mut self) -> Result<()> {
        let salt = RandomState::new().hash_one(self.header.epoch);
        let header = IndexHeader { salt, lines: self.entries.len() as u32, ..self.header.clone() };
        let mut fresh = header.to_bytes();
        for _ in 0..COPIES {
            for (number, (key, Entry { pages, meta })) in (0..).zip(&self.entries) {
                let line = Line::Put { key: key.clone(), pages: pages.clone(), meta: meta.clone() };
                fresh.extend(line.to_bytes(salt, number, fresh.len() as u64));
            }
        }
        self.file = Some(self.directory.replace(NAME, &fresh).map_err(Error::io("writing the index"))?);
        self.end = fresh.len() as u64;
        self.number = header.lines;
        self.header = header;
        self.limit = BYTES_MAX.min(2 * self.end + SPARE_BYTES);
        Ok(())
    }

    /// How often the store was opened before.
    pub(super) fn epoch(&self) -> u64 {
        self.header.epoch
    }

    /// Whether the drive is known to have exactly these entries. After a failure it is not, until the log has been rewritten.
    pub(super) fn is_sure(&self) -> bool {
        self.file.is_some()
    }

    /// Rewrites the log if it is not known what the drive has.
    pub(super) fn make_sure(&mut self) -> Result<()> {
        if self.is_sure() { Ok(()) } else { self.rewrite() }
    }

    pub(super) fn entries(&self) -> &BTreeMap<Vec<u8>, Entry> {
        &self.entries
    }

    /// Refuses a line with this key, number of pages and bytes of meta if `put` would.
    pub(super) fn require_room(&self, key: &[u8], pages: usize, meta: usize) -> Result<()> {
        let copies = |key: &[u8], pages, meta| COPIES * put_bytes(key.len(), pages, meta);
        let size = |(key, entry): (&Vec<u8>, &Entry)| copies(key, entry.pages.len(), entry.meta.len());
        let kept = self.header.to_bytes().len() as u64 + self.entries.iter().map(size).sum::<u64>();
        let (wanted, most) = (copies(key, pages, meta), BYTES_MAX - SPARE_BYTES);
        let left = most.saturating_sub(kept);
        if wanted <= left { Ok(()) } else { Err(Error::IndexFull { wanted, left, most }) }
    }

    /// Lets `key` stand for `entry`; returns the previous entry. The change is safe from a loss of power when this returns.
    pub(super) fn put(&mut self, key: &[u8], entry: Entry) -> Result<Option<Entry>> {
        self.require_room(key, entry.pages.len(), entry.meta.len())?;
        let Entry { pages, meta } = entry.clone();
        self.append(&Line::Put { key: key.to_vec(), pages, meta })?;
        Ok(self.entries.insert(key.to_vec(), entry))
    }

    /// Forgets `key`; returns its entry.
    pub(super) fn delete(&mut self, key: &[u8]) -> Result<Option<Entry>> {
        // Without a file it is not known what is on the drive: it may have the key nevertheless.
        if self.file.is_some() && !self.entries.contains_key(key) {
            return Ok(None);
        }
        self.append(&Line::Delete { key: key.to_vec() })?;
        Ok(self.entries.remove(key))
    }

    fn append(&mut self, line: &Line) -> Result<()> {
        let bytes = |index: &Self| line.to_bytes(index.header.salt, index.number, index.end);
        let mut first = bytes(self);
        let end = self.end + COPIES * first.len() as u64;
        if self.file.is_none() || end > self.limit {
            let rewritten = self.rewrite();
            if self.file.is_none() || end > BYTES_MAX {
                rewritten?;
            } else if rewritten.is_err() {
                // The existing log has the same content and stays in use: the drive may have no room for another.
                self.limit = BYTES_MAX.min(end + SPARE_BYTES);
            }
            first = bytes(self);
        }
        let file = self.file.clone().expect("written anew if there was none");
        // If this fails, what was written is not a whole line, and the next line overwrites it.
        file.write(self.end, &first).map_err(Error::io("writing the index"))?;
        if let Err(error) = file.sync() {
            // It is not known what was lost, or whether another sync would report it.
            self.file = None;
            return Err(Error::Io { operation: "syncing the index", source: error });
        }
        self.end += first.len() as u64;
        // The line is safe without its second copy. If that cannot be written, the next line overwrites what was.
        let second = bytes(self);
        if file.write(self.end, &second).is_ok() {
            self.end += second.len() as u64;
        }
        self.number += 1;
        Ok(())
    }
}

/// The entries of an index with this header, whose lines begin at `start`.
fn replay(bytes: &[u8], header: &IndexHeader, start: usize) -> (BTreeMap<Vec<u8>, Entry>, Recovered) {
    let (mut lines, mut recovered, mut end) = (BTreeMap::new(), Recovered::default(), start);
    for (at, number, line) in Lines::new(bytes, header.salt, start) {
        recovered.damaged_bytes += (at.start - end) as u64;
        end = at.end;
        lines.entry(u64::from(number)).or_insert(line);
    }
    recovered.torn_bytes = (bytes.len() - end) as u64;
    let (mut entries, mut doubtful) = (BTreeMap::new(), BTreeSet::new());
    let (begun, mut next) = (u64::from(header.lines), 0);
    for (number, line) in lines {
        recovered.lost_lines += number - next;
        if number > next.max(begun) {
            // The lost lines may have put or deleted any key, so that everything known so far may be out of date.
            doubtful.extend(std::mem::take(&mut entries).into_keys());
        }
        next = number + 1;
        let (Line::Put { key, .. } | Line::Delete { key }) = &line;
        doubtful.remove(key);
        match line {
            Line::Put { key, pages, meta } => entries.insert(key, Entry { pages, meta }),
            Line::Delete { key } => entries.remove(&key),
        };
    }
    if next < begun {
        // The index has lost its end, and with it everything that was added.
        recovered.lost_lines += begun - next;
        doubtful.extend(std::mem::take(&mut entries).into_keys());
    }
    let why = "a later line of the index is lost, which may have been about it";
    recovered.lost = doubtful.into_iter().map(|key| (key, why.to_owned())).collect();
    (entries, recovered)
}

/// Refuses an arena that is too small for something that is kept.
fn require_memory(
    entries: &BTreeMap<Vec<u8>, Entry>,
    geometry: &Geometry,
    bytes_of_pages: u64,
) -> Result<()> {
    let pages = entries.values().flat_map(|entry| &entry.pages);
    let segments = pages.filter_map(|page| geometry.segment_of(page.group, page.block));
    // Segments that begin past the end of the file were never written.
    let end = segments.filter(|segment| segment.start < bytes_of_pages).map(|segment| segment.end).max();
    let (bytes, count) = geometry.segments();
    if let Some(end) = end
        && end > bytes * count
    {
        let (what, arguments) = ("the end of what is kept", "disk_memory");
        let (stored, wanted) = (format!("{end} bytes"), format!("{} bytes", bytes * count));
        return Err(Error::Mismatch { what, arguments, stored, wanted });
    }
    Ok(())
}

/// Removes entries with pages outside of the file, in blocks that newer pages were written to, or with a generation from
/// `next` on: future pages get those, and could not be told from them.
fn remove_impossible(
    entries: &mut BTreeMap<Vec<u8>, Entry>,
    geometry: &Geometry,
    next: u64,
) -> Vec<(Vec<u8>, String)> {
    let mut newest = HashMap::<(u8, u32), Record>::new();
    let pages = entries.values().flat_map(|entry| &entry.pages);
    for page in pages.filter(|page| page.generation < next) {
        let known = newest.entry((page.group, page.block)).or_insert(*page);
        if known.generation < page.generation {
            *known = *page;
        }
    }
    let why = |entry: &Entry| {
        entry.pages.iter().find_map(|page| {
            if !geometry.has(page.group, page.block) {
                return Some(format!(
                    "block {} of layer group {} is beyond disk_memory",
                    page.block, page.group
                ));
            }
            if page.generation >= next {
                return Some(format!(
                    "block {} of layer group {} has generation {}, of a later opening than its index",
                    page.block, page.group, page.generation
                ));
            }
            (newest[&(page.group, page.block)] != *page)
                .then(|| format!("block {} of layer group {} was written anew", page.block, page.group))
        })
    };
    let lost: Vec<_> = entries.iter().filter_map(|(key, entry)| Some((key.clone(), why(entry)?))).collect();
    lost.iter().for_each(|(key, _)| drop(entries.remove(key)));
    lost
}
