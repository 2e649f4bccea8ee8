//! How much may be written a day: flash wears out.

use super::{Error, Result};
use std::time::Instant;

const DAY_SECONDS: f64 = 86_400.0;

/// A day's writes may come at once; from then on they may go on at the rate at which a day passes.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    per_day: u64,
    spent: f64,
    at: Instant,
}

impl Budget {
    /// `per_day` bytes at once, and as many again as each day passes: never more than two days' worth in 24 hours.
    pub fn new(per_day: u64, now: Instant) -> Self {
        Self { per_day, spent: 0.0, at: now }
    }

    /// Takes `bytes` from what may be written at `now`.
    pub(super) fn spend(&mut self, bytes: u64, now: Instant) -> Result<()> {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        let spent = (self.spent - self.per_day as f64 * passed / DAY_SECONDS).max(0.0);
        let left = (self.per_day as f64 - spent) as u64;
        if bytes > left {
            return Err(Error::OverBudget { wanted: bytes, left, per_day: self.per_day });
        }
        (self.spent, self.at) = (spent + bytes as f64, now);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_day_s_worth_at_once_then_at_the_rate_of_a_day() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut budget = Budget::new(86_400, start);
        budget.spend(86_400, start).unwrap();
        assert!(matches!(budget.spend(11, at(10)), Err(Error::OverBudget { wanted: 11, left: 10, .. })));
        budget.spend(10, at(10)).unwrap();
        assert!(budget.spend(1, at(10)).is_err());
        budget.spend(86_400, at(10 + 86_400)).unwrap();
        assert!(budget.spend(1, at(10 + 86_400)).is_err(), "what was not used does not pile up");
    }
}
