//! What is kept under keys, and what happens to it when writing fails.

use super::*;
use std::sync::mpsc::channel;

/// Where the pages of the first of two keys lie.
fn places(entries: &Entries) -> Vec<(GroupId, BlockId)> {
    entries[0].1.iter().map(|((group, block), _)| (*group, BlockId::new(*block))).collect()
}

/// Whichever operation of keeping something fails, the next attempt works, and both report the truth.
#[test]
fn keeping_goes_on_after_it_has_failed() {
    for after in 0..3 {
        let (disk, entries) = kept();
        let (store, _) = open(&disk).unwrap();
        let places = places(&entries);
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

/// Otherwise doubt about the index could last for as long as something else fails.
#[test]
fn a_change_makes_sure_of_the_index_before_all_else() {
    let (disk, entries) = kept();
    let (store, _) = open(&disk).unwrap();
    let places = places(&entries);
    let fault = Fault::Errno(rustix::io::Errno::IO.raw_os_error());
    // After the sync of the pages and the line comes the line's sync; after the new index, the sync of the pages.
    for (operations_before, is_sure) in [(2, false), (1, true)] {
        disk.fail(operations_before, fault);
        store.put(b"more", &places, b"").unwrap_err();
        assert_eq!(store.is_sure(), is_sure);
    }
    store.put(b"more", &places, b"").unwrap();
}

/// The drive may have its line nevertheless: in one of the two cases it has.
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

/// If pages of two keys were written to the same block, this is the one with the older page, whichever comes first.
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

/// Otherwise the next change of the key would take away what is not counted yet.
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
        let pages = crate::lock(&store.pages);
        lets.send(()).unwrap();
        scope.spawn(move || ends.send(store.is_sure()).unwrap());
        // If it does not wait for the index, it has ended by then.
        let ended = ended.recv_timeout(std::time::Duration::from_millis(100));
        drop(pages);
        assert!(ended.is_err());
    });
    store.delete(b"it").unwrap();
    write(&mut lane, LARGE, &[(block, 2)]).unwrap();
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
