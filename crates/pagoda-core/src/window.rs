//! Which tokens a layer group keeps. This is the policy; tables carry it out.

/// Keeps the first `sinks` tokens of a sequence and the last `tokens + headroom`.
///
/// Pages that hold none of these leave when a step commits. Queries see the sinks and the last `tokens` tokens, themselves
/// included; the headroom is what `truncate` may take back afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Tokens at the start of a sequence that stay and that every query sees.
    pub sinks: u32,
    /// Last tokens that a query also sees, itself included; at least 1.
    pub tokens: u32,
    /// Tokens before these that are also kept.
    pub headroom: u32,
    /// Whether queries see the sinks as if they stood right before the window instead of where they were stored.
    pub trailing: bool,
}

impl Window {
    /// The first token after the sinks that a sequence of `len` tokens has to keep.
    pub(crate) fn keeps_from(&self, len: u64) -> u64 {
        len.saturating_sub(u64::from(self.tokens) + u64::from(self.headroom))
    }

    /// The smallest length other than 0 that a sequence may have without the tokens between its sinks and `first`.
    pub(crate) fn least_len(&self, first: u64) -> u64 {
        first + u64::from(self.tokens)
    }

    /// The index on the token axis from which on sinks trail: a query `n` places after it sees them `n` positions nearer.
    pub(crate) fn trails_from(&self) -> u64 {
        u64::from(self.sinks) + u64::from(self.tokens) - 1
    }
}
