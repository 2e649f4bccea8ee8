//! How much may be written per day: flash wears out.

use super::format::{Fields, sum};
use super::io::Directory;
use super::{Error, Result};
use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const DAY_SECONDS: f64 = 86_400.0;

const NAME: &str = "written";

/// Bytes of a note: how much counts as written, the time, and a checksum of both.
const NOTE_BYTES: u64 = 24;

/// How many notes a day's writes take. Each note is made ahead of the writes that it counts, so a process that is killed may
/// seem to have written one note's worth more than it has.
const NOTES_PER_DAY: f64 = 64.0;

/// A day's writes may come at once; after that they are allowed at the rate at which the day passes.
#[derive(Debug)]
pub struct Budget {
    per_day: u64,
    spent: f64,
    at: SystemTime,
    /// Where other processes find what was spent, and how much they find.
    directory: Option<Box<dyn Directory>>,
    noted: f64,
}

impl Budget {
    /// Allows `per_day` bytes at once, and as many again with each day that passes: never more than two days' worth in 24
    /// hours.
    pub fn new(per_day: u64, now: SystemTime) -> Self {
        Self { per_day, spent: 0.0, at: now, directory: None, noted: 0.0 }
    }

    /// Continues from what another budget has noted in a directory, and notes there what is spent. Only the holder of the
    /// directory's lock may call this.
    pub(super) fn noted_in(mut self, directory: &dyn Directory) -> io::Result<Self> {
        let note = match directory.read(NAME, NOTE_BYTES) {
            Err(error) if error.kind() == io::ErrorKind::FileTooLarge => None,
            other => other?,
        };
        // A note that does not verify is ignored.
        if let Some((spent, at)) = note.and_then(|note| read_note(&note)) {
            (self.spent, self.noted, self.at) = (spent, spent, at);
        }
        self.directory = Some(directory.share());
        Ok(self)
    }

    /// Takes `bytes` from what may be written at `now`.
    pub(super) fn spend(&mut self, bytes: u64, now: SystemTime) -> Result<()> {
        self.pass(now);
        let left = (self.per_day as f64 - self.spent) as u64;
        if bytes > left {
            return Err(Error::OverBudget { wanted: bytes, left, per_day: self.per_day });
        }
        let spent = self.spent + bytes as f64;
        if spent > self.noted {
            self.note(spent + self.per_day as f64 / NOTES_PER_DAY)?;
        }
        self.spent = spent;
        Ok(())
    }

    /// Whether other processes find no more than was spent.
    pub(super) fn is_settled(&self) -> bool {
        self.directory.is_none() || self.noted <= self.spent
    }

    /// Notes what was spent if more than that is noted.
    pub(super) fn settle(&mut self, now: SystemTime) -> Result<()> {
        self.pass(now);
        if self.is_settled() { Ok(()) } else { self.note(self.spent) }
    }

    /// Lets time pass until `now`. If the clock was set back, no time passes, once.
    fn pass(&mut self, now: SystemTime) {
        let passed = now.duration_since(self.at).unwrap_or_default().as_secs_f64();
        let back = self.per_day as f64 * passed / DAY_SECONDS;
        (self.spent, self.noted) = ((self.spent - back).max(0.0), (self.noted - back).max(0.0));
        self.at = now;
    }

    fn note(&mut self, spent: f64) -> Result<()> {
        if let Some(directory) = &self.directory {
            let note = note(spent, self.at);
            directory.replace(NAME, &note).map_err(Error::io("noting what is written"))?;
            self.noted = spent;
        }
        Ok(())
    }
}

fn note(spent: f64, at: SystemTime) -> Vec<u8> {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut bytes = [(spent.ceil() as u64).to_le_bytes(), (since.as_nanos() as u64).to_le_bytes()].concat();
    bytes.extend(sum(&bytes).to_le_bytes());
    bytes
}

