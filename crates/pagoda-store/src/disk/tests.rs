//! Tests of the store: what they share, and reading and writing.

use super::io::fault::{Fault, FaultyDisk};
use super::io::{Access, Directory, Folder};
use super::segment::Slot;
use super::*;
use pagoda_core::ids::{BlockId, GroupId};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

mod bytes;
mod damage;
mod index;
mod keys;
mod kills;
mod model;
mod parsers;
mod places;
mod space;

const FINGERPRINT: Fingerprint = *b"a model of tests";
const LARGE: GroupId = GroupId(0);
const SMALL: GroupId = GroupId(1);
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

/// Bytes that are unique to the page `name`.
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

/// Reads layers of pages and checks the bytes.
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

/// Blocks of a group, from segments in which the other group has none.
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
    let blocks: Vec<_> = (0..4).map(BlockId::new).collect();
    lane.write(LARGE, &blocks, |page, range, target| {
        target.iter_mut().zip(range).for_each(|(target, at)| *target = byte(page, at));
    })
    .unwrap();
    lane.read(LARGE, &blocks, 0..2, |page, range, source| {
        assert!(source.iter().zip(range).all(|(&source, at)| source == byte(page, at)));
    })
    .unwrap();
    let written = store.traffic();
    assert_eq!(written.bytes_written, 4 * (4096 + 3_002_368 + (9 << 20)));
    assert_eq!(written.bytes_read, written.bytes_written - 4 * 4096, "headers are known");
    for (page, block) in blocks.iter().enumerate() {
        lane.read(LARGE, &[*block], 0..2, |_, range, source| {
            assert!(source.iter().zip(range).all(|(&source, at)| source == byte(page, at)));
        })
        .unwrap();
    }
}

#[test]
fn neighbours_share_operations() {
    let disk = FaultyDisk::default();
    let store = scratch(&disk);
    let mut lane = store.lane().unwrap();
    let segment = |block: u32| geometry().slot(LARGE, BlockId::new(block)).segment;
    let own = blocks(LARGE);
    let pages: Vec<_> =
        own.iter().filter(|&&block| segment(block) == segment(own[0])).map(|&b| (b, 1)).collect();
    assert!(pages.len() > 1);
    let mut count = |pages: &[(u32, u64)]| {
        let start = disk.operations();
        write(&mut lane, LARGE, pages).unwrap();
        let written = disk.operations();
        read(&mut lane, LARGE, pages, layers(LARGE)).unwrap();
        [written - start, disk.operations() - written]
    };
    // A page alone takes one for its header and one for each layer.
    assert_eq!(count(&pages[..1]), [1 + 3, 3]);
    assert_eq!(count(&pages[1..]), [1 + 3, 3]);
    // In a segment that is full the layers follow each other.
    let full = store.geometry().blocks_in(segment(own[0])).filter(|&(group, _)| group == LARGE);
    assert_eq!(full.count(), pages.len());
    assert_eq!(count(&pages), [1 + 1, 1]);
}

/// What is written to two slots at once is not written next to the first of them, where another page lies.
#[test]
fn slots_that_are_apart_are_no_neighbours() {
    let disk = FaultyDisk::default();
    let store = scratch(&disk);
    let mut lane = store.lane().unwrap();
    let at = |segment, slot| {
        let is = |&block: &u32| geometry().slot(SMALL, BlockId::new(block)) == Slot { segment, slot };
        (0..).find(is).unwrap()
    };
    let (first, next) = ((at(1, 0), 1), (at(1, 1), 2));
    for apart in [(at(1, 2), 3), (at(3, 1), 3)] {
        write(&mut lane, SMALL, &[next]).unwrap();
        write(&mut lane, SMALL, &[first, apart]).unwrap();
        for pages in [&[next][..], &[apart], &[first, apart]] {
            read(&mut lane, SMALL, pages, layers(SMALL)).unwrap();
        }
    }
}

