//! The store against a naive model: a page is the bytes that were written, or an error. Never other bytes.

use super::io::fault::{Fault, FaultyDisk};
use super::io::{ALIGN, Access, Directory, Folder};
use super::*;
use pagoda_core::ids::{BlockId, GroupId};
use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;

mod bytes;
mod kills;
mod parsers;
mod places;

const FINGERPRINT: Fingerprint = *b"a model of tests";
const RUNS: [&[u64]; 2] = [&[5000, 64, 4096], &[700]];

fn geometry() -> Geometry {
    Geometry::new(&RUNS.map(<[u64]>::to_vec), 4 << 20).unwrap()
}

fn scratch(disk: &FaultyDisk) -> Arc<Store> {
    Arc::new(Store::scratch(disk, geometry(), FINGERPRINT, None).unwrap())
}

fn open(directory: &dyn Directory) -> Result<(Arc<Store>, Recovered)> {
    let (store, recovered) = Store::open(directory, geometry(), FINGERPRINT, None)?;
    Ok((Arc::new(store), recovered))
}

/// Bytes that only the page `name` has.
fn payload(group: GroupId, name: u64) -> Vec<u8> {
    let bytes: u64 = RUNS[group.index()].iter().sum();
    let mut state = name.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..bytes).map(|_| next()).collect()
}

fn write(lane: &mut Lane, group: GroupId, pages: &[(u32, u64)]) -> Result<()> {
    let blocks: Vec<_> = pages.iter().map(|&(block, _)| BlockId::new(block)).collect();
    let bytes: Vec<_> = pages.iter().map(|&(_, name)| payload(group, name)).collect();
    lane.write(group, &blocks, |page, range, target| {
        target.copy_from_slice(&bytes[page][range.start as usize..range.end as usize]);
    })
}

/// Reads layers of pages and requires that what comes is right.
fn read(lane: &mut Lane, group: GroupId, pages: &[(u32, u64)], layers: std::ops::Range<usize>) -> Result<()> {
    let blocks: Vec<_> = pages.iter().map(|&(block, _)| BlockId::new(block)).collect();
    let mut seen = 0;
    let result = lane.read(group, &blocks, layers.clone(), |page, range, source| {
        let right = payload(group, pages[page].1);
        assert!(source == &right[range.start as usize..range.end as usize], "wrong bytes handed out");
        seen += 1;
    });
    assert!(result.is_err() || seen == pages.len() * layers.len());
    result
}

/// Blocks of a group, from segments that the other group has none of.
fn blocks(group: GroupId) -> Vec<u32> {
    let geometry = geometry();
    let own = |&block: &u32| {
        let odd = geometry.slot(group, BlockId::new(block)).segment % 2;
        geometry.has(group.0, block) && odd == u64::from(group.0)
    };
    (0..2000).filter(own).take(12).collect()
}

fn layers(group: GroupId) -> std::ops::Range<usize> {
    0..RUNS[group.index()].len()
}

/// A directory of the file system that goes when it is dropped.
struct Place(PathBuf);

impl Place {
    fn new() -> Self {
        static MADE: AtomicU64 = AtomicU64::new(0);
        let made = MADE.fetch_add(1, Ordering::Relaxed);
        let place = std::env::temp_dir().join(format!("pagoda-test-{}-{made}", std::process::id()));
        Self(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const SMALL: GroupId = GroupId(1);
const LARGE: GroupId = GroupId(0);

#[test]
fn pages_come_back_by_layers_on_every_way_to_a_real_disk() {
    let place = Place::new();
    let folder = Folder::open(&place.0).unwrap();
    let best = folder.access();
    for (direct, uring) in [(true, true), (true, false), (false, true), (false, false)] {
        if (direct && !best.direct) || (uring && !best.uring) {
            continue;
        }
        let folder = folder.with(Access { direct, uring, refused: Vec::new() });
        let store = Arc::new(Store::scratch(&folder, geometry(), FINGERPRINT, None).unwrap());
        let mut lane = store.lane().unwrap();
        let own = blocks(LARGE);
        let (left, right) = own.split_at(own.len() / 2);
        let pages: Vec<_> = right.iter().chain(left).map(|&block| (block, u64::from(block))).collect();
        write(&mut lane, LARGE, &pages).unwrap();
        read(&mut lane, LARGE, &pages, 0..3).unwrap();
        // More I/Os at once than a ring has room for.
        let apart: Vec<_> = own.iter().step_by(2).map(|&block| (block, u64::from(block))).collect();
        write(&mut lane, LARGE, &apart).unwrap();
        read(&mut lane, LARGE, &apart, 0..3).unwrap();
        let mut other = store.lane().unwrap();
        for page in &pages {
            (0..3).for_each(|layer| read(&mut other, LARGE, &[*page], layer..layer + 1).unwrap());
        }
    }
    assert_eq!(std::fs::read_dir(&place.0).unwrap().count(), 0, "scratch files have no name");
}

#[test]
fn a_piece_of_several_megabytes_is_cut_into_ios() {
    let place = Place::new();
    let folder = Folder::open(&place.0).unwrap();
    let runs = vec![vec![3_000_001u64, 9 << 20]];
    let geometry = Geometry::new(&runs, 200 << 20).unwrap();
    let store = Arc::new(Store::scratch(&folder, geometry, FINGERPRINT, None).unwrap());
    let mut lane = store.lane().unwrap();
    let byte = |page: usize, at: u64| (at.wrapping_mul(31) >> 3) as u8 ^ page as u8;
    let blocks: Vec<_> = (0..3).map(BlockId::new).collect();
    lane.write(LARGE, &blocks, |page, range, target| {
        target.iter_mut().zip(range).for_each(|(target, at)| *target = byte(page, at));
    })
    .unwrap();
    lane.read(LARGE, &blocks, 0..2, |page, range, source| {
        assert!(source.iter().zip(range).all(|(&source, at)| source == byte(page, at)));
    })
    .unwrap();
    let written = store.traffic();
    assert_eq!(written.bytes_written, 3 * (4096 + 3_002_368 + (9 << 20)));
    assert_eq!(written.bytes_read, written.bytes_written - 3 * 4096, "headers are known");
}

#[derive(Clone, Debug)]
enum Step {
    Write(bool, Vec<u8>),
    Read(bool, u8, u8),
    Put(u8, Vec<u8>),
    Delete(u8),
    Reopen,
    Fault(u8, u8),
    PowerLoss(u64),
}

fn steps(faults: bool) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (any::<bool>(), proptest::collection::vec(any::<u8>(), 1..6)).prop_map(|(g, b)| Step::Write(g, b)),
        6 => any::<(bool, u8, u8)>().prop_map(|(g, b, l)| Step::Read(g, b, l)),
        3 => (0u8..4, proptest::collection::vec(any::<u8>(), 0..6)).prop_map(|(k, b)| Step::Put(k, b)),
        1 => (0u8..4).prop_map(Step::Delete),
        1 => Just(Step::Reopen),
        1 => any::<u64>().prop_map(Step::PowerLoss),
        if faults { 4 } else { 0 } => (0u8..12, 0..Fault::ALL.len() as u8).prop_map(|(n, f)| Step::Fault(n, f)),
    ];
    proptest::collection::vec(step, 1..60)
}

type At = (GroupId, u32);

/// What the caller of a store knows: what it wrote where, and what it keeps.
struct Model {
    disk: FaultyDisk,
    store: Arc<Store>,
    lane: Lane,
    written: HashMap<At, u64>,
    kept: BTreeMap<Vec<u8>, Vec<(At, u64)>>,
    next: u64,
    faulty: bool,
    /// Whether the drive may have said that it did what it did not.
    lied: bool,
    blocks: [Vec<u32>; 2],
}

impl Model {
    fn new(faulty: bool) -> Self {
        let disk = FaultyDisk::default();
        let store = open(&disk).unwrap().0;
        let lane = store.lane().unwrap();
        Self {
            disk,
            store,
            lane,
            written: HashMap::new(),
            kept: BTreeMap::new(),
            next: 1,
            faulty,
            lied: false,
            blocks: [LARGE, SMALL].map(blocks),
        }
    }

