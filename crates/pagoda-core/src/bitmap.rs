//! A set of small integers that gives out its lowest member: one bit each, and a summary bit per 64.

const WORD_BITS: u32 = u64::BITS;

/// Which of `0..len` are free.
#[derive(Debug, Default)]
pub(crate) struct Bitmap {
    words: Vec<u64>,
    /// Bit `w` is set when `words[w]` is not zero.
    summary: Vec<u64>,
    len: u32,
    free: u32,
}

impl Bitmap {
    /// Makes all of `0..len` free, whatever was taken before; reuses its memory.
    pub(crate) fn reset(&mut self, len: u32) {
        fill_ones(&mut self.words, len);
        fill_ones(&mut self.summary, self.words.len() as u32);
        self.len = len;
        self.free = len;
    }

    /// How many integers the set ranges over.
    pub(crate) fn size(&self) -> u32 {
        self.len
    }

    /// How many are free.
    pub(crate) fn free(&self) -> u32 {
        self.free
    }

    /// Whether all are free.
    pub(crate) fn is_all_free(&self) -> bool {
        self.free == self.len
    }

    /// Whether `index` is free.
    pub(crate) fn contains(&self, index: u32) -> bool {
        self.words[(index / WORD_BITS) as usize] >> (index % WORD_BITS) & 1 == 1
    }

    /// Takes the lowest free integer.
    pub(crate) fn take_lowest(&mut self) -> Option<u32> {
        let s = self.summary.iter().position(|&word| word != 0)?;
        let w = s * WORD_BITS as usize + self.summary[s].trailing_zeros() as usize;
        let word = &mut self.words[w];
        let index = w as u32 * WORD_BITS + word.trailing_zeros();
        *word &= *word - 1;
        if *word == 0 {
            self.summary[s] &= self.summary[s] - 1;
        }
        self.free -= 1;
        Some(index)
    }

    /// Takes `index`; says whether it was free.
    pub(crate) fn take(&mut self, index: u32) -> bool {
        if !self.contains(index) {
            return false;
        }
        let w = (index / WORD_BITS) as usize;
        self.words[w] &= !(1 << (index % WORD_BITS));
        if self.words[w] == 0 {
            self.summary[w / WORD_BITS as usize] &= !(1 << (w as u32 % WORD_BITS));
        }
        self.free -= 1;
        true
    }

    /// Gives `index` back. Panics when it is free already or out of range: that is a bug in this crate, never bad input.
    pub(crate) fn give(&mut self, index: u32) {
        assert!(index < self.len, "block {index} of {} given back", self.len);
        assert!(!self.contains(index), "block {index} given back twice");
        let w = index / WORD_BITS;
        self.words[w as usize] |= 1 << (index % WORD_BITS);
        self.summary[(w / WORD_BITS) as usize] |= 1 << (w % WORD_BITS);
        self.free += 1;
    }
}

fn fill_ones(words: &mut Vec<u64>, bits: u32) {
    words.clear();
    words.resize((bits / WORD_BITS) as usize, u64::MAX);
    if !bits.is_multiple_of(WORD_BITS) {
        words.push((1 << (bits % WORD_BITS)) - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::Bitmap;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn agrees_with_an_ordered_set(len in 0u32..9000, gives in proptest::collection::vec(any::<u32>(), 0..300)) {
            let mut map = Bitmap::default();
            map.reset(len);
            let mut model: BTreeSet<u32> = (0..len).collect();
            for give in gives {
                // Drain a stretch, then give back one that was taken.
                for _ in 0..give % 97 {
                    prop_assert_eq!(map.take_lowest(), model.pop_first());
                }
                if len > 0 {
                    // Take any index; one that is taken already is not free.
                    let any = give / 97 % len;
                    prop_assert_eq!(map.take(any), model.remove(&any));
                    let taken = give % len;
                    if !model.contains(&taken) {
                        map.give(taken);
                        model.insert(taken);
                    }
                }
                prop_assert_eq!(map.free() as usize, model.len());
            }
            for index in 0..len {
                prop_assert_eq!(map.contains(index), model.contains(&index));
            }
        }
    }

    #[test]
    fn what_has_been_taken_one_by_one_is_passed_over() {
        let mut map = Bitmap::default();
        map.reset(200);
        assert!((64..128).all(|index| map.take(index)));
        assert!(std::iter::from_fn(|| map.take_lowest()).eq((0..64).chain(128..200)));
    }

    #[test]
    #[should_panic(expected = "given back twice")]
    fn refuses_a_double_free() {
        let mut map = Bitmap::default();
        map.reset(3);
        map.give(1);
    }
}
