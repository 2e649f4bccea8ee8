//! The index of a named cache: a log of what is kept under which key.
//!
//! It is read to its last whole line: a line that was cut short, or changed, ends it. It is written anew when it is opened, when
//! most of it is about what is no longer kept, and after a failure that may have left anything in it.

use super::format::{Fingerprint, IndexHeader, Line, Record, put_bytes};
use super::io::{Directory, File};
use super::segment::Geometry;
use super::{Error, Result};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

const NAME: &str = "index";

/// 100 GB of pages take some megabytes. In this crate's unit tests few enough to have them all.
const BYTES_MAX: u64 = if cfg!(test) { 8 << 20 } else { 4 << 30 };

/// From how many bytes on, beside those of what is kept, the log is written anew. As many have room beside what is kept: a key can
/// always be forgotten.
const SPARE_BYTES: u64 = 1 << 20;

/// What a key stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its pages, in an order that is the caller's.
    pub pages: Vec<Record>,
    /// Whatever else the caller wants to know of it.
    pub meta: Vec<u8>,
}

/// What reopening found, besides the entries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Keys that are gone, and why.
    pub lost: Vec<(Vec<u8>, String)>,
    /// Bytes after the last whole line.
    pub torn_bytes: u64,
    /// Why the index could not be written anew: it is before anything is added.
    pub unwritten: Option<String>,
}

/// The index of an open store.
#[derive(Debug)]
pub(super) struct Index {
    directory: Box<dyn Directory>,
    /// None until it has been written anew.
    file: Option<Arc<dyn File>>,
    header: IndexHeader,
    /// Where the next line goes.
    end: u64,
    /// Where it is long enough to be written anew.
    limit: u64,
    entries: BTreeMap<Vec<u8>, Entry>,
}