    fn is_kept(&self, place: At) -> bool {
        self.store
            .entries()
            .iter()
            .flat_map(|(_, entry)| &entry.pages)
            .any(|page| (page.group, page.block) == (place.0.0, place.1))
    }

    fn reopen(&mut self, disk: FaultyDisk) {
        disk.calm();
        (self.disk, self.written) = (disk, HashMap::new());
        let (store, recovered) = match open(&self.disk) {
            Ok(opened) => opened,
            Err(error) => {
                assert!(self.lied && matches!(error, Error::Index(_)), "{error}");
                *self = Self::new(true);
                return;
            }
        };
        self.lane = store.lane().unwrap();
        self.store = store;
        if !self.faulty {
            assert_eq!(recovered.lost, []);
            let found: Vec<_> = self.store.entries().into_iter().map(|(key, _)| key).collect();
            assert!(found.iter().eq(self.kept.keys()), "kept keys survive");
        }
        self.kept.clear();
        for (key, entry) in self.store.entries() {
            let names = entry.meta.chunks_exact(8).map(|n| u64::from_le_bytes(n.try_into().unwrap()));
            let places = entry.pages.iter().map(|page| (GroupId(page.group), page.block));
            let pages: Vec<_> = places.zip(names).collect();
            assert_eq!(pages.len(), entry.pages.len());
            for &((group, block), name) in &pages {
                let result = read(&mut self.lane, group, &[(block, name)], layers(group));
                if !self.faulty {
                    result.unwrap();
                }
                self.written.insert((group, block), name);
            }
            self.kept.insert(key, pages);
        }
    }