/// A lane gathers two of these pages at once, of five.
#[test]
fn what_is_left_of_a_stretch_is_written_and_read_as_well() {
    let disk = FaultyDisk::default();
    let geometry = Geometry::new(&[vec![3_000_001]], 200 << 20).unwrap();
    let store = Arc::new(Store::scratch(&disk, geometry, FINGERPRINT, None).unwrap());
    let mut lane = store.lane().unwrap();
    let blocks: Vec<_> = (0..5).map(BlockId::new).collect();
    assert_eq!(store.geometry().slot(LARGE, blocks[4]), Slot { segment: 0, slot: 4 });
    lane.write(LARGE, &blocks, |page, _, target| target.fill(page as u8 + 1)).unwrap();
    let mut seen = Vec::new();
    let note = |page: usize, _, source: &[u8]| {
        assert!(source.iter().all(|&byte| byte == page as u8 + 1));
        seen.push(page);
    };
    lane.read(LARGE, &blocks, 0..1, note).unwrap();
    assert_eq!(seen, [0, 1, 2, 3, 4]);
}

/// Their headers are read, and those of the others are not needed.
#[test]
fn pages_that_were_read_before_come_back_with_others() {
    let (disk, entries) = kept();
    let mut lane = open(&disk).unwrap().0.lane().unwrap();
    let pages: Vec<_> = entries[0].1.iter().map(|&((_, block), name)| (block, name)).collect();
    read(&mut lane, LARGE, &pages[1..2], layers(LARGE)).unwrap();
    read(&mut lane, LARGE, &pages, layers(LARGE)).unwrap();
}

type At = (GroupId, u32);

/// Their checksums take more than one block of the drive.
#[test]
fn pages_may_have_many_hundreds_of_layers() {
    const LAYERS: u64 = 600;
    let disk = FaultyDisk::default();
    let open = || {
        let geometry = Geometry::new(&[vec![8; LAYERS as usize]], 64 << 20).unwrap();
        Arc::new(Store::open(&disk, geometry, FINGERPRINT, None).unwrap().0)
    };
    let (blocks, store) = ([0, 1].map(BlockId::new), open());
    let fill = |page: usize, range: std::ops::Range<u64>, target: &mut [u8]| {
        target.copy_from_slice(&(range.start + page as u64).to_le_bytes());
    };
    store.lane().unwrap().write(LARGE, &blocks, fill).unwrap();
    store.put(b"key", &blocks.map(|block| (LARGE, block)), b"").unwrap();
    drop(store);
    let mut seen = Vec::new();
    let mut note = |page: usize, range: std::ops::Range<u64>, bytes: &[u8]| {
        assert_eq!(bytes, (range.start + page as u64).to_le_bytes());
        seen.push((page, range.start / 8));
    };
    open().lane().unwrap().read(LARGE, &blocks, 0..LAYERS as usize, &mut note).unwrap();
    seen.sort_unstable();
    assert!(
        seen.into_iter().eq([0, 1].into_iter().flat_map(|page| (0..LAYERS).map(move |layer| (page, layer))))
    );
}

/// Otherwise callers would give up on a drive that is only slow.
#[test]
fn a_call_that_moves_no_bytes_is_progress_as_well() {
    let place = Place::new();
    let folder = Folder::open(&place.0).unwrap();
    let store = Arc::new(Store::scratch(&folder, geometry(), FINGERPRINT, None).unwrap());
    let (progress, traffic) = (store.progress(), store.traffic());
    store.discard(0..store.geometry().arena().extent_bytes).unwrap();
    assert!(store.progress() != progress);
    assert_eq!(store.traffic(), traffic);
}

/// Keys, and what each keeps.
type Entries = Vec<(Vec<u8>, Vec<(At, u64)>)>;

/// A store with two keys, on a disk that can be spoilt.
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

/// Opens a spoilt store and reads everything it claims to have; returns how many pages came back, all of them right.
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

/// Operations that the system did in part or not at all continue where they stopped; past the end of the file there is
/// nothing.
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