fn read_note(bytes: &[u8]) -> Option<(f64, SystemTime)> {
    let mut fields = Fields(bytes);
    let (spent, since, stored) = (fields.u64()?, fields.u64()?, fields.u64()?);
    let at = UNIX_EPOCH.checked_add(Duration::from_nanos(since))?;
    (stored == sum(&bytes[..16])).then_some((spent as f64, at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::io::fault::{Fault, FaultyDisk};

    const DAY: u64 = 86_400;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    /// Whether exactly this many bytes are left at a time.
    fn is_left(budget: &mut Budget, bytes: u64, now: SystemTime) -> bool {
        let refused = budget.spend(u64::MAX, now).unwrap_err();
        matches!(refused, Error::OverBudget { left, .. } if left == bytes)
    }

    #[test]
    fn a_day_s_worth_at_once_then_at_the_rate_of_a_day() {
        let mut budget = Budget::new(DAY, at(0));
        budget.spend(86_400, at(0)).unwrap();
        assert!(matches!(budget.spend(11, at(10)), Err(Error::OverBudget { wanted: 11, left: 10, .. })));
        budget.spend(10, at(10)).unwrap();
        assert!(budget.spend(1, at(10)).is_err());
        budget.spend(86_400, at(10 + DAY)).unwrap();
        assert!(budget.spend(1, at(10 + DAY)).is_err(), "what was not used does not pile up");
    }

    #[test]
    fn a_clock_that_is_set_back_gives_nothing_and_takes_nothing() {
        let mut budget = Budget::new(DAY, at(DAY));
        budget.spend(DAY, at(DAY)).unwrap();
        assert!(is_left(&mut budget, 0, at(100)));
        assert!(is_left(&mut budget, 50, at(150)));
    }

    #[test]
    fn a_clock_that_jumps_ahead_gives_a_day_s_worth_and_that_once() {
        let mut budget = Budget::new(DAY, at(0));
        budget.spend(DAY, at(0)).unwrap();
        assert!(is_left(&mut budget, DAY, at(1000 * DAY)));
        budget.spend(DAY, at(1000 * DAY)).unwrap();
        assert!(is_left(&mut budget, 0, at(1000 * DAY)));
        assert!(is_left(&mut budget, 0, at(10)), "set right again");
        assert!(is_left(&mut budget, 50, at(60)));
    }

    #[test]
    fn the_next_budget_of_a_directory_goes_on_from_what_was_noted() {
        let disk = FaultyDisk::default();
        let opened = |now| Budget::new(DAY, at(now)).noted_in(&disk).unwrap();
        let mut budget = opened(0);
        budget.spend(1000, at(0)).unwrap();
        let ahead = DAY / 64;
        assert!(is_left(&mut opened(0), DAY - 1000 - ahead, at(0)), "as if it had been killed");
        let before = disk.operations();
        budget.spend(ahead, at(0)).unwrap();
        assert_eq!(disk.operations(), before, "that much was noted");
        budget.spend(1, at(0)).unwrap();
        assert!(disk.operations() > before);
        budget.settle(at(500)).unwrap();
        let before = disk.operations();
        budget.settle(at(500)).unwrap();
        assert_eq!(disk.operations(), before, "there is nothing to note");
        assert!(is_left(&mut opened(500), DAY - 1001 - ahead + 500, at(500)));
        assert!(is_left(&mut opened(0), DAY - 1001 - ahead + 500, at(0)), "a clock that was set back");
        assert!(is_left(&mut opened(DAY), DAY, at(DAY)));
        let mut less = Budget::new(DAY / 100, at(500)).noted_in(&disk).unwrap();
        assert!(is_left(&mut less, 0, at(500)));
    }

    /// What was spent shrinks with time, and so does what others find of it.
    #[test]
    fn what_is_spent_is_noted_also_where_more_was_noted_before() {
        let disk = FaultyDisk::default();
        let opened = |now| Budget::new(DAY, at(now)).noted_in(&disk).unwrap();
        let mut budget = opened(0);
        budget.spend(DAY / 2, at(0)).unwrap();
        budget.spend(DAY / 4, at(DAY / 2)).unwrap();
        assert!(
            is_left(&mut opened(DAY / 2), DAY - DAY / 4 - DAY / 64, at(DAY / 2)),
            "as if it had been killed"
        );
    }

    #[test]
    fn what_cannot_be_noted_is_not_written_and_what_does_not_verify_is_no_note() {
        let disk = FaultyDisk::default();
        let opened = || Budget::new(DAY, at(0)).noted_in(&disk).unwrap();
        let mut budget = opened();
        disk.fail(0, Fault::Errno(28));
        assert!(budget.spend(1000, at(0)).unwrap_err().to_string().contains("noting what is written"));
        assert!(is_left(&mut budget, DAY, at(0)));
        budget.spend(1000, at(0)).unwrap();
        budget.settle(at(0)).unwrap();
        assert!(is_left(&mut opened(), DAY - 1000, at(0)));
        for bit in 0..8 * NOTE_BYTES as usize {
            disk.with(NAME, |bytes| bytes[bit / 8] ^= 1 << (bit % 8));
            assert!(is_left(&mut opened(), DAY, at(0)));
            disk.with(NAME, |bytes| bytes[bit / 8] ^= 1 << (bit % 8));
        }
        for len in [23, 25, 1 << 20] {
            disk.with(NAME, |bytes| bytes.resize(len, 0));
            assert!(is_left(&mut opened(), DAY, at(0)));
        }
    }
}