    fn apply(&mut self, step: &Step) {
        let group = |large: bool| if large { LARGE } else { SMALL };
        match step {
            Step::Write(large, picks) => {
                let group = group(*large);
                let mut pages: Vec<(u32, u64)> = Vec::new();
                for &pick in picks {
                    let own = &self.blocks[group.index()];
                    let block = own[usize::from(pick) % own.len()];
                    if !self.is_kept((group, block)) && pages.iter().all(|page| page.0 != block) {
                        pages.push((block, self.next));
                        self.next += 1;
                    }
                }
                let result = write(&mut self.lane, group, &pages);
                for (block, name) in pages {
                    match &result {
                        Ok(()) => self.written.insert((group, block), name),
                        Err(error) if self.faulty => {
                            assert!(matches!(error, Error::Io { .. }), "{error}");
                            self.written.remove(&(group, block))
                        }
                        Err(error) => panic!("{error}"),
                    };
                }
            }
            Step::Read(large, pick, layer) => {
                let group = group(*large);
                let own = &self.blocks[group.index()];
                let block = own[usize::from(*pick) % own.len()];
                let layer = usize::from(*layer) % layers(group).len();
                let name = self.written.get(&(group, block)).copied();
                let result = read(&mut self.lane, group, &[(block, name.unwrap_or(0))], layer..layer + 1);
                match (name, result) {
                    (None, Err(Error::Corrupt { .. })) => {}
                    (None, other) => panic!("nothing was written, and {other:?}"),
                    (Some(_), result) => assert!(self.faulty || result.is_ok()),
                }
            }
            Step::Put(key, picks) => {
                let all: Vec<_> = self.written.iter().map(|(place, name)| (*place, *name)).collect();
                let mut pages: Vec<(At, u64)> = if all.is_empty() {
                    Vec::new()
                } else {
                    picks.iter().map(|&pick| all[usize::from(pick) % all.len()]).collect()
                };
                pages.sort();
                let meta: Vec<u8> = pages.iter().flat_map(|(_, name)| name.to_le_bytes()).collect();
                let places: Vec<_> = pages.iter().map(|((g, b), _)| (*g, BlockId::new(*b))).collect();
                let result = self.store.put(&[*key], &places, &meta);
                assert!(self.faulty || result.is_ok(), "{result:?}");
                if result.is_ok() {
                    self.kept.insert(vec![*key], pages);
                }
            }
            Step::Delete(key) => {
                let result = self.store.delete(&[*key]);
                assert!(self.faulty || result.is_ok());
                if result.is_ok() {
                    self.kept.remove(&vec![*key]);
                }
            }
            Step::Reopen => self.reopen(self.disk.killed()),
            Step::PowerLoss(seed) => {
                let mut state = seed | 1;
                let survives = || {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    state >> 63 == 1
                };
                self.reopen(self.disk.power_lost(survives));
            }
            Step::Fault(after, fault) => {
                let fault = Fault::ALL[*fault as usize];
                self.lied |= !fault.is_honest();
                self.disk.fail(u64::from(*after), fault);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn what_is_kept_survives_kills_and_losses_of_power(steps in steps(false)) {
        let mut model = Model::new(false);
        steps.iter().for_each(|step| model.apply(step));
    }

    #[test]
    fn faults_make_errors_never_wrong_bytes(steps in steps(true)) {
        let mut model = Model::new(true);
        steps.iter().for_each(|step| model.apply(step));
    }
}

/// Keys, and what each keeps.
type Entries = Vec<(Vec<u8>, Vec<(At, u64)>)>;

/// A store of two keys, on a disk that can be spoilt.
fn kept() -> (FaultyDisk, Entries) {
    let disk = FaultyDisk::default();
    let (store, _) = open(&disk).unwrap();
    let mut lane = store.lane().unwrap();
    let mut entries = Vec::new();
    for (key, group) in [(b"first", LARGE), (b"other", SMALL)] {
        let own = blocks(group);
        let pages: Vec<_> = own[1..4].iter().map(|&block| (block, u64::from(block) + 7)).collect();
        write(&mut lane, group, &pages).unwrap();
        let places: Vec<_> = pages.iter().map(|&(block, _)| (group, BlockId::new(block))).collect();
        store.put(key, &places, b"meta").unwrap();
        entries.push((key.to_vec(), pages.iter().map(|&(block, name)| ((group, block), name)).collect()));
    }
    (disk, entries)
}

/// Opens a spoilt store and reads all that it says it has; returns how many pages came back, all of them right.
fn readable(disk: &FaultyDisk, entries: &Entries) -> Result<usize> {
    let (store, _) = open(disk)?;
    let mut lane = store.lane().unwrap();
    let mut count = 0;
    for (key, entry) in store.entries() {
        let (_, pages) = entries.iter().find(|(known, _)| *known == key).expect("a key that was put");
        assert_eq!(entry.pages.len(), pages.len());
        for &((group, block), name) in pages {
            count += usize::from(read(&mut lane, group, &[(block, name)], layers(group)).is_ok());
        }
    }
    Ok(count)
}

#[test]
fn an_index_cut_at_any_byte_gives_the_keys_before_the_cut() {
    let (disk, entries) = kept();
    let whole = disk.with("index", |bytes| bytes.clone());
    let mut found = Vec::new();
    for len in 0..=whole.len() {
        let cut = disk.killed();
        cut.with("index", |bytes| bytes.truncate(len));
        found.push(readable(&cut, &entries).map_or(0, |count| count + 1));
    }
    assert!(found.is_sorted(), "more bytes never mean fewer keys");
    found.dedup();
    assert_eq!(found, [0, 1, 4, 7], "no header, no key, one, two; each with all of its pages");
}

#[test]
fn every_flipped_bit_is_noticed() {
    let (disk, entries) = kept();
    let index = disk.with("index", |bytes| bytes.len());
    let header = disk.with("index", |bytes| format::IndexHeader::parse(bytes).unwrap().1);
    for at in 0..index {
        let spoilt = disk.killed();
        spoilt.with("index", |bytes| bytes[at] ^= 1 << (at % 8));
        match open(&spoilt) {
            Ok((store, recovered)) => {
                let seen = recovered.damaged_bytes + recovered.torn_bytes;
                assert!(seen > 0 && recovered.lost_lines == 0, "byte {at} of the index");
                drop(store);
                assert_eq!(readable(&spoilt, &entries).unwrap(), 6, "second copies say what it said");
            }
            Err(error) => assert!(at < header && matches!(error, Error::Index(_)), "{error}"),
        }
    }
    // All bytes of a page and its header, padding included.
    let geometry = geometry();
    for (_, pages) in &entries {
        for &((group, block), name) in &pages[..1] {
            let slot = geometry.slot(group, BlockId::new(block));
            let header = (geometry.header_at(group, slot), geometry.header_bytes(group));
            let run = |layer| (geometry.run_at(group, slot, layer), geometry.stored_run(group, layer));
            for (start, len) in layers(group).map(run).chain([header]) {
                let spoilt = disk.killed();
                for at in start..start + len {
                    let flip = |bytes: &mut Vec<u8>| bytes[at as usize] ^= 1 << (at % 8);
                    spoilt.with("pages", flip);
                    let store = open(&spoilt).unwrap().0;
                    let result = read(&mut store.lane().unwrap(), group, &[(block, name)], layers(group));
                    assert!(matches!(result, Err(Error::Corrupt { .. })), "byte {at} of the pages");
                    spoilt.with("pages", flip);
                }
            }
        }
    }
}

/// Keys that an earlier process kept, and that were kept anew, forgotten or both since: what each has under the last save.
fn changed() -> (FaultyDisk, BTreeMap<Vec<u8>, Vec<u8>>) {
    let disk = FaultyDisk::default();
    let (store, _) = open(&disk).unwrap();
    ["above", "again", "anew", "gone"]
        .iter()
        .for_each(|key| drop(store.put(key.as_bytes(), &[], b"1").unwrap()));
    drop(store);
    let (store, _) = open(&disk).unwrap();
    for (key, saves) in [("anew", &b"23"[..]), ("new", b"4"), ("gone", b""), ("again", b""), ("short", b"5")]
    {
        if saves.is_empty() {
            store.delete(key.as_bytes()).unwrap();
        }
        saves.iter().for_each(|save| drop(store.put(key.as_bytes(), &[], &[*save]).unwrap()));
    }
    store.put(b"again", &[], b"6").unwrap();
    store.delete(b"short").unwrap();
    drop(store);
    let newest = [("above", b"1"), ("anew", b"3"), ("new", b"4"), ("again", b"6")];
    (disk, newest.map(|(key, meta)| (key.as_bytes().to_vec(), meta.to_vec())).into())
}

/// What a disk keeps by key, each as it was last saved; what was said of the rest.
fn newest(disk: &FaultyDisk, newest: &BTreeMap<Vec<u8>, Vec<u8>>) -> (Vec<Vec<u8>>, Recovered, Vec<String>) {
    let (store, recovered) = open(disk).unwrap();
    let found = store.entries().into_iter().map(|(key, entry)| {
        assert_eq!(newest.get(&key), Some(&entry.meta), "{:?}", String::from_utf8_lossy(&key));
        key
    });
    (found.collect(), recovered, store.access().refused.clone())
}

#[test]
fn an_index_with_one_wrong_bit_has_every_key_as_it_was_last_saved() {
    let (disk, kept) = changed();
    let (bits, header) =
        disk.with("index", |bytes| (bytes.len() * 8, format::IndexHeader::parse(bytes).unwrap().1));
    for bit in header * 8..bits {
        let spoilt = disk.killed();
        spoilt.with("index", |bytes| bytes[bit / 8] ^= 1 << (bit % 8));
        let (found, recovered, told) = newest(&spoilt, &kept);
        assert!(found.iter().eq(kept.keys()), "bit {bit}");
        assert_eq!((recovered.lost, recovered.lost_lines), (vec![], 0));
        assert!(recovered.damaged_bytes > 0 || recovered.torn_bytes > 0, "bit {bit}");
        assert_eq!(recovered.damaged_bytes > 0, told.iter().any(|told| told.contains("second copies")));
        assert_eq!(newest(&spoilt, &kept).1, Recovered::default(), "it was written anew");
    }
}

/// A place that is damaged, however long it is and wherever it begins: no key is as an older save left it, and none is gone without
/// a word. Only the end of an index may be missing and nobody can tell.
#[test]
fn an_index_with_a_damaged_place_has_no_key_as_an_older_save_left_it() {
    let (disk, kept) = changed();
    let whole = disk.with("index", |bytes| bytes.clone());
    let (header, start) = format::IndexHeader::parse(&whole).unwrap();
    let lines: Vec<_> = format::Lines::new(&whole, header.salt, start).collect();
    let numbers: Vec<_> = lines.iter().map(|(_, number, _)| *number).collect();
    assert_eq!(numbers, [0, 1, 2, 3, 0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11]);
    let (last, _, _) = &lines[lines.len() - 2];
    let mut seen = HashSet::new();
    for from in (start..last.start).step_by(3) {
        for until in (from + 1..=last.start).step_by(7) {
            let spoilt = disk.killed();
            spoilt.with("index", |bytes| bytes[from..until].iter_mut().for_each(|byte| *byte ^= 0xa5));
            let (found, recovered, told) = newest(&spoilt, &kept);
            let mut gone = kept.keys().filter(|key| !found.contains(key));
            let named = |key: &Vec<u8>| recovered.lost.iter().any(|(lost, _)| lost == key);
            let said = told.iter().any(|told| told.contains("line(s) of the index"));
            assert_eq!(said, recovered.lost_lines > 0);
            assert!(said || gone.all(named), "{from}..{until}: {found:?}, {recovered:?}");
            assert!(recovered.lost.iter().all(|(key, _)| !found.contains(key)));
            seen.insert((found.len(), said));
        }
    }
    assert!(seen.contains(&(4, false)), "second copies far from the first are of use");
    assert!(seen.contains(&(0, true)) && seen.contains(&(3, true)), "{seen:?}");
    // Of the lines that an index was begun with none says anything about the key of another: this one is about a key that is gone.
    let spoilt = disk.killed();
    let both = lines.iter().filter(|(_, number, _)| *number == 3).map(|(at, ..)| at.start);
    spoilt.with("index", |bytes| both.for_each(|at| bytes[at] ^= 1));
    let (found, recovered, _) = newest(&spoilt, &kept);
    assert_eq!((found.len(), recovered.lost_lines, recovered.lost), (4, 1, vec![]));
    // Where some of these are missing at the end, so is all that was added.
    for cut in start..lines[3].0.end {
        let spoilt = disk.killed();
        spoilt.with("index", |bytes| bytes.truncate(cut));
        let (found, recovered, _) = newest(&spoilt, &kept);
        let whole = lines[..4].iter().filter(|(at, ..)| at.end <= cut).count();
        assert_eq!((found.len(), recovered.lost.len(), recovered.lost_lines), (0, whole, 4 - whole as u64));
    }
}

/// Whoever chooses keys and meta writes no lines with them, also where what holds them is damaged.
#[test]
fn what_reads_as_a_line_inside_of_another_is_none() {
    let disk = FaultyDisk::default();
    let (store, _) = open(&disk).unwrap();
    let at = disk.with("index", |bytes| bytes.len());
    let forged = format::Line::Put { key: b"forged".to_vec(), pages: Vec::new(), meta: Vec::new() };
    let meta: Vec<u8> = forged.to_bytes(0, 0, (at + format::put_bytes(2, 0, 0) as usize - 8) as u64);
    store.put(b"it", &[], &meta).unwrap();
    let salt = disk.with("index", |bytes| {
        bytes[at] ^= 1;
        format::IndexHeader::parse(bytes).unwrap().0.salt
    });
    assert_ne!(salt, 0);
    let (store, _) = open(&disk.killed()).unwrap();
    assert_eq!(store.entries().len(), 1);
    // With a salt that is known it would be one.
    let bytes = disk.with("index", |bytes| bytes.clone());
    assert!(format::Lines::new(&bytes, 0, at).any(|(_, _, line)| line == forged));
}

#[test]
fn swapped_and_stale_pages_are_noticed() {
    let (disk, entries) = kept();
    let before = disk.with("pages", |bytes| bytes.clone());
    let geometry = geometry();
    let ((group, first), name) = entries[0].1[0];
    let ((_, second), _) = entries[0].1[1];
    let bytes_of = |block: u32| {
        let slot = geometry.slot(group, BlockId::new(block));
        let header = (geometry.header_at(group, slot), geometry.header_bytes(group));
        let run = |layer| (geometry.run_at(group, slot, layer), geometry.stored_run(group, layer));
        layers(group).map(run).chain([header]).collect::<Vec<_>>()
    };
    let swapped = disk.killed();
    swapped.with("pages", |bytes| {
        for (a, b) in bytes_of(first).into_iter().zip(bytes_of(second)) {
            (0..a.1).for_each(|at| bytes.swap((a.0 + at) as usize, (b.0 + at) as usize));
        }
    });
    assert_eq!(readable(&swapped, &entries).unwrap(), 4, "all but the two");

    // The page is written anew and kept; then its old bytes, which verify by themselves, come back.
    let (store, _) = open(&disk).unwrap();
    store.delete(&entries[0].0).unwrap();
    let mut lane = store.lane().unwrap();
    write(&mut lane, group, &[(first, name)]).unwrap();
    store.put(b"first", &[(group, BlockId::new(first))], b"").unwrap();
    let stale = disk.killed();
    stale.with("pages", |bytes| *bytes = before);
    let (store, _) = open(&stale).unwrap();
    let error = read(&mut store.lane().unwrap(), group, &[(first, name)], 0..3).unwrap_err();
    assert!(error.to_string().contains("generation"), "{error}");
}

#[test]
fn stores_of_other_models_are_refused() {
    let (disk, _) = kept();
    let other = Store::open(&disk.killed(), geometry(), *b"another model...", None).unwrap_err();
    assert!(matches!(other, Error::Mismatch { .. }) && other.to_string().contains("fingerprint"), "{other}");
    let larger = Geometry::new(&RUNS.map(<[u64]>::to_vec), 16 << 20).unwrap();
    assert_ne!(larger.describe(), geometry().describe());
    let other = Store::open(&disk.killed(), larger, FINGERPRINT, None).unwrap_err();
    assert!(other.to_string().contains("layout"), "{other}");
}

/// Page generations have 24 bits for how often an index was opened: with more they would begin anew.
#[test]
fn an_index_of_an_impossible_age_is_refused() {
    let aged = |epoch| {
        let disk = FaultyDisk::default();
        let geometry = geometry().describe();
        let header = format::IndexHeader { fingerprint: FINGERPRINT, epoch, salt: 0, lines: 0, geometry };
        disk.replace("index", &header.to_bytes()).unwrap();
        disk
    };
    let last = aged((1 << 24) - 2);
    let (store, _) = open(&last).unwrap();
    let ((group, block), mut lane) = ((GroupId(1), blocks(GroupId(1))[0]), store.lane().unwrap());
    write(&mut lane, group, &[(block, 1)]).unwrap();
    assert_eq!(store.generations(group, &[BlockId::new(block)]), [Some(0xff_ffff << 40)]);
    for epoch in [(1 << 24) - 1, u64::MAX] {
        assert!(open(&aged(epoch)).unwrap_err().to_string().contains(&format!("opened {epoch} times")));
    }
}

/// A drive that is full when a store is opened: what is there can be read, and what is kept from then on is there as well once
/// there is space.
#[test]
fn an_index_that_cannot_be_written_anew_is_read_and_written_later() {
    let (disk, entries) = kept();
    let full = Fault::Errno(rustix::io::Errno::NOSPC.raw_os_error());
    // After the lock and the index that is there, which is synced and read.
    disk.fail(3, full);
    let (store, recovered) = open(&disk).unwrap();
    assert!(recovered.unwritten.is_some_and(|why| why.contains("No space")));
    let mut lane = store.lane().unwrap();
    for &((group, block), name) in entries.iter().flat_map(|(_, pages)| pages) {
        read(&mut lane, group, &[(block, name)], layers(group)).unwrap();
    }
    let places: Vec<_> =
        entries[0].1.iter().map(|((group, block), _)| (*group, BlockId::new(*block))).collect();
    disk.fail(1, full);
    assert!(store.put(b"first", &places, b"").unwrap_err().to_string().contains("No space"));
    assert_eq!(readable(&disk.killed(), &entries).unwrap(), 6, "nothing was lost");
    store.put(b"first", &places[..2], b"").unwrap();
    store.delete(b"other").unwrap();
    let (store, recovered) = open(&disk.power_lost(|| false)).unwrap();
    assert_eq!(recovered, Recovered::default());
    let found: Vec<_> = store.entries().iter().map(|(key, entry)| (key.clone(), entry.pages.len())).collect();
    assert_eq!(found, [(b"first".to_vec(), 2)]);
}

/// Which operation of keeping something fails does not matter: the next one works, and both tell the truth.
#[test]
fn keeping_goes_on_after_it_has_failed() {
    for after in 0..3 {
        let (disk, entries) = kept();
        let (store, _) = open(&disk).unwrap();
        let places: Vec<_> =
            entries[0].1.iter().map(|((group, block), _)| (*group, BlockId::new(*block))).collect();
        disk.fail(after, Fault::Errno(rustix::io::Errno::IO.raw_os_error()));
        store.put(b"more", &places, b"1").unwrap_err();
        assert_eq!(store.is_sure(), after < 2, "a line was written, and nobody knows what became of it");
        store.put(b"else", &places, b"2").unwrap();
        assert!(store.is_sure());
        store.put(b"more", &places, b"3").unwrap();
        let (store, _) = open(&disk.power_lost(|| false)).unwrap();
        let found: Vec<_> = store.entries().into_iter().map(|(key, entry)| (key, entry.meta)).collect();
        assert_eq!(found.len(), 4);
        assert_eq!(found[0], (b"else".to_vec(), b"2".to_vec()));
        assert_eq!(found[2], (b"more".to_vec(), b"3".to_vec()));
    }
}

/// The drive may have its line all the same: it has in one of the two cases.
#[test]
fn a_key_that_could_not_be_kept_is_gone_when_it_is_forgotten() {
    let mut found = 0;
    for operations_before in 0..2 {
        let (disk, _) = kept();
        let (store, _) = open(&disk).unwrap();
        (0..operations_before).for_each(|_| drop(disk.lock("another").unwrap()));
        disk.fail(2, Fault::Errno(rustix::io::Errno::IO.raw_os_error()));
        store.put(b"more", &[], b"").unwrap_err();
        let has_it = || open(&disk.killed()).unwrap().0.entries().iter().any(|(key, _)| key == b"more");
        found += u32::from(has_it());
        assert_eq!(store.delete(b"more").unwrap(), None);
        assert!(!has_it());
    }
    assert_eq!(found, 1);
}

/// Of two keys with pages that were written to the same block, the one with the older page: whichever comes first.
#[test]
fn a_key_whose_block_was_written_anew_is_lost() {
    let (disk, _) = kept();
    let block = blocks(LARGE)[5];
    for (old, new) in [(b"x", b"y"), (b"y", b"x")] {
        let hostile = disk.killed();
        hostile.with("index", |bytes| {
            let header = format::IndexHeader::parse(bytes).unwrap().0;
            for (number, (key, generation)) in (header.lines + 2..).zip([(old, 30), (new, 50)]) {
                let pages = vec![format::Record { group: LARGE.0, block, generation, sum: 3 }];
                let line = format::Line::Put { key: key.to_vec(), pages, meta: Vec::new() };
                bytes.extend(line.to_bytes(header.salt, number, bytes.len() as u64));
            }
        });
        let (store, recovered) = open(&hostile).unwrap();
        let [(lost, why)] = &recovered.lost[..] else { panic!("{:?}", recovered.lost) };
        assert!(lost == old && why.contains("was written anew"), "{why}");
        assert_eq!(store.generations(LARGE, &[BlockId::new(block)]), [Some(50)]);
    }
}

/// As many bytes as an index may have here lie beside keys: no more is taken, what is there stays, and any key can be forgotten.
#[test]
fn an_index_that_is_full_says_so_and_forgets() {
    let (disk, entries) = kept();
    let (store, _) = open(&disk).unwrap();
    let blocks = |pages: &[(At, u64)]| {
        pages.iter().map(|((group, block), _)| (*group, BlockId::new(*block))).collect::<Vec<_>>()
    };
    let places = blocks(&entries[0].1);
    let (size, room) = (500_000, |key: &[u8], meta| store.require_room(key, places.len(), meta));
    let fits = |key: &[u8], meta: usize| {
        let (refused, before) = (room(key, meta), store.entries());
        let put = store.put(key, &places, &vec![7; meta]);
        assert_eq!(refused.is_ok(), put.is_ok(), "what is asked is what is done");
        if let (Err(refused), Err(put)) = (refused, &put) {
            assert!(matches!(put, Error::IndexFull { .. }));
            assert_eq!(refused.to_string(), put.to_string());
            assert_eq!(store.entries(), before);
        }
        assert!(disk.with("index", |bytes| bytes.len()) <= 8 << 20);
        assert!(store.is_sure());
        put.is_ok()
    };
    let keys: Vec<Vec<u8>> =
        (0..100).map(|number| vec![number; 100]).take_while(|key| fits(key, size)).collect();
    assert!(keys.len() > 5);
    // What is left is taken to the last byte.
    let Err(Error::IndexFull { wanted, left, .. }) = room(b"last", size) else { panic!("there is room") };
    let rest = size - (wanted - left) as usize / 2;
    assert!(!fits(b"last", rest + 1));
    assert!(fits(b"last", rest));
    assert!(!fits(&keys[0], 0), "a key has its line beside the one that it has");
    for key in keys.iter().cycle().take(20) {
        assert!(store.delete(key).unwrap().is_some());
        assert!(fits(key, size), "there is room again, however long the log has become");
    }
    for key in &keys {
        let (store, _) = open(&disk.killed()).unwrap();
        assert_eq!(store.delete(key).unwrap().unwrap().meta.len(), size);
        assert!(store.delete(key).unwrap().is_none());
    }
    for key in &keys {
        store.delete(key).unwrap();
    }
    store.delete(b"last").unwrap();
    assert_eq!(readable(&disk.power_lost(|| false), &entries).unwrap(), 6, "nothing else is left");
}

#[test]
fn an_index_does_not_grow_with_what_is_kept_no_more() {
    let (disk, entries) = kept();
    let (store, _) = open(&disk).unwrap();
    let mut longest = 0;
    for round in 0u32..20_000 {
        store.put(b"again", &[], &[round as u8; 1000]).unwrap();
        if round % 5 == 0 {
            store.delete(b"again").unwrap();
        }
        longest = longest.max(disk.with("index", |bytes| bytes.len()));
    }
    assert!(longest < 3 << 20, "{longest} bytes for 20 000 times one");
    let (store, _) = open(&disk.power_lost(|| false)).unwrap();
    let again = store.entries().into_iter().find(|(key, _)| key == b"again").unwrap().1;
    assert_eq!(again.meta, [19_999u32 as u8; 1000]);
    drop(store);
    let (store, _) = open(&disk.killed()).unwrap();
    let mut lane = store.lane().unwrap();
    let ((group, block), name) = entries[0].1[0];
    read(&mut lane, group, &[(block, name)], layers(group)).unwrap();
}

/// A long log goes on as it is where the drive has no room for a new one, so that keys can be forgotten.
#[test]
fn a_log_that_cannot_be_written_anew_goes_on_as_far_as_it_may() {
    let (disk, entries) = kept();
    let (store, _) = open(&disk).unwrap();
    let len = || disk.with("index", |bytes| bytes.len());
    // Up to where the next line has the log written anew.
    let line = |store: &Store, meta: usize| store.put(b"again", &[], &vec![7; meta]).unwrap();
    let most = 2 * len() + (1 << 20);
    line(&store, 0);
    let shortest = len() - (most - (1 << 20)) / 2;
    line(&store, (most - len() - shortest) / 2);
    assert_eq!(len(), most);
    disk.fail(0, Fault::Errno(rustix::io::Errno::NOSPC.raw_os_error()));
    assert!(store.delete(b"again").unwrap().is_some());
    assert!(store.is_sure());
    assert!(len() > most);
    line(&store, 0);
    store.delete(b"again").unwrap();
    assert_eq!(readable(&disk.power_lost(|| false), &entries).unwrap(), 6, "nothing else is left");
    // Nobody reads more than 8 MiB.
    for key in 0..4 {
        store.put(&[key], &[], &[7; 1 << 19]).unwrap();
    }
    drop(store);
    let (store, _) = open(&disk).unwrap();
    while len() < 6 << 20 {
        line(&store, 1 << 19);
    }
    line(&store, ((8 << 20) - len() - shortest) / 2);
    assert_eq!(len(), 8 << 20);
    disk.fail(0, Fault::Errno(rustix::io::Errno::NOSPC.raw_os_error()));
    assert!(store.delete(b"again").unwrap_err().to_string().contains("No space"));
    assert!(store.is_sure());
    assert!(store.delete(b"again").unwrap().is_some());
    let (store, _) = open(&disk.power_lost(|| false)).unwrap();
    assert_eq!(store.entries().len(), entries.len() + 4);
}

/// Else who changes a key next would take away what is not yet counted.
#[test]
fn the_next_change_of_a_key_waits_until_the_pages_of_this_one_count_as_kept() {
    let store = open(&FaultyDisk::default()).unwrap().0;
    let mut lane = store.lane().unwrap();
    let block = blocks(LARGE)[0];
    write(&mut lane, LARGE, &[(block, 1)]).unwrap();
    let (place, store) = ((LARGE, BlockId::new(block)), &store);
    let ((begins, begun), (lets, goes), (ends, ended)) = (channel(), channel(), channel());
    std::thread::scope(|scope| {
        let wanted = move || {
            begins.send(()).unwrap();
            goes.recv().unwrap();
            true
        };
        scope.spawn(move || store.put_if(b"it", &[place], b"", wanted).unwrap());
        begun.recv().unwrap();
        let pages = store::lock(&store.pages);
        lets.send(()).unwrap();
        scope.spawn(move || ends.send(store.is_sure()).unwrap());
        // If it does not wait for the index, it is done by then.
        let ended = ended.recv_timeout(std::time::Duration::from_millis(100));
        drop(pages);
        assert!(ended.is_err());
    });
    store.delete(b"it").unwrap();
    write(&mut lane, LARGE, &[(block, 2)]).unwrap();
}

#[test]
fn two_at_once_are_refused() {
    let (disk, _) = kept();
    let first = open(&disk).unwrap();
    assert!(matches!(open(&disk), Err(Error::Locked)));
    drop(first);
    open(&disk).unwrap();

    let place = Place::new();
    let folder = Folder::open(&place.0).unwrap();
    let first = open(&folder).unwrap();
    assert!(matches!(open(&Folder::open(&place.0).unwrap()), Err(Error::Locked)));
    drop(first);
    open(&folder).unwrap();
}

#[test]
fn what_is_kept_is_not_written_over_and_what_is_discarded_is_gone() {
    let (disk, entries) = kept();
    let (store, _) = open(&disk).unwrap();
    let mut lane = store.lane().unwrap();
    let ((group, block), name) = entries[0].1[0];
    assert!(matches!(write(&mut lane, group, &[(block, 1)]), Err(Error::Invalid { .. })));
    read(&mut lane, group, &[(block, name)], 0..3).unwrap();
    store.delete(b"first").unwrap();
    write(&mut lane, group, &[(block, 1)]).unwrap();
    read(&mut lane, group, &[(block, 1)], 0..3).unwrap();
    let (segment, extent) =
        (geometry().slot(group, BlockId::new(block)).segment, geometry().arena().extent_bytes);
    store.discard(segment * extent..(segment + 1) * extent).unwrap();
    assert!(matches!(read(&mut lane, group, &[(block, 1)], 0..3), Err(Error::Corrupt { .. })));
    assert_eq!(store.traffic().corrupt, 1);
}

/// A page that is written where space is yet to be given back does not go with it, and others are not held up.
#[test]
fn a_write_waits_until_the_space_under_it_has_been_given_back() {
    let store = scratch(&FaultyDisk::default());
    let (mut lane, mut other) = (store.lane().unwrap(), store.lane().unwrap());
    let page = (blocks(LARGE)[0], 1);
    let segment = store.geometry.slot(LARGE, BlockId::new(page.0)).segment;
    let extent = store.geometry.arena().extent_bytes;
    let hole = store.hole(segment * extent..(segment + 1) * extent);
    write(&mut other, SMALL, &[(blocks(SMALL)[0], 2)]).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| write(&mut lane, LARGE, &[page]).unwrap());
        // If it does not wait, it is done by then.
        std::thread::sleep(std::time::Duration::from_millis(100));
        hole.punch().unwrap();
        drop(hole);
    });
    read(&mut other, LARGE, &[page], layers(LARGE)).unwrap();
    read(&mut other, SMALL, &[(blocks(SMALL)[0], 2)], layers(SMALL)).unwrap();
}

/// Whether bytes that only this page has are anywhere in a file.
fn is_in(disk: &FaultyDisk, file: &str, group: GroupId, name: u64) -> bool {
    let bytes = payload(group, name);
    let own: HashSet<_> = bytes.windows(32).step_by(32).collect();
    disk.with(file, |file| file.windows(32).any(|window| own.contains(window)))
}

#[test]
fn what_is_zeroed_is_nowhere_and_the_rest_as_it_was() {
    let (disk, entries) = kept();
    let (store, _) = open(&disk).unwrap();
    let mut lane = store.lane().unwrap();
    let own = blocks(LARGE);
    let spare: Vec<_> = (0..own.len()).filter(|at| !(1..4).contains(at)).map(|at| own[at]).collect();
    let pages: Vec<_> = spare.iter().map(|&block| (block, 900 + u64::from(block))).collect();
    write(&mut lane, LARGE, &pages).unwrap();
    assert!(pages.iter().all(|&(_, name)| is_in(&disk, "pages", LARGE, name)));
    for (at, &(block, name)) in pages.iter().enumerate() {
        store.zero(LARGE, block..block + 1).unwrap();
        assert!(!is_in(&disk, "pages", LARGE, name));
        assert!(matches!(read(&mut lane, LARGE, &[(block, name)], 0..3), Err(Error::Corrupt { .. })));
        pages[at + 1..].iter().for_each(|page| read(&mut lane, LARGE, &[*page], 0..3).unwrap());
    }
    // A header, and the layers of 5000, 64 and 4096 bytes.
    assert_eq!(store.traffic().bytes_cleared, pages.len() as u64 * 5 * 4096);
    let kept = entries[0].1[0].0.1;
    assert!(matches!(store.zero(LARGE, kept..kept + 1), Err(Error::Invalid { .. })));
    disk.fail(0, Fault::Errno(rustix::io::Errno::IO.raw_os_error()));
    assert!(matches!(store.zero(LARGE, spare[0]..spare[0] + 1), Err(Error::Io { .. })));
    drop((lane, store));
    assert_eq!(readable(&disk, &entries).unwrap(), 6);
}

/// Segments of which nothing is kept give their space back when a store is opened, others' parts are zeroed where that is asked for.
#[test]
fn what_others_have_left_goes_and_what_is_kept_stays() {
    let (disk, entries) = kept();
    let (store, _) = open(&disk).unwrap();
    let segment = |(group, block): At| geometry().slot(group, BlockId::new(block)).segment;
    let places: Vec<At> = entries.iter().flat_map(|(_, pages)| pages.iter().map(|page| page.0)).collect();
    let shares = |block: &u32| places.iter().any(|&kept| segment(kept) == segment((LARGE, *block)));
    let spare = |block: &u32| !places.contains(&(LARGE, *block));
    let (beside, apart): (Vec<u32>, Vec<u32>) = blocks(LARGE).into_iter().filter(spare).partition(shares);
    write(&mut store.lane().unwrap(), LARGE, &[(beside[0], 901), (apart[0], 902)]).unwrap();
    drop(store);
    let (store, _) = open(&disk).unwrap();
    assert!(is_in(&disk, "pages", LARGE, 901));
    assert!(!is_in(&disk, "pages", LARGE, 902));
    store.zero_on_free().unwrap();
    assert!(!is_in(&disk, "pages", LARGE, 901));
    drop(store);
    assert_eq!(readable(&disk, &entries).unwrap(), 6);
    let (store, _) = open(&disk).unwrap();
    entries.iter().for_each(|(key, _)| drop(store.delete(key).unwrap()));
    store.zero_on_free().unwrap();
    assert!(disk.with("pages", |bytes| bytes.iter().all(|&byte| byte == 0)));
}

#[test]
fn a_smaller_disk_memory_is_refused_while_something_is_kept_behind_its_end_and_what_else_is_there_goes() {
    let disk = FaultyDisk::default();
    let opened = |segments: u64| {
        let geometry = Geometry::new(&[vec![ALIGN]], segments * 2 * ALIGN).unwrap();
        Store::open(&disk, geometry, FINGERPRINT, None)
    };
    let store = Arc::new(opened(15).unwrap().0);
    let [low, high] = [3, 14].map(BlockId::new);
    store.lane().unwrap().write(LARGE, &[low, high], |_, _, target| target.fill(7)).unwrap();
    store.put(b"low", &[(LARGE, low)], b"").unwrap();
    store.put(b"high", &[(LARGE, high)], b"").unwrap();
    let there = || disk.with("pages", |bytes| bytes.iter().filter(|&&byte| byte == 7).count() as u64 / ALIGN);
    assert_eq!(there(), 2);
    drop(store);
    let Err(refused) = opened(14) else { panic!("it is kept in the last segment of 15") };
    assert!(matches!(refused, Error::Mismatch { arguments: "disk_memory", .. }), "{refused}");
    assert!(refused.to_string().contains("122880 bytes on disk, and 114688 bytes here"), "{refused}");
    let (store, recovered) = opened(15).unwrap();
    assert_eq!((recovered.lost.len(), there()), (0, 2));
    store.delete(b"high").unwrap();
    drop(store);
    assert_eq!((opened(8).unwrap().1.lost.len(), there()), (0, 1));
    assert_eq!(opened(15).unwrap().0.entries().len(), 1);
}

#[test]
fn a_write_over_budget_is_refused_before_anything_is_lost() {
    let disk = FaultyDisk::default();
    let page = geometry().written_bytes(LARGE);
    let budget = Budget::new(2 * page, std::time::SystemTime::now());
    let store = Arc::new(Store::scratch(&disk, geometry(), FINGERPRINT, Some(budget)).unwrap());
    let mut lane = store.lane().unwrap();
    write(&mut lane, LARGE, &[(0, 1), (1, 2)]).unwrap();
    let refused = write(&mut lane, LARGE, &[(0, 3)]).unwrap_err();
    assert!(matches!(refused, Error::OverBudget { wanted, .. } if wanted == page), "{refused}");
    read(&mut lane, LARGE, &[(0, 1), (1, 2)], 0..3).unwrap();
}

#[test]
fn what_was_written_before_a_kill_counts_for_the_next_store() {
    let disk = FaultyDisk::default();
    let page = geometry().written_bytes(LARGE);
    let opened = |disk: &FaultyDisk| {
        let budget = Budget::new(3 * page, std::time::SystemTime::now());
        Arc::new(Store::open(disk, geometry(), FINGERPRINT, Some(budget)).unwrap().0)
    };
    let store = opened(&disk);
    write(&mut store.lane().unwrap(), LARGE, &[(0, 1), (1, 2)]).unwrap();
    let refused = write(&mut opened(&disk.killed()).lane().unwrap(), LARGE, &[(2, 3)]).unwrap_err();
    assert!(matches!(refused, Error::OverBudget { left, .. } if left > page / 2), "{refused}");
    store.put(b"it", &[(LARGE, BlockId::new(0)), (LARGE, BlockId::new(1))], b"").unwrap();
    write(&mut opened(&disk.killed()).lane().unwrap(), LARGE, &[(2, 3)]).unwrap();
}

#[test]
fn a_failing_operation_leaves_an_error_with_its_errno_and_the_rest_as_it_was() {
    let disk = FaultyDisk::default();
    let store = scratch(&disk);
    let mut lane = store.lane().unwrap();
    write(&mut lane, LARGE, &[(0, 1)]).unwrap();
    let before = disk.operations();
    write(&mut lane, LARGE, &[(1, 2)]).unwrap();
    for after in 0..disk.operations() - before {
        for (errno, name) in [(rustix::io::Errno::NOSPC, "No space"), (rustix::io::Errno::IO, "Input/output")]
        {
            disk.fail(after, Fault::Errno(errno.raw_os_error()));
            let error = write(&mut lane, LARGE, &[(1, 3)]).unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
            disk.calm();
            assert!(read(&mut lane, LARGE, &[(1, 3)], 0..3).is_err());
            read(&mut lane, LARGE, &[(0, 1)], 0..3).unwrap();
        }
    }
    write(&mut lane, LARGE, &[(1, 4)]).unwrap();
    read(&mut lane, LARGE, &[(1, 4)], 0..3).unwrap();
}

/// What the system did in part, or was kept from, goes on where it ended; behind the end of the file there is nothing.
#[test]
fn short_and_interrupted_operations_go_on() {
    let disk = FaultyDisk::default();
    let store = scratch(&disk);
    let mut lane = store.lane().unwrap();
    let page = [(blocks(LARGE)[1], 1)];
    let before = disk.operations();
    write(&mut lane, LARGE, &page).unwrap();
    let writes = disk.operations() - before;
    let [interrupted, again] = [rustix::io::Errno::INTR, rustix::io::Errno::AGAIN];
    for fault in [Fault::Short, Fault::Errno(interrupted.raw_os_error()), Fault::Errno(again.raw_os_error())]
    {
        for after in 0..writes {
            disk.fail(after, fault);
            write(&mut lane, LARGE, &page).unwrap();
            for after in 0..2 {
                disk.fail(after, fault);
                read(&mut lane, LARGE, &page, layers(LARGE)).unwrap();
            }
        }
    }
    disk.with("scratch 1", Vec::clear);
    let result = read(&mut lane, LARGE, &page, layers(LARGE));
    assert!(matches!(result, Err(Error::Corrupt { .. })), "{result:?}");
}

/// Parts of real files in any order, and noise: none of it panics, and what comes out was put in.
#[test]
fn hostile_files_are_refused_or_read_right() {
    let (disk, entries) = kept();
    let whole = disk.with("index", |bytes| bytes.clone());
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(2000));
    let piece =
        (0..whole.len(), 0..whole.len(), proptest::collection::vec(any::<u8>(), 0..12), any::<bool>());
    let pieces = proptest::collection::vec(piece, 0..6);
    runner
        .run(&(0..whole.len(), pieces), |(start, pieces)| {
            let mut bytes = whole[..start].to_vec();
            for (a, b, noise, keeps) in pieces {
                bytes.extend(&whole[a.min(b)..a.max(b)]);
                bytes.extend(&noise);
                if keeps {
                    bytes.extend(&whole[start..]);
                }
            }
            let hostile = disk.killed();
            hostile.with("index", |index| *index = bytes);
            let _ = readable(&hostile, &entries);
            Ok(())
        })
        .unwrap();
}