impl Index {
    /// Reads the index of `directory`, or begins one where there are no bytes of pages; only the holder of the directory's lock may.
    pub(super) fn open(
        directory: &dyn Directory,
        fingerprint: &Fingerprint,
        geometry: &Geometry,
        bytes_of_pages: u64,
    ) -> Result<(Self, Recovered)> {
        let bytes = directory.read(NAME, BYTES_MAX).map_err(Error::io("reading the index"))?;
        let mut header = IndexHeader { fingerprint: *fingerprint, epoch: 0, geometry: geometry.describe() };
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
                let arguments = "spec, formats, page_size and model";
                let (stored, wanted) = (hex(&stored.fingerprint), hex(fingerprint));
                return Err(Error::Mismatch { what, arguments, stored, wanted });
            }
            if stored.geometry != header.geometry {
                let (what, arguments) = ("the layout of pages", "disk_memory");
                let (stored, wanted) = (format!("{:?}", stored.geometry), format!("{:?}", header.geometry));
                return Err(Error::Mismatch { what, arguments, stored, wanted });
            }
            let mut offset = start;
            while let Some((line, end)) = Line::parse(&bytes, stored.epoch, offset) {
                match line {
                    Line::Put { key, pages, meta } => entries.insert(key, Entry { pages, meta }),
                    Line::Delete { key } => entries.remove(&key),
                };
                offset = end;
            }
            require_memory(&entries, geometry, bytes_of_pages)?;
            recovered.torn_bytes = (bytes.len() - offset) as u64;
            recovered.lost = remove_impossible(&mut entries, geometry);
            header.epoch = stored.epoch + 1;
        }
        let directory = directory.share().map_err(Error::io("opening the directory"))?;
        let mut index = Self { directory, file: None, header, end: 0, limit: 0, entries };
        match index.rewrite() {
            // Entries can still be read, even if the drive is full.
            Err(error) if !is_new => recovered.unwritten = Some(error.to_string()),
            other => other?,
        }
        Ok((index, recovered))
    }

    /// Puts a log of what is kept, and of nothing else, in the place of the one that is there.
    fn rewrite(&mut self) -> Result<()> {
        let mut fresh = self.header.to_bytes();
        for (key, Entry { pages, meta }) in &self.entries {
            let line = Line::Put { key: key.clone(), pages: pages.clone(), meta: meta.clone() };
            fresh.extend(line.to_bytes(self.header.epoch, fresh.len() as u64));
        }
        self.file = Some(self.directory.replace(NAME, &fresh).map_err(Error::io("writing the index"))?);
        self.end = fresh.len() as u64;
        self.limit = BYTES_MAX.min(2 * self.end + SPARE_BYTES);
        Ok(())
    }

    /// How often the store was opened before.
    pub(super) fn epoch(&self) -> u64 {
        self.header.epoch
    }

    /// Whether the drive has these entries and no others: not after a failure, until the log has been written anew.
    pub(super) fn is_sure(&self) -> bool {
        self.file.is_some()
    }

    pub(super) fn entries(&self) -> &BTreeMap<Vec<u8>, Entry> {
        &self.entries
    }

    /// Refuses a line with a key, so many pages and so much else, if `put` would.
    pub(super) fn require_room(&self, key: &[u8], pages: usize, meta: usize) -> Result<()> {
        let size =
            |(key, entry): (&Vec<u8>, &Entry)| put_bytes(key.len(), entry.pages.len(), entry.meta.len());
        let kept = self.header.to_bytes().len() as u64 + self.entries.iter().map(size).sum::<u64>();
        let (wanted, most) = (put_bytes(key.len(), pages, meta), BYTES_MAX - SPARE_BYTES);
        let left = most.saturating_sub(kept);
        if wanted <= left { Ok(()) } else { Err(Error::IndexFull { wanted, left, most }) }
    }

    /// Lets `key` stand for `entry`; returns what it stood for. It is safe from a loss of power when this returns.
    pub(super) fn put(&mut self, key: &[u8], entry: Entry) -> Result<Option<Entry>> {
        self.require_room(key, entry.pages.len(), entry.meta.len())?;
        let Entry { pages, meta } = entry.clone();
        self.append(&Line::Put { key: key.to_vec(), pages, meta })?;
        Ok(self.entries.insert(key.to_vec(), entry))
    }

    /// Forgets `key`; returns what it stood for.
    pub(super) fn delete(&mut self, key: &[u8]) -> Result<Option<Entry>> {
        // Without a file nobody knows what is on the drive: it may have the key all the same.
        if self.file.is_some() && !self.entries.contains_key(key) {
            return Ok(None);
        }
        self.append(&Line::Delete { key: key.to_vec() })?;
        Ok(self.entries.remove(key))
    }

    fn append(&mut self, line: &Line) -> Result<()> {
        let mut bytes = line.to_bytes(self.header.epoch, self.end);
        let end = self.end + bytes.len() as u64;
        if self.file.is_none() || end > self.limit {
            let rewritten = self.rewrite();
            if self.file.is_none() || end > BYTES_MAX {
                rewritten?;
            } else if rewritten.is_err() {
                // The log that is there says the same, and goes on: the drive may have no room for another.
                self.limit = BYTES_MAX.min(end + SPARE_BYTES);
            }
            bytes = line.to_bytes(self.header.epoch, self.end);
        }
        let file = self.file.clone().expect("written anew if there was none");
        // If this fails, what was written is not a whole line, and the next line overwrites it.
        file.write(self.end, &bytes).map_err(Error::io("writing the index"))?;
        if let Err(error) = file.sync() {
            // Nobody knows what was lost, or whether another sync would report it.
            self.file = None;
            return Err(Error::Io { operation: "syncing the index", source: error });
        }
        self.end += bytes.len() as u64;
        Ok(())
    }
}

/// Refuses an arena that is smaller than one that something was kept in.
fn require_memory(
    entries: &BTreeMap<Vec<u8>, Entry>,
    geometry: &Geometry,
    bytes_of_pages: u64,
) -> Result<()> {
    let pages = entries.values().flat_map(|entry| &entry.pages);
    let segments = pages.filter_map(|page| geometry.segment_of(page.group, page.block));
    // What lies behind the end of the file as well was never there.
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

/// Takes out entries with pages outside of the file, or in blocks that newer pages were written to.
fn remove_impossible(entries: &mut BTreeMap<Vec<u8>, Entry>, geometry: &Geometry) -> Vec<(Vec<u8>, String)> {
    let mut newest = HashMap::<(u8, u32), Record>::new();
    for page in entries.values().flat_map(|entry| &entry.pages) {
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
            (newest[&(page.group, page.block)] != *page)
                .then(|| format!("block {} of layer group {} was written anew", page.block, page.group))
        })
    };
    let lost: Vec<_> = entries.iter().filter_map(|(key, entry)| Some((key.clone(), why(entry)?))).collect();
    lost.iter().for_each(|(key, _)| drop(entries.remove(key)));
    lost
}
