//! Every sequence of a cache, by its handle.

use crate::error::{Error, Result};
use crate::ids::SequenceId;
use crate::limits;
use crate::rest::Rests;
use crate::table::Table;

/// One request, beam or branch.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) generation: u32,
    pub(crate) live: bool,
    /// Whether it is in the open step.
    pub(crate) stepping: bool,
    pub(crate) len: u64,
    /// The number of its current rest, which began when it last stepped or was created.
    pub(crate) rest: u64,
    /// One per layer group.
    pub(crate) tables: Vec<Table>,
}

/// Every sequence of a cache.
#[derive(Debug, Default)]
pub(crate) struct Sequences {
    slots: Vec<Sequence>,
    vacant: Vec<u32>,
    pub(crate) rests: Rests,
    /// How many were created, and how many of those have ended.
    made: u64,
    pub(crate) ended: u64,
}

impl Sequences {
    pub(crate) fn insert(&mut self, len: u64, tables: Vec<Table>) -> Result<SequenceId> {
        if self.count() >= limits::SEQUENCES_MAX as u64 {
            let limit = format!("at most {}", limits::SEQUENCES_MAX);
            return Err(Error::invalid("sequences", self.count() + 1, limit));
        }
        let sequence =
            |generation| Sequence { generation, live: true, stepping: false, len, rest: 0, tables };
        let id = if let Some(index) = self.vacant.pop() {
            let generation = self.slots[index as usize].generation;
            self.slots[index as usize] = sequence(generation);
            SequenceId { index, generation }
        } else {
            self.slots.push(sequence(0));
            SequenceId { index: self.slots.len() as u32 - 1, generation: 0 }
        };
        self.made += 1;
        self.rest(id);
        Ok(id)
    }

    /// How many there are.
    pub(crate) fn count(&self) -> u64 {
        self.made - self.ended
    }

    /// Begins a rest of a sequence, which has just stepped or been created.
    pub(crate) fn rest(&mut self, id: SequenceId) {
        let Self { slots, rests, .. } = self;
        let rest = rests.begin(id, slots.len(), |rest, id| goes_on(slots, rest, id));
        slots[id.index as usize].rest = rest;
    }

    /// Whether a rest has not ended.
    pub(crate) fn goes_on(&self, rest: u64, id: SequenceId) -> bool {
        goes_on(&self.slots, rest, id)
    }

    /// Sets the generation of a vacant slot, as if it had been handed out that often.
    #[cfg(test)]
    pub(crate) fn age(&mut self, index: u32, generation: u32) {
        self.slots[index as usize].generation = generation;
    }

    /// Ends a sequence and returns its tables.
    pub(crate) fn remove(&mut self, id: SequenceId) -> Vec<Table> {
        self.ended += 1;
        let slot = &mut self.slots[id.index as usize];
        slot.live = false;
        // A slot that has used all generations stays empty: otherwise very old handles would become valid again.
        if let Some(generation) = slot.generation.checked_add(1) {
            slot.generation = generation;
            self.vacant.push(id.index);
        }
        std::mem::take(&mut slot.tables)
    }

    /// The sequence of a handle, whether or not a step uses it.
    pub(crate) fn get(&self, id: SequenceId) -> Result<&Sequence> {
        match self.slots.get(id.index as usize) {
            Some(slot) if slot.live && slot.generation == id.generation => Ok(slot),
            _ => Err(Error::UseAfterRelease { id }),
        }
    }

    /// The sequence of a handle, to be changed; refused while a step uses it.
    pub(crate) fn get_idle(&mut self, id: SequenceId) -> Result<&mut Sequence> {
        self.get(id)?;
        let slot = &mut self.slots[id.index as usize];
        if slot.stepping {
            return Err(Error::invalid("sequence", id, "not in the open step: commit or roll it back first"));
        }
        Ok(slot)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (SequenceId, &Sequence)> {
        let all = self.slots.iter().enumerate();
        all.filter(|(_, s)| s.live)
            .map(|(index, s)| (SequenceId { index: index as u32, generation: s.generation }, s))
    }
}

fn goes_on(slots: &[Sequence], rest: u64, id: SequenceId) -> bool {
    // Rest numbers are never reused, so a later sequence in the same slot has another.
    let slot = &slots[id.index as usize];
    slot.live && slot.rest == rest
}

impl std::ops::Index<SequenceId> for Sequences {
    type Output = Sequence;

    fn index(&self, id: SequenceId) -> &Sequence {
        &self.slots[id.index as usize]
    }
}

impl std::ops::IndexMut<SequenceId> for Sequences {
    fn index_mut(&mut self, id: SequenceId) -> &mut Sequence {
        &mut self.slots[id.index as usize]
    }
}
