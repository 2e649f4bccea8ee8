//! A kept sequence as an entry of the index: its blocks are the pages, and its shape precedes the caller's data.

use super::format::Fields;
use super::index::Entry;
use pagoda_core::ids::{BlockId, GroupId};
use pagoda_core::keep::{KeptGroup, KeptPage, KeptSequence};
use pagoda_core::table::{Left, Span};

/// The blocks of a sequence, and the rest of its entry; `meta` is the caller's part.
pub fn encode(kept: &KeptSequence, meta: &[u8]) -> (Vec<(GroupId, BlockId)>, Vec<u8>) {
    let (mut blocks, mut bytes) = (Vec::new(), Vec::new());
    let mut words = |words: &[u64]| words.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
    words(&[kept.len, kept.groups.len() as u64]);
    for (group, KeptGroup { left, spans, pages }) in (0..).map(GroupId).zip(&kept.groups) {
        words(&[left.after, left.count, spans.len() as u64, pages.len() as u64]);
        for &Span { first_page, skip, count, position } in spans {
            words(&[first_page.into(), skip.into(), count.into(), position]);
        }
        for page in pages {
            match *page {
                KeptPage::Left => words(&[LEFT]),
                KeptPage::Sealed(block) => {
                    words(&[SEALED]);
                    blocks.push((group, block));
                }
                KeptPage::Open(block, fill) => {
                    words(&[OPEN + u64::from(fill)]);
                    blocks.push((group, block));
                }
            }
        }
    }
    bytes.extend(meta);
    (blocks, bytes)
}

/// The sequence of which `encode` made an entry, and the caller's part; none if `encode` did not make it.
pub fn decode(entry: &Entry) -> Option<(KeptSequence, Vec<u8>)> {
    let mut fields = Fields(&entry.meta);
    let mut blocks = entry.pages.iter();
    let (len, groups) = (fields.u64()?, fields.u64()?);
    let mut kept = KeptSequence { len, groups: Vec::new() };
    for group in 0..groups {
        let left = Left { after: fields.u64()?, count: fields.u64()? };
        let (spans, pages) = (fields.u64()?, fields.u64()?);
        let mut written = KeptGroup { left, ..KeptGroup::default() };
        for _ in 0..spans {
            let mut number = || u32::try_from(fields.u64()?).ok();
            let (first_page, skip, count) = (number()?, number()?, number()?);
            written.spans.push(Span { first_page, skip, count, position: fields.u64()? });
        }
        for _ in 0..pages {
            let code = fields.u64()?;
            if code == LEFT {
                written.pages.push(KeptPage::Left);
                continue;
            }
            let page = blocks.next().filter(|page| u64::from(page.group) == group)?;
            let block = (page.block < u32::MAX).then(|| BlockId::new(page.block))?;
            written.pages.push(match code {
                SEALED => KeptPage::Sealed(block),
                open => KeptPage::Open(block, u32::try_from(open - OPEN).ok()?),
            });
        }
        kept.groups.push(written);
    }
    blocks.next().is_none().then(|| (kept, fields.0.to_vec()))
}

const LEFT: u64 = 0;
const SEALED: u64 = 1;
/// And rows that are in it.
const OPEN: u64 = 2;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::Record;
    use proptest::prelude::*;

    fn kept() -> impl Strategy<Value = KeptSequence> {
        let page = prop_oneof![
            Just(KeptPage::Left),
            (0u32..1000).prop_map(|block| KeptPage::Sealed(BlockId::new(block))),
            (0u32..1000, any::<u32>()).prop_map(|(block, fill)| KeptPage::Open(BlockId::new(block), fill)),
        ];
        let left = any::<(u64, u64)>().prop_map(|(after, count)| Left { after, count });
        let span = any::<(u32, u32, u32, u64)>().prop_map(|(first_page, skip, count, position)| Span {
            first_page,
            skip,
            count,
            position,
        });
        let (spans, pages) = (proptest::collection::vec(span, 0..4), proptest::collection::vec(page, 0..6));
        let group = (left, spans, pages).prop_map(|(left, spans, pages)| KeptGroup { left, spans, pages });
        (any::<u64>(), proptest::collection::vec(group, 0..4))
            .prop_map(|(len, groups)| KeptSequence { len, groups })
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded_and_what_is_cut_is_not(kept in kept(), meta: Vec<u8>, cut: prop::sample::Index) {
            let (blocks, bytes) = encode(&kept, &meta);
            let page = |&(group, block): &(GroupId, BlockId)| {
                Record { group: group.0, block: block.index(), generation: 0, sum: 0 }
            };
            let entry = Entry { pages: blocks.iter().map(page).collect(), meta: bytes };
            let shape = entry.meta.len() - meta.len();
            prop_assert_eq!(decode(&entry), Some((kept, meta)));
            let cut = Entry { meta: entry.meta[..cut.index(shape)].to_vec(), ..entry.clone() };
            prop_assert_eq!(decode(&cut), None);
            if !entry.pages.is_empty() {
                let fewer = Entry { pages: entry.pages[1..].to_vec(), ..entry };
                prop_assert_eq!(decode(&fewer), None);
            }
        }
    }
}
