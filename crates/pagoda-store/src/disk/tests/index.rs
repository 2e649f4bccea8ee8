//! The log of what is kept: how it grows and is rewritten, and what is read from a damaged one.

use super::*;
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

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

/// Keys that an earlier process kept and that were then kept again, forgotten or both: what each has since its last save.
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

/// What a disk keeps by key, checked to be as last saved, and what was reported about the rest.
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

/// One damaged place, of any length and anywhere: no key is as an older save left it, and none is gone without a report. Only
/// a missing end of an index can go unnoticed.
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
    // Each line that an index was begun with is about a key of its own: this one is about a key that is gone.
    let spoilt = disk.killed();
    let both = lines.iter().filter(|(_, number, _)| *number == 3).map(|(at, ..)| at.start);
    spoilt.with("index", |bytes| both.for_each(|at| bytes[at] ^= 1));
    let (found, recovered, _) = newest(&spoilt, &kept);
    assert_eq!((found.len(), recovered.lost_lines, recovered.lost), (4, 1, vec![]));
    // If some of these are missing at the end, so is everything that was added.
    for cut in start..lines[3].0.end {
        let spoilt = disk.killed();
        spoilt.with("index", |bytes| bytes.truncate(cut));
        let (found, recovered, _) = newest(&spoilt, &kept);
        // Where bytes were cut off, this disk reads zeros, and a line may end with zeros.
        let is_whole = |at: &Range<usize>| whole[cut.min(at.end)..at.end].iter().all(|&byte| byte == 0);
        let count = lines[..4].iter().filter(|(at, ..)| is_whole(at)).count();
        assert_eq!((found.len(), recovered.lost.len(), recovered.lost_lines), (0, count, 4 - count as u64));
    }
}

/// Those who choose keys and meta cannot write lines with them, even if the line around them is damaged.
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
    // With a known salt it would be one.
    let bytes = disk.with("index", |bytes| bytes.clone());
    assert!(format::Lines::new(&bytes, 0, at).any(|(_, _, line)| line == forged));
}

/// Page generations have 24 bits for how often an index was opened: with more openings they would start over.
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

/// A drive that is full when a store is opened: what is there can be read, and what is kept from then on is there as well
/// once there is space again.
#[test]
fn an_index_that_cannot_be_written_anew_is_read_and_written_later() {
    let (disk, entries) = kept();
    let full = Fault::Errno(rustix::io::Errno::NOSPC.raw_os_error());
    // After three operations: the lock, then the sync and the read of the existing index.
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

/// An index that is filled to its limit: no more is accepted, what is there stays, and any key can be forgotten.
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

/// A log without room for a line is written anew before it, also if it has room for one copy of it.
#[test]
fn a_long_line_does_not_take_an_index_beyond_its_limit() {
    let (disk, entries) = kept();
    let (store, _) = open(&disk).unwrap();
    let ((group, block), _) = entries[0].1[0];
    let put = |key: &[u8], meta| store.put(key, &[(group, BlockId::new(block))], &vec![7; meta]).unwrap();
    put(b"stays", 1_800_000);
    put(b"goes", 1_800_000);
    store.delete(b"goes").unwrap();
    assert!(disk.with("index", |bytes| bytes.len()) > 7_200_000);
    put(b"comes", 1_000_000);
    let (store, _) = open(&disk.killed()).unwrap();
    let meta = |key: &[u8]| {
        store.entries().into_iter().find_map(|(of, entry)| (of == key).then_some(entry.meta.len()))
    };
    assert_eq!([meta(b"stays"), meta(b"goes"), meta(b"comes")], [Some(1_800_000), None, Some(1_000_000)]);
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

/// If the drive has no room for a new log, a long one stays in use, so that keys can be forgotten.
#[test]
fn a_log_that_cannot_be_written_anew_goes_on_as_far_as_it_may() {
    let (disk, entries) = kept();
    let (store, _) = open(&disk).unwrap();
    let len = || disk.with("index", |bytes| bytes.len());
    // Up to the point where the next line would cause a rewrite.
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

/// Anyone who can write checksums can write any line: lengths and blocks beyond the file are refused nevertheless.
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

/// The next page written would get the same generation in the same block, and be mistaken for the one that was read there.
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
