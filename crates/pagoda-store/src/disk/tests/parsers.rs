//! What parsers make of bytes that nobody wrote: nothing. Lengths are tested in crates/pagoda-store/tests/hostile_index.rs.

use super::*;
use crate::disk::format::{
    IndexHeader, Line, Lines, Record, header_bytes, put_bytes, read_header, write_header,
};
use pagoda_core::keep::{KeptGroup, KeptPage, KeptSequence};
use pagoda_core::table::{Left, Span};
use proptest::prelude::*;

const RECORD: Record = Record { group: 3, block: 0x0102_0304, generation: 0x0506_0708_090a_0b0c, sum: 0 };
const LAYERS: usize = 5;

/// A header, and what it is expected to be.
fn header() -> (Vec<u8>, Record) {
    let mut bytes = vec![0; header_bytes(LAYERS) as usize];
    let sums: Vec<u64> = (0..LAYERS as u64).map(|layer| layer.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
    let identity = (RECORD.group, RECORD.block, RECORD.generation);
    let sum = write_header(&mut bytes, &FINGERPRINT, identity, 12_345, &sums);
    (bytes, Record { sum, ..RECORD })
}

fn index_header() -> IndexHeader {
    IndexHeader { fingerprint: FINGERPRINT, epoch: 7, salt: 8, lines: 9, geometry: geometry().describe() }
}

fn line() -> Line {
    let pages = (0..3).map(|at| Record { block: at, generation: at.into(), ..RECORD });
    Line::Put { key: b"a key".to_vec(), pages: pages.collect(), meta: b"and what else there is".to_vec() }
}

/// The first whole line from a place on, and where it ends.
fn first_line(bytes: &[u8], salt: u64, from: usize) -> Option<(Line, u32, usize)> {
    let (at, number, line) = Lines::new(bytes, salt, from).next()?;
    Some((line, number, at.end))
}

/// Something that happens to bytes at a place.
#[derive(Clone, Debug)]
enum Change {
    Flip(u8),
    Set(u8),
    Cut,
    Insert(Vec<u8>),
    Remove(usize),
    Repeat(usize),
}

type Mutations = Vec<(prop::sample::Index, Change)>;

fn mutations() -> impl Strategy<Value = Mutations> {
    let change = prop_oneof![
        (0u8..8).prop_map(Change::Flip),
        any::<u8>().prop_map(Change::Set),
        Just(Change::Cut),
        proptest::collection::vec(any::<u8>(), 1..9).prop_map(Change::Insert),
        (1usize..20).prop_map(Change::Remove),
        (1usize..80).prop_map(Change::Repeat),
    ];
    proptest::collection::vec((any::<prop::sample::Index>(), change), 1..5)
}

fn mutated(bytes: &[u8], mutations: &Mutations) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for (at, change) in mutations {
        let len = bytes.len().max(1);
        bytes.resize(len, 0);
        let at = at.index(len);
        match change {
            Change::Flip(bit) => bytes[at] ^= 1 << bit,
            Change::Set(byte) => bytes[at] = *byte,
            Change::Cut => bytes.truncate(at),
            Change::Insert(more) => drop(bytes.splice(at..at, more.iter().copied())),
            Change::Remove(count) => drop(bytes.drain(at..len.min(at + count))),
            Change::Repeat(count) => bytes.extend_from_within(at..len.min(at + count)),
        }
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn noise_is_nothing(mut bytes in proptest::collection::vec(any::<u8>(), 0..300), salt: u64, offset in 0usize..400) {
        prop_assert!(IndexHeader::parse(&bytes).is_err());
        prop_assert_eq!(first_line(&bytes, salt, offset), None);
        prop_assert!(read_header(&mut bytes, &FINGERPRINT, &RECORD, LAYERS).is_err());
        bytes.splice(0..0, *b"PAGODAPG");
        prop_assert!(read_header(&mut bytes, &FINGERPRINT, &RECORD, LAYERS).is_err());
        bytes.splice(0..8, *b"PAGODAIX");
        prop_assert!(IndexHeader::parse(&bytes).is_err());
    }

    #[test]
    fn a_mutated_header_of_a_page_is_refused(mutations in mutations()) {
        let (whole, expected) = header();
        let mut bytes = mutated(&whole, &mutations);
        let same = bytes == whole;
        prop_assert_eq!(read_header(&mut bytes, &FINGERPRINT, &expected, LAYERS).is_ok(), same);
    }

    #[test]
    fn a_mutated_header_of_an_index_is_refused(mutations in mutations()) {
        let whole = index_header().to_bytes();
        let bytes = mutated(&whole, &mutations);
        let right = bytes.starts_with(&whole).then(|| (index_header(), whole.len()));
        prop_assert_eq!(IndexHeader::parse(&bytes).ok(), right);
    }

    #[test]
    fn a_mutated_line_is_no_line(mutations in mutations(), before in 0usize..50) {
        let whole = line().to_bytes(7, 3, before as u64);
        let mut bytes = vec![0; before];
        bytes.extend(mutated(&whole, &mutations));
        let right = bytes[before..].starts_with(&whole).then(|| (line(), 3, before + whole.len()));
        prop_assert_eq!(first_line(&bytes, 7, before), right);
    }

    /// What follows a line is found whatever becomes of that line, and nothing else is.
    #[test]
    fn a_line_behind_a_mutated_one_is_found(mutations in mutations(), more in 0usize..9) {
        let whole = line().to_bytes(7, 3, 0);
        let mut bytes = mutated(&whole, &mutations);
        let right = bytes.starts_with(&whole);
        // Bytes that were there are never fewer: files do not shrink in the middle.
        bytes.resize(bytes.len().max(whole.len()) + more, 0x5a);
        let at = bytes.len();
        let next = Line::Delete { key: b"another".to_vec() };
        bytes.extend(next.to_bytes(7, 4, at as u64));
        let end = bytes.len();
        let found: Vec<_> = Lines::new(&bytes, 7, 0).collect();
        let first = (0..whole.len(), 3, line());
        let wanted: Vec<_> = right.then_some(first).into_iter().chain([(at..end, 4, next)]).collect();
        prop_assert_eq!(found, wanted);
    }

    /// A record is inside a line that verifies. Whatever it says, it is a sequence that would be written that way, or none.
    #[test]
    fn a_mutated_record_of_a_sequence_is_none_or_what_it_says(
        mutations in mutations(),
        blocks in proptest::collection::vec((0u8..3, prop_oneof![any::<u32>(), Just(u32::MAX)]), 0..5),
        keeps_blocks: bool,
    ) {
        let page = |block| BlockId::new(block);
        let pages = vec![KeptPage::Left, KeptPage::Sealed(page(9)), KeptPage::Open(page(4), 5)];
        let first = Span { first_page: 0, skip: 3, count: 20, position: 7 };
        let spans = vec![first, Span { first_page: 2, skip: 0, count: 5, position: 90 }];
        let group = KeptGroup { left: Left { after: 2, count: 16 }, spans, pages };
        let kept = KeptSequence { len: 41, groups: vec![group.clone(), group] };
        let (own, bytes) = sequence::encode(&kept, b"meta");
        let own: Vec<_> = own.iter().map(|(group, block)| (group.0, block.index())).collect();
        let pages = if keeps_blocks { own } else { blocks };
        let pages: Vec<_> = pages.into_iter().map(|(group, block)| Record { group, block, ..RECORD }).collect();
        let entry = Entry { pages, meta: mutated(&bytes, &mutations) };
        if let Some((decoded, meta)) = sequence::decode(&entry) {
            let (blocks, bytes) = sequence::encode(&decoded, &meta);
            prop_assert_eq!(bytes, entry.meta);
            let listed = entry.pages.iter().map(|page| (GroupId(page.group), page.block));
            prop_assert!(blocks.into_iter().map(|(group, block)| (group, block.index())).eq(listed));
        }
    }
}

#[test]
fn every_bit_of_every_header_and_line_counts() {
    let (mut page, expected) = header();
    for bit in 0..page.len() * 8 {
        let mut spoilt = page.clone();
        spoilt[bit / 8] ^= 1 << (bit % 8);
        assert!(
            read_header(&mut spoilt, &FINGERPRINT, &expected, LAYERS).is_err(),
            "bit {bit} of a page's header"
        );
    }
    read_header(&mut page, &FINGERPRINT, &expected, LAYERS).unwrap();
    let mut header = index_header().to_bytes();
    for bit in 0..header.len() * 8 {
        header[bit / 8] ^= 1 << (bit % 8);
        assert!(IndexHeader::parse(&header).is_err(), "bit {bit} of the index's header");
        header[bit / 8] ^= 1 << (bit % 8);
    }
    IndexHeader::parse(&header).unwrap();
    for line in [line(), Line::Delete { key: b"a key".to_vec() }] {
        let mut bytes = line.to_bytes(7, 3, 0);
        for bit in 0..bytes.len() * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(first_line(&bytes, 7, 0), None, "bit {bit} of a line");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(first_line(&bytes, 7, 0), Some((line, 3, bytes.len())));
    }
}

/// These sizes are used to ask for room in the index.
#[test]
fn a_line_has_as_many_bytes_as_is_said_before_it_is_made() {
    for (key, count, meta) in [(0, 0, 0), (1, 0, 0), (0, 3, 0), (0, 0, 5), (7, 100, 11)] {
        let line = Line::Put { key: vec![1; key], pages: vec![RECORD; count], meta: vec![2; meta] };
        assert_eq!(line.to_bytes(7, 3, 0).len() as u64, put_bytes(key, count, meta));
    }
}

/// A line is valid only in its own index and place.
#[test]
fn lines_of_another_index_or_place_are_none() {
    let bytes = [vec![0; 100], line().to_bytes(7, 3, 100)].concat();
    assert!(first_line(&bytes, 7, 100).is_some());
    for salt in [0, 6, 8, 7 << 40] {
        assert_eq!(first_line(&bytes, salt, 0), None);
    }
    let moved = [vec![0; 101], line().to_bytes(7, 3, 100)].concat();
    assert_eq!(first_line(&moved, 7, 0), None);
}

/// A line whose length verifies is skipped as a whole, so that no byte is looked at twice however many lengths a file claims.
#[test]
fn a_length_that_verifies_is_believed() {
    let mut bytes = Line::Put { key: vec![], pages: vec![], meta: vec![0; 200] }.to_bytes(7, 3, 0);
    let inner = Line::Delete { key: b"a key".to_vec() };
    let inside = inner.to_bytes(7, 4, 100);
    let end = 100 + inside.len();
    bytes[100..end].copy_from_slice(&inside);
    assert_eq!(first_line(&bytes, 7, 0), None);
    assert_eq!(first_line(&bytes, 7, 1), Some((inner, 4, end)));
}

#[test]
fn one_field_of_a_header_that_is_expected_otherwise_is_refused_with_a_reason() {
    let (bytes, expected) = header();
    let read = |fingerprint, expected, layers| {
        read_header(&mut bytes.clone(), fingerprint, &expected, layers).unwrap_err()
    };
    assert!(read(b"another model...", expected, LAYERS).contains("another model"));
    assert!(read(&FINGERPRINT, Record { group: 2, ..expected }, LAYERS).contains("of group Some(3)"));
    assert!(read(&FINGERPRINT, Record { block: 2, ..expected }, LAYERS).contains("of block Some(16909060)"));
    assert!(read(&FINGERPRINT, Record { generation: 2, ..expected }, LAYERS).contains("not 2"));
    assert!(read(&FINGERPRINT, Record { sum: 2, ..expected }, LAYERS).contains("does not verify"));
    assert!(read(&FINGERPRINT, expected, LAYERS + 1).contains("Some(5) layers, not 6"));
    let mut newer = bytes.clone();
    newer[8] += 1;
    assert!(
        read_header(&mut newer, &FINGERPRINT, &expected, LAYERS)
            .unwrap_err()
            .contains("version Some(3), not 2")
    );
    let mut index = index_header().to_bytes();
    index[8] += 1;
    assert!(IndexHeader::parse(&index).unwrap_err().to_string().contains("version Some(3), not 2"));
}

/// Flips `PAGODA_FLIPS` bits of a page, one after the other: each time the page is refused.
#[test]
fn a_flipped_bit_of_a_page_is_never_read() {
    let flips = std::env::var("PAGODA_FLIPS").map_or(100_000, |count| count.parse().unwrap());
    let (disk, entries) = kept();
    let (store, _) = open(&disk).unwrap();
    let mut lane = store.lane().unwrap();
    let ((group, block), name) = entries[1].1[0];
    let slot = geometry().slot(group, BlockId::new(block));
    let (start, bits) = (geometry().run_at(group, slot, 0), geometry().stored_run(group, 0) * 8);
    let mut state = 1u64;
    for _ in 0..flips {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let bit = start * 8 + (state >> 33) % bits;
        let flip = |bytes: &mut Vec<u8>| bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
        disk.with("pages", flip);
        let result = read(&mut lane, group, &[(block, name)], layers(group));
        assert!(matches!(result, Err(Error::Corrupt { .. })), "bit {bit}");
        disk.with("pages", flip);
    }
    assert_eq!(store.traffic().corrupt, flips);
    read(&mut lane, group, &[(block, name)], layers(group)).unwrap();
}
