//! The bytes of headers and of the index: docs/layout.md draws them. All numbers are little-endian.
//!
//! Parsers check lengths before they look at bytes: a file may hold anything.

use super::io::ALIGN;
use super::{Error, Result};
use std::ops::Range;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Identifies the model and row formats of pages; pages of others are not read.
pub type Fingerprint = [u8; 16];

const VERSION: u32 = 2;
const PAGE_MAGIC: [u8; 8] = *b"PAGODAPG";
const INDEX_MAGIC: [u8; 8] = *b"PAGODAIX";

/// How often an index may be opened: generations have no room for more.
const EPOCHS_MAX: u64 = 1 << 24;

/// The first page generation that a store hands out after it was opened `epoch` times before. Its others are above this one
/// and below the first one of the next opening.
pub(super) fn first_generation(epoch: u64) -> u64 {
    epoch << 40
}

/// Bytes before the checksums of the layers.
const HEADER_FIXED: usize = 64;

/// Where the header's own checksum lies in it.
const HEADER_SUM: usize = 56;

/// Bytes of a page's header in the file.
pub(super) fn header_bytes(layers: usize) -> u64 {
    ((HEADER_FIXED + 8 * layers) as u64).next_multiple_of(ALIGN)
}

/// The checksum of a layer of a page as it is stored.
pub(super) fn sum(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

/// A page in the file, as a reader expects it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Record {
    /// Layer group.
    pub group: u8,
    /// Block of the disk tier's arena.
    pub block: u32,
    /// Tells the page from all others ever written.
    pub generation: u64,
    /// The checksum of its header, which contains those of its layers.
    pub sum: u64,
}

/// Writes the header of a page; returns its checksum.
pub(super) fn write_header(
    bytes: &mut [u8],
    fingerprint: &Fingerprint,
    (group, block, generation): (u8, u32, u64),
    payload: u64,
    sums: &[u64],
) -> u64 {
    bytes.fill(0);
    bytes[0..8].copy_from_slice(&PAGE_MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..16].copy_from_slice(&u32::from(group).to_le_bytes());
    bytes[16..32].copy_from_slice(fingerprint);
    bytes[32..36].copy_from_slice(&block.to_le_bytes());
    bytes[36..40].copy_from_slice(&(sums.len() as u32).to_le_bytes());
    bytes[40..48].copy_from_slice(&generation.to_le_bytes());
    bytes[48..56].copy_from_slice(&payload.to_le_bytes());
    for (at, sum) in bytes[HEADER_FIXED..].chunks_exact_mut(8).zip(sums) {
        at.copy_from_slice(&sum.to_le_bytes());
    }
    let sum = xxh3_64(bytes);
    bytes[HEADER_SUM..HEADER_SUM + 8].copy_from_slice(&sum.to_le_bytes());
    sum
}

/// If `bytes` are the header of the page that `expected` describes, the checksums of its layers; otherwise why they are not.
pub(super) fn read_header(
    bytes: &mut [u8],
    fingerprint: &Fingerprint,
    expected: &Record,
    layers: usize,
) -> std::result::Result<Box<[u64]>, String> {
    if bytes.len() as u64 != header_bytes(layers) {
        return Err(format!("its header has {} bytes", bytes.len()));
    }
    let mut fields = Fields(&*bytes);
    if fields.take() != Some(PAGE_MAGIC) {
        return Err("its header is none".into());
    }
    let version = fields.u32();
    if version != Some(VERSION) {
        return Err(format!("its header has version {version:?}, not {VERSION}"));
    }
    let group = fields.u32();
    if fields.take() != Some(*fingerprint) {
        return Err("it is of another model or format".into());
    }
    let (block, count, generation) = (fields.u32(), fields.u32(), fields.u64());
    if (group, block, generation)
        != (Some(expected.group.into()), Some(expected.block), Some(expected.generation))
    {
        return Err(format!(
            "its header is of block {block:?} of group {group:?} in generation {generation:?}, not {}",
            expected.generation
        ));
    }
    if count != Some(layers as u32) {
        return Err(format!("its header has {count:?} layers, not {layers}"));
    }
    let stored: [u8; 8] = bytes[HEADER_SUM..HEADER_SUM + 8].try_into().expect("8 bytes");
    bytes[HEADER_SUM..HEADER_SUM + 8].fill(0);
    if [xxh3_64(bytes), u64::from_le_bytes(stored)] != [expected.sum; 2] {
        return Err("its header does not verify".into());
    }
    let sums = bytes[HEADER_FIXED..].chunks_exact(8).take(layers);
    Ok(sums.map(|sum| u64::from_le_bytes(sum.try_into().expect("8 bytes"))).collect())
}

