//! Files that are not as we left them, or that belong to others.

use super::*;
use proptest::prelude::*;

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

    // The page is rewritten and kept; then its old bytes, which verify by themselves, come back.
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
    let other = Geometry::new(&[vec![5000, 64, 4097], vec![700]], 4 << 20).unwrap();
    let other = Store::open(&disk.killed(), other, FINGERPRINT, None).unwrap_err();
    assert!(other.to_string().contains("layout"), "{other}");
}

/// Parts of real files in any order, and noise: nothing panics, and whatever is read was written before.
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
