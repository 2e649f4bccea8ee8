//! The space of pages: given back, zeroed, and how much may be written.

use super::*;
use crate::disk::io::ALIGN;
use std::collections::HashSet;

/// A page that is written where space is about to be given back does not go with it, and other writes are not held up.
#[test]
fn a_write_waits_until_the_space_under_it_has_been_given_back() {
    let store = scratch(&FaultyDisk::default());
    let (mut lane, mut other) = (store.lane().unwrap(), store.lane().unwrap());
    let page = (blocks(LARGE)[0], 1);
    let segment = store.geometry.slot(LARGE, BlockId::new(page.0)).segment;
    let extent = store.geometry.arena().extent_bytes;
    let hole = store.hole(segment * extent..(segment + 1) * extent);
    // Another one comes and goes meanwhile.
    drop(store.hole((segment + 2) * extent..(segment + 3) * extent));
    write(&mut other, SMALL, &[(blocks(SMALL)[0], 2)]).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| write(&mut lane, LARGE, &[page]).unwrap());
        // If it does not wait, it has ended by then.
        std::thread::sleep(std::time::Duration::from_millis(100));
        hole.punch().unwrap();
        drop(hole);
    });
    read(&mut other, LARGE, &[page], layers(LARGE)).unwrap();
    read(&mut other, SMALL, &[(blocks(SMALL)[0], 2)], layers(SMALL)).unwrap();
}

/// Whether bytes that are unique to this page are anywhere in a file.
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

/// When a store is opened, segments without anything kept give their space back; unused parts of others are zeroed on
/// request.
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

/// Whether or not anything was kept.
#[test]
fn a_store_that_is_closed_has_noted_what_it_wrote_and_no_more() {
    let disk = FaultyDisk::default();
    let page = geometry().written_bytes(LARGE);
    let opened = || {
        let budget = Budget::new(100 * page, std::time::SystemTime::now());
        Arc::new(Store::open(&disk, geometry(), FINGERPRINT, Some(budget)).unwrap().0)
    };
    for turn in 0..100 {
        let store = opened();
        assert!(store.is_settled());
        write(&mut store.lane().unwrap(), LARGE, &[(0, turn)]).unwrap();
        assert!(!store.is_settled());
    }
    let refused = write(&mut opened().lane().unwrap(), LARGE, &[(0, 1)]).unwrap_err();
    assert!(matches!(refused, Error::OverBudget { left, .. } if left < page), "{refused}");
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

/// Existing segments keep their size, whatever it would be in a new tier of the other budget.
#[test]
fn a_tier_with_pages_grows_and_shrinks() {
    let (disk, entries) = kept();
    let with = |budget| Geometry::new(&RUNS.map(<[u64]>::to_vec), budget).unwrap();
    let open_with =
        |budget| Store::open(&disk, with(budget), FINGERPRINT, None).map(|(store, _)| Arc::new(store));
    let count = readable(&disk, &entries).unwrap();
    let (described, (segment_bytes, segments)) = (geometry().describe(), geometry().segments());
    for budget in [16 << 20, 30 << 20] {
        assert_ne!(with(budget).describe(), described);
        let store = open_with(budget).unwrap();
        assert_eq!(store.geometry().describe(), described);
        assert_eq!(store.geometry().segments(), (segment_bytes, budget / segment_bytes));
        let last = (0..10_000).rfind(|&block| store.geometry().has(SMALL.0, block)).unwrap();
        let pages = [(last, 1000 + budget)];
        write(&mut store.lane().unwrap(), SMALL, &pages).unwrap();
        store.put(b"at the end", &[(SMALL, BlockId::new(last))], b"").unwrap();
        drop(store);
        let store = open_with(30 << 20).unwrap();
        read(&mut store.lane().unwrap(), SMALL, &pages, layers(SMALL)).unwrap();
        drop(store);
        let refused = open_with(4 << 20).map(drop).unwrap_err().to_string();
        assert!(refused.contains("the end of what is kept") && refused.contains("disk_memory"), "{refused}");
        open_with(budget).unwrap().delete(b"at the end").unwrap();
        assert_eq!(readable(&disk, &entries).unwrap(), count, "with the first budget");
    }
    let least = segment_bytes * 2;
    let refused = open_with(least).map(drop).unwrap_err().to_string();
    assert!(segments > 2 && refused.contains("the end of what is kept"), "{refused}");
    assert_eq!(readable(&disk, &entries).unwrap(), count);

    let large = FaultyDisk::default();
    let open_large = |budget| Store::open(&large, with(budget), FINGERPRINT, None).map(drop);
    open_large(30 << 20).unwrap();
    let refused = open_large(least).unwrap_err();
    assert!(matches!(refused, Error::Invalid { argument: "disk_memory", .. }), "{refused}");
}
