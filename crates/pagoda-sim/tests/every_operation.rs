//! One short life of a store, again and again: each time the next operation of its disk goes wrong, until every one has.

use pagoda_core::ids::{BlockId, GroupId};
use pagoda_store::disk::io::fault::{Event, Fault, FaultyDisk};
use pagoda_store::disk::{Error, Geometry, Result, Store};
use rustix::io::Errno;
use std::sync::Arc;

const GROUP: GroupId = GroupId(0);
const RUNS: [u64; 2] = [5000, 700];
const KEYS: [(&[u8], [u32; 3]); 2] = [(b"first", [0, 1, 2]), (b"other", [5, 3, 6])];

fn open(disk: &FaultyDisk) -> Result<Arc<Store>> {
    let geometry = Geometry::new(&[RUNS.to_vec()], 2 << 20).unwrap();
    Ok(Arc::new(Store::open(disk, geometry, *b"a model of tests", None)?.0))
}

fn byte(block: u32, at: u64) -> u8 {
    (u64::from(block) * 31 + at * 7 + (at >> 8)) as u8
}

fn write(store: &Arc<Store>, blocks: &[u32]) -> Result<()> {
    let ids: Vec<_> = blocks.iter().map(|&block| BlockId::new(block)).collect();
    store.lane()?.write(GROUP, &ids, |page, range, target| {
        target.iter_mut().zip(range).for_each(|(target, at)| *target = byte(blocks[page], at));
    })
}

/// Reads pages and checks that all bytes that come are right.
fn read(store: &Arc<Store>, blocks: &[u32]) -> Result<()> {
    let ids: Vec<_> = blocks.iter().map(|&block| BlockId::new(block)).collect();
    store.lane()?.read(GROUP, &ids, 0..RUNS.len(), |page, range, source| {
        assert!(
            source.iter().zip(range).all(|(&source, at)| source == byte(blocks[page], at)),
            "wrong bytes"
        );
    })
}

/// What was acknowledged: which keys are kept, and which are forgotten.
#[derive(Debug, Default)]
struct Acknowledged {
    kept: Vec<&'static [u8]>,
    forgotten: Vec<&'static [u8]>,
}

fn live(disk: &FaultyDisk, acknowledged: &mut Acknowledged) -> Result<()> {
    let store = open(disk)?;
    for (key, blocks) in KEYS {
        write(&store, &blocks)?;
        store.put(key, &blocks.map(|block| (GROUP, BlockId::new(block))), b"")?;
        acknowledged.kept.push(key);
        read(&store, &blocks)?;
    }
    let (first, _) = KEYS[0];
    acknowledged.kept.retain(|key| *key != first);
    store.delete(first)?;
    acknowledged.forgotten.push(first);
    drop(store);
    read(&open(disk)?, &KEYS[1].1)
}

#[test]
fn whichever_operation_fails_errors_are_typed_and_what_was_acknowledged_is_there() {
    let nomem = Fault::Errno(Errno::NOMEM.raw_os_error());
    for fault in Fault::ALL.into_iter().chain([nomem]) {
        for after in 0.. {
            let disk = FaultyDisk::default();
            disk.fail(after, fault);
            let mut acknowledged = Acknowledged::default();
            let result = live(&disk, &mut acknowledged);
            if disk.calm() > 0 {
                result.unwrap();
                assert!(after > 20, "a life of {after} operations");
                break;
            }
            let wrong = disk.events().iter().any(|event| matches!(event, Event::WrongBytes(_)));
            match &result {
                Ok(()) => assert!(!wrong || !fault.is_honest()),
                Err(Error::Io { .. } | Error::Locked) => {}
                Err(Error::Corrupt { .. } | Error::Index(_)) => {
                    assert!(wrong, "{fault:?} after {after}: {result:?}")
                }
                Err(error) => panic!("{fault:?} after {after}: {error}"),
            }
            for left in [disk.killed(), disk.power_lost(|| false)] {
                let found = match open(&left) {
                    Ok(store) => check(&store, &format!("{fault:?} after {after}"), fault.is_honest()),
                    Err(Error::Index(_)) if !fault.is_honest() => continue,
                    Err(error) => panic!("{fault:?} after {after} spoilt it for good: {error}"),
                };
                if fault.is_honest() {
                    let Acknowledged { kept, forgotten } = &acknowledged;
                    assert!(
                        kept.iter().all(|key| found.contains(&key.to_vec())),
                        "{kept:?}, and found {found:?}"
                    );
                    assert!(!forgotten.iter().any(|key| found.contains(&key.to_vec())), "{found:?}");
                }
            }
        }
    }
}

