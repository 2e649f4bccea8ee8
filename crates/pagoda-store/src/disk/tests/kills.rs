//! Processes that are killed while they write. `PAGODA_KILLS` says how many.

use super::*;
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write, stdout};
use std::process::{Command, Stdio};
use std::time::Duration;

const TEST: &str = "disk::tests::kills::what_was_acknowledged_is_there_after_kill_9_and_nothing_is_wrong";

/// Where a child works, and the number of its first round.
const PLACE: &str = "PAGODA_TEST_STORE";
const FIRST: &str = "PAGODA_TEST_FIRST_ROUND";

const KEYS: u64 = 3;
const PAGES: usize = 3;

fn key(round: u64) -> [u8; 2] {
    [b'k', (round % KEYS) as u8]
}

/// The pages of a round: blocks that only rounds with the same key use, and their contents.
fn pages(round: u64) -> Vec<(u32, u64)> {
    let at = (round % KEYS) as usize * PAGES;
    blocks(LARGE)[at..at + PAGES].iter().map(|&block| (block, round * 64 + u64::from(block))).collect()
}

/// Keeps something else under each key in turn, as fast as it can, and reports each save.
fn write_until_killed(place: PathBuf, first: u64) {
    let (store, _) = open(&Folder::open(&place).unwrap()).unwrap();
    let mut lane = store.lane().unwrap();
    for round in first.. {
        let pages = pages(round);
        store.delete(&key(round)).unwrap();
        if round % 2 == 0 {
            pages.iter().for_each(|&(block, _)| store.zero(LARGE, block..block + 1).unwrap());
        }
        write(&mut lane, LARGE, &pages).unwrap();
        let places: Vec<_> = pages.iter().map(|&(block, _)| (LARGE, BlockId::new(block))).collect();
        store.put(&key(round), &places, &round.to_le_bytes()).unwrap();
        writeln!(stdout(), "{round}").unwrap();
    }
}

#[test]
fn what_was_acknowledged_is_there_after_kill_9_and_nothing_is_wrong() {
    if let Some(place) = std::env::var_os(PLACE) {
        let first = std::env::var(FIRST).unwrap().parse().unwrap();
        return write_until_killed(place.into(), first);
    }
    let kills = std::env::var("PAGODA_KILLS").map_or(200, |count| count.parse().unwrap());
    let place = Place::new();
    let (mut first, mut read_back) = (0, 0u64);
    // The round that each key is known to be from, if it is there.
    let mut known: HashMap<[u8; 2], Option<u64>> = HashMap::new();
    for kill in 0..kills {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", TEST, "--nocapture"])
            .env(PLACE, &place.0)
            .env(FIRST, first.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (mut output, mut said) = (BufReader::new(child.stdout.take().unwrap()), String::new());
        let acknowledges = |said: &str| said.lines().any(|line| line.parse::<u64>().is_ok());
        // Every other child gets something done, however slow the machine is.
        while kill % 2 == 1 && !acknowledges(&said) && output.read_line(&mut said).unwrap() > 0 {}
        // This waits for nothing: it only makes the moments differ.
        std::thread::sleep(Duration::from_micros(4_000 + kill * 7_919 % 20_000));
        child.kill().unwrap();
        output.read_to_string(&mut said).unwrap();
        assert!(!child.wait().unwrap().success(), "it works until it is killed: {said}");
        for round in said.lines().filter_map(|line| line.parse::<u64>().ok()) {
            known.insert(key(round), Some(round));
            first = round + 1;
        }
        let (store, recovered) = open(&Folder::open(&place.0).unwrap()).unwrap();
        assert_eq!(recovered.lost, []);
        let left = std::fs::read_dir(&place.0).unwrap().map(|file| file.unwrap());
        let left = left.filter(|file| file.metadata().is_ok_and(|data| data.len() > 0));
        let left: Vec<_> = left.map(|file| file.file_name()).filter(|name| name != "pages").collect();
        assert_eq!(left, ["index"], "beside the pages");
        let mut lane = store.lane().unwrap();
        let mut there: HashMap<[u8; 2], u64> = HashMap::new();
        for (found, entry) in store.entries() {
            let round = u64::from_le_bytes(entry.meta.try_into().unwrap());
            read(&mut lane, LARGE, &pages(round), layers(LARGE)).unwrap();
            read_back += PAGES as u64;
            there.insert(found.try_into().unwrap(), round);
        }
        for round in first..first + KEYS {
            let (key, now) = (key(round), there.get(&key(round)).copied());
            let before = known.get(&key).copied().flatten();
            // Anything may have become of the first round that was not acknowledged.
            let half_way = round == first && (now.is_none() || now == Some(first));
            assert!(now == before || half_way, "{key:?} is of round {now:?}, and was of {before:?}");
            known.insert(key, now);
        }
        if kill % 3 == 0 {
            store.zero_on_free().unwrap();
        }
        first += 1;
    }
    assert!(read_back > kills && first > kills, "the children came to something: {first} rounds");
}
