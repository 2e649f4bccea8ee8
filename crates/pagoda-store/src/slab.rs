//! One tier's memory: reserved at once, touched as it is used, given back in ranges.

use memmap2::{Advice, MmapOptions, MmapRaw, UncheckedAdvice};
use std::io;
use std::ops::Range;

/// An anonymous mapping. Pages of the operating system are taken when they are first written and come zeroed.
#[derive(Debug)]
pub struct Slab {
    map: MmapRaw,
}

impl Slab {
    /// Reserves `bytes` of address space; huge pages are asked for, where the system has them.
    ///
    /// Fails when the system refuses the address space. A slab of 0 bytes reserves one page.
    pub fn new(bytes: usize) -> io::Result<Self> {
        let map = MmapRaw::from(MmapOptions::new().len(bytes.max(1)).no_reserve_swap().map_anon()?);
        #[cfg(target_os = "linux")]
        if map.len() >= HUGE_PAGE_BYTES {
            // Refused where huge pages are switched off: then the slab is just slower.
            let _ = map.advise(Advice::HugePage);
        }
        Ok(Self { map })
    }

    /// The address of byte 0.
    pub fn base(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    /// Bytes of the slab.
    pub fn bytes(&self) -> usize {
        self.map.len()
    }

    /// Gives the memory under `range` back to the system. It reads as zeros, or as before, from then on.
    ///
    /// # Safety
    /// Nobody may read or write the range meanwhile, nor rely on its bytes afterwards.
    pub unsafe fn give_back(&self, range: Range<u64>) -> io::Result<()> {
        let (start, len) = (range.start as usize, (range.end - range.start) as usize);
        // SAFETY: the range holds no data that anybody relies on (the caller's promise), so losing it harms nobody.
        unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, len) }
    }
}

#[cfg(target_os = "linux")]
const HUGE_PAGE_BYTES: usize = 2 << 20;

#[cfg(test)]
mod tests {
    use super::Slab;

    #[test]
    fn memory_given_back_reads_as_zeros() {
        let slab = Slab::new(4 << 20).unwrap();
        // SAFETY: nobody else has the slab.
        unsafe {
            slab.base().add(1 << 20).write_bytes(7, 1 << 20);
            slab.give_back(1 << 20..2 << 20).unwrap();
            assert_eq!(slab.base().add(1 << 20).read(), 0);
        }
        assert_eq!(slab.bytes(), 4 << 20);
    }
}