/// Reads everything that is kept; returns its keys.
fn check(store: &Arc<Store>, when: &str, honest: bool) -> Vec<Vec<u8>> {
    let found: Vec<_> = store.entries().into_iter().map(|(key, _)| key).collect();
    for (key, blocks) in KEYS.iter().filter(|(key, _)| found.contains(&key.to_vec())) {
        let read = read(store, blocks);
        assert!(read.is_ok() || !honest, "{when}, {key:?}: {read:?}");
    }
    found
}

/// After a failed sync nobody knows whether the line is there. A key that is reported to be gone must be gone.
#[test]
fn a_key_that_may_come_back_is_not_said_to_be_gone() {
    let disk = FaultyDisk::default();
    let store = open(&disk).unwrap();
    write(&store, &[0]).unwrap();
    // The pages are synced and the line is written, but not synced.
    disk.fail(2, Fault::Errno(Errno::IO.raw_os_error()));
    store.put(b"doubtful", &[(GROUP, BlockId::new(0))], b"").unwrap_err();
    assert_eq!(open(&disk.killed()).unwrap().entries().len(), 1, "the line is there");
    let gone = store.delete(b"doubtful").is_ok();
    let found = open(&disk.killed()).unwrap().entries().len();
    assert!(!gone || found == 0, "it was said to be gone");
}

/// The next process finds the line of a failed save, but its drive is full and takes no new index. When the power fails,
/// pages of the save that the line was about to replace may already be overwritten.
#[test]
fn what_a_full_drive_was_opened_with_is_there_after_a_loss_of_power() {
    let (line, full) = (Fault::Errno(Errno::IO.raw_os_error()), Fault::Errno(Errno::NOSPC.raw_os_error()));
    for operations in 0..2 {
        let disk = FaultyDisk::default();
        let store = open(&disk).unwrap();
        write(&store, &[0, 1]).unwrap();
        store.put(b"it", &[(GROUP, BlockId::new(0))], b"").unwrap();
        for _ in 0..operations {
            drop(store.lane().unwrap());
        }
        // The pages are synced and the line is written, but not synced.
        disk.fail(2, line);
        store.put(b"it", &[(GROUP, BlockId::new(1))], b"").unwrap_err();
        let disk = disk.killed();
        let mut tried = 0;
        let store = loop {
            disk.fail(tried, full);
            let store = open(&disk);
            disk.calm();
            match store {
                Ok(store) if !store.is_sure() => break store,
                _ => tried += 1,
            }
        };
        let found = store.entries();
        for block in (0..2).filter(|block| found[0].1.pages[0].block != *block) {
            write(&store, &[block]).unwrap();
        }
        let store = open(&disk.power_lost(|| false)).unwrap();
        assert_eq!(store.entries(), found);
        read(&store, &[found[0].1.pages[0].block]).unwrap();
    }
}

/// A system may mark as written what a sync could not write, so that the next sync succeeds without writing it.
#[test]
fn what_a_sync_has_lost_is_not_kept_before_it_is_written_anew() {
    for operations in 0..2 {
        let disk = FaultyDisk::default();
        let store = open(&disk).unwrap();
        write(&store, &[0]).unwrap();
        store.put(b"before", &[(GROUP, BlockId::new(0))], b"").unwrap();
        write(&store, &[1, 2]).unwrap();
        for _ in 0..operations {
            drop(store.lane().unwrap());
        }
        disk.fail(0, Fault::Errno(Errno::IO.raw_os_error()));
        let blocks = [0, 1, 2].map(|block| (GROUP, BlockId::new(block)));
        store.put(b"it", &blocks, b"").unwrap_err();
        write(&store, &[2, 3]).unwrap();
        store.put(b"since", &[(GROUP, BlockId::new(0)), (GROUP, BlockId::new(2))], b"").unwrap();
        let refused = store.put(b"it", &blocks, b"").unwrap_err();
        assert!(matches!(refused, Error::Unsynced { pages: 1 }), "{refused}");
        read(&store, &[1]).unwrap();
        write(&store, &[1]).unwrap();
        store.put(b"it", &blocks, b"").unwrap();
        let store = open(&disk.power_lost(|| false)).unwrap();
        assert_eq!(store.entries().len(), 3);
        read(&store, &[0, 1, 2]).unwrap();
    }
}