/// Whoever can write checksums can write any line: lengths and blocks beyond the file are refused all the same.
#[test]
fn lines_with_impossible_fields_are_refused() {
    let (disk, _) = kept();
    let pages = |group, block, generation| vec![format::Record { group, block, generation, sum: 3 }];
    for pages in
        [pages(2, 0, 1), pages(255, 0, 1), pages(0, u32::MAX, 1), pages(1, 1 << 29, 1), pages(0, 3, u64::MAX)]
    {
        let hostile = disk.killed();
        hostile.with("index", |bytes| {
            let line = format::Line::Put { key: b"x".to_vec(), pages, meta: Vec::new() };
            let (salt, at) = (format::IndexHeader::parse(bytes).unwrap().0.salt, bytes.len() as u64);
            bytes.extend(line.to_bytes(salt, 2, at));
        });
        let (store, recovered) = open(&hostile).unwrap();
        let known = store.entries().iter().any(|(key, _)| key == b"x");
        assert_eq!(known, recovered.lost.iter().all(|(key, _)| key != b"x"));
    }
    for lie in [0u32, 3, 4, u32::MAX / 24, u32::MAX] {
        for field in [0, 16, 20, 24, 28] {
            let hostile = disk.killed();
            hostile.with("index", |bytes| {
                let (salt, at) = (format::IndexHeader::parse(bytes).unwrap().0.salt, bytes.len());
                let line = format::Line::Put { key: b"x".to_vec(), pages: pages(0, 3, 9), meta: vec![1] };
                bytes.extend(line.to_bytes(salt, 2, at as u64));
                bytes[at + field..at + field + 4].copy_from_slice(&lie.to_le_bytes());
                let sum = xxhash_rust::xxh3::xxh3_64_with_seed;
                let head = sum(&bytes[at..at + 8], salt ^ at as u64);
                bytes[at + 8..at + 16].copy_from_slice(&head.to_le_bytes());
                let end = bytes.len() - 8;
                let body = sum(&bytes[at + 16..end], head);
                bytes[end..].copy_from_slice(&body.to_le_bytes());
            });
            assert!(open(&hostile).unwrap().0.entries().iter().all(|(key, _)| key != b"x"), "{field} {lie}");
        }
    }
}