/// The beginning of the index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct IndexHeader {
    pub(super) fingerprint: Fingerprint,
    /// How often the store was opened: page generations of one epoch are above those of all before.
    pub(super) epoch: u64,
    /// Checksums of lines cover this first. Those who chose keys and meta did not know it, so nothing in these is taken for a
    /// line.
    pub(super) salt: u64,
    /// How many lines the index had when it was written: each puts another key.
    pub(super) lines: u32,
    /// `Geometry::describe`.
    pub(super) geometry: Vec<u64>,
}

impl IndexHeader {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(INDEX_MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((self.geometry.len() as u32).to_le_bytes());
        bytes.extend(self.fingerprint);
        bytes.extend(self.epoch.to_le_bytes());
        bytes.extend(self.salt.to_le_bytes());
        bytes.extend(self.lines.to_le_bytes());
        self.geometry.iter().for_each(|number| bytes.extend(number.to_le_bytes()));
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        bytes
    }

    /// The header, and how many bytes it takes.
    pub(super) fn parse(bytes: &[u8]) -> Result<(Self, usize)> {
        let broken = |why: &str| Error::Index(format!("{why}; remove the directory to begin anew"));
        let mut fields = Fields(bytes);
        if fields.take() != Some(INDEX_MAGIC) {
            return Err(broken("not one of a Pagoda cache"));
        }
        let version = fields.u32();
        if version != Some(VERSION) {
            return Err(broken(&format!("version {version:?}, not {VERSION}")));
        }
        let len = fields.u32().unwrap_or(u32::MAX) as usize;
        let (fingerprint, epoch) = (fields.take(), fields.u64());
        let (salt, lines) = (fields.u64(), fields.u32());
        let geometry = len.checked_mul(8).and_then(|bytes| fields.bytes(bytes));
        let end = bytes.len() - fields.0.len();
        let (Some(fingerprint), Some(epoch), Some(salt), Some(lines), Some(geometry), Some(sum)) =
            (fingerprint, epoch, salt, lines, geometry, fields.u64())
        else {
            return Err(broken("its header is cut short"));
        };
        if sum != xxh3_64(&bytes[..end]) {
            return Err(broken("its header does not verify"));
        }
        // Opening it now would write the number after this one.
        if epoch >= EPOCHS_MAX - 1 {
            return Err(broken(&format!("opened {epoch} times")));
        }
        let numbers =
            geometry.chunks_exact(8).map(|number| u64::from_le_bytes(number.try_into().expect("8 bytes")));
        Ok((Self { fingerprint, epoch, salt, lines, geometry: numbers.collect() }, end + 8))
    }
}

/// One line of the index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Line {
    /// From now on `key` has these pages, and other data of the caller's.
    Put { key: Vec<u8>, pages: Vec<Record>, meta: Vec<u8> },
    /// From now on `key` does not exist.
    Delete { key: Vec<u8> },
}

const PUT: u32 = 1;
const DELETE: u32 = 2;

/// Bytes of a page in a line.
const RECORD_BYTES: usize = 24;

/// Bytes before the body of a line: its length, the line's number, a checksum of both.
const HEAD_BYTES: usize = 16;

/// Bytes of a line that puts a key: head, four numbers, the key with its pages and meta, checksum.
pub(super) fn put_bytes(key: usize, pages: usize, meta: usize) -> u64 {
    (HEAD_BYTES + 16) as u64 + (key + pages * RECORD_BYTES + meta) as u64 + 8
}

