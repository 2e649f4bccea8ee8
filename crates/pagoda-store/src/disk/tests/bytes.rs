//! The bytes of the file, drawn by hand after docs/layout.md.

use super::*;
use xxhash_rust::xxh3::xxh3_64;

/// A page: its group and block, the name of its bytes, its generation.
type Drawn = (GroupId, u32, u64, u64);

fn padded(bytes: u64) -> u64 {
    bytes.div_ceil(4096) * 4096
}

/// The file with these pages and no others, of `len` bytes.
fn drawn(pages: &[Drawn], extent_bytes: u64, len: usize) -> Vec<u8> {
    let blocks_in = |runs: &[u64]| extent_bytes / runs.iter().sum::<u64>();
    let segment = |runs: &[u64]| blocks_in(runs) * (4096 + runs.iter().map(|&run| padded(run)).sum::<u64>());
    let segment_bytes = RUNS.map(segment).into_iter().max().unwrap();
    let mut file = vec![0; len];
    let mut put = |at: u64, bytes: &[u8]| file[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    for &(group, block, name, generation) in pages {
        let (runs, bytes) = (RUNS[group.index()], payload(group, name));
        let (count, block_bytes) = (blocks_in(runs), bytes.len() as u64);
        let extent = u64::from(block) * block_bytes / extent_bytes;
        let slot = u64::from(block) - (extent * extent_bytes).div_ceil(block_bytes);
        let (mut at, mut from, mut sums) = (extent * segment_bytes + count * 4096, 0, Vec::new());
        for &run in runs {
            let mut layer = bytes[from..from + run as usize].to_vec();
            layer.resize(padded(run) as usize, 0);
            put(at + slot * padded(run), &layer);
            sums.extend(xxh3_64(&layer).to_le_bytes());
            (at, from) = (at + count * padded(run), from + run as usize);
        }
        let mut header = [&b"PAGODAPG"[..], &2u32.to_le_bytes(), &u32::from(group.0).to_le_bytes()].concat();
        header.extend(FINGERPRINT);
        header.extend([block.to_le_bytes(), (runs.len() as u32).to_le_bytes()].concat());
        header.extend([generation, block_bytes, 0].map(u64::to_le_bytes).concat());
        header.extend(sums);
        header.resize(4096, 0);
        let sum = xxh3_64(&header);
        header[56..64].copy_from_slice(&sum.to_le_bytes());
        put(extent * segment_bytes + slot * 4096, &header);
    }
    file
}

/// What pages leave in the memory that they are written from appears nowhere: neither in padding nor in headers.
#[test]
fn the_file_is_as_docs_layout_md_draws_it() {
    let disk = FaultyDisk::default();
    let store = scratch(&disk);
    let mut lane = store.lane().unwrap();
    let mut pages = Vec::new();
    for turn in 0..2 {
        pages.clear();
        for group in [LARGE, SMALL] {
            let named: Vec<_> =
                blocks(group).iter().map(|&block| (block, u64::from(block) + 5000 * turn)).collect();
            write(&mut lane, group, &named).unwrap();
            let places: Vec<_> = named.iter().map(|&(block, _)| BlockId::new(block)).collect();
            let generations = store.generations(group, &places);
            pages.extend(
                named.iter().zip(generations).map(|(&(block, name), now)| (group, block, name, now.unwrap())),
            );
        }
    }
    let extent_bytes = store.geometry().arena().extent_bytes;
    disk.with("scratch 1", |file| assert!(*file == drawn(&pages, extent_bytes, file.len())));
}

/// Headers written here are known; those of an earlier process are read once.
#[test]
fn a_header_is_read_once() {
    let (disk, entries) = kept();
    let (store, _) = open(&disk).unwrap();
    let mut lane = store.lane().unwrap();
    let ((group, block), name) = entries[0].1[0];
    let mut reads = || {
        let before = store.traffic().bytes_read;
        read(&mut lane, group, &[(block, name)], 0..1).unwrap();
        store.traffic().bytes_read - before
    };
    assert_eq!([reads(), reads()], [4096 + padded(RUNS[0][0]), padded(RUNS[0][0])]);
}
