//! The memory of one tier: reserved at once, touched as it is used, given back in ranges. Or memory that belongs to somebody
//! else.

use memmap2::{MmapOptions, MmapRaw, UncheckedAdvice};
use std::io;
use std::ops::Range;

/// Memory that blocks lie in.
#[derive(Debug)]
pub struct Slab(Memory);

#[derive(Debug)]
enum Memory {
    /// An anonymous mapping. The operating system provides zeroed pages when they are first written.
    Own(MmapRaw),
    /// The address and the bytes of memory that is not given back here, since a device has it pinned.
    Lent(usize, usize),
}

impl Slab {
    /// Reserves `bytes` of address space, and asks for huge pages where the system has them. On Linux, forked children do not
    /// have the memory.
    ///
    /// Fails when the system refuses the address space. A slab of 0 bytes reserves one page.
    pub fn new(bytes: usize) -> io::Result<Self> {
        let map = MmapRaw::from(MmapOptions::new().len(bytes.max(1)).no_reserve_swap().map_anon()?);
        #[cfg(target_os = "linux")]
        {
            use memmap2::Advice;
            // If a fork shares memory into which direct I/O is under way, the drive may write to the child's copy (open(2)).
            map.advise(Advice::DontFork)?;
            if map.len() >= HUGE_PAGE_BYTES {
                // Refused where huge pages are switched off: the slab is then just slower.
                let _ = map.advise(Advice::HugePage);
            }
        }
        Ok(Self(Memory::Own(map)))
    }

    /// Memory that belongs to somebody else.
    ///
    /// # Safety
    /// It is there as long as the slab, and so is whatever else of it the calls of a slab's users promise.
    pub unsafe fn lent(address: usize, bytes: usize) -> Self {
        Self(Memory::Lent(address, bytes))
    }

    /// The address of byte 0.
    pub fn base(&self) -> *mut u8 {
        match &self.0 {
            Memory::Own(map) => map.as_mut_ptr(),
            Memory::Lent(address, _) => std::ptr::with_exposed_provenance_mut(*address),
        }
    }

    /// Bytes of the slab.
    pub fn bytes(&self) -> usize {
        match &self.0 {
            Memory::Own(map) => map.len(),
            Memory::Lent(_, bytes) => *bytes,
        }
    }

    /// Zeroes a range.
    ///
    /// # Safety
    /// Nobody may read or write the range meanwhile.
    ///
    /// # Panics
    /// When the range leaves the slab.
    pub unsafe fn zero(&self, range: Range<u64>) {
        assert!(range.start <= range.end && range.end <= self.bytes() as u64, "{range:?} leaves the slab");
        // SAFETY: the range lies in the mapping, and nobody else touches it (the caller's promise).
        unsafe { self.base().add(range.start as usize).write_bytes(0, (range.end - range.start) as usize) };
    }

    /// Gives the memory of `range` back to the system, except at its ends, where it shares a page of the system with
    /// something else. From then on it reads as zeros, or as before. Lent memory stays as it is.
    ///
    /// # Safety
    /// Nobody may read or write the range meanwhile, nor rely on its bytes afterwards.
    pub unsafe fn give_back(&self, range: Range<u64>) -> io::Result<()> {
        let Memory::Own(map) = &self.0 else { return Ok(()) };
        let start = (range.start as usize).next_multiple_of(SYSTEM_PAGE_BYTES_MAX);
        let end = range.end as usize / SYSTEM_PAGE_BYTES_MAX * SYSTEM_PAGE_BYTES_MAX;
        if start >= end {
            return Ok(());
        }
        // SAFETY: nobody relies on the bytes of the range (the caller's promise), and its ends are borders of pages, so
        // that nothing beside it is lost.
        unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, end - start) }
    }
}

/// The largest page of any supported system: advice works on whole pages.
const SYSTEM_PAGE_BYTES_MAX: usize = 64 << 10;

#[cfg(target_os = "linux")]
const HUGE_PAGE_BYTES: usize = 2 << 20;

#[cfg(test)]
mod tests {
    use super::Slab;

    #[test]
    fn memory_given_back_reads_as_zeros_and_its_neighbours_as_before() {
        let slab = Slab::new(4 << 20).unwrap();
        let (start, end) = ((1 << 20) + 1, (2 << 20) + 12345);
        // SAFETY: nobody else has the slab.
        unsafe {
            slab.base().write_bytes(7, slab.bytes());
            slab.give_back(start..end).unwrap();
            slab.give_back(1..2).unwrap();
            let at = |offset: u64| slab.base().add(offset as usize).read();
            assert_eq!(at(3 << 19), 0);
            assert!((0..start).chain(end..4 << 20).all(|offset| at(offset) == 7));
        }
    }
}