impl Line {
    /// The bytes of a line with this number at `offset` of an index with this salt; they verify nowhere else.
    pub(super) fn to_bytes(&self, salt: u64, number: u32, offset: u64) -> Vec<u8> {
        let mut body = Vec::new();
        match self {
            Self::Put { key, pages, meta } => {
                body.extend(PUT.to_le_bytes());
                body.extend((key.len() as u32).to_le_bytes());
                body.extend((pages.len() as u32).to_le_bytes());
                body.extend((meta.len() as u32).to_le_bytes());
                body.extend(key);
                for page in pages {
                    body.extend(u32::from(page.group).to_le_bytes());
                    body.extend(page.block.to_le_bytes());
                    body.extend(page.generation.to_le_bytes());
                    body.extend(page.sum.to_le_bytes());
                }
                body.extend(meta);
            }
            Self::Delete { key } => {
                body.extend(DELETE.to_le_bytes());
                body.extend((key.len() as u32).to_le_bytes());
                body.extend(key);
            }
        }
        let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
        bytes.extend(number.to_le_bytes());
        let head = head_sum(&bytes, salt, offset);
        bytes.extend(head.to_le_bytes());
        bytes.extend(&body);
        bytes.extend(xxh3_64_with_seed(&body, head).to_le_bytes());
        bytes
    }

    /// The line with this body; none if no line has such a body.
    fn parse(body: &[u8]) -> Option<Self> {
        let mut body = Fields(body);
        let parsed = match body.u32()? {
            PUT => {
                let (key, pages, meta) = (body.u32()?, body.u32()?, body.u32()?);
                let key = body.bytes(key as usize)?.to_vec();
                let rows = body.bytes((pages as usize).checked_mul(RECORD_BYTES)?)?;
                let pages = rows.chunks_exact(RECORD_BYTES).map(|row| {
                    let mut row = Fields(row);
                    let group = u8::try_from(row.u32()?).ok()?;
                    Some(Record { group, block: row.u32()?, generation: row.u64()?, sum: row.u64()? })
                });
                let pages = pages.collect::<Option<_>>()?;
                Self::Put { key, pages, meta: body.bytes(meta as usize)?.to_vec() }
            }
            DELETE => {
                let key = body.u32()?;
                Self::Delete { key: body.bytes(key as usize)?.to_vec() }
            }
            _ => return None,
        };
        body.0.is_empty().then_some(parsed)
    }
}

/// The whole lines of an index from a given place on, each with its range and number. Anything else is skipped.
pub(super) struct Lines<'a> {
    bytes: &'a [u8],
    salt: u64,
    at: usize,
}

impl<'a> Lines<'a> {
    pub(super) fn new(bytes: &'a [u8], salt: u64, at: usize) -> Self {
        Self { bytes, salt, at }
    }

    /// The number and length of the line that begins here, and the checksum of both; none if no line begins here.
    fn head(&self) -> Option<(u32, usize, u64)> {
        let bytes = self.bytes.get(self.at..)?;
        let mut fields = Fields(bytes);
        let (len, number, sum) = (fields.u32()?, fields.u32()?, fields.u64()?);
        (sum == head_sum(&bytes[..8], self.salt, self.at as u64)).then_some((number, len as usize, sum))
    }
}

impl Iterator for Lines<'_> {
    type Item = (Range<usize>, u32, Line);

    fn next(&mut self) -> Option<Self::Item> {
        while self.at < self.bytes.len() {
            let start = self.at;
            let Some((number, len, seed)) = self.head() else {
                self.at += 1;
                continue;
            };
            // A length that verifies is trusted whatever the body holds, so that no byte is looked at twice, whoever wrote
            // the file.
            self.at = start + HEAD_BYTES + len + 8;
            let mut fields = Fields(self.bytes.get(start + HEAD_BYTES..self.at)?);
            let body = fields.bytes(len)?;
            if fields.u64() == Some(xxh3_64_with_seed(body, seed))
                && let Some(line) = Line::parse(body)
            {
                return Some((start..self.at, number, line));
            }
        }
        None
    }
}

fn head_sum(length_and_number: &[u8], salt: u64, offset: u64) -> u64 {
    xxh3_64_with_seed(length_and_number, salt ^ offset)
}

/// Bytes from whose front values are taken, as long as there are enough.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N).map(|bytes| bytes.try_into().expect("N bytes"))
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }
}