/// A page that is written next would get the same generation in the same block, and be taken for the one that was read there.
#[test]
fn an_entry_with_generations_of_a_later_opening_than_its_index_is_lost() {
    let (disk, _) = kept();
    let [block, another] = [5, 6].map(|at| blocks(LARGE)[at]);
    for (ahead, is_lost) in [(-1, false), (0, true), (1 << 40, true)] {
        let hostile = disk.killed();
        let next = hostile.with("index", |bytes| {
            let header = format::IndexHeader::parse(bytes).unwrap().0;
            let next = format::first_generation(header.epoch + 1);
            let generation = next.checked_add_signed(ahead).unwrap();
            let pages = vec![format::Record { group: LARGE.0, block, generation, sum: 3 }];
            let line = format::Line::Put { key: b"x".to_vec(), pages, meta: Vec::new() };
            bytes.extend(line.to_bytes(header.salt, header.lines + 2, bytes.len() as u64));
            next
        });
        let (store, recovered) = open(&hostile).unwrap();
        assert_eq!(store.entries().iter().all(|(key, _)| key != b"x"), is_lost, "{ahead}");
        let told = recovered.lost.iter().any(|(key, why)| key == b"x" && why.contains("of a later opening"));
        assert_eq!(told, is_lost, "{ahead}: {:?}", recovered.lost);
        write(&mut store.lane().unwrap(), LARGE, &[(another, 1)]).unwrap();
        assert_eq!(store.generations(LARGE, &[BlockId::new(another)]), [Some(next)]);
    }
}

#[test]
fn hostile_places_are_refused() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let place = Place::new();
    let path = |name: &str| place.0.join(name);
    let refused = |name: &str| {
        let folder = Folder::open(&path(name));
        let error = folder.and_then(|folder| open(&folder)).unwrap_err();
        error.to_string()
    };
    let rights =
        |name: &str, mode| std::fs::set_permissions(path(name), PermissionsExt::from_mode(mode)).unwrap();
    std::fs::create_dir(&place.0).unwrap();
    assert!(refused("no/such").contains("No such file"));
    std::fs::write(path("file"), b"").unwrap();
    assert!(refused("file").contains("Not a directory"));
    open(&Folder::open(&path("good")).unwrap()).unwrap();
    assert_eq!(std::fs::metadata(path("good")).unwrap().permissions().mode() & 0o777, 0o700);
    for name in ["pages", "index"] {
        let mode = std::fs::metadata(path("good").join(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
    symlink(path("good"), path("link")).unwrap();
    assert!(refused("link").contains("Not a directory") || refused("link").contains("symbolic"));
    rights("good", 0o770);
    assert!(refused("good").contains("mode 770"));
    rights("good", 0o700);
    for name in ["good/pages", "good/index"] {
        rights(name, 0o640);
        assert!(refused("good").contains("mode 640"));
        rights(name, 0o600);
        std::fs::rename(path(name), path("aside")).unwrap();
        symlink(path("aside"), path(name)).unwrap();
        assert!(refused("good").contains("symbolic links"));
        std::fs::remove_file(path(name)).unwrap();
        std::fs::hard_link(path("aside"), path(name)).unwrap();
        assert!(refused("good").contains("2 names"));
        std::fs::remove_file(path("aside")).unwrap();
        open(&Folder::open(&path("good")).unwrap()).unwrap();
    }
    std::fs::remove_file(path("good/index")).unwrap();
    std::fs::create_dir(path("good/index")).unwrap();
    rights("good/index", 0o700);
    assert!(refused("good").contains("not a file"));
}
